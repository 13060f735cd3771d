"""What is said beside a formation: other ways to train, who is left out, and why it is as it is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from ...dag.plan.report import Alternative, PlanWithReport, Spare
from ...job.words import count_of, size_text
from ..schedulers.alternatives import alone
from .division import NEAR, Division, Judge
from .pace import MOST_PEERS, Pace, Paces, links
from .rounds import local_steps
from .search import nearest

__all__ = [
    "ALL_REDUCE",
    "ONE_REPLICA",
    "alternatives",
    "hangs_on",
    "left_out",
    "one_replica",
    "reasons",
    "slowest_between",
    "slowest_inside",
]

ALL_REDUCE = "all-reduce each step"
ONE_REPLICA = "one replica"
DENSE_BYTES = 4.0
"""Of a number in fp32."""
MOST_EXPLAINED = 64
"""Replicas, over the peers that are left out and for whom divisions with them are looked at."""
OTHERS_BETTER = "no division with it that was looked at trains more samples/s"


def alternatives(
    judge: Judge, chosen: Division, divisions: Sequence[Division], one: Division | None
) -> tuple[Alternative, ...]:
    """Other ways to train the same samples with these peers."""
    found, count = [], len(chosen.peers)
    if count > 1:
        text = "no pipelines through these peers hold the model"
        if one is not None:
            text = f"{_named(judge, one.peers[0])}, equal weights after every step"
        step_s = 0.0 if one is None else judge.batch / one.samples_per_s
        found.append(Alternative(ONE_REPLICA, step_s, text))
    other = max(
        (d for d in divisions if len(d.peers) not in (1, count)),
        key=lambda d: d.samples_per_s,
        default=None,
    )
    if other is not None:
        text = "; ".join(_named(judge, g) for g in other.peers[:4])
        text += " …" if len(other.peers) > 4 else ""
        step_s = judge.batch / other.samples_per_s
        found.append(Alternative(f"{len(other.peers)} replicas", step_s, text))
    if count > 1:
        each = Judge(judge.paces, 1, DENSE_BYTES).exchange(chosen.paces).seconds
        text = f"the same replicas, gradients in fp32 added up in {each:.3g} s after every step"
        # Whole microbatches of a step to each, in place of whole steps of a round.
        seconds = [p.seconds / chosen.microbatches for p in chosen.paces]
        shares = local_steps(seconds, judge.request.microbatches)
        slowest = max(s * m for s, m in zip(seconds, shares, strict=True))
        found.append(Alternative(ALL_REDUCE, slowest + each, text))
    return (*found, alone(judge.paces.judge))


def one_replica(judge: Judge, divisions: Sequence[Division]) -> Division | None:
    """The best that is known, or of all peers together; of very many by closed formulas."""
    known = [d for d in divisions if len(d.peers) == 1]
    everyone = range(len(judge.request.offers))
    looks = judge if len(everyone) <= MOST_PEERS else judge.roughly()
    return max(known, key=lambda d: d.samples_per_s) if known else looks.of([everyone])


def left_out(
    judge: Judge,
    searched: Division,
    planned: Division,
    made: Iterable[PlanWithReport],
    count: int | None,
) -> Iterator[Spare]:
    """Return the peers that have no share, with the best that was found for a division with
    each."""
    offers, paces = judge.request.offers, judge.paces
    spares = {s.peer: s.reason for m in made for s in m.report.spares}
    inside = {p for g in planned.peers for p in g}
    used = {p for g in searched.peers for p in g}
    explained = 0
    for p in sorted(set(range(len(offers))) - inside, key=lambda p: (-paces.speed[p], p)):
        if p in used:  # the planner of its replica does without it
            yield Spare(offers[p].peer, spares.get(offers[p].peer, OTHERS_BETTER))
        elif explained < MOST_EXPLAINED:
            explained += len(searched.peers)
            yield Spare(offers[p].peer, _why_not(judge, searched, p, count))
        else:
            yield Spare(offers[p].peer, OTHERS_BETTER)


def _why_not(judge: Judge, chosen: Division, p: int, count: int | None) -> str:
    paces, groups = judge.paces, chosen.peers
    now, found = chosen.samples_per_s, list[tuple[float, str]]()
    if count is None and paces.may_hold([p]):
        own = judge.of((*groups, frozenset({p})))
        if own is not None:
            r = next(r for r, g in enumerate(own.peers) if g == {p})
            text = "as a replica of its own"
            if own.steps[r] == 1 and own.local_s > chosen.local_s:
                text += (
                    f" it makes a local step in {own.paces[r].seconds:.3g} s and the others their "
                    f"round in {chosen.local_s:.3g} s"
                )
            elif own.exchange.seconds > chosen.exchange.seconds * 1.01:
                text += (
                    f" it makes the exchange take {own.exchange.seconds:.3g} s in place of "
                    f"{chosen.exchange.seconds:.3g} s"
                )
            found.append((own.samples_per_s, text))
    for r in nearest(paces, [p], groups):
        joined = judge.of((*groups[:r], groups[r] | {p}, *groups[r + 1 :]))
        if joined is not None and any(p in g for g in joined.peers):
            found.append((joined.samples_per_s, f"in replica {r}"))
    if not found:
        return (
            f"it offers {size_text(int(paces.rooms[p]))}, the model needs "
            f"{size_text(paces.needed)}, and the replicas near it train no faster with it"
        )
    best, text = max(found)
    if best > now:
        return (
            f"{text}: {best / now:.3g} times the samples/s, too little for another "
            "replica or a slow link"
        )
    return f"{text}: {best / now:.3g} times the samples/s"


def hangs_on(judge: Judge, chosen: Division) -> str:
    """What a round's seconds hang on."""
    offers, exchange = judge.request.offers, chosen.exchange
    shown = judge.shown(chosen.local_s, exchange.seconds)
    if shown > chosen.local_s:
        at = [str(offers[p]) for p in exchange.between]
        where = f"the line of {at[0]}" if len(at) == 1 else f"the link between {' and '.join(at)}"
        return f"the exchange, {shown:.3g} s, and in it {where}"
    each = [h * p.seconds for h, p in zip(chosen.steps, chosen.paces, strict=True)]
    r = int(np.argmax(each))
    more = f", while {shown:.3g} s go into the exchange" if shown else ""
    return (
        f"local work, {chosen.local_s:.3g} s: {count_of(chosen.steps[r], 'step')} of replica {r} "
        f"with {chosen.paces[r].seconds:.3g} s each{more}"
    )


