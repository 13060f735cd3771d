"""HTTP proxies, as universities and companies have them: the way out goes through CONNECT.

`https_proxy`, `no_proxy` and their relatives are read here and nowhere else, so that everything
that is dialled goes by one rule: gRPC alone would look at the names in small letters only.

which proxy    the first one set of grpc_proxy, https_proxy, all_proxy, http_proxy; small letters
               before capitals
not for        this machine itself (loopback), and what no_proxy names: a host, the end of a host's
               name, HOST:PORT, an address, a network such as 10.0.0.0/8, or * for everything

What a proxy sees is who speaks with whom, when, and how much: TLS goes through it untouched.
"""

from __future__ import annotations

import asyncio
import base64
import ipaddress
import socket
import time
import urllib.parse
import urllib.request
from typing import NamedTuple

from ..local import is_loopback, joined, split
from .pump import BUFFER_BYTES, Stream, close

__all__ = [
    "Proxy",
    "ProxyError",
    "ProxyRefusedError",
    "dial",
    "open_stream",
    "proxy_for",
    "proxy_options",
    "through",
]

_NAMES = ("grpc", "https", "all", "http")
_MOST_ANSWER_BYTES = 16 * 1024
_END = b"\r\n\r\n"


class ProxyError(ValueError):
    """The environment names a proxy that cannot be used; the message says what is expected."""


class ProxyRefusedError(ConnectionError):
    """The proxy is away or does not let through; the message says what to do."""


class Proxy(NamedTuple):
    """One that speaks plain HTTP and knows CONNECT."""

    host: str
    port: int
    user: str = ""
    """NAME or NAME:PASSWORD; empty: it asks for none."""

    @property
    def url(self) -> str:
        """In gRPC's terms."""
        user = urllib.parse.quote(self.user, safe=":") + "@" if self.user else ""
        return f"http://{user}{self}"

    def __str__(self) -> str:
        return joined(self.host, self.port)  # without the password: it may land in a log

    def request(self, target: str) -> bytes:
        """What asks it for a way to HOST:PORT."""
        lines = [f"CONNECT {target} HTTP/1.1", f"Host: {target}"]
        if self.user:
            coded = base64.b64encode(self.user.encode()).decode()
            lines.append(f"Proxy-Authorization: Basic {coded}")
        return "\r\n".join(lines).encode() + _END

    def check(self, answer: bytes, target: str) -> None:
        """Raises ProxyRefusedError unless the head of an answer says that the way is open."""
        words = answer.split(b"\r\n", 1)[0].decode("ascii", "replace").split(None, 2)
        if len(words) >= 2 and words[0].startswith("HTTP/") and words[1].startswith("2"):
            return
        said = " ".join(words[1:])[:80] or "nothing"
        more = "many let only port 443 out: a broker can listen there (`shoal broker --port 443`)"
        if words[1:2] == ["407"]:
            more = "it wants a name and a password: https_proxy=http://NAME:PASSWORD@HOST:PORT"
        raise ProxyRefusedError(
            f"the proxy {self} does not let through to {target} ({said}); {more}"
        )


def proxy_for(address: str) -> Proxy | None:
    """The proxy that stands between here and HOST:PORT, None when there is none. Raises ProxyError
    for one that Shoal cannot speak to, ValueError when the address is none."""
    host, _ = split(address)
    found = urllib.request.getproxies_environment()
    text = next((found[name] for name in _NAMES if found.get(name)), "")
    if not text or is_loopback(host) or _excepted(host, address, found):
        return None
    return _parsed(text)


def _excepted(host: str, address: str, found: dict[str, str]) -> bool:
    if urllib.request.proxy_bypass(address):
        return True
    try:
        here = ipaddress.ip_address(host)
    except ValueError:
        return False
    return any(here in network for network in _networks(found.get("no", "")))


def _networks(text: str) -> list[ipaddress.IPv4Network | ipaddress.IPv6Network]:
    networks = []
    for part in text.split(","):
        try:
            networks.append(ipaddress.ip_network(part.strip(), strict=False))
        except ValueError:
            continue  # a name
    return networks


def _parsed(text: str) -> Proxy:
    shown = text.rpartition("@")[2]
    try:
        url = urllib.parse.urlsplit(text if "://" in text else f"http://{text}")
        host, port = url.hostname or "", url.port or 80
    except ValueError as error:
        raise ProxyError(f"the proxy {shown} is no address: {error}") from None
    if url.scheme != "http" or not host:
        raise ProxyError(
            f"the proxy {shown} is none that Shoal can use: expected http://HOST:PORT in "
            "https_proxy (HTTP with CONNECT), or no_proxy with the broker's host to go around it"
        )
    user = urllib.parse.unquote(url.netloc.rpartition("@")[0])
    return Proxy(host, port, user)


def proxy_options(address: str) -> list[tuple[str, int | str]]:
    """For a gRPC channel to HOST:PORT. Raises as `proxy_for`."""
    proxy = proxy_for(address)
    return [("grpc.enable_http_proxy", 0)] if proxy is None else [("grpc.http_proxy", proxy.url)]


def through(address: str) -> str:
    """For messages: " through the proxy HOST:PORT", or nothing. Raises as `proxy_for`."""
    proxy = proxy_for(address)
    return "" if proxy is None else f" through the proxy {proxy}"


def dial(host: str, port: int, timeout_s: float) -> socket.socket:
    """A connection to where others reach HOST:PORT, through the proxy if there is one; blocks.
    Raises OSError (ProxyRefusedError among them), ProxyError."""
    target = joined(host, port)
    proxy = proxy_for(target)
    if proxy is None:
        return socket.create_connection((host, port), timeout_s)
    until = time.monotonic() + timeout_s
    try:
        found = socket.create_connection((proxy.host, proxy.port), timeout_s)
    except OSError as error:
        raise _away(proxy, error) from None
    try:
        found.sendall(proxy.request(target))
        answer = b""
        while not answer.endswith(_END):  # byte by byte: what follows is the other end's
            found.settimeout(max(0.01, until - time.monotonic()))
            byte = found.recv(1)
            if not byte or len(answer) > _MOST_ANSWER_BYTES:
                raise ProxyRefusedError(f"the proxy {proxy} gave no whole answer for {target}")
            answer += byte
        proxy.check(answer, target)
        found.settimeout(timeout_s)
    except BaseException:
        found.close()
        raise
    return found


async def open_stream(host: str, port: int) -> Stream:
    """Open a stream in an event loop, without a limit of time. Raises as `dial`."""
    target = joined(host, port)
    proxy = proxy_for(target)
    if proxy is None:
        return await asyncio.open_connection(host, port, limit=BUFFER_BYTES)
    try:
        stream = await asyncio.open_connection(proxy.host, proxy.port, limit=BUFFER_BYTES)
    except OSError as error:
        raise _away(proxy, error) from None
    try:
        stream[1].write(proxy.request(target))
        proxy.check(await stream[0].readuntil(_END), target)
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        close(stream)
        raise ProxyRefusedError(f"the proxy {proxy} gave no whole answer for {target}") from None
    except BaseException:
        close(stream)
        raise
    return stream


def _away(proxy: Proxy, error: OSError) -> ProxyRefusedError:
    return ProxyRefusedError(
        f"the proxy {proxy} of the environment cannot be reached ({error.strerror or error}): is "
        "https_proxy right? no_proxy names what is reached without it"
    )
