"""Directed pairs of peers, and the messages that leave between them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

from .clock import Bucket

__all__ = ["Pair", "WanFlow"]

Call = Callable[[], None]


class Pair:
    """A directed pair of peers. `ends`: its two endpoints, uplink and downlink. `fast`: for what
    finds tokens in its bucket, the same without the pair's bandwidth; None: nothing else holds it
    up."""

    __slots__ = (
        "alone",
        "back_s",
        "bucket",
        "ends",
        "fast",
        "flows",
        "held",
        "index",
        "jitter_s",
        "latency_s",
        "loss",
        "random",
    )

    def __init__(self, index: int, ends: tuple[int, int], alone: float) -> None:
        self.index, self.ends, self.alone = index, ends, alone
        self.latency_s = self.back_s = self.jitter_s = self.loss = 0.0
        self.random: random.Random | None = None  # None: nothing is drawn
        self.bucket: Bucket | None = None
        self.fast: Pair | None = None
        self.held: list[WanFlow] | None = None  # a list while it is parted
        self.flows: dict[WanFlow, None] = {}


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
