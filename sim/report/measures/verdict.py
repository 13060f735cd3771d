"""The one sentence on top: which peer or link holds the run back, and by how much."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from ...trace import Trace
from ..words import bit_rate, percent, plain, seconds
from .critical import Link, PathSegment, critical_path, shares
from .measure import Measured

__all__ = ["Verdict", "judge"]

LEAST = 0.1
"""What the run would gain, of its time, from which something holds the run back by itself."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """`text`: the sentence; `short`: the same behind "hangs on". `on`: the peer or the link that it
    names; None when none stands out. `share` of the time hangs on it. `path`: the chain of the
    typical steps."""

    text: str = ""
    short: str = ""
    on: str | Link | None = None
    share: float = 0.0
    path: tuple[PathSegment, ...] = ()

    def marks(self, peer: str) -> bool:
        """Whether this peer is the one, or sends on the link that is."""
        return self.on == peer or (isinstance(self.on, tuple) and self.on[0] == peer)


def judge(trace: Trace, found: Measured) -> Verdict:
    """From the chain of causes of the typical steps. Every stage has its part in the chain, so who
    holds the run back is who would shorten it most by being as the others are: a peer by computing
    as long as they do in the median, a link by delaying the chain as the links do in the median."""
    if not found.typical or not found.span_s:
        return Verdict()
    path = critical_path(
        trace.spans,
        found.typical[0].start_s,
        found.typical[-1].end_s,
        {pair: link.latency_s for pair, link in found.links.items()},
    )
    ranked = shares(path)
    if not ranked:
        return Verdict()
    holders = [p for p in found.peers.values() if p.stages]
    if len(holders) == 1:
        [alone] = holders
        share = found.share(alone.compute_s)
        rest = f"it computes {percent(share)} of the time"
        name = plain(alone.name)
        return Verdict(
            f"{name} trains alone; {rest}", f"{name} alone; {rest}", alone.name, share, tuple(path)
        )
    usual = median([p.compute_s for p in found.peers.values() if p.stages] or [0.0])
    of = dict(ranked)
    middle = median([of.get(pair, 0.0) for pair in found.links] or [0.0])

    def gain(on: str | Link) -> float:
        if isinstance(on, tuple):
            return of[on] - middle
        own = found.peers[on].compute_s
        return of[on] * max(0.0, 1 - usual / own) if own else 0.0

    best = sorted(of, key=lambda on: (-gain(on), -of[on], str(on)))
    if gain(best[0]) < LEAST:
        return _alike(ranked, found, path)
    on, hangs = best[0], percent(of[best[0]])
    use = _use(on, found, path)
    if len(best) > 1 and gain(best[1]) >= LEAST / 2:
        use += f"; next {_name(best[1])} ({percent(of[best[1]])})"
    text = f"{_name(on)} holds the run back: {hangs} of the time hangs on it; {use}"
    return Verdict(text, f"{_name(on)}: {hangs} of the time; {use}", on, of[on], tuple(path))


def _alike(
    ranked: Sequence[tuple[str | Link, float]], found: Measured, path: Sequence[PathSegment]
) -> Verdict:
    """Where nobody is worse than the others: whether the time hangs on computing or on links."""
    links = [(on, share) for on, share in ranked if isinstance(on, tuple)]
    on_links = sum(share for _, share in links)
    computing = sum(share for on, share in ranked if isinstance(on, str))
    if on_links < computing:
        on, share = ranked[0]
        rest = f"{percent(computing)} of the time on computing, the most on {_name(on)}"
        rest += f" ({percent(share)})"
        text = f"No peer or link holds the run back by itself: it hangs {rest}"
        return Verdict(text, f"no peer or link by itself: {rest}", None, 0.0, tuple(path))
    link, share = links[0]
    rest = f"{percent(on_links)} of the time hangs on them, the most on {_name(link)}"
    rest += f" ({percent(share)}); {_use(link, found, path)}"
    return Verdict(f"Links hold the run back: {rest}", f"links: {rest}", link, share, tuple(path))


def _name(on: str | Link) -> str:
    return plain(on) if isinstance(on, str) else f"{plain(on[0])} → {plain(on[1])}"


def _use(on: str | Link, found: Measured, path: Sequence[PathSegment]) -> str:
    if isinstance(on, str):
        own = percent(found.share(found.peers[on].compute_s))
        others = [
            found.share(p.compute_s) for p in found.peers.values() if p.stages and p.name != on
        ]
        beside = f", the others {percent(median(others))} (median)" if others else ""
        return f"it computes {own} of the time{beside}"
    link = found.links.get(on)
    if link is None:
        return "a frame is under way"
    use = found.use(link)
    if use is None:
        return f"a frame is under way {percent(found.share(link.busy_s))} of the time"
    text = f"it uses {percent(use)} of its {bit_rate(link.rate)}"
    delayed = sum(
        p.end_s - max(p.start_s, p.span.end_s)
        for p in path
        if p.on == on and p.end_s > p.span.end_s
    )
    taken = sum(p.end_s - p.start_s for p in path if p.on == on)
    if delayed > taken / 2:
        text += f", but mostly delays frames: {seconds(link.latency_s)} one way"
    full = found.up.get(on[0], 0.0)
    if full > 1.2 * use and full > found.down.get(on[1], 0.0):
        text += f"; all that {plain(on[0])} sends uses {percent(full)} of its uplink"
    elif found.down.get(on[1], 0.0) > 1.2 * use:
        text += f"; all that {plain(on[1])} gets uses {percent(found.down[on[1]])} of its downlink"
    return text
