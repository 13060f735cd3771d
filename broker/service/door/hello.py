"""Whom a TLS client asks for and whether it speaks HTTP/1.1, read from its first message (RFC 8446,
sections 4.1.2 and 5.1; RFC 6066, section 3; RFC 7301). Nothing else of TLS is understood here, and
nothing is believed: a wrong name only leads to a server that refuses.
"""

from __future__ import annotations

import re
from typing import NamedTuple

__all__ = ["ClientHello", "HelloError", "TooOldError", "read_hello"]

_CLIENT_HELLO = 1
_SERVER_NAME = 0
_HOST_NAME = 0
_HOST = re.compile(rb"[A-Za-z0-9._-]{1,253}")
_VERSIONS, _TLS_1_3 = 43, 0x0304
_PROTOCOLS = 16


class HelloError(ValueError):
    """Bytes that are no TLS ClientHello."""


class TooOldError(HelloError):
    """A ClientHello that does not offer TLS 1.3."""


class ClientHello(NamedTuple):
    """name: the host that the client asks for; empty when it names none. http: it offers HTTP/1.1,
    as browsers and Prometheus do, or names no protocol and nobody of ours, as proxies and probes
    do; gRPC always offers HTTP/2, and never that."""

    name: str
    http: bool


class _Bytes:
    """Reads numbers and parts from the front; never past the end."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def take(self, size: int) -> bytes:
        if size > self.left:
            raise HelloError(f"a part of {size} bytes where {self.left} are left")
        self._at += size
        return self._data[self._at - size : self._at]

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "big")

    def part(self, size: int) -> _Bytes:
        """What a length of so many bytes announces."""
        return _Bytes(self.take(self.number(size)))


def read_hello(record: bytes) -> ClientHello:
    """A ClientHello that is whole in one record. Raises HelloError, also for a client that does not
    offer TLS 1.3."""
    outer = _Bytes(record)
    outer.take(3)  # handshake, and a version that means nothing
    handshake = outer.part(2)
    if handshake.number(1) != _CLIENT_HELLO:
        raise HelloError("a handshake that does not begin with a ClientHello")
    hello = handshake.part(3)
    hello.take(2 + 32)  # version, random
    hello.part(1)  # session
    hello.part(2)  # cipher suites
    hello.part(1)  # compression
    extensions = hello.part(2)
    found, offers, http = "", False, None
    while extensions.left:
        kind, content = extensions.number(2), extensions.part(2)
        if kind == _VERSIONS:
            offers = _offers(content.part(1))
        elif kind == _PROTOCOLS:
            http = _offers_http(content.part(2))
        elif kind == _SERVER_NAME and not found:
            found = _name(content.part(2))
    if not offers:
        raise TooOldError("it does not offer TLS 1.3: older ones show certificates to everybody")
    return ClientHello(found, not found.endswith(".shoal") if http is None else http)


def _offers_http(protocols: _Bytes) -> bool:
    """Whether HTTP/1.1 is among them."""
    names = []
    while protocols.left:
        name = protocols.part(1)
        names.append(name.take(name.left))
    return b"http/1.1" in names


def _offers(versions: _Bytes) -> bool:
    """Whether TLS 1.3 is among them."""
    return _TLS_1_3 in [versions.number(2) for _ in range(versions.left // 2)]


def _name(names: _Bytes) -> str:
    while names.left:
        host, name = names.number(1), names.part(2)
        if host == _HOST_NAME:
            return _host_name(name.take(name.left))
    return ""


def _host_name(raw: bytes) -> str:
    if not _HOST.fullmatch(raw):
        raise HelloError(f"a server name of {len(raw)} bytes that is no host name")
    return raw.decode("ascii")
