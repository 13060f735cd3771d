"""Which addresses the broker dials because a peer says that it is there.

A peer names any address it likes, so the broker must not become its hand inside of networks that
the peer cannot reach itself: the broker's own host, the house around it, a cloud's own services.

the address is                                     dialled for a peer that came from
-------------------------------------------------  -----------------------------------
of this very host (loopback)                       loopback
private, shared (100.64/10), or of no public use   loopback, or such an address itself
link-local, multicast, unspecified, reserved       nobody
any other                                          anywhere
"""

from __future__ import annotations

import ipaddress
from urllib.parse import unquote

__all__ = ["came_from", "may_dial", "socket_name"]

_HTTPS = 443
"""The one port below 1024 where a forwarded port of a peer may be: networks that let out nothing
else. What others listen there is somebody's mail, names or shell."""
_BEHIND_FRONT = "from-"

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


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
    if not _is_public(there) and (from_ is None or _is_public(from_)):
        return f"{host} is a private address, and the peer came from a public one"
    return ""


def _is_public(address: Address) -> bool:
    site = isinstance(address, ipaddress.IPv6Address) and address.is_site_local
    return address.is_global and not site  # fec0::/10 is a house's, whatever is_global says


def _ip(text: str) -> Address | None:
    """What is dialled in the end: of an IPv6 address that stands for one of IPv4, that one."""
    try:
        found = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    if isinstance(found, ipaddress.IPv4Address):
        return found
    return found.ipv4_mapped or found.sixtofour or found


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
