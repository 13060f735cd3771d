"""How the local work of a round is divided among its replicas, by what they are taken to do in a
second. Pure.

What one replica alone says of its speed counts up to a bound (`planner/replicas/rounds.py`), and
others wait for it at most so many times as long as for the next one.

Where local steps go on while the round before is exchanged, a replica makes some of the next round
behind its own, *ahead* of the version that these belong to; that version lands behind them. So what
was made ahead is the beginning of the next round's work, and only the rest of it is handed out when
that round begins. A replica that was left out gives it back with all else.

Clients of a replica that is lost in a round are handed to others in the same round: where all who
are left have trained theirs, they train those of the lost as well, each some of them, from the same
version. A client's work is a function of (seed, round, client), so the round comes to what it comes
to if nobody is lost. Who takes more adds up what it has and what is to come by weight, and says
that it is ready once more (`RoundWork.more`). It is done only where the deadline is expected to
allow it, by how long the slowest took for its own.
"""

from __future__ import annotations

import heapq
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy

from ...dag.rounds.cohorts import places_of, ranges_of
from ...planner.replicas.rounds import MOST_TIMES, at_least
from ...proto.broker_pb2 import RoundWork
from ..records.run import RunRecord

__all__ = ["at_most", "divide", "handed_on", "local_work", "steps_of", "with_places"]

_SPARE = 1.25
"""Times what the exchange took last, with `overlap = "auto"`."""
_MOST = 2
"""Of a round, no more than this part is ahead then."""


def at_most(seconds: Sequence[float]) -> float:
    """The longest of some times of different replicas, but no more than MOST_TIMES the next
    one."""
    longest = sorted(seconds)[-2:]
    return min(longest[-1], MOST_TIMES * longest[0])


def divide(units: int, seconds: Sequence[float]) -> list[int]:
    """How many of so many steps each replica makes, by the seconds that it takes for one, so that
    all end together: proportional to its speed, by largest remainders; at least one each while
    there are enough. The sum is `units`."""
    if not seconds:
        return []
    speeds = [1.0 / s if s > 0 else 0.0 for s in seconds]
    known = [s for s in speeds if s > 0]
    mean = sum(known) / len(known) if known else 1.0
    speeds = [s or mean for s in speeds]
    total = sum(speeds)
    least = 1 if units >= len(speeds) else 0
    shares = [max(float(least), units * s / total) for s in speeds]
    found = [int(share) for share in shares]
    order = sorted(range(len(speeds)), key=lambda i: (found[i] - shares[i], i))
    for i in order[: max(0, units - sum(found))]:
        found[i] += 1
    while sum(found) > units:  # those of one step each took it from the others
        most = max(range(len(found)), key=lambda i: (found[i], -i))
        found[most] -= 1
    return found


def steps_of(units: int, seconds: Sequence[float], carried: Sequence[int]) -> list[int]:
    """How many of so many steps each replica makes, `carried` of them done ahead: one after the
    other goes to who would end first with it, so that who was ahead by more has fewer to come. Who
    has none comes first: a round in which only one works is lost with that one."""
    if not any(carried):
        return divide(units, seconds)
    found, known = [*carried], [s for s in seconds if s > 0]
    typical = statistics.median(known) if known else 1.0
    each = [s if s > 0 else typical for s in seconds]
    ends = [((found[i] + 1) * s if found[i] else 0.0, i) for i, s in enumerate(each)]
    heapq.heapify(ends)
    for _ in range(units - sum(carried)):
        _, i = ends[0]
        found[i] += 1
        heapq.heapreplace(ends, ((found[i] + 1) * each[i], i))
    return found


