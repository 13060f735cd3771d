"""What a run committed of its rounds, from its events: what `round_oracle.py` is fed with."""

from __future__ import annotations

from collections.abc import Iterable

from ..proto.broker_pb2 import RoundWork, RunEvent
from .round_oracle import Member, Round

__all__ = ["committed_rounds"]


def committed_rounds(
    events: Iterable[RunEvent], *, microbatches: int, microbatch_size: int
) -> list[Round]:
    """`microbatches`: of one step of the run, each of `microbatch_size` samples. Raises ValueError
    for a round that was committed and never handed out."""
    found: list[Round] = []
    work: dict[int, RoundWork] = {}
    committed = 0
    terms: dict[int, int] = {}
    """By replica, its newest: another one at the beginning of a round is one without a past."""
    fresh: set[int] = set()
    for event in events:
        match event.WhichOneof("kind"):
            case "round_begun":
                for w in event.round_begun.work:
                    if w.replica not in work and w.term != terms.get(w.replica, w.term):
                        fresh.add(w.replica)
                    work[w.replica], terms[w.replica] = w, w.term
            case "round_done":
                done = event.round_done
                if missing := {m.replica for m in done.members} - work.keys():
                    raise ValueError(f"round {done.round} has members {missing} without work")
                handed = sum(s.count for w in work.values() for s in w.samples)
                members = tuple(
                    _member(work[m.replica], m.weight, microbatch_size, m.replica in fresh)
                    for m in done.members
                )
                start, length = committed / microbatches, handed / microbatches
                found.append(Round(start, length, members))
                committed, work = done.microbatches, {}
                fresh -= {m.replica for m in done.members}
    return found


def _member(work: RoundWork, weight: int, size: int, fresh: bool) -> Member:
    samples = [
        g * size + i
        for s in work.samples
        for g in range(s.first, s.first + s.count)
        for i in range(size)
    ]
    return Member(work.replica, work.steps, samples, weight, fresh)
