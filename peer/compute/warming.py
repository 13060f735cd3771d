"""What a warm peer fetches while it waits: the frozen part of the stages whose snapshots it keeps,
which no snapshot has (`records.py`). It lies in the cache, on disk, when a stage is taken over.

Nobody waits for it, so it gives way: one shard at a time, with a pause behind each as long as its
fetch took, so that it has half of a line at most; and through the owner's caps, as any fetch. Of
that which would push out half of what the cache may keep, and of a stage whose frozen part is
larger than what the owner offers, nothing is fetched. Weights that are in one file, not in shards,
are read by ranges when a stage is built, and cannot be had before.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

from ..blobs.starting import ByGraph
from ..blobs.weight_shards import WeightShard
from .order import BuildOrder

__all__ = ["frozen_shards", "warm"]


def frozen_shards(order: BuildOrder) -> list[WeightShard]:
    """The frozen shards of all holders whose copies the order's peer keeps, by holder, each once.
    Raises ValueError as `build_work` does."""
    graph, stages = order.divided()
    still = {p.name for p in graph.parameters if not p.trainable}
    still |= {b.name for b in graph.buffers if b.update is None}
    weights = ByGraph(order.weights, graph)
    found: dict[WeightShard, None] = {}
    for holder in (k.holder for k in order.plan.keepers if k.peer == order.peer):
        held = [stages[k] for k in order.plan.stages_of(holder)]
        names = [n for s in held for n in (*s.parameters, *s.buffers) if n in still]
        own = dict.fromkeys(weights.shards(names))
        size = sum(shard.size_bytes for shard in own)
        if not order.memory_bytes or size <= order.memory_bytes:
            found |= own
    return list(found)


def warm(
    shards: Iterable[WeightShard],
    bring: Callable[[WeightShard], object],
    most_bytes: int,
    stopped: threading.Event,
    *,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[threading.Event, float], object] = threading.Event.wait,
) -> int:
    """Brings shards, in their order, until `stopped` or `most_bytes` of them are here; returns how
    many bytes are. `clock`: seconds; `pause` waits so many seconds, or until the event. Raises what
    `bring` raises."""
    here = 0
    for shard in shards:
        if stopped.is_set() or here + shard.size_bytes > most_bytes:
            break
        began_s = clock()
        bring(shard)
        here += shard.size_bytes
        pause(stopped, clock() - began_s)
    return here