def steps_ahead(
    overlap: int | str,
    every: int,
    steps: Mapping[int, int],
    *,
    left: int,
    exchange_s: float,
    round_s: float,
) -> dict[int, int]:
    """How many steps of the next round each replica may make, in proportion to its `steps` of this
    one. `left`: steps that are there for it, over all replicas, but for one of each behind those:
    what is evaluated twice, where the version lands and at the end, must not be at one step. Where
    they are too few, nobody is ahead. `exchange_s`, `round_s`: how long the last exchange took, and
    the steps of a round, which "auto" goes by; 0: not known."""
    if overlap == "auto":
        share = _SPARE * exchange_s / round_s if round_s else 0.0
        most = every // _MOST
        overlap = min(most, math.ceil(every * share) + 1) if share else 0
    found = {n: h * int(overlap) // every for n, h in steps.items()}
    return found if sum(found.values()) <= left else dict.fromkeys(steps, 0)


def local_work(
    run: RunRecord,
    numbers: Sequence[int],
    exchange_s: float,
    *,
    saves: Callable[[RunRecord, int], bool],
) -> list[RoundWork]:
    """The work of the next round, for these replicas; those that would get no step are not in it.
    `exchange_s`: how long the last exchange took, 0: not known. `saves`: whether the version with
    so many steps is kept as a checkpoint. Nothing changes before the event that says so."""
    spec, sync = run.run.spec, run.run.requirements.sync
    ledger, number = run.of_rounds.work, run.of_rounds.versions.round
    mine = {n: run.replicas[n] for n in numbers}
    own = spec.microbatches // len(run.replicas)
    left = min(sync.steps * spec.microbatches, ledger.total - ledger.committed)
    times = at_least([r.round_step_s for r in mine.values()])
    past = {n: ledger.carried(n, r.term) for n, r in mine.items()}
    carried = {n: w.ahead if w else 0 for n, w in past.items()}
    steps = steps_of(left // own, times, [*carried.values()])
    chosen = {n: h for n, h in zip(numbers, steps, strict=True) if h}
    kept = saves(run, (ledger.committed + left) // spec.microbatches)
    ahead = steps_ahead(
        0 if kept else sync.overlap,  # a checkpoint has the version alone
        sync.steps,
        chosen,
        left=(ledger.total - ledger.committed - left) // own - len(run.replicas),
        exchange_s=exchange_s,
        round_s=max(h * s for h, s in zip(steps, times, strict=True)),
    )
    final = ledger.committed + left >= ledger.total
    fragment = 0 if final or sync.fragments == 1 else number % sync.fragments + 1
    counts = [h - carried[n] for n, h in chosen.items()] + [ahead[n] for n in chosen]
    begun = [r for w in past.values() if w for r in w.ahead_samples]
    ranges = ledger.hand_out((count * own for count in counts), begun)
    firsts = {n: max(r.committed, ledger.gate(n, r.term)) for n, r in mine.items()}
    found = []
    for i, (n, h) in enumerate(chosen.items()):
        before = past[n]
        found.append(
            RoundWork(
                replica=n,
                term=mine[n].term,
                first_step=before.first_step + before.steps if before else firsts[n],
                steps=h,
                samples=[*(before.ahead_samples if before else ()), *ranges[i]],
                ahead=ahead[n],
                ahead_samples=ranges[len(chosen) + i],
                late=carried[n],
                fragment=fragment,
                final=final,
            )
        )
    return found


def handed_on(
    given: Mapping[int, RoundWork],
    lost: Sequence[int],
    seconds: Mapping[int, float],
    *,
    took_s: float,
    left_s: float,
) -> list[RoundWork]:
    """Return the work of the round anew: none of the `lost`, more of those that take it; empty:
    nobody does. given: by replica. seconds: of one that may take some, what it needs for one
    client, by comparison; 0: not known. took_s: how long the slowest took for its own. left_s:
    until the deadline."""
    places = [place for n in lost for place in places_of(given[n].cohort)]
    if not places or not seconds:
        return []
    found, start = list[RoundWork](), 0
    for n, count in zip(seconds, divide(len(places), [*seconds.values()]), strict=True):
        own, taken = places_of(given[n].cohort), places[start : start + count]
        start += count
        if took_s * count > left_s * len(own):
            return []
        if taken:
            found.append(with_places(given[n], sorted([*own, *taken])))
            found[-1].more += 1
    return [*(with_places(given[n], ()) for n in lost), *found]


def with_places(work: RoundWork, places: Sequence[int]) -> RoundWork:
    """Return work with the clients at these places of the cohort in place of its own."""
    found = deepcopy(work)
    found.ClearField("cohort")
    found.cohort.extend(ranges_of(places))
    return found
