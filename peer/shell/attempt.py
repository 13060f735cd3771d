"""One attempt to attach: to where the broker was, while it is looked up whether it has moved."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from typing import NamedTuple

from ...net.discovery.process import DhtDirectory
from ...net.discovery.record import DirectoryError, newest
from ...net.identity.credential import Credential
from ...net.identity.enroll import BrokerAwayError, shown_by
from ...net.identity.token import fingerprint_of_pem
from ...net.local import split
from ...net.web.proxy import proxy_for
from ...proto import broker_pb2
from ...proto.broker_pb2 import Confirmed
from ..host.config import PeerConfig
from ..logs import note
from .control import ControlStream, reaches

__all__ = ["Attempt", "Finder", "attempt", "confirm", "finder_of"]

# Where the broker is now, for a peer whose host has a node of its swarm.

_log = logging.getLogger(__name__)
_PAUSE_S = 1.0


class Finder:
    """`fingerprint`: of the authority that the peer believes; nobody else's record counts."""

    def __init__(self, swarm: str, fingerprint: bytes, directory: DhtDirectory) -> None:
        self._swarm, self._fingerprint, self._directory = swarm, fingerprint, directory

    async def look(self) -> str:
        """HOST:PORT of the broker as it says now; empty when nothing is found. Never raises for
        what the network does."""
        try:
            found = await self._directory.find()
        except DirectoryError as error:
            note(_log, logging.DEBUG, "swarm not asked", why=error)
            return ""
        said = newest(found, self._swarm, self._fingerprint, time.time())
        return "" if said is None else said.address

    async def elsewhere(self, address: str) -> str:
        """Waits until the broker is somewhere else than at `address`, and says where."""
        while (found := await self.look()) in ("", address):  # noqa: ASYNC110  # nobody tells
            await asyncio.sleep(_PAUSE_S)
        return found

    async def way(self) -> str:
        """The multiaddr of this host's node; waits for it to be there."""
        while True:
            try:
                return (await self._directory.look()).multiaddr
            except DirectoryError:
                await asyncio.sleep(_PAUSE_S)


def finder_of(config: PeerConfig, fingerprint: bytes) -> Finder | None:
    """None where the peer has only its broker's address."""
    if not config.directory:
        return None
    return Finder(config.swarm, fingerprint, DhtDirectory(config.directory))


_HEAD_START_S = 1.0
"""For the broker where it was, before what was found elsewhere counts."""
_SEEK_S = 3.0
"""For the broker to be looked up, when nobody is where it was."""


class Attempt(NamedTuple):
    """How it ended."""

    why: str
    """Why there is no stream any more."""
    reached: bool
    """Whether there was one."""
    elsewhere: str
    """HOST:PORT where the broker turned out to be before it was reached; empty: nowhere."""


async def attempt(
    stream: ControlStream, opened: asyncio.Event, finder: Finder | None, address: str
) -> Attempt:
    """Runs the stream to the broker at HOST:PORT to its end; `opened` is set once it is up, and
    gives it up when the broker is found elsewhere before that."""
    running = asyncio.ensure_future(stream.run())
    seeking = asyncio.ensure_future(_seek(stream, running, opened, finder, address))
    try:
        await asyncio.wait((running, seeking), return_when=asyncio.FIRST_COMPLETED)
        if not running.done() and not seeking.result():
            await asyncio.wait((running,))
        if running.done() and not opened.is_set():
            await asyncio.wait((seeking,), timeout=_SEEK_S)
        elsewhere = seeking.result() if seeking.done() else ""
        why = running.result() if running.done() else f"the broker is at {elsewhere} now"
        return Attempt(why, opened.is_set(), elsewhere)
    finally:
        for task in (running, seeking):
            task.cancel()
        await asyncio.gather(running, seeking, return_exceptions=True)


async def _seek(
    stream: ControlStream,
    running: asyncio.Future[str],
    opened: asyncio.Event,
    finder: Finder | None,
    address: str,
) -> str:
    """Where else the broker is, if it is not reached soon where it was. Once it is, the stream is
    told of this host's node of the swarm. Empty: nothing was found, or needed."""
    if finder is None:
        return ""
    elsewhere = asyncio.ensure_future(finder.elsewhere(address))
    reached = asyncio.ensure_future(opened.wait())
    first = asyncio.FIRST_COMPLETED
    try:
        await asyncio.wait((reached, running), timeout=_HEAD_START_S, return_when=first)
        await asyncio.wait((reached, elsewhere), return_when=first)
        if not reached.done():
            return elsewhere.result()
    finally:
        for task in (reached, elsewhere):
            task.cancel()
        await asyncio.gather(reached, elsewhere, return_exceptions=True)
    way = broker_pb2.Way(multiaddr=await finder.way())
    stream.tell(broker_pb2.PeerMessage(way=way))
    return ""


# Whether an address leads to our broker: tried as a stranger would, for the broker's owner.


async def confirm(address: str, dialled: str, credential: Credential) -> Confirmed:
    """Dials HOST:PORT (`dialled` in its place, where this host has a way of its own) and lets who
    answers prove to be the broker of the credential. Never raises for what the network does."""
    found = Confirmed(address=address)
    try:
        found.inside, found.problem = await asyncio.to_thread(_looked, dialled, credential)
    except ValueError as error:  # no address
        found.problem = str(error)
    if not found.problem and not found.inside:
        found.reached = await reaches(dialled, credential)
        if not found.reached:
            found.problem = f"{address} shows the broker's certificate, and TLS to it breaks"
    return found


def _looked(address: str, credential: Credential) -> tuple[bool, str]:
    """Whether the address is of this very host, and why it does not lead to the broker."""
    host, _ = split(address)
    if proxy_for(address) is None and _is_ours(host):
        return True, ""
    try:
        shown = shown_by(address)
    except BrokerAwayError as error:
        return False, str(error)
    if fingerprint_of_pem(shown.authority) != credential.fingerprint:
        return False, f"another broker answers at {address}"
    return False, ""


def _is_ours(host: str) -> bool:
    """Whether one of the addresses that a name stands for is this host's."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(address)  # only own addresses can be had
                return True
        except OSError:
            continue
    return False
