"""Addresses as people write them, read as HOST:PORT.

    broker.example:7077      Broker.Example:7077     bücher.example:7077
    http://host:7077/        https://host:7077       host:7077/
    10.0.0.5                 [fd00::5]               (a port where one is usual)
    [fd00::5]:7077           [fe80::5%eth0]:7077     [fe80::5%25eth0]:7077

A URL with a path, a user or a query, an IPv6 address without brackets, and what cannot be a host
are refused with what to write instead.
"""

from __future__ import annotations

import ipaddress
import re

from .local import joined

__all__ = ["USUAL_PORT", "AddressError", "address_of", "host_of"]

USUAL_PORT = 7077
"""Where `shoal broker` listens when no port is given."""
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_SCHEMES = ("http", "https", "grpc", "grpcs", "tcp", "shoal")
_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?", re.ASCII)
_ZONE = re.compile(r"[A-Za-z0-9_.:@-]{1,32}", re.ASCII)
_EXPECTED = "expected HOST:PORT, e.g. 127.0.0.1:7077"


class AddressError(ValueError):
    """No address, or something that is none; the message says what to write."""


def address_of(text: str, port: int | None = USUAL_PORT) -> str:
    """HOST:PORT in one form: a host in small ASCII letters, an IPv6 address in brackets. `port`: of
    an address that has none; None: it must have one. Raises AddressError."""
    said = text.strip()
    rest = said
    if found := _SCHEME.match(said):
        if found[1].lower() not in _SCHEMES:
            raise AddressError(f'"{said}" is no address: {_EXPECTED}, without {found[1]}://')
        rest = said[found.end() :]
    rest, _, path = rest.partition("/")
    host, number = _parts(said, rest)
    chosen = _port(said, number) if number else port
    if chosen is None:
        raise AddressError(f'no port in "{said}": {_EXPECTED}')
    known = joined(_host(said, host), chosen)
    if path or any(c in rest for c in "@?#"):
        raise AddressError(f'"{said}" is a URL: expected HOST:PORT alone, which is {known}')
    return known


def host_of(text: str) -> str:
    """The address of this host to listen on, without brackets. Raises AddressError."""
    said = text.strip()
    bare = said.removeprefix("[").removesuffix("]")
    if ":" in bare and not _is_ip(bare):
        raise AddressError(
            f'"{said}" is no host to listen on: expected a name or an IP address, as 0.0.0.0 or '
            "::; the port is said with --port"
        )
    return _host(said, bare)


def _parts(said: str, rest: str) -> tuple[str, str]:
    """Host without brackets and port, as they stand there; an empty port where there is none."""
    authority = re.split(r"[?#]", rest.rpartition("@")[2])[0]
    if authority.startswith("["):
        host, closed, after = authority[1:].partition("]")
        if not closed or (after and not after.startswith(":")):
            raise AddressError(f'"{said}" is no address: expected [HOST]:PORT, e.g. [fd00::5]:7077')
        if after == ":":
            raise AddressError(f'no port behind the colon of "{said}": {_EXPECTED}')
        return host, after[1:]
    if authority.count(":") > 1:
        whole, _, last = authority.rpartition(":")
        both = f"[{authority}]:{USUAL_PORT}"
        other = f" or [{whole}]:{last}" if _is_ip(whole) and last.isdecimal() else ""
        if _is_ip(authority) or other:
            raise AddressError(
                f'"{said}" has an IPv6 address without brackets: expected {both}{other}'
            )
        raise AddressError(f'"{said}" is no address: {_EXPECTED}')
    host, colon, number = authority.partition(":")
    if colon and not number:
        raise AddressError(f'no port behind the colon of "{said}": {_EXPECTED}')
    return host, number


def _port(said: str, number: str) -> int:
    if not (number.isascii() and number.isdigit()) or not 0 < int(number[:9]) < 65536:
        raise AddressError(f'"{said}" is no address: its port is {number}, expected 1 to 65535')
    return int(number)


def _host(said: str, host: str) -> str:
    bare, percent, zone = host.partition("%")
    if percent:
        zone = zone.removeprefix("25") if zone.startswith("25") and len(zone) > 2 else zone
        if not _is_ip(bare) or ":" not in bare or not _ZONE.fullmatch(zone):
            raise AddressError(f'"{said}" is no address: {_EXPECTED}, or [fe80::1%eth0]:7077')
        return f"{ipaddress.ip_address(bare)}%{zone}"
    if _is_ip(host):
        there = ipaddress.ip_address(host)
        return str(getattr(there, "ipv4_mapped", None) or there)
    name = host.lower()
    if not name.isascii():
        try:
            name = name.encode("idna").decode()
        except UnicodeError as error:
            raise AddressError(f'"{said}" is no address: {host} is no name ({error})') from None
    labels = name.removesuffix(".").split(".")
    if not name or len(name) > 253 or not all(map(_LABEL.fullmatch, labels)):
        raise AddressError(f'"{said}" is no address: {_EXPECTED}')
    if labels[-1].isdigit():  # resolvers read 1.2.3 as 1.2.0.3
        raise AddressError(f'"{said}" is no address: {host} is no IPv4 address of four numbers')
    return ".".join(labels)  # without the dot that ends it


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True
