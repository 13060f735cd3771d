"""The divisions of a batch that the plans of a run may have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ...dag.schedule.convert_plan import microbatches_of
from ...job import MOST_MICROBATCHES, Job
from ...job.training import Train
from ...proto.broker_pb2 import RunSpec
from .run_spec import RunSpecError

__all__ = ["Batching", "batchings"]


class Batching(NamedTuple):
    """A way to divide the batch of a step into microbatches."""

    microbatch_size: int
    """Samples."""
    microbatches: int
    """Of one step."""
    evaluation_microbatches: int
    """Of one evaluation; 0: the run has none."""


def batchings(spec: RunSpec, job: Job) -> tuple[Batching, ...]:
    """Return the divisions of a batch that are enough for the job's pipelines, of which replicas
    have the first. Raises RunSpecError where there is none, or not that of a plan by hand."""
    pipelines = 1 if job.plan.pipelines == "auto" else job.plan.pipelines
    found = tuple(
        b for b in _batchings(spec, job.train, job.divided) if b.microbatches >= pipelines
    )
    if job.rounds is not None:
        found = found[:1]  # the same for all replicas
    by_hand = spec.HasField("plan")
    if by_hand and job.sync.kind != "allreduce":
        raise RunSpecError(
            f'the run has a plan written by hand, and its job sync.kind = "{job.sync.kind}": '
            "expected none"
        )
    sizes = [b.microbatch_size for b in found]
    if not found or (by_hand and spec.plan.microbatch_size not in sizes):
        raise RunSpecError(
            f"plan.pipelines is {pipelines} with {microbatches_of(spec.plan) or spec.microbatches} "
            "microbatches in a step: "
            "expected at least one microbatch for each pipeline"
        )
    return found


def _batchings(spec: RunSpec, train: Train, replicas: int) -> Iterator[Batching]:
    """The default, then the choices in their order, of one of so many replicas; raises
    RunSpecError."""
    for size in (spec.microbatch_size, *spec.microbatch_sizes):
        if train.batch % size:
            raise RunSpecError(
                f"microbatch_sizes of the run has {size}, and the {train.batch} samples of a step "
                f"are not divisible by it (remainder {train.batch % size})"
            )
        count = train.batch // size
        evaluation = train.evaluated_batches * count
        if max(count, evaluation) > MOST_MICROBATCHES:
            raise RunSpecError(
                f"with microbatches of {size}, a step has {count} microbatches and one evaluation "
                f"has {evaluation} microbatches: expected at most {MOST_MICROBATCHES}"
            )
        if count % replicas == 0:
            yield Batching(size, count // replicas, evaluation)
