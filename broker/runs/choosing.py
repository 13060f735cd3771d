"""Clients of a round to come, as the submitter's rule has chosen them (docs/federated.md)."""

from __future__ import annotations

from ...proto.broker_pb2 import Cohort, RunEvent
from ..events import Instruction
from .run import Run

__all__ = ["choose"]

_SHOWN = 5


def choose(run: Run, cohort: Cohort, now: float) -> list[Instruction]:
    """Have the next round that begins be of these clients; nothing where that is known already.
    Raises ValueError for a cohort that no round can have, and where it comes too late."""
    wanted = run.submitted.requirements
    cohorts = wanted.cohorts
    if cohorts is None or not cohorts.selected:
        raise ValueError(
            f"run {run.id} has its clients by (seed, round): expected one that was submitted with "
            "sync.select"
        )
    work, number = run.rounds.work, run.rounds.next
    if run.ended or work.committed + work.begun >= work.total:
        raise ValueError(f"run {run.id} begins no round any more")
    if cohort.round != number:
        when = "has begun" if cohort.round < number else "is not the next one"
        raise ValueError(f"round {cohort.round} {when}: expected the clients of round {number}")
    most, count = wanted.sync.asked(cohorts.per_round), len(cohort.clients)
    if not cohorts.least <= count <= most:
        raise ValueError(f"round {number} has {count} clients: expected {cohorts.least} to {most}")
    if unknown := [c for c in cohort.clients if c >= cohorts.clients]:
        some = ", ".join(map(str, unknown[:_SHOWN]))
        raise ValueError(
            f"round {number} has clients {some}, and there are {cohorts.clients}: expected numbers "
            f"from 0 to {cohorts.clients - 1}"
        )
    if len(set(cohort.clients)) < count:
        raise ValueError(f"round {number} has a client twice: expected each once")
    if work.chosen is not None:
        if set(work.chosen.clients) == set(cohort.clients):
            return []
        raise ValueError(f"round {number} has its clients already: others were chosen before")
    return [run.record.publish(RunEvent(chosen=cohort), 0, now)]
