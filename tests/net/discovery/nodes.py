"""A stand-in for a swarm's node process, for tests without hivemind: it speaks what
`net/discovery/process.py` says over a real Unix socket, and keeps records in a MemoryDirectory."""

from __future__ import annotations

import asyncio
import base64
import json
from pathlib import Path
from types import TracebackType
from typing import Self

__all__ = ["NODE", "SmallNode"]

NODE = "/ip4/192.0.2.7/tcp/4001/p2p/QmduvmWovF5kFgVztCq1dXBspXNJpvBFpxbSCech8VqWLC"


class MemoryDirectory:
    """The twin of the real one: keeps all that anybody leaves, and checks nothing."""

    def __init__(self) -> None:
        self._left: list[bytes] = []

    async def publish(self, record: bytes) -> None:
        self._left.append(record)

    async def find(self) -> list[bytes]:
        return list(self._left)


class SmallNode:
    """`async with SmallNode(socket) as node:`; `node.directory` is what it keeps."""

    def __init__(self, socket: Path) -> None:
        self.socket = str(socket)
        self.directory = MemoryDirectory()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_unix_server(self._asked, self.socket)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.close()

    async def _asked(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        question = json.loads(await reader.readline())
        answer: dict[str, object] = {"node": NODE, "neighbours": 1, "serves": False}
        if question["do"] == "publish":
            await self.directory.publish(base64.b64decode(question["record"]))
        elif question["do"] == "find":
            found = await self.directory.find()
            answer["records"] = [base64.b64encode(data).decode() for data in found]
        writer.write(json.dumps(answer).encode() + b"\n")
        writer.close()
