"""A scenario that broke an invariant, played again and again with less, until little is left."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ...job import Job
from ...proto import broker_pb2
from ..monitor.shortest import shortest
from ..monitor.violation import Violation
from ..scenario.scenario import Scenario
from ..scenario.sentences import Fault
from .virtual_run import run_virtual

__all__ = ["shortened", "shorter"]

MOST_TRIES = 24
"""Each plays the scenario once more, most of them a part of it."""


def shortened(
    violation: Violation,
    scenario: Scenario,
    job: Job,
    submitted: broker_pb2.RunSpec,
    blobs: Mapping[str, bytes],
    folder: Path,
    *,
    ghost: bool = False,
) -> Violation:
    """The violation of the fewest faults and steps of a virtual run with which there is one still;
    `violation` itself where there is none the second time. Churn stays as it is. The other
    arguments are those of `run_virtual`."""

    def fails(faults: tuple[Fault, ...], steps: int) -> Violation | None:
        less, spec = replace(scenario, faults=faults), shorter(submitted, steps)
        try:
            run_virtual(less, job, spec, blobs, folder, ghost=ghost)
        except Violation as found:
            return found
        return None

    try:
        return shortest(scenario.faults, submitted.steps, fails, MOST_TRIES).violation
    except ValueError:
        return violation


def shorter(spec: broker_pb2.RunSpec, steps: int) -> broker_pb2.RunSpec:
    """A copy of a run's spec with `steps` steps."""
    found = broker_pb2.RunSpec()
    found.CopyFrom(spec)
    job = Job.from_json(spec.job)
    found.job, found.steps = replace(job, train=replace(job.train, steps=steps)).to_json(), steps
    return found
