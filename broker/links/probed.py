"""What the broker knows of a member whose links it has measured, and what probes may take of it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field

from ...dag.plan.plan import PeerId
from ...net.knocks import TokenBucket
from ..membership.member import Member
from .links import Caps, Links

__all__ = ["LINKS", "PROBE_BYTES", "SMALLEST_BYTES", "Allowance", "Landmarks", "Probed"]

PROBE_BYTES = 64 << 20
"""Of a probe at most, each way: sixteen times the largest bucket that is looked for
(`peer/core/rates/load.py`), since half of it was still seen in a rate where processes send little
faster than the bucket fills. Links of less than 60 MB/s tell their rate before, in about a
second."""
SMALLEST_BYTES = 48 << 10
"""Of one of a peer that trains: the latency, and the rate of a slow link."""
_HOUR_S = 3600.0
_SHARE = 0.01


class Allowance(TokenBucket):
    """What probes may take of a link that trains: in any window of W seconds at most
    `share` · bandwidth · W + one smallest probe, in bytes. Pure accounting."""

    def __init__(self, bytes_per_s: float) -> None:
        super().__init__(SMALLEST_BYTES, _SHARE * bytes_per_s)


@dataclass(eq=False)
class Probed:
    """A member. `tried`: until when a pair is not tried again; `sent`: (when, bytes) of its probes
    of the last hour."""

    boot: tuple[str, int]
    address: str
    joined_at: float
    caps: Caps
    tried: dict[PeerId, float] = field(default_factory=dict)
    sent: deque[tuple[float, int]] = field(default_factory=deque)
    allowance: Allowance | None = None

    @classmethod
    def of(cls, member: Member, now: float) -> Probed:
        """One that has just joined. Where it does not say its place, its machine or the net of its
        address stands for one."""
        profile = member.profile
        place = profile.place or (f"host {profile.host}" if profile.host else "")
        caps = Caps(
            place or _site(member.address),
            _cap(profile.up_bytes_per_s),
            _cap(profile.down_bytes_per_s),
        )
        return cls((member.boot, member.counter), member.address, now, caps)

    def affords(self, size_bytes: int, most: int, now: float) -> bool:
        """Whether so many bytes more keep it within `most` of the last hour."""
        while self.sent and self.sent[0][0] <= now - _HOUR_S:
            self.sent.popleft()
        return sum(sent for _, sent in self.sent) + size_bytes <= most

    def reserve(self, size_bytes: int, now: float) -> None:
        """A probe of so many bytes begins."""
        self.sent.append((now, size_bytes))

    def settle(self, size_bytes: int) -> None:
        """Replace the bytes set aside for a peer's last probe by those that it really sent."""
        if self.sent:
            at, reserved = self.sent.pop()
            self.sent.append((at, min(size_bytes, reserved)))

    def takes(self, size_bytes: int, uplink: float, now: float) -> bool:
        """Whether so many bytes may go while it trains; they count from then on. `uplink`: bytes/s,
        0 where it is not known, and then nothing may: a hundredth of nobody knows what."""
        if not uplink:
            return False
        if self.allowance is None:
            self.allowance = Allowance(uplink)
        return self.allowance.take(size_bytes, now)


def _cap(bytes_per_s: float) -> float:
    return bytes_per_s if bytes_per_s > 0 and math.isfinite(bytes_per_s) else 0.0


def _site(address: str) -> str:
    """The first two numbers of an IPv4 address: neighbours there are often neighbours indeed."""
    parts = address.rpartition(":")[0].split(".")
    is_ip = len(parts) == 4 and all(part.isdigit() for part in parts)
    return f"net {parts[0]}.{parts[1]}" if is_ip else ""


# Whom a peer is measured against next, so that O(n) probes tell of n² links.
#
# A peer is measured against `LINKS` others at most. These are the landmarks: the first two that
# joined, then those farthest from them by latency. When many peers wait for a landmark, they
# measure each other instead.

LINKS = 4
_MOST_WAITING = 16
"""Peers that may wait for landmarks before they measure each other."""


class Landmarks:
    """`chosen`: in the order in which they became landmarks. `short`: peers of the pool that have
    fewer links than they could have."""

    def __init__(self, peers: Mapping[PeerId, Probed], links: Links) -> None:
        self._peers = peers
        self._links = links
        self.chosen: list[PeerId] = []
        self.short: dict[PeerId, None] = {}
        self._counted = False  # whether `short` is of the members that are here now...
        self._ended: dict[PeerId, None] = {}  # ...but for these, which were measured since

    def changed(self) -> None:
        """Members came, went, or changed their state."""
        self.chosen = [p for p in self.chosen if p in self._peers]
        self._counted = False

    def measured(self, peer: PeerId) -> None:
        """A probe of it has ended."""
        self._ended[peer] = None

    def count(self, pool: list[PeerId], reach: Callable[[PeerId, PeerId], bool]) -> None:
        """Brings `short` up to date. While members stay as they are, only a probe's end changes
        that, and of its two peers alone: nobody becomes short."""
        ended, self._ended = self._ended, {}
        if self._counted and not any(p in self.short for p in ended):
            return
        most = min(LINKS, len(pool) - 1)

        def is_short(peer: PeerId) -> bool:
            tried = self._peers[peer].tried
            return len(tried) < most and any(
                q != peer and q not in tried and reach(peer, q) for q in pool
            )

        if self._counted:
            for peer in ended:
                if peer in self.short and not is_short(peer):
                    del self.short[peer]
        else:
            self.short = {p: None for p in pool if is_short(p)}
        self._counted = True

    def partner(
        self,
        peer: PeerId,
        others: Iterable[PeerId],
        busy: Container[PeerId],
        open_to: Callable[[PeerId], bool],
        now: float,
    ) -> PeerId | None:
        """Return the peer that one of the pool is measured against next; None: nobody now.
        `others`: in the order in which they are asked where no landmark is free. `busy`: who takes
        part in a probe. `open_to`: whether another may be measured with it at all."""
        if len(self.chosen) < min(LINKS, 2):
            self.chosen += [peer] if peer not in self.chosen else []
        marks = [p for p in self.chosen if open_to(p)]
        if not marks and len(self.chosen) < LINKS:
            marks = [p for p in self._farthest(now) if open_to(p)]
        free = [p for p in marks if p not in busy]
        if free or (marks and len(self.short) <= _MOST_WAITING):
            return free[0] if free else None
        return next((p for p in others if p not in busy and open_to(p)), None)

    def _farthest(self, now: float) -> list[PeerId]:
        """The peer whose nearest landmark is farthest, which is one from now on; or nobody."""
        best: tuple[float, PeerId] | None = None
        for peer in self._peers:
            if peer in self.chosen:
                continue
            to = [e.latency_s for p in self.chosen if (e := self._links.get(peer, p, now))]
            near = min((x for x in to if not math.isnan(x)), default=-1.0)
            if near >= 0 and (best is None or near > best[0]):
                best = near, peer
        if best is None:
            return []
        self.chosen.append(best[1])
        return [best[1]]

    def validate(self) -> None:
        """Raises AssertionError when the state contradicts the rules of this module."""
        assert len(self.chosen) == len(set(self.chosen)) <= LINKS
        assert all(p in self._peers for p in self.chosen)
