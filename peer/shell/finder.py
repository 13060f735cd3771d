"""Where the broker is now, for a peer whose host has a node of its swarm."""

from __future__ import annotations

import asyncio
import logging
import time

from ...net.discovery.directory import DirectoryError
from ...net.discovery.process import DhtDirectory
from ...net.discovery.record import newest
from ..host.config import PeerConfig
from ..logs import note

__all__ = ["Finder", "finder_of"]

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
