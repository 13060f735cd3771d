"""SCAFFOLD's clients (Karimireddy et al. 2020, 1910.06378, algorithm 1, option II): control variates
of those that one peer trains, and what local gradients are corrected by.

    g   <- g + c - c_i               in each local step
    c_i <- c_i - c + D_i / (steps · rate)

with D_i what the client moved, towards where it came from. What a client sends a part of only, it
has moved by that part: so the mean of all c_i stays c, which the server has
(`peer/rounds/scaffold.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ...dag.ir.graph import Graph
from ..data.manifest import DataError
from ..rounds.scaffold import CONTROL
from ..rounds.strategy import State
from .client_states import ClientStates
from .cohort import Trained

__all__ = ["ControlVariates"]


class ControlVariates:
    """Control variates of clients, one vector over all that is trained."""

    def __init__(self, graph: Graph, states: ClientStates) -> None:
        self._states = states
        self._shapes = {p.name: p.spec.shape for p in graph.parameters if p.trainable}
        self._sizes = [p.spec.elements for p in graph.parameters if p.trainable]
        self._mean = torch.zeros(sum(self._sizes))
        self._trained: Mapping[int, int] = {}
        self._lost = set[int]()
        self._round, self._to_gradient = -1, 0.0

    def begin(
        self,
        shared: Mapping[str, State],
        trained: Mapping[int, int],
        round_: int,
        to_gradient: float,
    ) -> set[int]:
        """What follows is of this round. `shared`: by entry, what all replicas share. `trained`: by
        client, as in RoundStart. `to_gradient`: as `LocalSteps` has it. Return clients whose
        control variate is not here, and should be: they have that of who was never trained."""
        self._mean = torch.cat([shared[f"param:{name}"][CONTROL] for name in self._shapes])
        self._trained, self._round, self._to_gradient = trained, round_, to_gradient
        self._lost = {n for n, since in trained.items() if since and self._found(n) is None}
        return self._lost

    def _found(self, client: int) -> Tensor | None:
        return self._states.load(client, self._trained[client], len(self._mean))

    def _rows(self, clients: Sequence[int]) -> Tensor:
        """c_i of these, (clients, numbers)."""
        none = torch.zeros_like(self._mean)
        rows = [self._found(n) if self._trained[n] and n not in self._lost else none for n in clients]
        return torch.stack([none if row is None else row for row in rows])

    def corrections(
        self, clients: Sequence[int], device: torch.device | str
    ) -> dict[str, Tensor]:
        """Return by parameter what is added to the gradients of these, c - c_i, (clients,
        *shape)."""
        bends = (self._mean - self._rows(clients)).to(device)
        parts = torch.split(bends, self._sizes, dim=1)
        shapes = zip(self._shapes.items(), parts, strict=True)
        return {name: part.view(-1, *shape) for (name, shape), part in shapes}

    def followed(
        self, trained: Iterable[Trained], began: Mapping[str, Tensor]
    ) -> Iterator[Trained]:
        """Pass clients on, and keep the control variate of each behind the round. `began`: what all
        came from, by parameter. Raises DataError where it cannot be kept."""
        for some in trained:
            moved = [began[n].detach() - some.values[n].detach() for n in self._shapes]
            whole = torch.cat([m.flatten(1) for m in moved], dim=1).to("cpu", torch.float32)
            own = self._rows(some.participants)
            if self._to_gradient > 0:
                own = own - self._mean + whole * self._to_gradient
            for row, client in zip(own, some.participants, strict=True):
                try:
                    self._states.keep(client, self._round + 1, self._trained[client], row)
                except OSError as error:
                    text = f"the control variate of client {client} cannot be kept: {error}"
                    raise DataError(text) from error
            yield some
