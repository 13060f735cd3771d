"""A small real HTTP proxy with CONNECT, for tests: knows names that no resolver knows."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from shoal.net.local import split
from shoal.net.web.pump import Stream, close, join

__all__ = ["ConnectProxy"]


class ConnectProxy:
    """`async with ConnectProxy({"broker.invalid:7077": "127.0.0.1:4000"}) as proxy:` lets through
    to the named targets and to nothing else. `asked`: every target that was asked for."""

    def __init__(self, targets: Mapping[str, str], user: str = "") -> None:
        self.targets = dict(targets)
        self.asked: list[str] = []
        self.answer = b"HTTP/1.1 200 Connection established\r\n\r\n"
        self._user = user
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port = int(self._server.sockets[0].getsockname()[1])
        self.url = f"http://{self._user + '@' if self._user else ''}127.0.0.1:{self.port}"
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            await self._serve((reader, writer))
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            close((reader, writer))

    async def _serve(self, client: Stream) -> None:
        head = (await client[0].readuntil(b"\r\n\r\n")).decode()
        verb, target, _ = head.split("\r\n")[0].split()
        assert verb == "CONNECT", head
        coded = base64.b64encode(self._user.encode()).decode()
        if self._user and f"Proxy-Authorization: Basic {coded}\r\n" not in head:
            client[1].write(b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n")
            return
        self.asked.append(target)
        if target not in self.targets:
            client[1].write(b"HTTP/1.1 403 Forbidden\r\n\r\n")
            return
        host, port = split(self.targets[target])
        server = await asyncio.open_connection(host, port)
        try:
            client[1].write(self.answer)
            await join(client, server)
        finally:
            close(server)
