"""What a submitted run asks for, read once from its RunSpec and checked against itself."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from ..dag.plan import PeerId
from ..job import Job, SettingsError
from ..proto.broker_pb2 import RunSpec
from ..proto.common_pb2 import BlobRef
from .scheduler.interface import PlanOptions

__all__ = ["HASH", "SpecError", "Wish", "read_spec"]

HASH = re.compile(r"[0-9a-f]{64}")
"""SHA-256 as it is written in every BlobRef."""

MOST_MICROBATCHES = 65_536
MOST_STEPS = 10**12


class SpecError(ValueError):
    """A RunSpec that cannot become a run; the message names the field, what it is and must be."""


@dataclass(frozen=True, slots=True)
class Wish:
    """The part of a run's spec that the broker decides by.

    wanted: peers that a hand-written plan names, in its order; empty: the broker plans.
    core: whether a peer with the core operator set can take part.
    """

    priority: int
    options: PlanOptions
    evaluation_microbatches: int
    training: str
    wanted: tuple[PeerId, ...]
    core: bool

    @property
    def least(self) -> int:
        """The fewest peers that it can start with."""
        return (self.options.stages or 1) * self.options.pipelines


def read_spec(spec: RunSpec) -> Wish:
    """Raises SpecError."""
    for problem in _problems(spec):
        raise SpecError(problem)
    try:
        job = Job.from_json(spec.job)
    except (SettingsError, RecursionError) as error:
        raise SpecError(f"the job of the run is not valid: {error}") from None
    train = job.train
    for name, given, wanted in (
        ("steps", spec.steps, train.steps),
        ("microbatch_size", spec.microbatch_size, train.microbatch_size),
        ("microbatches", spec.microbatches, train.microbatches),
    ):
        if given != wanted:
            raise SpecError(f"{name} of the run is {given}, its job says {wanted}")
    pipelines = 1 if job.plan.pipelines == "auto" else job.plan.pipelines
    if not 1 <= pipelines <= spec.microbatches:
        raise SpecError(
            f"plan.pipelines is {pipelines} with {spec.microbatches} microbatches in a step: "
            "expected at least one microbatch for each pipeline"
        )
    evaluation = train.evaluation_microbatches
    if evaluation > MOST_MICROBATCHES:
        raise SpecError(
            f"one evaluation has {evaluation} microbatches: expected at most {MOST_MICROBATCHES}"
        )
    return Wish(
        priority=job.priority,
        options=PlanOptions(
            stages=None if job.plan.stages == "auto" else job.plan.stages,
            pipelines=pipelines,
            schedule="gpipe" if job.plan.schedule == "gpipe" else "1f1b",
            optimizer_slots=2 if train.optimizer == "adamw" else 1,
        ),
        evaluation_microbatches=evaluation,
        training=job.training.to_json(),
        wanted=tuple(dict.fromkeys(PeerId(h) for stage in spec.plan.stages for h in stage.holders)),
        core=spec.HasField("core_graph"),
    )


def _problems(spec: RunSpec) -> Iterator[str]:
    if spec.version != 1:
        yield f"version of the run is {spec.version}: expected 1"
    if len(spec.name) > 200 or not spec.name.isprintable():
        yield "name of the run: expected at most 200 printable characters"
    for name, value, most in (
        ("steps", spec.steps, MOST_STEPS),
        ("microbatches", spec.microbatches, MOST_MICROBATCHES),
        ("microbatch_size", spec.microbatch_size, 2**31),
    ):
        if not 1 <= value <= most:
            yield f"{name} of the run is {value}: expected 1 to {most}"
    for name, ref in _refs(spec):
        if not HASH.fullmatch(ref.hash):
            yield (
                f"{name} of the run has the hash {ref.hash[:80]!r}: expected 64 lowercase "
                "hexadecimal digits"
            )
    if not spec.HasField("plan"):
        return
    if not spec.plan.stages:
        yield "the plan of the run has no stage: expected at least one, or no plan at all"
    if len(spec.plan.routes) != spec.microbatches:
        yield (
            f"the plan of the run has {len(spec.plan.routes)} routes: expected one for each of "
            f"{spec.microbatches} microbatches"
        )
    if spec.plan.microbatch_size != spec.microbatch_size:
        yield (
            f"the plan of the run is for microbatches of {spec.plan.microbatch_size}, the run has "
            f"microbatches of {spec.microbatch_size}"
        )


def _refs(spec: RunSpec) -> Iterator[tuple[str, BlobRef]]:
    yield "graph", spec.graph
    yield "data", spec.data
    if spec.HasField("core_graph"):
        yield "core_graph", spec.core_graph
    for i, file in enumerate(spec.weights):
        yield f"weights[{i}]", file.blob
