"""Whether an address leads to our broker: tried as a stranger would, for the broker's owner."""

from __future__ import annotations

import asyncio
import socket

from ...net.identity.credential import Credential
from ...net.identity.enroll import BrokerAwayError, shown_by
from ...net.identity.token import fingerprint_of_pem
from ...net.local import split
from ...net.web.proxy import proxy_for
from ...proto.broker_pb2 import Confirmed
from .control import reaches

__all__ = ["confirm"]


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
