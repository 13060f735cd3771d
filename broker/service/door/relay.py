"""The broker in the middle, for two peers of which neither can be dialled.

A dials the broker's port in B's name (its TLS hello asks for B's DNS name). B hears of it on its
control stream, with a ticket; it dials the same port, shows the ticket, and joins what comes to its
own Frames service. From then on bytes are passed on: A and B speak TLS with each other, with fresh
keys for each dial, so the broker in between reads nothing and changes nothing unnoticed.

A ticket is good once and for a few seconds. Who steals it gets bytes that only B's key can answer.

Whoever dials may be a stranger, who never ends his handshake, or a member that B has no business
with; only B finds that out. B ends such a connection within twenty seconds (peer/shell/relayed.py),
so one that is older is one that a link of B uses, and is counted by itself. Of the young ones there
are so many; when another comes, the oldest one goes of the address that has most of them: a
handshake takes a second, so who needs more time than others is not missed, and no number of
strangers keeps B's partners out.

When all places of B's links are taken, one gives way on which nothing passed for long, of the
address that has most; else one of the address that has most, if the newcomer's has fewer.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ....net.identity.names import PartyRole, dns_name
from ....net.web.pump import Stream, join

__all__ = ["Relay", "RelayLimits"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RelayLimits:
    """What relaying may cost."""

    answer_s: float = 10.0
    """For the peer that is dialled to come."""
    unanswered: int = 16
    """Dials of one address for one peer that wait for it."""
    of_a_peer: int = 256
    """Connections in one peer's name at once that are not young any more: its partners in a run,
    and as many again while they are replaced."""
    at_once: int = 2048
    """All of these."""
    idle_s: float = 60.0
    """One on which no byte passed for so long gives way to others: partners ping each other every
    ten seconds."""
    young_s: float = 22.0
    """So long a connection is young: the peer ends what no link of it uses 20 s after its answer
    (peer/shell/relayed.py)."""
    young_of_a_peer: int = 256
    """As many as partners that all dial it at once."""
    young_at_once: int = 1024
    """All of these."""


@dataclass(eq=False)
class _Dial:
    """One that is passed on, or waits for its answer. `patience` ends it when others need its
    place."""

    name: str
    source: str
    patience: asyncio.Timeout
    passed_at: float = 0.0
    """When bytes passed last, on the loop's clock."""

    def passes(self) -> None:
        self.passed_at = asyncio.get_running_loop().time()

    def drop(self) -> None:
        if not self.patience.expired():
            self.patience.reschedule(asyncio.get_running_loop().time())


