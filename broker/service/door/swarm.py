"""Makes the broker findable by the name of its swarm, wherever it is.

A record that says where it is, and through which nodes others find that out, is left in the
swarm's directory: at the start, when anything in it has changed, and every few minutes. Peers offer
nodes of their own as ways in; those that can be reached from here stand in the record, so that a
broker that moves, and who looks for it, find each other through them. A way is dialled where the
address of its peer would be, and nowhere else (`reach.py`).

What others leave there is looked at too: a later start of a broker with the same identity takes the
name over (`net/discovery/record.py`).
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ....net.discovery.process import NodeConfig, NodeProcess
from ....net.discovery.record import (
    MOST_NODES,
    Claim,
    Directory,
    DirectoryError,
    check_multiaddr,
    endpoint_of,
    newest,
    sign,
)
from ....net.identity.authority import Authority
from ....net.knocks import RateLimiter
from ....net.local import free_port, joined, split
from .reach import resolved

__all__ = ["GREETING", "Beacon", "Swarm"]

log = logging.getLogger(__name__)

_PRINTED_WAYS = 3
_LOOK_S = 5.0
_FIRST_LOOK_S = 8.0
"""So that the line that the broker prints names those who are there."""
_REFRESH_S = 300.0
"""A record lasts an hour."""
_TRY_AGAIN_S = 60.0
"""Ways in are tried so often."""
_PATIENCE_S = 3.0
_MOST_OFFERS = 64
_MOST_OF_ONE = 2
"""Of these, of one peer: that of its host, and where that was before."""
_IN_A_ROW, _PER_S = 32, 0.1
"""Offers of one peer: each makes the broker look and dial."""
GREETING = b"\x13/multistream/1.0.0\n"
"""What both ends of a libp2p connection say first."""


class Swarm:
    """The broker's part in its swarm: a node of the directory, behind the broker's own port, and
    what it says there. `boot`: random id of this start."""

    def __init__(
        self,
        name: str,
        folder: Path,
        bootstrap: tuple[str, ...],
        authority: Authority,
        boot: str,
    ) -> None:
        self.name = name
        self.port = free_port("127.0.0.1")
        """Of loopback, where the front passes on what is for the node."""
        self._folder, self._bootstrap = folder, bootstrap
        self._authority, self._boot = authority, boot
        self._node: NodeProcess | None = None
        self._beacon: Beacon | None = None
        self._shining: asyncio.Task[None] | None = None

    async def start(self, address: str) -> None:
        """Starts the node of a broker that is to listen at HOST:PORT. Raises DirectoryError where
        none can run."""
        host, port = split(address)
        node = NodeProcess(
            NodeConfig(
                swarm=self.name,
                fingerprint=self._authority.fingerprint.hex(),
                folder=str(self._folder),
                host="127.0.0.1",
                port=self.port,
                public_host=host,
                public_port=port,
                bootstrap=self._bootstrap,
                serves=True,
            )
        )
        self._node = node.__enter__()
        way = (await node.started()).multiaddr
        self._beacon = Beacon(
            node.directory,
            Claim(self.name, self._boot),
            self._authority,
            address=address,
            way=way,
            neighbours=lambda: node.directory.state.neighbours if node.directory.state else 0,
        )

    async def shine(self, tasks: asyncio.TaskGroup) -> None:
        """Call it when the broker listens: from now on it is found."""
        assert self._node is not None
        assert self._beacon is not None
        with suppress(TimeoutError):  # nobody else is there, most likely: it goes on below
            async with asyncio.timeout(_FIRST_LOOK_S):
                await self._beacon.turn(wait_s=0.0)
        self._shining = tasks.create_task(self._shine(self._node, self._beacon))

    async def _shine(self, node: NodeProcess, beacon: Beacon) -> None:
        while True:
            node.keep()
            await beacon.turn()

    def offered(self, way: str, came: str, by: str) -> None:
        """A peer says that its host has a node there; see Beacon."""
        if self._beacon is not None:
            self._beacon.offered(way, came, by)

    @property
    def ways(self) -> list[str]:
        """Into the swarm, for the line that a peer's owner pastes."""
        return [] if self._beacon is None else self._beacon.ways[:_PRINTED_WAYS]

    async def stop(self) -> None:
        if self._shining is not None:
            self._shining.cancel()
        if self._node is not None:
            await asyncio.to_thread(self._node.__exit__, None, None, None)


@dataclass
class _Offer:
    """`came`: the IP address of who offers it; `by`: its id, empty for what stood in a record of
    ours; `reached`: a node answers there."""

    came: str
    by: str
    reached: bool = False


