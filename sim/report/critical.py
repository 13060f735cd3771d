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
from collections.abc import Sequence
from dataclasses import dataclass

from ..trace import COMPUTE, Span

__all__ = ["Link", "Piece", "critical_path", "shares"]

Link = tuple[str, str]
"""Sender and receiver."""
_WORK = COMPUTE | {"recover", "build"}
TOLERANCE = 0.02
"""Of the median action: a pause that short between two actions is no waiting."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of the chain; the parts lie end to end."""

    start_s: float
    end_s: float
    on: str | Link
    """A peer, or a link."""
    span: Span


def critical_path(spans: Sequence[Span], start_s: float, end_s: float) -> list[Piece]:
    """The chain from the last action that ended by `end_s` back to `start_s`, in order of time.
    Empty when nothing ended between them."""
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

    last = max(
        (s for of in work.values() for s in of if s.end_s <= end_s),
        key=lambda s: (s.end_s, s.peer),
        default=None,
    )
    pieces: list[Piece] = []
    at = last
    until_s = last.end_s if last is not None else start_s
    while at is not None and until_s > start_s:
        begin_s = min(at.start_s, until_s)
        pieces.append(Piece(max(begin_s, start_s), until_s, at.peer, at))
        before = _before(work[at.peer], starts[at.peer], begin_s)
        frame = _waited_for(at, before, sends.get((at.peer, at.step), ()), pause_s)
        until_s = begin_s
        if frame is not None and frame.start_s < begin_s:
            link = (frame.peer, frame.to)
            pieces.append(Piece(max(frame.start_s, start_s), until_s, link, frame))
            until_s = frame.start_s
            before = _before(work[frame.peer], starts.get(frame.peer, []), until_s + pause_s)
        if before is not None and before.end_s < until_s:  # between two actions
            pieces.append(Piece(max(before.end_s, start_s), until_s, before.peer, before))
            until_s = before.end_s
        at = before
    return [p for p in reversed(pieces) if p.end_s > p.start_s]


def _before(work: Sequence[Span], starts: Sequence[float], at_s: float) -> Span | None:
    """The last action of a peer that began before a time."""
    i = bisect_right(starts, at_s) - 1
    while i >= 0 and work[i].start_s >= at_s:
        i -= 1
    return work[i] if i >= 0 else None


def _waited_for(
    span: Span, before: Span | None, came: Sequence[Span], pause_s: float
) -> Span | None:
    """Of the frames that came to a peer in a step, the last one that its action needs, when the
    peer stood still for it."""
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
    return max(needed, key=lambda s: (min(s.end_s, span.start_s), s.start_s), default=None)


def shares(pieces: Sequence[Piece]) -> list[tuple[str | Link, float]]:
    """What each peer and link takes of the chain, 0 to 1, the most first."""
    taken: Counter[str | Link] = Counter()
    for piece in pieces:
        taken[piece.on] += piece.end_s - piece.start_s  # type: ignore[assignment]
    total = sum(taken.values())
    ranked = sorted(taken.items(), key=lambda item: (-item[1], str(item[0])))
    return [(on, seconds / total) for on, seconds in ranked]
