"""Features of all clients, on which each trains what lies above its own (FedImpro, 2402.07011): in
each local step, beside the loss of the batch,

    weight·(loss of a batch of features f_i of classes c_i),  f_i = mean[c_i] + std[c_i]·normal

with the statistics of the version that the round began with
(`dag/transforms/feature_statistics.py`), std = sqrt(variance + 1e-5), `most_std` at most (0: any).
What lies below the features gets no gradient of it. The classes of a batch are those that have
statistics, in turns from word key(seed, FEATURE_CLASS, round, client, step) on; number e of place i
has `normal(key(seed, FEATURE_SAMPLE, round, client, step, i), e)` (`generator.py`). As long as no
class has any, there is no such loss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...dag.execute.model_copies import CopiesForward, ModelCopies
from ...dag.ir.graph import Graph
from ...dag.permutation import Domain, key
from ...dag.transforms.feature_statistics import (
    COUNT,
    DRAWN,
    SQUARE,
    SUM,
    AboveFeatures,
    above_features,
)
from ...job import Training
from ...job.clients.local_work import FedImproOptions
from ...job.rounds import options_of
from .batches import Participant
from .generator import UNIT, normal

__all__ = ["LEAST_COUNT", "Distribution", "SharedFeatures", "distribution_of", "shared_features"]

LEAST_COUNT, _EPSILON = 1e-6, 1e-5
"""What is left of a class's count when it is forgotten; and what is added to variances, which are
small differences of large sums."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """Features of the classes that are known. classes: (known,) int64; mean, std: (known, width)
    float64."""

    classes: npt.NDArray[np.int64]
    mean: npt.NDArray[np.float64]
    std: npt.NDArray[np.float64]


def distribution_of(version: Mapping[str, Tensor], most_std: float) -> Distribution:
    """Return what a version, by name, knows of features. `most_std`: as the job has it."""
    count, total, square = (
        version[n].detach().to("cpu", torch.float64).numpy() for n in (COUNT, SUM, SQUARE)
    )
    known = np.flatnonzero(count >= LEAST_COUNT)
    by = count[known][:, None]
    mean = total[known] / by
    variance = np.maximum(square[known] / by - mean**2, 0.0)
    std = np.sqrt(variance + _EPSILON)
    return Distribution(known, mean, np.minimum(std, most_std) if most_std else std)


class SharedFeatures:
    """What clients of a run train on beside their samples. `batch`: the most samples of a client's
    own in a step, and without a word of the job's the features in one."""

    def __init__(
        self,
        options: FedImproOptions,
        above: AboveFeatures,
        *,
        seed: int,
        batch: int,
        device: torch.device,
    ) -> None:
        self._options, self._above, self._seed = options, above, seed
        self._size, self._device = options.batch or batch, device
        self._copies = ModelCopies(above.graph, device)
        self._names = {p.name for p in above.graph.parameters}
        self._names |= {b.name for b in above.graph.buffers}

    @property
    def takes_key(self) -> bool:
        """Whether what lies above features draws random numbers."""
        return self._copies.takes_key

    def begin(self, version: Mapping[str, Tensor], round_: int) -> Distribution | None:
        """Return of which features clients of a round are trained; None: of none."""
        found = distribution_of(version, self._options.most_std)
        return found if len(found.classes) and self._weight(round_) else None

    def _weight(self, round_: int) -> float:
        rise = self._options.rise
        return self._options.weight * (min(1.0, round_ / rise) if rise else 1.0)

    def drawn(
        self, known: Distribution, clients: Sequence[Participant], round_: int, step: int
    ) -> dict[str, Tensor]:
        """Return a step's features and their labels of each client: (clients, batch, *shape)
        float32 and (clients, batch) int64, by input."""
        of = np.asarray([c.number for c in clients], np.uint64)[:, None]
        places = np.arange(self._size, dtype=np.uint64)
        first = key(self._seed, Domain.FEATURE_CLASS, round_, of, step)
        count = np.uint64(len(known.classes))
        at = ((first % count + places) % count).astype(np.int64)
        words = key(self._seed, Domain.FEATURE_SAMPLE, round_, of, step, places)[..., None]
        apart = normal(words, known.mean.shape[1]) / UNIT
        found = (known.mean[at] + known.std[at] * apart).astype(np.float32)
        shaped = found.reshape(*at.shape, *self._above.shape)
        return {
            DRAWN: torch.from_numpy(shaped).to(self._device),
            self._above.labels: torch.from_numpy(known.classes[at]).to(self._device),
        }

    def beside(
        self,
        made: CopiesForward,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        inputs: Mapping[str, Tensor],
        keys: Sequence[int],
        round_: int,
    ) -> CopiesForward:
        """Return what copies came to of their batches and of drawn features, `inputs`, together.
        `made`: of their batches alone, from the same parameters and buffers."""
        own, fixed = (
            {n: t for n, t in of.items() if n in self._names} for of in (parameters, buffers)
        )
        more, weight = self._copies.run(own, fixed, inputs, keys), self._weight(round_)
        grads = dict(made.grads)
        for name, grad in more.grads.items():
            if grad is not None:
                before = grads[name]
                grads[name] = weight * grad + (0.0 if before is None else before)
        return replace(made, grads=grads, losses=made.losses + weight * more.losses)


def shared_features(
    graph: Graph, training: Training, device: torch.device
) -> SharedFeatures | None:
    """Return what clients of a run train on beside their samples; None: its method has no such
    thing. Raises GraphError for a graph without statistics."""
    assert training.rounds is not None
    options = options_of(training.rounds.method, training.rounds.options)
    if not isinstance(options, FedImproOptions):
        return None
    names = {"features": options.features, "logits": options.logits}
    above = above_features(graph, options.share, **names)
    batch = training.train.batch
    return SharedFeatures(options, above, seed=training.seed, batch=batch, device=device)
