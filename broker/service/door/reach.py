"""Whether a peer's address leads to that very peer, seen from the broker.

Tried once, when the peer attaches: a TLS handshake in which the other end proves to be that peer,
whom its certificate names and not its Hello. Not every address is dialled (`dialable.py`).
Behind a home router the address that a peer knows of itself leads nowhere; it counts as one that
can only dial then, and two such peers meet through the relay.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
import socket
import time
from collections.abc import Callable

import grpc
import grpc.aio

from ....net.identity.credential import Credential
from ....net.identity.enroll import channel_options
from ....net.identity.names import PartyRole, dns_name
from ....net.local import joined, split
from .dialable import may_dial
from .front import RateLimiter

__all__ = ["Reach", "resolved"]

log = logging.getLogger(__name__)

_PATIENCE_S = 3.0
"""A firewall that drops what comes answers nothing at all; the farthest link answers in one."""
_AT_ONCE = 64
_QUEUE_S = 2.0
"""For a slot; the Hello must be heard within BrokerOptions.hello_s."""
_IN_A_ROW, _PER_S, _MOST_PEERS = 32, 0.1, 10_000
"""Dials for one peer in a row, those per second afterwards, and peers that are counted: one that
loses its stream every few seconds is still tried."""
_NAME = re.compile(r"[A-Za-z0-9.-]{1,253}", re.ASCII)


class Reach:
    """`credential`: the broker's own, the newest one."""

    def __init__(self, credential: Callable[[], Credential]) -> None:
        self._often = RateLimiter(_IN_A_ROW, _PER_S, _MOST_PEERS)
        self._credential = credential
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self._checking: set[str] = set()

    async def checked(self, peer: str, address: str, came: str) -> str:
        """The address, or nothing when it does not lead to the peer. `peer`: who its certificate
        says it is; `came`: the IP address from which it attached, empty where nobody knows."""
        if not address:
            return ""
        if peer in self._checking or not _plain(address):
            log.info("peer_not_tried peer=%s: it can only dial", peer)
            return ""
        if not self._often.allowed(peer, time.monotonic()):
            log.info("peer_not_tried peer=%s: it attaches too often; it can only dial", peer)
            return ""
        self._checking.add(peer)
        try:
            async with asyncio.timeout(_QUEUE_S):
                await self._slots.acquire()
        except TimeoutError:  # many come at once: it need not wait, the relay serves
            return ""
        else:
            try:
                found = await self._reaches(peer, address, came)
            finally:
                self._slots.release()
        finally:
            self._checking.discard(peer)
        if not found:
            log.info("peer_not_reached peer=%s address=%s: it can only dial", peer, address)
        return address if found else ""

    async def _reaches(self, peer: str, address: str, came: str) -> bool:
        try:
            async with asyncio.timeout(_PATIENCE_S):
                target = await resolved(peer, address, came)
                if not target:
                    return False
                options = channel_options(address, dns_name(PartyRole.PEER, peer))
                credentials = self._credential().for_channel()
                async with grpc.aio.secure_channel(target, credentials, options=options) as channel:
                    state = channel.get_state(try_to_connect=True)
                    while state is not grpc.ChannelConnectivity.READY:
                        if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                            return False
                        await channel.wait_for_state_change(state)
                        state = channel.get_state()
        except (TimeoutError, ValueError):
            return False
        return True


async def resolved(peer: str, address: str, came: str) -> str:
    """HOST:PORT with the IP address that is dialled: looked up once, so that what was checked is
    what is used; the one that the peer came from, if it is among them. Empty: none may be."""
    host, port = split(address)
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return ""
    hosts = list(dict.fromkeys(str(there[0]) for *_, there in found))
    reasons = {host: may_dial(host, port, came) for host in hosts}
    good = [host for host in hosts if not reasons[host]]
    if not good:
        why = next(iter(reasons.values()), "it has no address")
        log.warning("peer_not_dialled peer=%s address=%s why=%s", peer, address, why)
        return ""
    return joined(came if came in good else good[0], port)


def _plain(address: str) -> bool:
    """A name or an IP address with a port: gRPC would also take sockets of this host and names of
    resolvers."""
    try:
        host, _ = split(address)
    except ValueError:
        return False
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return _NAME.fullmatch(host) is not None
    return True
