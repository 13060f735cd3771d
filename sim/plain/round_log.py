"""What a run committed of its rounds, from its events: what `round_oracle.py` is fed with."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from ...broker.records.version_ledger import pairs_of
from ...broker.records.work_ledger import handed_out
from ...dag.rounds.cohorts import cohort_of, places_of
from ...proto.broker_pb2 import WAITING, RoundDone, RoundWork, RunEvent
from .round_oracle import PlainMember, Round

__all__ = ["committed_rounds"]


def committed_rounds(
    events: Iterable[RunEvent],
    *,
    microbatches: int,
    microbatch_size: int,
    committed: int = 0,
    gossip: bool = False,
    clients: int = 0,
    seed: int = 0,
) -> list[Round]:
    """`microbatches`: of one step of the run, each of `microbatch_size` samples; `committed`: in
    the checkpoint that the run went on from; `clients`: of federated training, whose cohorts follow
    from the run's `seed`. Who was left out
    of a round and went on in the same term is in it with no weight: its optimizer has made these
    steps. Raises ValueError for a round that was committed and never handed out."""
    found: list[Round] = []
    work: dict[int, RoundWork] = {}
    terms: dict[int, int] = {}
    """By replica, its newest: another one at the beginning of a round is one without a past."""
    fresh: set[int] = set()
    left_out: dict[int, tuple[int, PlainMember]] = {}
    """By replica, the round that it was left out of, with what it did there."""
    past: dict[int, _Place] = {}
    """By replica, its last round."""
    over = defaultdict[int, int](int)
    """By replica, its newest term that has ended."""
    for event in events:
        match event.WhichOneof("kind"):
            case "state":
                for n, replica in enumerate(event.state.replicas):
                    over[n] = replica.term - (replica.phase != WAITING)
            case "round_begun":
                for w in event.round_begun.work:
                    if w.replica not in work:
                        # Of an older term: what it did in a later round before it was lost.
                        same = w.term <= terms.get(w.replica, w.term)
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
                handed = sum(map(handed_out, work.values()))
                start, length = committed / microbatches, handed / microbatches
                members = dict[int, PlainMember]()
                for n, w in work.items():
                    now, last = (start, length, w.planned or w.steps), past.get(n, (0.0, 0.0, 1))
                    places = [_at(last, last[2] + j) for j in range(w.late)]
                    places += [_at(now, j) for j in range(w.late, w.steps + w.ahead)]
                    out, weight = n not in weights, weights.get(n, 0)
                    members[n] = _member(w, weight, microbatch_size, n in fresh, places, out)
                    if w.cohort:
                        mine = cohort_of(clients, seed, done.round - w.behind, places_of(w.cohort))
                        members[n] = replace(members[n], clients=tuple(mine), behind=w.behind)
                    if out:
                        left_out[n] = len(found), members[n]
                    past[n] = now
                inside = tuple(members[n] for n in weights)
                met: dict[str, Any] = _met(done) if gossip else {}
                met["fragment"] = max(w.fragment for w in work.values())
                met["final"] = any(w.final for w in work.values())
                met["gone"] = tuple(m.replica for m in done.members if m.term <= over[m.replica])
                found.append(Round(start, length, inside, **met))
                committed, work = done.microbatches, {}
                fresh -= members.keys()
    return found


_Place = tuple[float, float, int]
"""Where a round begins in the learning rate's schedule, how much of it that is, and steps."""


def _at(place: _Place, j: int) -> float:
    start, length, steps = place
    return start + length * j / steps


def _met(done: RoundDone) -> dict[str, Any]:
    """Return who met in a round of gossip, and who took whose weights."""
    return {
        "pairs": pairs_of(done.members),
        "gathers": not any(m.group for m in done.members),
        "joined": tuple((m.replica, m.source) for m in done.joined),
    }


def _member(
    work: RoundWork, weight: int, size: int, fresh: bool, at: Sequence[float], out: bool
) -> PlainMember:
    """`at`: where each step stands, those ahead of the next round too; who was left `out` has made
    these in this one."""
    ranges = (*work.samples, *(work.ahead_samples if out else ()))
    samples = [
        g * size + i for s in ranges for g in range(s.first, s.first + s.count) for i in range(size)
    ]
    steps = work.steps + (work.ahead if out else 0)
    return PlainMember(work.replica, steps, samples, weight, fresh, work.late, tuple(at[:steps]))
