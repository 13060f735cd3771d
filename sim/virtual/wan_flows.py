"""Directed pairs of peers, and the messages that leave between them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from .clock import Bucket

__all__ = ["Pair", "WanFlow"]

Call = Callable[[], None]


@dataclass(eq=False, slots=True)
class Pair:
    """A directed pair of peers. `ends`: its two endpoints, uplink and downlink. `fast`: for what
    finds tokens in its bucket, the same without the pair's bandwidth; None: nothing else holds it
    up."""

    index: int
    ends: tuple[int, int]
    alone: float
    latency_s: float = 0.0
    back_s: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0
    random: Random | None = None  # None: nothing is drawn
    bucket: Bucket | None = None
    fast: Pair | None = None
    held: list[WanFlow] | None = None  # a list while it is parted
    flows: dict[WanFlow, None] = field(default_factory=dict)


class WanFlow:
    """A message that leaves. `bytes_left`: at time `since`. `due`: of the last call for it. `rest`:
    bytes for which there were no tokens, while the others leave on `pair.fast`."""

    __slots__ = (
        *("arrived", "bytes_left", "due", "equal", "left", "pair", "rate", "rest", "since", "size"),
    )

    def __init__(self, pair: Pair, size: int, left: Call, arrived: Call) -> None:
        self.pair, self.size = pair, size
        self.left, self.arrived = left, arrived
        self.bytes_left = size / (1.0 - pair.loss)
        self.rate = self.since = self.rest = 0.0
        self.due = math.inf
        self.equal = False
