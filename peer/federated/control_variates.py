"""SCAFFOLD's clients (Karimireddy et al. 2020, 1910.06378, algorithm 1, option II): control
variates of those that one peer trains, and what local gradients are corrected by.

    g   <- g + c - c_i               in each local step
    c_i <- c_i - c + D_i / (steps · rate)

with D_i what the client moved, towards where it came from. What a client sends a part of only, it
has moved by that part: so the mean of all c_i stays c, which the server has
(`peer/rounds/methods/fed_opt.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ...dag.ir.graph import Graph
from ..rounds.methods.fed_opt import CONTROL
from ..rounds.methods.round_strategy import State
from .client_states import RoundStates
from .cohort import Trained, as_rows

__all__ = ["ControlVariates"]


class ControlVariates:
    """Control variates of the clients of one round, each a vector over all that is trained.
    `shared`: by entry, what all replicas share. `states`: c_i. `to_gradient`: as `LocalSteps` has
    it."""

    def __init__(
        self,
        graph: Graph,
        shared: Mapping[str, State],
        states: RoundStates,
        to_gradient: float,
    ) -> None:
        self._sizes = {p.name: p.spec.elements for p in graph.parameters if p.trainable}
        self._mean = torch.cat([shared[f"param:{name}"][CONTROL] for name in self._sizes])
        self._states, self._to_gradient = states, to_gradient

    def corrections(self, clients: Sequence[int], device: torch.device) -> dict[str, Tensor]:
        """Return by parameter what is added to gradients of these, c - c_i, (clients, numbers)."""
        added = (self._mean - self._states.rows(clients)).to(device)
        parts = torch.split(added, [*self._sizes.values()], dim=1)
        return dict(zip(self._sizes, parts, strict=True))

    def followed(
        self, trained: Iterable[Trained], began: Mapping[str, Tensor]
    ) -> Iterator[Trained]:
        """Pass clients on, and keep the control variate of each behind the round. `began`: what all
        came from, by parameter. Raises DataError where it cannot be kept."""
        for some in trained:
            own = self._states.rows(some.participants)
            if self._to_gradient > 0:
                moved = [began[n].detach() - some.values[n].detach() for n in self._sizes]
                whole = torch.cat([as_rows(m) for m in moved], dim=1).to("cpu", torch.float32)
                own = own - self._mean + whole * self._to_gradient
            self._states.keep(some.participants, own)
            yield some
