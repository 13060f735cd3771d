"""The scale of losses under fp16, where small gradients would be zero and large ones infinite:
gradients are those of scale · loss, and every holder divides them by the scale again.

    all gradients of the step are finite    the update is made; behind the growth_interval-th such
                                            step in a row the scale is doubled
    one is not                              nobody updates anything, and the scale is halved

So does torch.amp.GradScaler with its own factors. Which of the two it is, the global norm of the
gradients says, which all peers have from one place: it is finite where all gradients are. So all
holders come to one scale, each by itself. It is a power of two, which rounds no gradient.

Between rounds each replica has its own, which goes where its optimizer goes: into its snapshots,
and to the beginning with an optimizer that begins anew. So each client of federated training, whose
optimizer always does, begins with init_scale.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from ...job.training import LEAST_SCALE, MOST_SCALE, LossScale

__all__ = ["LossScaler"]


class LossScaler:
    """The scale of the next step's losses. `good_steps`: steps in a row since it changed last."""

    def __init__(self, settings: LossScale) -> None:
        self._settings = settings
        self.scale, self.good_steps = settings.init_scale, 0

    def update(self, *, overflowed: bool) -> None:
        """Go on to the next step. The scale stays a normal number of float32: torch's goes on to
        zero, from which it never comes back."""
        if overflowed:
            self.scale, self.good_steps = max(self.scale / 2, LEAST_SCALE), 0
            return
        self.good_steps += 1
        if self.good_steps >= self._settings.growth_interval:
            self.scale, self.good_steps = min(self.scale * 2, MOST_SCALE), 0

    def state_tensors(self) -> dict[str, Tensor]:
        """Return the state to go on from: two scalars."""
        return {
            "scale": torch.tensor(self.scale, dtype=torch.float64),
            "good_steps": torch.tensor(self.good_steps, dtype=torch.int64),
        }

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from what `state_tensors` gave. Raises ValueError for what it does not give."""
        try:
            scale, good = float(tensors["scale"]), int(tensors["good_steps"])
        except (KeyError, RuntimeError, ValueError, OverflowError) as error:
            raise ValueError(f"the scale of losses cannot be read: {error}") from None
        if not (LEAST_SCALE <= scale <= MOST_SCALE and math.frexp(scale)[0] == 0.5 and good >= 0):
            raise ValueError(
                f"the scale of losses is {scale:g} behind {good} steps without an overflow: "
                "expected a power of two, and a number of steps"
            )
        self.scale, self.good_steps = scale, good

    def __repr__(self) -> str:
        return f"<LossScaler {self.scale:g}, {self.good_steps} steps>"
