"""Who does which microbatch: SWARM's interleaved weighted round robin (arXiv 2301.11913).

Each stage has a queue of its holders by the time that the microbatches so far take them. Every
microbatch goes, hop by hop, to whoever is first in the queue of the next stage, and puts that one
back by the time that it takes.

A queue there lives as long as the training; here the routes of a plan begin anew with each step. So
a holder stands in the queue with its next microbatch counted: who would be done first comes first,
and one that takes longer for a single microbatch than the others for all of a step gets none.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Mapping, Sequence

__all__ = ["round_robin"]


def round_robin(
    seconds: Sequence[Mapping[int, float]], microbatches: int, seed: int = 0
) -> list[tuple[int, ...]]:
    """By microbatch, the holder of each stage. `seconds[k]`: by holder of stage k, what one
    microbatch takes there; equals are drawn by the seed."""
    rng = random.Random(seed)
    queues = [[(s, rng.random(), p, 1) for p, s in of.items()] for of in seconds]
    for queue in queues:
        heapq.heapify(queue)

    def hop(k: int) -> int:
        _, _, holder, count = queues[k][0]
        # Not summed up: holders of one speed stay equal to the bit.
        again = (count + 1) * seconds[k][holder]
        heapq.heapreplace(queues[k], (again, rng.random(), holder, count + 1))
        return holder

    return [tuple(map(hop, range(len(queues)))) for _ in range(microbatches)]
