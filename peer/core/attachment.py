"""The peer's connection to the broker, as far as this side can tell. Pure; `PeerMachine` acts.

It connects, says Hello, and is a member from Welcome on: then it says that it lives every
`heartbeat_s` of the Welcome. A broker that does not answer Hello within 10 s counts as a failed
connection. A connection that fails or ends is tried
again after a pause that doubles from 0.5 s to 30 s and starts anew with each Welcome. While it
holds a run it dials more often, since a broker that was started again waits for one lease. With
`give_up_s` it gives up when no Welcome came for so long, with `first_s` when none came at all.
"""

from __future__ import annotations

import math
from typing import Literal
from zlib import crc32

from ...proto.broker_pb2 import Heartbeat, Hello, Holding, PeerMessage, Speeds, Welcome
from ...proto.common_pb2 import Reason
from . import events as e
from .keeping.snapshot_manager import SnapshotManager
from .options import PeerOptions
from .part import Part
from .reports import MOST_BYTES, fitting
from .snapshots import SnapshotId

__all__ = ["WELCOME_S", "Attachment"]

WELCOME_S = 10.0
_SNAPSHOTS_TOLD = 3000
"""To a broker that may not know them: the newest in the Hello, the rest after the Welcome."""
_OF_A_LEASE = 0.25
"""The longest pause between two connections of a peer that holds a run."""


class Attachment:
    """The state of the peer's connection to the broker, as far as this side can tell. `hello`: who
    the peer is."""

    def __init__(self, hello: Hello, options: PeerOptions) -> None:
        self._hello, self._options = hello, options
        self.state: Literal["new", "waiting", "connecting", "greeting", "member"] = "new"
        self.heartbeat_s = 1.0
        """The interval that the last Welcome named."""
        self.started_at = 0.0
        self.failures = 0
        """Connections that failed or ended since the last Welcome."""
        self._lease_s = math.inf  # of the last Welcome
        self._told: frozenset[SnapshotId] = frozenset()
        """Snapshots that were in the last Hello."""
        self._was_member = False
        self._away_since: float | None = None  # None while it is a member

    @property
    def away(self) -> bool:
        """Whether the broker is, as far as this peer can tell."""
        return self.state != "member"

    def began(self, now: float) -> None:
        self._away_since = self.started_at = now

    def connect(self) -> list[e.Instruction]:
        self.state = "connecting"
        return [e.Connect()]

    def greet(
        self, part: Part | None, keeping: SnapshotManager, closed: Reason | None, now: float
    ) -> list[e.Instruction]:
        """Say Hello: what this peer holds, why it takes part in nothing, if so, and which snapshots
        lie here."""
        self.state, hello = "greeting", Hello()
        hello.CopyFrom(self._hello)
        profile = hello.profile
        if profile.stay_s:  # of what it meant when it started, what is left
            profile.stay_s = max(1.0, profile.stay_s - (now - self.started_at))
        if closed is not None:
            hello.closed.CopyFrom(closed)
        if part is not None:  # a failed one too: the broker may not have its fault
            hello.holding.CopyFrom(Holding(run=part.run, term=part.term, step=part.step))
        newest = keeping.newest(_SNAPSHOTS_TOLD)[::-1]
        told = newest[: fitting(newest, MOST_BYTES - hello.ByteSize())][::-1]
        hello.snapshots.extend(told)
        self._told = frozenset(SnapshotId.of(s) for s in told)
        return [e.SetTimer("welcome", now + WELCOME_S), e.Tell(PeerMessage(hello=hello))]

    def untold(self, keeping: SnapshotManager) -> list[e.Instruction]:
        """Reports of snapshots that had no room in the Hello."""
        return keeping.untold(self._told, _SNAPSHOTS_TOLD)

    def measured(self, speeds: Speeds) -> list[e.Instruction]:
        """Say what the device does, which was measured again, from here on."""
        self._hello.profile.speeds.CopyFrom(speeds)
        self._hello.profile.flops_per_s = speeds.product_flops_per_s
        return [e.Tell(PeerMessage(measured=speeds))]

    def heartbeat(self, part: Part | None, now: float) -> list[e.Instruction]:
        """Say that the peer lives and which step it is in; nothing while the broker is away."""
        if self.away:
            return []
        beat = Heartbeat(sent_at_s=now)
        if part is not None and part.alive:
            beat.run, beat.step = part.run, part.step
        tell = e.Tell(PeerMessage(heartbeat=beat))
        return [tell, e.SetTimer("heartbeat", now + self.heartbeat_s)]

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
        pause *= 0.75 + 0.5 * crc32(f"{self._hello.peer} {min(self.failures, 32)}".encode()) / 2**32
        return pause if give_up is None else min(pause, max(0.0, give_up - self.away_s(now)))

    def validate(self) -> None:
        """Raises AssertionError when the state contradicts itself."""
        away = self.state in ("waiting", "connecting", "greeting")
        assert away == (self._away_since is not None), "it does not know whether it is away"

    def __repr__(self) -> str:
        return f"<Attachment {self.state}>"