def reasons(
    judge: Judge,
    chosen: Division,
    divisions: Sequence[Division],
    one: Division | None,
    count: int | None,
) -> Iterator[str]:
    """One sentence each, the recommendation first."""
    replicas, now = len(chosen.peers), chosen.samples_per_s
    if replicas > 1:
        beside = "; one replica cannot be made of these peers"
        if one is not None:
            beside = f", {now / one.samples_per_s:.2f} times one replica's"
        yield (
            f"{replicas} replicas that exchange every {judge.every} steps: {now:.4g} samples/s"
            f"{beside}. Samples count alike; that one teaches less the rarer replicas exchange is "
            "not predicted"
        )
    else:
        yield f"one replica with equal weights after every step: {now:.4g} samples/s"
    best = divisions[0]
    if best.peers != chosen.peers and best.samples_per_s > now:
        why = (
            "has a slow link inside a replica"
            if best.slow and not chosen.slow
            else "has more replicas"
        )
        yield (
            f"with {count_of(len(best.peers), 'replica')} {best.samples_per_s:.4g} samples/s: "
            f"within {1 - NEAR:.0%}, and {why}"
        )
    if chosen.slow:
        yield (
            f"{count_of(chosen.slow, 'slow link')} inside replicas: no division without that was "
            "found trains as many samples/s"
        )
    if count is not None:
        yield f"{count_of(count, 'replica')} as asked for"


def slowest_inside(paces: Paces, pace: Pace) -> float:
    """bytes/s of the slowest link that a replica uses."""
    return min((float(paces.rate[a, b]) for a, b in links(pace.candidate)), default=np.inf)


def slowest_between(paces: Paces, chosen: Division) -> float:
    """bytes/s of the slowest link between two replicas."""
    groups = [sorted(g) for g in chosen.peers]
    least = np.inf
    for r, group in enumerate(groups):
        others = [p for g in groups[r + 1 :] for p in g]
        if others:
            least = min(least, float(paces.rate[np.ix_(group, others)].min()))
    return float(least)


def _named(judge: Judge, peers: Iterable[int]) -> str:
    names = [str(judge.request.offers[p]) for p in sorted(peers)]
    return " - ".join(names[:8]) + (" …" if len(names) > 8 else "")
