"""The plain loop of a run whose replicas train apart: its method, its samples, and the rounds that
it committed, whoever was lost, left out or late in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...broker.round_rows import RoundRow
from ...compression.sparse.masks import SharedMask
from ...dag.rounds.vector import PIECE
from ...job import Job
from ...peer.data.reader import Reader
from ...proto.broker_pb2 import RunEvent
from . import round_methods
from .oracle import gradient
from .round_buffers import WithBuffers
from .round_log import committed_rounds
from .round_oracle import Batches, Gradients, PlainMethod, PlainResult, Scalers, train

__all__ = ["METHODS", "batches_of", "beside", "method_of", "train_rounds"]

METHODS: Mapping[str, Callable[..., PlainMethod]] = {
    "diloco": round_methods.DiLoCo,
    "average": round_methods.Average,
    "sparse-loco": lambda lr=1.0, decay=0.95, result_density=0.0, **wire: round_methods.SparseLoCo(
        lr,
        decay,
        round_methods.sparse_wire(**wire),
        round_methods.sparse_wire(**wire | {"density": result_density}) if result_density else None,
    ),
    "streaming-diloco": lambda bits=4, **options: round_methods.Streaming(**options),
    "random-pairs": round_methods.Saps,
    "ring": round_methods.Saps,
    "noloco": round_methods.NoLoCo,
    "saps-outer": lambda lr=0.7, momentum=0.5, **links: round_methods.NoLoCo(lr, momentum),
    "saps": lambda seed=0, keep=0.01, **links: round_methods.Saps(saps_mask(seed, keep)),
}
"""What the plain loop does between replicas, by [sync] method; called with its options, of saps
with the seed of the job, too."""


def saps_mask(seed: int, keep: float) -> Callable[[int, str, torch.Size], Tensor]:
    """The positions that a run of saps draws: of a round, in a parameter."""

    def mask(count: int, name: str, shape: torch.Size) -> Tensor:
        found = torch.zeros(shape.numel(), dtype=torch.bool)
        for start in range(0, shape.numel(), PIECE):
            shared = SharedMask(seed, count, keep)
            elements = min(PIECE, shape.numel() - start)
            found[start + shared.positions(f"param:{name}:{start}", elements)] = True
        return found.view(shape)

    return mask


def method_of(job: Job) -> PlainMethod:
    """Anew, with the job's options."""
    sync = job.sync
    options: dict[str, Any] = dict(sync.options)
    options.pop("overlap", None)
    if sync.chosen == "saps":
        options["seed"] = job.seed
    method = METHODS[sync.chosen](**options)
    if sync.overlap and not isinstance(method, round_methods.Streaming):
        return round_methods.Overlapped(method)
    return method


def batches_of(reader: Reader, microbatches: int, size: int) -> Batches:
    """`microbatches`: of one step of the run, each of `size` samples."""

    def batches(samples: Sequence[int]) -> dict[str, Tensor]:
        numbers = [s // size for s in samples[::size]]
        each = [reader.batch(g // microbatches, g % microbatches, size) for g in numbers]
        return {name: torch.cat([e[name] for e in each]) for name in each[0]}

    return batches


def by_microbatch(size: int) -> Gradients:
    """The gradients of each microbatch of `size` samples by itself: a batch norm has the
    statistics of one."""

    def gradients(
        modules: Sequence[nn.Module], batches: Sequence[Mapping[str, Tensor]], scalers: Scalers
    ) -> list[float]:
        losses = []
        for module, batch, scaler in zip(modules, batches, scalers, strict=True):
            parts = zip(*(torch.split(t, size) for t in batch.values()), strict=True)
            loss, _ = gradient(module, (dict(zip(batch, p, strict=True)) for p in parts), scaler)
            losses.append(loss)
        return losses

    return gradients


def train_rounds(
    module: nn.Module,
    job: Job,
    events: Iterable[RunEvent],
    reader: Reader,
    *,
    microbatches: int,
    microbatch_size: int,
    steps: int,
) -> PlainResult:
    """Trains copies of the module on what the events say was committed. `microbatches`: of one of
    the `steps` of the run. Raises HalfLossError."""
    rounds = committed_rounds(
        events,
        microbatches=microbatches,
        microbatch_size=microbatch_size,
        gossip=job.sync.kind == "gossip",
    )
    batches = batches_of(reader, microbatches, microbatch_size)
    method = WithBuffers(method_of(job), module)
    gradients = by_microbatch(microbatch_size)
    return train(
        module,
        rounds,
        batches,
        job.train,
        method,
        steps=steps,
        gradients=gradients,
        fp16=job.model.dtype == "fp16",
    )


def beside(
    rows: Iterable[RoundRow], found: PlainResult
) -> Iterator[tuple[int, int, int, float, float]]:
    """(round, replica, local step of it, loss, the plain loop's) of each step that was committed
    or made the optimizer of who was left out what it is."""
    for row, wanted in zip(rows, found.losses, strict=True):
        for m in (*row.members, *row.left_out):
            # Who was left out and lost has nothing that goes on.
            losses = wanted.get(m.replica, ())
            for j, (loss, other) in enumerate(zip(m.losses, losses, strict=False)):
                yield row.round, m.replica, j, loss, other
