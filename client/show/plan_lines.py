"""A plan in three lines: who trains, how long it takes, what holds it back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ...job.words import WRONG_CHOICE, count_of, some_of
from ...proto.broker_pb2 import Formation, RunEvent
from .text import safe, time_text

__all__ = ["formed_in_short", "long_time_text", "planned_in_short"]

MOST_NAMES = 4
"""Peers named of a stage."""
MOST_STAGES = 4
"""Stages whose peers are named."""


def planned_in_short(event: RunEvent, steps: int, names: Mapping[str, str]) -> Iterator[str]:
    """The lines of a planned term. steps: that are left; 0: not known. names: of peers, by id."""
    stages = [[names.get(h, h) for h in stage.holders] for stage in event.plan.stages]
    who = " | ".join(some_of(holders, MOST_NAMES, " + ") for holders in stages[:MOST_STAGES])
    more = f" | and {len(stages) - MOST_STAGES} more" if len(stages) > MOST_STAGES else ""
    holders = {h for stage in event.plan.stages for h in stage.holders}
    spare = f"; {count_of(len(event.report.spares), 'peer')} in reserve" * bool(event.report.spares)
    counted = f"{count_of(len(holders), 'peer')} in {count_of(len(stages), 'stage')}"
    yield safe(f"who trains   {counted}: {who}{more}{spare}")
    step_s = event.report.predicted.step_s
    if not step_s:
        yield "how long     not predicted: the bar says it after some steps"
    elif steps:
        each = f"{count_of(steps, 'step')} of {time_text(step_s)}"
        yield f"how long     about {long_time_text(steps * step_s)}: {each}, as predicted"
    else:
        yield f"how long     {time_text(step_s)} a step, as predicted"
    wrong = [reason for reason in event.report.reasons if WRONG_CHOICE in reason]
    slow = [*wrong, *event.report.predicted.bottlenecks, "nothing that stands out"]
    yield safe(f"held back by {slow[0]}")


def formed_in_short(formation: Formation) -> Iterator[str]:
    """The lines of a run in replicas, each of which has a plan of its own."""
    wrong = [reason for reason in formation.reasons[1:] if WRONG_CHOICE in reason]
    many = count_of(len(formation.replicas), "replica")
    yield safe(
        f"who trains   {many}: {formation.reasons[0] if formation.reasons else 'as asked for'}"
    )
    if round_s := formation.local_s + formation.exposed_s:
        yield f"how long     {long_time_text(round_s)} a round, as predicted"
    if wrong:
        yield safe(f"held back by {wrong[0]}")
    elif formation.exposed_s and round_s:
        share = formation.exposed_s / round_s
        yield f"held back by exchanges, for {share:.0%} of the time"


def long_time_text(seconds: float) -> str:
    """A time that somebody waits for, in at most two units."""
    if seconds < 1:
        return time_text(seconds)
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, hours = round(seconds / 60), round(seconds / 3600)
    if minutes < 60:
        return f"{minutes} min"
    if hours < 48:
        return f"{minutes // 60} h {minutes % 60} min" if minutes % 60 else f"{minutes // 60} h"
    return f"{hours // 24} days {hours % 24} h" if hours % 24 else f"{hours // 24} days"
