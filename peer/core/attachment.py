"""The peer's connection to the broker, as far as this side can tell. Pure; `PeerMachine` acts.

It connects, says Hello, and is a member from Welcome on. A connection that fails or ends is tried
again after a pause that doubles from 0.5 s to 30 s and starts anew with each Welcome. While it
holds a run it dials more often, since a broker that was started again waits for one lease. With
`give_up_s` it gives up when no Welcome came for so long, with `first_s` when none came at all.
"""

from __future__ import annotations

import math
from typing import Literal
from zlib import crc32

from ...dag.plan.plan import PeerId
from ...proto.broker_pb2 import Welcome
from .options import PeerOptions

__all__ = ["Attachment"]

_OF_A_LEASE = 0.25
"""The longest pause between two connections of a peer that holds a run."""


class Attachment:
    """The state of the peer's connection to the broker, as far as this side can tell."""

    def __init__(self, peer: PeerId, options: PeerOptions) -> None:
        self._peer, self._options = peer, options
        self.state: Literal["new", "waiting", "connecting", "greeting", "member"] = "new"
        self.heartbeat_s = 1.0
        """The interval that the last Welcome named."""
        self.started_at = 0.0
        self.failures = 0
        """Connections that failed or ended since the last Welcome."""
        self._lease_s = math.inf  # of the last Welcome
        self._was_member = False
        self._away_since: float | None = None  # None while it is a member

    @property
    def away(self) -> bool:
        """Whether the broker is, as far as this peer can tell."""
        return self.state != "member"

    def began(self, now: float) -> None:
        self._away_since = self.started_at = now

    def welcomed(self, welcome: Welcome) -> None:
        self.state = "member"
        self._was_member = True
        self.heartbeat_s = welcome.heartbeat_s or 1.0
        self._lease_s = welcome.lease_s or math.inf
        self.failures = 0
        self._away_since = None

    def detached(self, now: float) -> None:
        """The connection failed or ended."""
        self.state = "waiting"
        self.failures += 1
        if self._away_since is None:
            self._away_since = now

    def away_s(self, now: float) -> float:
        """For how long no Welcome has held."""
        return 0.0 if self._away_since is None else now - self._away_since

    def pause_s(self, now: float, *, holds_run: bool) -> float | None:
        """Until the next attempt, after one that failed; None: it gives up."""
        options, give_up = self._options, self._options.give_up_s
        if not self._was_member and options.first_s is not None:
            give_up = options.first_s if give_up is None else min(give_up, options.first_s)
        if give_up is not None and self.away_s(now) >= give_up:
            return None
        most = options.backoff_max_s
        if holds_run:
            most = min(most, _OF_A_LEASE * self._lease_s)
        pause = min(options.backoff_s * 2.0 ** min(self.failures - 1, 32), most)
        # Spread by a hash, so that thousands of peers do not come back in the same instant.
        pause *= 0.75 + 0.5 * crc32(f"{self._peer} {min(self.failures, 32)}".encode()) / 2**32
        return pause if give_up is None else min(pause, max(0.0, give_up - self.away_s(now)))

    def validate(self) -> None:
        """Raises AssertionError when the state contradicts itself."""
        away = self.state in ("waiting", "connecting", "greeting")
        assert away == (self._away_since is not None), "it does not know whether it is away"

    def __repr__(self) -> str:
        return f"<Attachment {self.state}>"
