"""Which forms of a request are looked at: microbatches of several sizes, and the head split.

Small microbatches fill a pipeline and keep little, large ones cost fewer kernels and frames: the
seconds over sizes have a valley, mostly one. So sizes are looked at from the request's own on, down
the valley, until both neighbours of the best are worse; where nothing fits, smaller ones first.
The head is split into ever more parts while that helps.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from ..base.interface import PlanRequest

__all__ = ["look_at_forms"]


def look_at_forms(request: PlanRequest, look: Callable[[PlanRequest], float]) -> None:
    """Calls `look` for the request and some of its others, each once. It gives the seconds of the
    best that was found, inf where nothing fits."""
    plain = [f for f in (request, *request.others) if f.head_parts == request.head_parts]
    plain.sort(key=lambda f: f.microbatch_size)
    known: dict[int, float] = {}

    def seconds(i: int) -> float:
        if i not in known:
            known[i] = look(plain[i])
        return known[i]

    own = plain.index(request)
    best = own
    for i in (*range(own, -1, -1), *range(own + 1, len(plain))):
        best = i
        if seconds(i) < inf:
            break
    while True:
        near = [i for i in (best - 1, best + 1) if 0 <= i < len(plain)]
        better = min(near, key=seconds, default=best)
        if seconds(better) >= seconds(best):
            break
        best = better
    before = seconds(own)
    split = [f for f in request.others if f.head_parts != request.head_parts]
    for form in sorted(split, key=lambda f: f.head_parts):
        now = look(form)
        if now >= before and before < inf:
            break
        before = min(before, now)
