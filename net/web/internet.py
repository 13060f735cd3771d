"""Whether an IP address is one host somewhere on the internet: what `ipaddress` says of that has
changed between versions of Python, and knows no cloud's services."""

from __future__ import annotations

import ipaddress

__all__ = ["Address", "is_public", "stands_for"]

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_ISATAP = (bytes.fromhex("00005efe"), bytes.fromhex("02005efe"))
"""How the lower half of an address begins that ends in one of IPv4 (RFC 5214, 6.1)."""
_OF_NO_HOST = tuple(
    map(
        ipaddress.ip_network,
        (
            "192.0.0.0/24",  # protocols; a cloud's metadata at .192
            "192.88.99.0/24",  # relays of 6to4
            "168.63.129.16/32",  # inside Azure, its services for the machine
            "64:ff9b:1::/48",  # NAT64 of a house
            "100::/64",
            "2001::/23",  # Teredo, identifiers
            "2001:db8::/32",
            "3fff::/20",
            "5f00::/16",
            "fec0::/10",  # of a house, whatever is_global says
        ),
    )
)
"""Of IANA's registries of special addresses, what some Python takes for global."""


def stands_for(address: Address) -> Address:
    """Return what is dialled in the end: of an IPv6 address that wraps one of IPv4, that one."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address in _NAT64 or address.packed[8:12] in _ISATAP:
        return ipaddress.IPv4Address(address.packed[-4:])
    return address.ipv4_mapped or address.sixtofour or address


def is_public(address: Address) -> bool:
    """Whether it is, and none behind a way into this house."""
    there = stands_for(address)
    if any(there in special for special in _OF_NO_HOST):
        return False
    return there.is_global and not (there.is_multicast or there.is_reserved)
