"""What `auto` and `exact` say: why these peers, and why not the others. Every number comes from the
judge. What is short when there is no plan: `enough.py`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from ...dag.analysis.blocks import describe_interval
from ...dag.plan.report import Spare
from ...job.words import size_text
from ..cost.candidate import Candidate, StageShare
from ..cost.cost_model import CostModel
from ..cost.predicted import seconds_text
from ..cost.rows import RowBuilder
from ..network.communities import Floats, rates
from .moves import with_pipeline
from .search import weight

__all__ = ["spare_reasons", "stage_reasons", "with_peer"]

MOST_SPARES = 24
"""Spare peers whose best insertion is judged."""
MOST_WORK = 40_000
"""Of all insertions, in units of the search."""
MOST_TRIES = 12
"""Structures that are tried for the spares."""


# ---------------------------------------------------------------- peers that are left over


def spare_reasons(judge: CostModel, best: Candidate, seconds: float) -> tuple[Spare, ...]:
    """For every peer without a share: what the step would be with it. The best of a few places is
    judged: a part of each share, or a microbatch of its own."""
    used = set(best.peers)
    spares = [p for p in range(len(judge.offers)) if p not in used]
    if not spares:
        return ()
    hang = _hangs_on(judge, best)
    found = []
    # The fastest are looked at, with as many places each as the work allows.
    allowed = max(2, MOST_WORK // weight(judge, best))
    by_speed = sorted(spares, key=lambda p: (judge.forward_s[p, -1], p))
    looked = set(by_speed[: min(MOST_SPARES, allowed)])
    places = max(1, min(MOST_TRIES, allowed // len(looked)))
    rows = RowBuilder(judge)
    for p in spares:
        if p in looked:
            why = _why_spare(rows, best, seconds, p, hang, places)
        else:
            why = f"not needed: {len(used)} peers are used, faster ones are spare, and {hang}"
        found.append(Spare(judge.offers[p].peer, why))
    return tuple(found)


def _why_spare(
    rows: RowBuilder, best: Candidate, seconds: float, peer: int, hang: str, places: int
) -> str:
    judge, offer = rows.judge, rows.judge.offers[peer]
    tried = sorted(with_peer(judge, best, peer), key=rows.seconds)[:places]
    tried = [c for c in tried if judge.cuttable(c)]
    least = min(judge.stage_bytes(i, i + 1, 1) for i in range(min(judge.operators, 64)))
    if least > offer.device_memory_bytes:
        return (
            f"too little memory for any stage: {size_text(offer.device_memory_bytes)}, the "
            f"smallest operator needs {size_text(least)}"
        )
    if tried and all(map(judge.misplaced, tried)):
        return "the parts that it could take must stay with the data, which it does not have"
    fitting = [c for c in tried if judge.fits(c)]
    if not fitting:
        room = size_text(offer.device_memory_bytes)
        return f"too little memory ({room}) for a share beside the others"
    bounds = [(judge.bound(c), i) for i, c in enumerate(fitting)]
    with_it = min(judge.seconds(fitting[i]) for _, i in sorted(bounds)[:2])
    more = with_it - seconds
    if more <= 1e-6 * seconds:
        return f"adds nothing: {hang}"
    what = _what(judge, best, peer)
    return f"it would add {seconds_text(more)} to the step's {seconds_text(seconds)}{what}"


def with_peer(judge: CostModel, best: Candidate, peer: int) -> Iterator[Candidate]:
    """The plan with one more peer, in a few places."""
    shares = [(p, i, s) for p, line in enumerate(best.pipelines) for i, s in enumerate(line)]
    shares = [x for x in shares if x[2].stop - x[2].start > 1]
    seconds = judge.both_s
    if len(shares) > MOST_TRIES // 2:
        shares.sort(
            key=lambda x: -float(seconds[x[2].peer, x[2].stop] - seconds[x[2].peer, x[2].start])
        )
        shares = shares[: MOST_TRIES // 2]
    for p, i, s in shares:
        line = best.pipelines[p]
        own, its = seconds[s.peer], seconds[peer]
        half = _half(s, own, its)
        new = StageShare(peer, half, s.stop, s.recompute)
        yield with_pipeline(best, p, (*line[:i], replace(s, stop=half), new, *line[i + 1 :]))
        half = _half(s, its, own)
        new = StageShare(peer, s.start, half, s.recompute)
        yield with_pipeline(best, p, (*line[:i], new, replace(s, start=half), *line[i + 1 :]))
    most = max(range(len(best.microbatches)), key=lambda p: best.microbatches[p])
    if best.microbatches[most] > 1 and judge.request.options.pipelines is None:
        m = [*best.microbatches, 1]
        m[most] -= 1
        alone = (StageShare(peer, 0, judge.operators),)
        yield replace(best, pipelines=(*best.pipelines, alone), microbatches=tuple(m))


def _half(share: StageShare, front: Floats, back: Floats) -> int:
    """Where two peers of these seconds part a share so that both take about equally long."""
    return min(
        range(share.start + 1, share.stop),
        key=lambda x: max(front[x] - front[share.start], back[share.stop] - back[x]),
    )


def _hangs_on(judge: CostModel, best: Candidate) -> str:
    critical = judge.estimate(best).critical[0]
    peers = best.peers
    a = judge.offers[peers[int(critical.peer[1:])]]
    if critical.destination is None:
        return f"the step hangs on {a}, which computes for {seconds_text(critical.seconds)} of it"
    b = judge.offers[peers[int(critical.destination[1:])]]
    return f"the step hangs on the link {a} -> {b} for {seconds_text(critical.seconds)}"


def _what(judge: CostModel, best: Candidate, peer: int) -> str:
    """Say what is wrong with a peer, in one clause: its links or its speed, whichever is further
    below those of the plan's peers."""
    rate = rates(judge.network)
    used = list(best.peers)
    own = max(rate[peer, q] for q in used)
    others = [max(rate[p, q] for q in used if q != p) for p in used if len(used) > 1]
    speed = 1 / max(float(judge.forward_s[peer, -1]), 1e-30)
    fastest = max(1 / max(float(judge.forward_s[p, -1]), 1e-30) for p in used)
    slower = fastest / speed
    narrower = min(others) / own if others and math.isfinite(own) else 0.0
    if narrower > slower and narrower > 1.2:
        return f": its best link to them carries {own / 1e6:.4g} MB/s"
    if len(used) > 1 and slower > 1.2:
        return f": it computes {slower:.2g} times slower than the fastest of them"
    if math.isfinite(own):
        return f": what it would take over must cross its link of {own / 1e6:.4g} MB/s"
    return ""


# ---------------------------------------------------------------- stages


def stage_reasons(judge: CostModel, best: Candidate) -> Iterator[str]:
    """One line for each pipeline, then one for each stage."""
    seconds = judge.both_s
    device = judge.device_bytes(best)
    graph = judge.request.graph
    many = len(best.pipelines) > 1
    shown = 0
    for p, (line, m) in enumerate(zip(best.pipelines, best.microbatches, strict=True)):
        if many:
            names = " -> ".join(str(judge.offers[s.peer]) for s in line)
            yield f"pipeline {p} takes {m} of the step's microbatches: {names}"
        for s in line:
            shown += 1
            if shown > 64:
                yield "and so on"
                return
            each = float(seconds[s.peer, s.stop] - seconds[s.peer, s.start])
            again = ", its forward computed again" if s.recompute else ""
            yield (
                f"{describe_interval(graph, s.start, s.stop)} on {judge.offers[s.peer]}: "
                f"{seconds_text(each)} for each microbatch{again}, {size_text(device[s.peer])} of "
                f"its {size_text(judge.offers[s.peer].device_memory_bytes)}"
            )
