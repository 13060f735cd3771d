"""Stderr of the planning processes, as lines of the broker's log.

They run a stranger's graph, so its names are in what they log, and what torch writes by itself is
nobody's to choose. Nothing of it reaches a terminal or a file but through the broker's own log,
which makes it printable, and no more of it than a line a second after the first ones.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import BinaryIO

from ...net.knocks import RateLimiter
from ...net.printable import printable

__all__ = ["follow"]

log = logging.getLogger(__name__)

IN_A_ROW = 256
"""Lines: a few tracebacks."""
PER_S = 1.0
MOST_LINE = 2000
"""Bytes; what is longer counts as several lines."""


def follow(stream: BinaryIO, clock: Callable[[], float] = time.monotonic) -> threading.Thread:
    """Log every line of a pipe until its other ends are closed, in a thread; what is too much is
    read all the same, so that nobody waits for a full pipe."""
    work = threading.Thread(target=_follow, args=(stream, clock), name="planner-said", daemon=True)
    work.start()
    return work


def _follow(stream: BinaryIO, clock: Callable[[], float]) -> None:
    often = RateLimiter(IN_A_ROW, PER_S, 1)
    with stream:
        while data := stream.readline(MOST_LINE):
            if (line := data.rstrip()) and often.allowed("", clock()):
                log.warning("planner_said line=%s", printable(line.decode(errors="replace")))
