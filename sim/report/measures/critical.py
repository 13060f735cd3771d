"""What the time of a run hangs on: the chain of causes behind its last action, walked backwards.

An action begins when the peer's action before it has ended and what it needs is there. Whichever
came last is its cause; the cause of a frame is the action behind which it was sent. Every second
between two points of the chain belongs to one peer (it computed) or to one link (a frame waited for
its turn, crossed, or was delayed). What a peer or link takes of the chain is what the run would
gain at most if it took no time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...trace import COMPUTE, Span

__all__ = ["Link", "PathSegment", "critical_path", "shares"]

Link = tuple[str, str]
"""Sender and receiver."""
SPREAD = 2.0
"""Times its latency: how late a frame may be behind its last byte."""
_WORK = COMPUTE | {"recover", "build"}
TOLERANCE = 0.02
"""A share of the median action: a pause that short between two actions is no waiting."""


@dataclass(frozen=True, slots=True)
class PathSegment:
    """A part of the chain; the parts lie end to end."""

    start_s: float
    end_s: float
    on: str | Link | None
    """A peer, or a link; None where a peer stood still and the trace does not say for what."""
    span: Span


def critical_path(
    spans: Sequence[Span],
    start_s: float,
    end_s: float,
    latency_s: Mapping[Link, float] | None = None,
) -> list[PathSegment]:
    """The chain from the last action that ended by `end_s` back to `start_s`, in order of time.
    Empty when nothing ended between them. `latency_s`: of each link, one way; needed where a send
    ends when the last byte left and not when the frame was there."""
    work: defaultdict[str, list[Span]] = defaultdict(list)
    sends: defaultdict[tuple[str, int], list[Span]] = defaultdict(list)
    for span in spans:
        if span.end_s <= start_s or span.start_s >= end_s:
            continue
        if span.kind in _WORK:
            work[span.peer].append(span)
        elif span.kind == "send":
            sends[span.to, span.step].append(span)
    for found in (*work.values(), *sends.values()):
        found.sort(key=lambda s: (s.start_s, s.end_s))
    starts = {peer: [s.start_s for s in of] for peer, of in work.items()}
    lengths = sorted(s.end_s - s.start_s for of in work.values() for s in of)
    pause_s = TOLERANCE * lengths[len(lengths) // 2] if lengths else 0.0

    ended = [
        (of[i].end_s, peer, i)
        for peer, of in work.items()
        for i in range(len(of))
        if of[i].end_s <= end_s
    ]
    if not ended:
        return []
    until_s, peer, i = max(ended)
    pieces: list[PathSegment] = []
    while i >= 0 and until_s > start_s:
        at, before = work[peer][i], work[peer][i - 1] if i else None
        begin_s = min(at.start_s, until_s)
        pieces.append(PathSegment(max(begin_s, start_s), until_s, peer, at))
        came = sends.get((peer, at.step), ())
        frame = _waited_for(at, before, came, pause_s, latency_s or {})
        i, until_s = i - 1, begin_s
        if frame is not None and frame.start_s < begin_s:
            link = (frame.peer, frame.to)
            pieces.append(PathSegment(max(frame.start_s, start_s), until_s, link, frame))
            peer, until_s = frame.peer, frame.start_s
            i = bisect_right(starts.get(peer, []), until_s + pause_s) - 1
        if i >= 0 and work[peer][i].end_s < until_s:  # between two actions
            before = work[peer][i]
            on = peer if until_s - before.end_s <= pause_s else None
            pieces.append(PathSegment(max(before.end_s, start_s), until_s, on, before))
            until_s = before.end_s
    return [p for p in reversed(pieces) if p.end_s > p.start_s]


def _waited_for(
    span: Span,
    before: Span | None,
    came: Sequence[Span],
    pause_s: float,
    latency_s: Mapping[Link, float],
) -> Span | None:
    """The last frame that an action needs of those that came to its peer in a step, if the peer
    stood still for it: what was there before the peer was free is no cause."""
    if before is not None and span.start_s - before.end_s <= pause_s:
        return None
    role = {"forward": "activation", "evaluate": "activation", "backward": "activation_grad"}
    needed = [
        frame
        for frame in came
        if frame.start_s < span.start_s
        and frame.role in (role.get(span.kind, "sync"), "")
        and (span.kind not in role or frame.microbatch == span.microbatch)
    ]
    if not needed:
        return None

    def there_s(frame: Span) -> float:
        return frame.end_s + SPREAD * latency_s.get((frame.peer, frame.to), 0.0)

    last = max(needed, key=lambda frame: (there_s(frame), frame.start_s))
    return last if before is None or there_s(last) > before.end_s else None


def shares(pieces: Sequence[PathSegment]) -> list[tuple[str | Link, float]]:
    """What each peer and link takes of the chain, 0 to 1, the most first. They add up to less than
    1 where the chain has pauses that nobody explains."""
    taken: Counter[str | Link] = Counter()
    total = 0.0
    for piece in pieces:
        total += piece.end_s - piece.start_s
        if piece.on is not None:
            taken[piece.on] += piece.end_s - piece.start_s  # type: ignore[assignment]
    ranked = sorted(taken.items(), key=lambda item: (-item[1], str(item[0])))
    return [(on, seconds / total) for on, seconds in ranked]
