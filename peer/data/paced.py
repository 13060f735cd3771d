"""Answers over HTTP that end: what `sources.py` gives fsspec's client.

aiohttp's own limits are of one wait, or of all of a file; a server that sends a byte now and then
keeps the first, and a long file over a slow line breaks the second. Imported when it is needed:
aiohttp takes a while to load.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import aiohttp

from ...net.web.web import HEAD_S, SLOW, WebError

if TYPE_CHECKING:
    from aiohttp.connector import Connection

__all__ = ["SILENT_S", "client_options"]

SILENT_S = 60.0
"""A server that sends nothing for so long is given up."""


def client_options(
    *, silent_s: float = SILENT_S, head_s: float = HEAD_S, floor: float = SLOW
) -> dict[str, object]:
    """For aiohttp.ClientSession: answers whose heads come within `head_s`, each redirect's too, and
    whose bodies come at `floor` bytes per second, looked at every `silent_s`. Who is slower makes
    whatever reads raise WebError."""

    class Paced(aiohttp.ClientResponse):
        async def start(self, connection: Connection) -> aiohttp.ClientResponse:
            try:
                async with asyncio.timeout(head_s):
                    await super().start(connection)
            except aiohttp.ServerTimeoutError:  # silence, which says so
                raise
            except TimeoutError:
                raise WebError(f"no whole head of an answer in {head_s:g} s, given up") from None
            look(self, asyncio.get_running_loop().time())
            return self

    def look(answer: aiohttp.ClientResponse, began_s: float) -> None:
        """Now and every `silent_s`, until the body is here or nobody wants it."""
        body = answer.content
        if answer.closed or body.is_eof() or body.exception() is not None:
            return
        loop = asyncio.get_running_loop()
        passed_s, came = loop.time() - began_s, body.total_bytes
        if passed_s >= silent_s and came < floor * passed_s:
            body.set_exception(WebError(f"{came} bytes in {passed_s:.3g} s, given up"))
            answer.close()
            return
        loop.call_later(silent_s, look, answer, began_s)

    timeout = aiohttp.ClientTimeout(total=None, sock_connect=silent_s, sock_read=silent_s)
    return {"timeout": timeout, "response_class": Paced}
