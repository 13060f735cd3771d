"""What is said without TLS: HTTP to the port, for whoever tries what listens here.

GET, HEAD     /authority.pem: the certificate that a token pins, which is public, with the date,
              which tells of clocks that differ; /full-size: some full packets, for who looks
              whether these pass; any other path: where the page is
OPTIONS       which methods there are
any other     that there is no such thing; so too the greeting of HTTP/2, by which a client comes
              that should have spoken TLS
"""

from __future__ import annotations

import asyncio
import re
from email.utils import formatdate
from typing import NamedTuple

from .hello import HelloError

__all__ = ["FULL_SIZE_BYTES", "ClearRequest", "answer", "begins_http", "whole_request"]

_METHODS = (
    *(b"GET ", b"HEAD ", b"OPTIONS ", b"POST ", b"PUT ", b"PATCH ", b"DELETE ", b"TRACE "),
    *(b"CONNECT ", b"PRI "),
)
_END = re.compile(rb"\r?\n\r?\n")
FULL_SIZE_BYTES = 16 * 1024
_ALLOWED = ("GET", "HEAD", "OPTIONS")


class ClearRequest(NamedTuple):
    """A request's head. whole: as it came."""

    method: str
    path: str
    whole: bytes

    @property
    def asks_authority(self) -> bool:
        return self.path.partition("?")[0] == "/authority.pem"

    @property
    def is_ours(self) -> bool:
        """Whether it is answered here, and not by the page."""
        return self.asks_authority or self.path == "/full-size"


def begins_http(first: bytes) -> bool:
    """Whether these bytes, or as many of a longer one, are a method of HTTP."""
    return first.startswith(tuple(name[: len(first)] for name in _METHODS))


async def whole_request(
    first: bytes, reader: asyncio.StreamReader, most_bytes: int
) -> ClearRequest:
    """What stands before the empty line. Raises HelloError for what begins in no known way, or has
    no end within `most_bytes`."""
    if not begins_http(first):
        raise HelloError("it begins in no known way")
    request = first
    while not _END.search(request):
        more = await reader.read(1024)
        if not more or len(request) > most_bytes:
            raise HelloError(f"{len(request)} bytes of a request without an end")
        request += more
    if not request.startswith(_METHODS):
        raise HelloError("it begins in no known way")
    words = request.split(b"\n", 1)[0].split()
    method, path = (w.decode("ascii", "replace") for w in (*words, b"", b"")[:2])
    return ClearRequest(method, path, request)


def answer(asked: ClearRequest, authority: bytes, *, page: bool) -> bytes:
    """The whole answer. `authority`: its certificate, PEM. `page`: whether there is one."""
    status, kind, body = "404 Not Found", "text/plain", _told(page)
    if asked.method not in _ALLOWED:
        status = "405 Method Not Allowed"
    elif asked.method == "OPTIONS":
        status, body = "204 No Content", b""
    elif asked.asks_authority:
        status, kind, body = "200 OK", "application/x-pem-file", authority
    elif asked.path == "/full-size":
        status, body = "200 OK", b"." * FULL_SIZE_BYTES
    head = (
        f"HTTP/1.1 {status}\r\nDate: {formatdate(usegmt=True)}\r\nContent-Type: {kind}\r\n"
        f"Content-Length: {len(body)}\r\nAllow: {', '.join(_ALLOWED)}\r\n"
        "Cache-Control: no-store\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + (b"" if asked.method == "HEAD" else body)


def _told(page: bool) -> bytes:
    text = "A broker of Shoal. Its certificate: /authority.pem. All else here is over TLS."
    if page:
        text += " Its page is served over https:// only."
    return f"{text}\n".encode()
