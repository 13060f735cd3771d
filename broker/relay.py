"""The broker in the middle, for two peers of which neither can be dialled.

A dials the broker's port in B's name (its TLS hello asks for B's DNS name). B hears of it on its
control stream, with a ticket; it dials the same port, shows the ticket, and joins what comes to its
own Frames service. From then on bytes are passed on: A and B speak TLS with each other, with fresh
keys for each dial, so the broker in between reads nothing and changes nothing unnoticed.

A ticket is good once and for a few seconds. Who steals it gets bytes that only B's key can answer.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from ..net.identity.names import Role, dns_name
from ..net.pump import Stream, join

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
    """Connections in one peer's name at once: its partners in a run, and as many again while they
    are replaced."""
    at_once: int = 2048
    """All of them."""


class Relay:
    """Knows who can be told of a dial, and joins those who meet here. Lives in one event loop."""

    def __init__(self, limits: RelayLimits | None = None) -> None:
        self.limits = limits or RelayLimits()
        self._told: dict[str, Callable[[str], bool]] = {}
        self._waiting: dict[str, asyncio.Future[tuple[Stream, asyncio.Event]]] = {}
        self._open: Counter[str] = Counter()
        self._unanswered: Counter[tuple[str, str]] = Counter()

    def here(self, peer: str, tell: Callable[[str], bool]) -> None:
        """`tell` sends a ticket to a peer whose control stream is open; False: it cannot."""
        self._told[dns_name(Role.PEER, peer)] = tell

    def gone(self, peer: str, tell: Callable[[str], bool]) -> None:
        """That stream is over; another one of the same peer may be open by now."""
        name = dns_name(Role.PEER, peer)
        if self._told.get(name) is tell:
            del self._told[name]

    async def dialled(self, name: str, hello: bytes, stream: Stream, source: str) -> None:
        """Somebody at `source` wants the peer of this DNS name; `hello` is what was read of the
        stream already. Returns when it is over. Raises OSError, TimeoutError."""
        tell, limits = self._told.get(name), self.limits
        if tell is None:
            log.info("relay_unknown name=%s", name)
            return
        if self._open[name] >= limits.of_a_peer or self._open.total() >= limits.at_once:
            log.warning("relay_full name=%s open=%d", name, self._open[name])
            return
        if self._unanswered[source, name] >= limits.unanswered:
            log.warning("relay_too_many name=%s from=%s", name, source)
            return
        if (task := asyncio.current_task()) is not None:
            task.set_name(f"relay {name}")
        ticket = secrets.token_hex(16)
        found = self._waiting[ticket] = asyncio.get_running_loop().create_future()
        self._open[name] += 1
        try:
            if not tell(ticket):
                return
            self._unanswered[source, name] += 1
            try:
                async with asyncio.timeout(limits.answer_s):
                    other, _ = await asyncio.shield(found)
            finally:
                self._unanswered[source, name] -= 1
                self._unanswered += Counter()
            other[1].write(hello)
            await join(stream, other)
        finally:
            del self._waiting[ticket]
            if found.done():  # whoever came waits for this
                found.result()[1].set()
            self._open[name] -= 1
            self._open += Counter()  # drops the zeros

    async def answered(self, ticket: str, stream: Stream) -> None:
        """A peer came with a ticket; returns when the stream is over."""
        found = self._waiting.get(ticket)
        if found is None or found.done():
            return
        over = asyncio.Event()
        found.set_result((stream, over))
        await over.wait()

    def __repr__(self) -> str:
        return f"<Relay for {len(self._told)} peers, {self._open.total()} connections>"