class Beacon:
    """`turn` keeps the record of one broker current. `address`: HOST:PORT of the broker; `way`: the
    multiaddr of its own node; `neighbours`: of that node, when it last said."""

    def __init__(
        self,
        directory: Directory,
        claim: Claim,
        authority: Authority,
        *,
        address: str,
        way: str,
        neighbours: Callable[[], int],
    ) -> None:
        self._directory, self._claim, self._authority = directory, claim, authority
        self._address, self._way, self._neighbours = address, way, neighbours
        self._began = time.monotonic()
        self._offers: dict[str, _Offer] = {}  # by way
        self._often = RateLimiter(_IN_A_ROW, _PER_S, 10_000)
        self._tried_at = float("-inf")
        self._published: tuple[object, ...] = ()
        self._published_at = float("-inf")
        self._failed = ""
        self._news = asyncio.Event()

    def offered(self, way: str, came: str, by: str) -> None:
        """A peer, by its certificate, says that its host has a node there; it came from that IP
        address."""
        try:
            check_multiaddr(way)
        except ValueError:
            return
        if way in self._offers or way == self._way or len(self._offers) >= _MOST_OFFERS:
            return
        if by:
            theirs = sum(offer.by == by for offer in self._offers.values())
            if theirs >= _MOST_OF_ONE or not self._often.allowed(by, time.monotonic()):
                return
        self._offers[way] = _Offer(came, by)
        self._tried_at = float("-inf")
        self._news.set()

    @property
    def ways(self) -> list[str]:
        """Into the swarm, the broker's own first."""
        reached = (way for way, offer in self._offers.items() if offer.reached)
        return [self._way, *reached][:MOST_NODES]

    async def turn(self, wait_s: float = _LOOK_S) -> None:
        """Looks, and then waits for news or for some seconds."""
        self._news.clear()
        try:
            await self.look()
            self._failed = ""
        except DirectoryError as error:
            if str(error) != self._failed:
                log.warning("swarm_not_published swarm=%s why=%s", self._claim.swarm, error)
            self._failed = str(error)
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._news.wait()

    async def look(self) -> None:
        """Once: sees what is there, and publishes if that is needed. Raises DirectoryError."""
        swarm, fingerprint = self._claim.swarm, self._authority.fingerprint
        seen = newest(await self._directory.find(), swarm, fingerprint, time.time())
        for way in seen.nodes if seen is not None else ():
            self.offered(way, _own(way), "")  # of before this start, and checked then
        now = time.monotonic()
        if now > self._tried_at + _TRY_AGAIN_S:
            await self._try_ways()
            self._tried_at = now
        ours = seen is not None and seen.boot == self._claim.boot
        state = (self._address, tuple(self.ways), self._neighbours())
        if ours and state == self._published and now < self._published_at + _REFRESH_S:
            return
        was_aside = self._claim.aside
        said = self._claim.next(
            seen, self._address, self.ways, now_s=time.time(), age_s=now - self._began
        )
        if said is None:
            if not was_aside:
                assert seen is not None
                log.warning(
                    "swarm_taken_over swarm=%s address=%s: a broker with this identity was started "
                    "there later, and peers find that one; stop one of the two",
                    *(swarm, seen.address),
                )
            return
        await self._directory.publish(sign(said, self._authority))
        if state[:2] != self._published[:2]:
            ways = " ".join(self.ways)
            log.info("swarm_published swarm=%s address=%s ways=%s", swarm, self._address, ways)
        self._published, self._published_at = state, now

    async def _try_ways(self) -> None:
        offers = list(self._offers.items())
        found = await asyncio.gather(*(_greets(way, o.came, o.by) for way, o in offers))
        for (way, offer), reached in zip(offers, found, strict=True):
            offer.reached = reached
            if not reached:
                del self._offers[way]  # who is still there offers it again

    def __repr__(self) -> str:
        return f"<Beacon of {self._claim.swarm}, {len(self.ways)} ways in>"


def _own(way: str) -> str:
    """The IP address in a way that was found to be one earlier; empty for a name, which may lead
    elsewhere by now."""
    host, _ = endpoint_of(way)
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return ""


async def _greets(way: str, came: str, by: str) -> bool:
    """Whether a libp2p node listens there, where that may be dialled for who came from `came`."""
    try:
        async with asyncio.timeout(_PATIENCE_S):
            there = await resolved(by or "of the record", joined(*endpoint_of(way)), came)
            if not there:
                return False
            reader, writer = await asyncio.open_connection(*split(there))
            try:
                writer.write(GREETING)
                return await reader.readexactly(len(GREETING)) == GREETING
            finally:
                writer.close()
    except (OSError, ValueError, asyncio.IncompleteReadError):
        return False
