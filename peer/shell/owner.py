"""The shell's eye on the owner: every second it gives the machine the facts that decide whether the
peer takes part, and now and then it keeps on disk what was moved."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from datetime import datetime

from ...net.cap import Meter
from ..core.events import OwnerLooked
from ..host.host import Host, Standing
from ..logs import note

__all__ = ["KEPT_S", "LOOKED_S", "Owner"]

_log = logging.getLogger(__name__)

LOOKED_S = 1.0
KEPT_S = 10.0
"""Between two writes of what was moved: so much of it is not counted when the process is killed."""


class Owner:
    """Looks, every second, at what the owner of one peer decided, and keeps on disk what was moved.
    `meter` counts what it moves; `clock` is the host's wall clock. Raises HostError for a damaged
    file."""

    def __init__(
        self,
        host: Host,
        meter: Meter,
        *,
        peer: str,
        name: str,
        broker: str,
        monthly_bytes: int | None,
        clock: Callable[[], datetime] = datetime.now,
    ) -> None:
        self.host, self._meter, self._clock = host, meter, clock
        before, month = host.standing(peer), _month(clock())
        moved = before.moved_bytes if before is not None and before.month == month else 0
        self.standing = Standing(
            peer=peer,
            name=name,
            broker=broker,
            month=month,
            moved_bytes=moved,
            monthly_bytes=monthly_bytes,
            closed="",
        )
        self._counted = 0  # of the meter, in `standing`

    def look(self, closed: str) -> OwnerLooked:
        """The facts of now; `closed`: why the peer takes part in nothing, for people. Reads small
        files. Raises HostError, OSError."""
        mine, now = self.standing, self._clock()
        if _month(now) != mine.month:
            mine.month, mine.moved_bytes, self._counted = _month(now), 0, self._meter.bytes
        mine.moved_bytes += self._meter.bytes - self._counted
        self._counted, mine.closed = self._meter.bytes, closed
        moved = mine.moved_bytes
        if mine.monthly_bytes is not None:  # else nobody asks
            moved += self.host.moved_bytes(mine.month, but=mine.peer)
        return OwnerLooked(now, self.host.paused, moved)

    async def watch(self, tell: Callable[[OwnerLooked], None], closed: Callable[[], str]) -> None:
        """Until it is cancelled. Raises OSError and HostError where the owner's wishes cannot be
        read."""
        rounds = 0
        kept: str | None = None
        try:
            while True:
                tell(await asyncio.to_thread(self.look, closed()))
                why = closed()
                if rounds % round(KEPT_S / LOOKED_S) == 0 or why != kept:
                    kept = self.standing.closed = why
                    await asyncio.to_thread(self._keep)
                rounds += 1
                await asyncio.sleep(LOOKED_S)
        finally:
            self.look(closed())
            self.standing.ended = True
            self._keep()

    def _keep(self) -> None:
        try:
            self.host.keep(self.standing)
        except OSError as error:  # a full disk: it goes on counting, and tries again
            note(_log, logging.WARNING, "traffic is not kept", why=error)


def _month(at: datetime) -> str:
    return f"{at:%Y-%m}"
