"""Evaluation of a version on clients' own held-out samples ([data.partition] held_out).

Whoever evaluates a version does this too, by itself: all peers have the same version, forwards
alone are a small part of what training a cohort takes, and nothing of a peer that is lost is
missing. Of more than MOST_EVALUATED clients with samples held out so many are evaluated, always
the same: the first of `permute` under the key (seed, EVALUATED).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import groupby

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...dag.execute.model_copies import ModelCopies
from ...dag.ir.graph import Graph
from ...dag.permutation import Domain, Indices, key, permute
from ...dag.transforms.evaluation import evaluation
from ...proto.broker_pb2 import ClientNumber
from ..data.partition import Partition

__all__ = ["MOST_EVALUATED", "ClientEvaluation"]

MOST_EVALUATED = 1000
"""Clients of one evaluation."""
Floats = npt.NDArray[np.float64]


class ClientEvaluation:
    """What clients evaluate with. `graph`: for training, not bound. `batch`: samples at once of one
    client; `most`: batches at once."""

    def __init__(
        self,
        graph: Graph,
        partition: Partition,
        *,
        seed: int,
        batch: int,
        most: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self._graph, self._partition, self._batch, self._most = graph, partition, batch, most
        self._copies = ModelCopies(evaluation(graph), device)
        have = np.flatnonzero(partition.held_out_sizes)
        count = min(have.size, MOST_EVALUATED)
        chosen = permute(np.arange(count), max(1, have.size), key(seed, Domain.EVALUATED))
        self.clients: Indices = np.sort(have[chosen])
        """Numbers of those that are evaluated, ascending."""

    def numbers(
        self, version: Mapping[str, Tensor], read: Callable[[Indices], Mapping[str, Tensor]]
    ) -> list[ClientNumber]:
        """Return how the clients' means of the loss, then of each metric, are spread; nothing where
        no sample counts. `version`: parameters and buffers by name. `read`: samples by their
        places, as of `Cohort.work`. A batch counts by its weight, or by its samples."""
        totals = np.zeros(self.clients.size)
        sums: dict[str, Floats] = {}
        for rows, places in self._groups():
            found = self._copies.evaluate(version, read(places))
            weights = found.weights.double().cpu().numpy()
            if not self._graph.weight:
                weights = weights * places.shape[1]
            np.add.at(totals, rows, weights)
            for name, values in {"loss": found.losses, **found.metrics}.items():
                known = np.where(weights != 0, values.double().cpu().numpy(), 0.0)
                np.add.at(sums.setdefault(name, np.zeros_like(totals)), rows, known * weights)
        some = totals != 0
        return [_spread(name, s[some], totals[some]) for name, s in sums.items() if some.any()]

    def _groups(self) -> Iterator[tuple[Indices, Indices]]:
        """Batches of one size: (batches,), whose each is, as a place in `clients`; and its samples,
        (batches, size)."""
        cut = [
            (row, part)
            for row, client in enumerate(self.clients.tolist())
            for samples in [self._partition.held_out(client)]
            for part in np.split(samples, range(self._batch, samples.size, self._batch))
        ]
        cut.sort(key=lambda one: one[1].size)
        for _, same in groupby(cut, key=lambda one: one[1].size):
            pieces = [*same]
            for first in range(0, len(pieces), self._most):
                some = pieces[first : first + self._most]
                yield np.array([row for row, _ in some]), np.stack([part for _, part in some])


def _spread(name: str, sums: Floats, weights: Floats) -> ClientNumber:
    each = sums / weights
    return ClientNumber(
        name=name,
        clients=each.size,
        mean=float(sums.sum() / weights.sum()),
        least=float(each.min()),
        median=float(np.median(each)),
        most=float(each.max()),
    )
