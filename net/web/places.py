"""Where on the web somebody's machine reads for others: what its owner has listed, and no more.

    "huggingface.co"  "*.hf.co"     https at its usual port, where that leads to a public address
    "http://10.0.0.5:8000"          this very origin, wherever it leads

A URL comes from a stranger, and the machine that reads it stands in a house with printers, routers
and a cloud's own services around it. So nothing is read that is not listed; a listed name that
leads into the house is not followed (its address is looked at right before it is dialled, by
`web.py`); and redirects are URLs like any other. Where only an origin will do, its owner has
written it out.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

from .internet import is_public

__all__ = ["Origin", "check_place", "origin_of", "reachable", "why_not"]

_URL = re.compile(
    r"(https?)://([a-z0-9.-]{1,253}|\[[0-9a-f:.]{2,45}\])(?::([0-9]{1,5}))?(/[!-~]*)?", re.I | re.A
)
_NAME = re.compile(r"(\*\.)?[a-z0-9-]+(\.[a-z0-9-]+)+", re.A)
_PORTS = {"http": 80, "https": 443}


class Origin(NamedTuple):
    """Origin that answers for a URL."""

    scheme: str
    host: str
    port: int

    def __str__(self) -> str:
        port = "" if self.port == _PORTS[self.scheme] else f":{self.port}"
        return f"{self.scheme}://{self.host}{port}"


def check_place(place: str) -> None:
    """Raises ValueError for what is neither a name nor an origin."""
    if _NAME.fullmatch(place):
        return
    found = _URL.fullmatch(place)
    if found is None or found[4] not in (None, "", "/"):
        raise ValueError(
            f'"{place}" is neither a name of hosts ("huggingface.co", "*.hf.co") nor an origin '
            '("http://10.0.0.5:8000")'
        )


def why_not(url: str, places: Iterable[str]) -> str:
    """Why a URL is not read, for people; empty: it is."""
    if (found := origin_of(url)) is None:
        return "expected http(s)://HOST/…, without a user or anything unprintable in it"
    for place in places:
        if (listed := origin_of(place)) is not None:
            if listed == found:
                return ""
        elif (found.scheme, found.port) == ("https", 443) and _named(found.host, place):
            return ""
    return f"its owner lists no {found}"


def reachable(places: Iterable[str]) -> Callable[[str, str], str]:
    """For `Web`: why an address that a host leads to is not dialled; empty: it is."""
    origins = (origin_of(place) for place in places)
    written = {origin.host.strip("[]") for origin in origins if origin is not None}

    def asked(host: str, address: str) -> str:
        if host.lower().strip("[]") in written:
            return ""
        return "" if _public(address) else "no public address"

    return asked


def origin_of(url: str) -> Origin | None:
    """None for what is no URL that is read here."""
    found = _URL.fullmatch(url)
    if found is None:
        return None
    scheme = found[1].lower()
    return Origin(scheme, found[2].lower(), int(found[3]) if found[3] else _PORTS[scheme])


def _named(host: str, place: str) -> bool:
    return host.endswith(place[1:]) if place.startswith("*.") else host == place


def _public(address: str) -> bool:
    try:
        return is_public(ipaddress.ip_address(address.partition("%")[0]))
    except ValueError:
        return False
