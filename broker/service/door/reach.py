"""Whether a peer's address leads to that very peer, seen from the broker.

Tried once, when the peer attaches: a TLS handshake in which the other end proves to be that peer,
whom its certificate names and not its Hello. Not every address is dialled.
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
from urllib.parse import unquote

import grpc
import grpc.aio

from ....net.grpc_quirks import is_reached
from ....net.identity.credential import Credential
from ....net.identity.enroll import channel_options
from ....net.identity.names import PartyRole, dns_name
from ....net.knocks import RateLimiter
from ....net.local import joined, split
from ....net.web.internet import Address, is_public, stands_for

__all__ = ["Reach", "came_from", "may_dial", "resolved", "socket_name"]

# Which addresses the broker dials because a peer says that it is there.
#
# A peer names any address it likes, so the broker must not become its hand inside of networks that
# the peer cannot reach itself: the broker's own host, the house around it, a cloud's own services.
#
# the address is                                     dialled for a peer that came from
# -------------------------------------------------  -----------------------------------
# of this very host (loopback)                       loopback
# private, shared (100.64/10), or of no public use   loopback, or such an address itself
# link-local, multicast, unspecified, reserved       nobody
# any other                                          anywhere

_HTTPS = 443
"""The one port below 1024 where a forwarded port of a peer may be: networks that let out nothing
else. What others listen there is somebody's mail, names or shell."""
_BEHIND_FRONT = "from-"


def may_dial(host: str, port: int, came: str) -> str:
    """Why an IP address is not dialled for a peer that came from `came` (an IP address; empty: not
    known, which counts as far away); empty: it is."""
    there, from_ = _ip(host), _ip(came)
    if there is None:
        return f"{host} is no IP address"
    if port < 1024 and port != _HTTPS:
        return f"port {port} is below 1024 and not {_HTTPS}"
    if there.is_loopback:
        if from_ is not None and from_.is_loopback:
            return ""
        return f"{host} is the broker's own host, and the peer is on another"
    if there.is_link_local or there.is_multicast or there.is_unspecified or there.is_reserved:
        return f"{host} is no address of one host"
    if not is_public(there) and (from_ is None or is_public(from_)):
        return f"{host} is a private address, and the peer came from a public one"
    return ""


def _ip(text: str) -> Address | None:
    """The address that is dialled in the end; None for what is none."""
    try:
        return stands_for(ipaddress.ip_address(text.partition("%")[0]))
    except ValueError:
        return None


def came_from(peer: str) -> str:
    """The IP address of who made a call, from what gRPC calls it: "ipv4:1.2.3.4:50000", or the
    socket that the front has made for the connection; empty where neither says it."""
    kind, _, rest = unquote(peer).partition(":")
    if kind in ("ipv4", "ipv6"):
        host = rest.rpartition(":")[0].removeprefix("[").removesuffix("]")
    else:
        host = rest.rpartition("/")[2].partition(_BEHIND_FRONT)[2].partition("-")[2]
    return host if _ip(host) is not None else ""


def socket_name(number: int, host: str) -> str:
    """What the front calls its end of a connection that it passes on, for `came_from`."""
    return f"{_BEHIND_FRONT}{number}-{host}"


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
                    return await is_reached(channel, _PATIENCE_S)
        except (TimeoutError, ValueError):
            return False


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
