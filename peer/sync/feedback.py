"""Error feedback for strategies that encode gradients themselves.

    A = g + E        sent: C(A), of which all holders have the sum        E' = A - C(A)

g the gradients that this holder accumulated, E what it has not sent of earlier ones. At every step
the sum of E' over all holders, and of what they have sent so far, is the sum of all g. E' takes the
place of E when the update has been made: until then this holder can begin the step anew. Of a
parameter that no microbatch of any holder reached nothing is taken, and E' = A; E' is 0 where A was
no number. A step in which no sample counts leaves E as it is.

Who takes a lost holder's place goes on from what that had; under a plan with fewer holders the
first one takes over what those that are gone had not sent, but of tied parameters, which peers of
other stages have as well.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from ...dag.plan.plan import PeerId
from .optimizer import KEPT
from .strategy import Holder, Strategy

__all__ = ["ErrorFeedback"]

ERROR = f"{KEPT}error"


class ErrorFeedback(Strategy):
    """What strategies have in common that keep what they did not send. They give `message`, and
    call `sent` in `take`. `decay`: what A has of E."""

    keeps = 1

    @property
    def decay(self) -> float:
        return 1.0

    def __init__(self, holder: Holder) -> None:
        super().__init__(holder)
        self.errors: dict[str, Tensor] = {}
        self.whole: dict[str, Tensor] = {}
        """A of this step, in the dtype of sums."""
        self.step = 0
        self._left: dict[str, Tensor] = {}
        self._flags = torch.zeros(0)

    @torch.no_grad()
    def on_gradient(self, step: int) -> None:
        """Takes the gradients away, and makes A of them."""
        self.step, dtype = step, self.holder.layout.dtype
        there = [float(p.grad is not None) for p in self.trained.values()]
        self._flags = torch.tensor(there, dtype=dtype, device=self.holder.device)
        for name, p in self.trained.items():
            error = self.errors.get(name)
            whole = torch.zeros_like(p, dtype=dtype) if error is None else error * self.decay
            self.whole[name] = whole if p.grad is None else whole.add_(p.grad)
            p.grad = None

    def flagged(self, parts: Collection[Tensor]) -> Tensor:
        """A message of these, as long as the first one of a step is: at its end a number for each
        parameter, whether it had a gradient."""
        specs = [spec for _, spec in self.holder.layout.parameters]
        length = self.holder.choice.elements(specs) - sum(p.numel() for p in parts)
        padding = self._flags.new_zeros(length - len(specs))
        return torch.cat([*(part.reshape(-1) for part in parts), padding, self._flags])

    def flags(self, total: Tensor) -> list[float]:
        """How many holders had a gradient of each parameter."""
        found: list[float] = total[total.numel() - len(self.trained) :].tolist()
        return found

    def flags_of(self, parts: Sequence[Tensor]) -> Tensor:
        """The sum of what messages have at their ends."""
        count = len(self.trained)
        return torch.stack([part[part.numel() - count :] for part in parts]).sum(0)

    @torch.no_grad()
    def sent(
        self, own: Mapping[str, Tensor], total: Mapping[str, Tensor], flags: Sequence[float]
    ) -> None:
        """Ends the exchange: what this holder sent of each A, what all sent together, and how many
        had a gradient."""
        for (name, p), flag in zip(self.trained.items(), flags, strict=True):
            left = self.whole.pop(name)
            p.grad = None
            if flag:
                left = left.sub_(own[name]).nan_to_num_(0.0, 0.0, 0.0)
                p.grad = total[name].to(p.dtype)
            self._left[name] = left

    def update(self, step: int, *, weight: float, norm: float) -> None:
        super().update(step, weight=weight, norm=norm)
        if weight and self._left:
            self.errors = self._left
        self._left = {}

    def own_tensors(self) -> dict[str, Tensor]:
        return {f"{name}:{ERROR}": error for name, error in self.errors.items()}

    def load_own_tensors(self, of: Mapping[PeerId, Mapping[str, Tensor]]) -> None:
        super().load_own_tensors(of)
        holders = self.holder.holders
        gone = sorted(p for p in of if p not in holders and self.holder.peer == holders[0])
        mine = [p for p in of if p == self.holder.peer]
        self.errors = {}
        for name, p in self.trained.items():
            peers = mine if name in self.holder.tied else [*mine, *gone]
            found = [e for peer in peers if (e := of[peer].get(f"{name}:{ERROR}")) is not None]
            if found:
                self.errors[name] = torch.stack(found).sum(0).to(p.device)
