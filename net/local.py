"""Which of this host's addresses the world sees, as far as the host itself knows; and how many
connections it lets a process have."""

from __future__ import annotations

import errno
import ipaddress
import resource
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

__all__ = [
    "allow_descriptors",
    "free_port",
    "is_loopback",
    "joined",
    "listening",
    "local_address",
    "split",
]

_SOMEWHERE = ("192.0.2.1", "2001:db8::1")
"""Addresses of nobody (RFC 5737, RFC 3849): which way would a packet leave for them?"""
_SIOCGIFADDR = 0x8915
"""Asks Linux for the IPv4 address of an interface (netdevice(7))."""
_TRIES = 16
"""To find one port that is free in IPv4 and IPv6."""

_DESCRIPTORS = 65_536


def allow_descriptors() -> None:
    """As many as the system lets this process have: a connection that is passed on takes three."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def split(address: str) -> tuple[str, int]:
    """Host and port of HOST:PORT or [IPv6]:PORT, without the brackets. Raises ValueError."""
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f'"{address}" is no address: expected HOST:PORT, e.g. 127.0.0.1:7077')
    return host, int(port)


def joined(host: str, port: int) -> str:
    """HOST:PORT, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def free_port(host: str) -> int:
    """One that nobody has now; raises OSError for a host that is not this one."""
    open_ = listening(host, 0)
    port = int(open_[0].getsockname()[1])
    for found in open_:
        found.close()
    return port


def listening(host: str, port: int, backlog: int = 128) -> list[socket.socket]:
    """Sockets that listen on one port of all addresses of a host; "::" stands for all of this
    machine's, of IPv4 too, as far as it has either. `port` 0: any free one. Raises OSError."""
    named = ("::", "0.0.0.0") if host == "::" else (host,)
    places = [p for name in named for p in socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)]
    for last in (False,) * (0 if port else _TRIES) + (True,):
        found: list[socket.socket] = []
        try:
            for family, _, _, _, there in dict.fromkeys(places):
                free = port or (found[0].getsockname()[1] if found else 0)
                at = (there[0], free, *there[2:])
                try:
                    found.append(socket.create_server(at, family=family, backlog=backlog))
                except OSError as error:
                    absent = error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
                    if not absent or (there is places[-1][4] and not found):
                        raise
            return found
        except OSError as error:
            for each in found:
                each.close()
            if last or error.errno != errno.EADDRINUSE:
                raise
    raise AssertionError("the last try returns or raises")


def is_loopback(host: str) -> bool:
    """Whether the host is this machine by its very name."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def local_address(*towards: str) -> str:
    """The address that a packet to the first of `towards` that there is a way to, hosts, would
    leave from; without any, to somewhere in the world, by IPv4 if there is a way. Where there is
    none, an address of an interface, or 127.0.0.1. Nothing is sent. A router that translates
    addresses shows another one outside."""
    for host in towards or _SOMEWHERE:
        try:
            found = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
        except OSError:
            continue
        for family, kind, protocol, _, address in found:
            with suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
    return "127.0.0.1" if towards else next(_of_interfaces(), "127.0.0.1")


def _of_interfaces() -> Iterator[str]:
    """Addresses of this host by which others on its own network may reach it, IPv4 first; none
    where the system is not asked as Linux is."""
    with suppress(OSError, ImportError):
        from fcntl import ioctl

        for _, name in socket.if_nameindex():
            with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
                answer = ioctl(asked, _SIOCGIFADDR, struct.pack("256s", name[:15].encode()))
                if not is_loopback(address := socket.inet_ntoa(answer[20:24])):
                    yield address
    with suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            number, _, _, scope, *_ = line.split()
            if scope == "00":  # neither loopback nor of the link
                yield str(ipaddress.IPv6Address(int(number, 16)))