class Relay:
    """Knows who can be told of a dial, and joins those who meet here. Lives in one event loop."""

    def __init__(self, limits: RelayLimits | None = None) -> None:
        self.limits = limits or RelayLimits()
        self._told: dict[str, Callable[[str], bool]] = {}
        self._waiting: dict[str, asyncio.Future[tuple[Stream, asyncio.Event]]] = {}
        self._young: dict[_Dial, None] = {}  # the oldest first
        self._proven: dict[_Dial, None] = {}  # older than RelayLimits.young_s
        self._unanswered: Counter[tuple[str, str]] = Counter()

    def here(self, peer: str, tell: Callable[[str], bool]) -> None:
        """`tell` sends a ticket to a peer whose control stream is open; False: it cannot."""
        self._told[dns_name(PartyRole.PEER, peer)] = tell

    def gone(self, peer: str, tell: Callable[[str], bool]) -> None:
        """That stream is over; another one of the same peer may be open by now."""
        name = dns_name(PartyRole.PEER, peer)
        if self._told.get(name) is tell:
            del self._told[name]

    async def dialled(self, name: str, hello: bytes, stream: Stream, source: str) -> None:
        """Somebody at `source` wants the peer of this DNS name; `hello` is what was read of the
        stream already. Returns when it is over. Raises OSError, TimeoutError."""
        tell, limits = self._told.get(name), self.limits
        if tell is None:
            log.info("relay_unknown name=%s", name)
            return
        if self._full(name, source):
            return
        if self._unanswered[source, name] >= limits.unanswered:
            log.warning("relay_too_many name=%s from=%s", name, source)
            return
        if (task := asyncio.current_task()) is not None:
            task.set_name(f"relay {name}")
        async with asyncio.timeout(None) as patience:
            dial = _Dial(name, source, patience)
            dial.passes()
            self._make_room(dial)
            self._young[dial] = None
            try:
                await self._meet(dial, tell, hello, stream)
            finally:
                self._young.pop(dial, None)
                self._proven.pop(dial, None)

    def _full(self, name: str, source: str) -> bool:
        """Whether there is no place for one more from `source`, after another gave way if it has
        to."""
        limits = self.limits
        of_a_peer = [d for d in self._proven if d.name == name]
        for dials, most in ((of_a_peer, limits.of_a_peer), ([*self._proven], limits.at_once)):
            if len(dials) >= most and not self._gives_way(dials, source):
                log.warning("relay_full name=%s open=%d", name, len(of_a_peer))
                return True
        return False

    def _gives_way(self, dials: Sequence[_Dial], source: str) -> bool:
        """Drops one of these for another from `source`, if one is idle or of an address that has
        more of them."""
        have = Counter(d.source for d in dials)
        since = asyncio.get_running_loop().time() - self.limits.idle_s
        idle = [d for d in dials if d.passed_at <= since]
        gone = max(idle or dials, key=lambda d: (have[d.source], -d.passed_at))
        if not idle and have[gone.source] <= have[source] + 1:
            return False
        log.warning("relay_dropped name=%s from=%s", gone.name, gone.source)
        del self._proven[gone]
        gone.drop()
        return True

    def _make_room(self, dial: _Dial) -> None:
        """Drops young ones, so that there is a place for another."""
        limits = self.limits
        of_a_peer = [d for d in self._young if d.name == dial.name]
        for young, most in ((of_a_peer, limits.young_of_a_peer), (None, limits.young_at_once)):
            among = list(self._young) if young is None else young
            if len(among) < most:
                continue
            have = Counter(d.source for d in among)
            oldest = max(among, key=lambda d: have[d.source])  # the first of equals
            log.warning("relay_crowded name=%s dropped_from=%s", oldest.name, oldest.source)
            del self._young[oldest]
            oldest.drop()

    def _prove(self, dial: _Dial) -> None:
        """Mark a dial as proven, unless it had to go."""
        if dial not in self._young:
            return
        del self._young[dial]
        if self._full(dial.name, dial.source):
            dial.drop()
        else:
            self._proven[dial] = None

    async def _meet(
        self, dial: _Dial, tell: Callable[[str], bool], hello: bytes, stream: Stream
    ) -> None:
        name, source = dial.name, dial.source
        ticket = secrets.token_hex(16)
        found = self._waiting[ticket] = asyncio.get_running_loop().create_future()
        try:
            if not tell(ticket):
                return
            self._unanswered[source, name] += 1
            try:
                async with asyncio.timeout(self.limits.answer_s):
                    other, _ = await asyncio.shield(found)
            finally:
                self._unanswered[source, name] -= 1
                self._unanswered += Counter()
            other[1].write(hello)
            grown_up = asyncio.get_running_loop().call_later(self.limits.young_s, self._prove, dial)
            try:
                await join(stream, other, dial.passes)
            finally:
                grown_up.cancel()
        finally:
            del self._waiting[ticket]
            if found.done():  # whoever came waits for this
                found.result()[1].set()

    async def answered(self, ticket: str, stream: Stream) -> None:
        """A peer came with a ticket; returns when the stream is over."""
        found = self._waiting.get(ticket)
        if found is None or found.done():
            return
        over = asyncio.Event()
        found.set_result((stream, over))
        await over.wait()

    def __repr__(self) -> str:
        count = len(self._young) + len(self._proven)
        return f"<Relay for {len(self._told)} peers, {count} connections>"
