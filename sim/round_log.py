"""What a run committed of its rounds, from its events: what `round_oracle.py` is fed with."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ..broker.records.rounds import handed_out
from ..proto.broker_pb2 import RoundWork, RunEvent
from .round_oracle import Member, Round

__all__ = ["committed_rounds"]


def committed_rounds(
    events: Iterable[RunEvent], *, microbatches: int, microbatch_size: int
) -> list[Round]:
    """`microbatches`: of one step of the run, each of `microbatch_size` samples. Who was left out
    of a round and went on in the same term is in it with no weight: its optimizer has made these
    steps. Raises ValueError for a round that was committed and never handed out."""
    found: list[Round] = []
    work: dict[int, RoundWork] = {}
    committed = 0
    terms: dict[int, int] = {}
    """By replica, its newest: another one at the beginning of a round is one without a past."""
    fresh: set[int] = set()
    left_out: dict[int, tuple[int, Member]] = {}
    """By replica, the round that it was left out of, with what it did there."""
    for event in events:
        match event.WhichOneof("kind"):
            case "round_begun":
                for w in event.round_begun.work:
                    if w.replica not in work:
                        same = w.term == terms.get(w.replica, w.term)
                        if not same:
                            fresh.add(w.replica)
                        if (before := left_out.pop(w.replica, None)) and same:
                            at, member = before
                            found[at] = replace(found[at], members=(*found[at].members, member))
                    work[w.replica], terms[w.replica] = w, w.term
            case "round_done":
                done = event.round_done
                weights = {m.replica: m.weight for m in done.members}
                if missing := weights.keys() - work.keys():
                    raise ValueError(f"round {done.round} has members {missing} without work")
                members = {
                    n: _member(w, weights.get(n, 0), microbatch_size, n in fresh)
                    for n, w in work.items()
                }
                handed = sum(map(handed_out, work.values()))
                start, length = committed / microbatches, handed / microbatches
                for number in work.keys() - weights.keys():
                    left_out[number] = len(found), members[number]
                found.append(Round(start, length, tuple(members[n] for n in weights)))
                committed, work = done.microbatches, {}
                fresh -= members.keys()
    return found


def _member(work: RoundWork, weight: int, size: int, fresh: bool) -> Member:
    samples = [
        g * size + i
        for s in work.samples
        for g in range(s.first, s.first + s.count)
        for i in range(size)
    ]
    return Member(work.replica, work.steps, samples, weight, fresh, work.planned)
