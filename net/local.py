"""Which of this host's addresses the world sees, as far as the host itself knows; and how many
connections it lets a process have."""

from __future__ import annotations

import ipaddress
import resource
import socket

__all__ = ["allow_descriptors", "free_port", "is_loopback", "joined", "local_address", "split"]

_SOMEWHERE = "192.0.2.1"
"""An address of nobody (RFC 5737): which way would a packet leave for it?"""


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
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as found:
        return int(found.getsockname()[1])


def is_loopback(host: str) -> bool:
    """Whether the host is this machine by its very name."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def local_address(towards: str = _SOMEWHERE) -> str:
    """The address that a packet to `towards`, a host, would leave from; 127.0.0.1 when there is no
    way there. Nothing is sent. A router that translates addresses shows another one outside."""
    try:
        found = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)
    except OSError:
        return "127.0.0.1"
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return "127.0.0.1"
