"""The directory over hivemind's DHT, in a process of its own: hivemind loads torch and starts a
daemon for the network (p2pd). We speak with it over a Unix socket in a private folder.

Nothing of it outlives us. The process ends when its standard input does, and the kernel ends it
with its parent; the daemon is tied to that process in the same way. So a SIGKILL of any of them, or
of all, leaves none behind.

One line of JSON each way, one after the other:

    {"do": "find"}                       {"records": [BASE64, …], …state}
    {"do": "publish", "record": BASE64}  {…state}
    {"do": "look"}                       {…state}

state: "node" (its multiaddr), "neighbours" (nodes of the DHT that it knows), "serves" (whether it
keeps records for others), or "error".
"""

from __future__ import annotations

import asyncio
import base64
import importlib.util
import json
import logging
import os
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

from ..temporary import TemporaryFolder
from .record import DirectoryError

__all__ = ["DhtDirectory", "NodeConfig", "NodeProcess", "NodeState", "check_available"]

log = logging.getLogger(__name__)

_ANSWER_S = 20.0
"""For one question; the node has limits of its own below it."""
_END_S = 5.0
_START_S, _LOOK_S = 90.0, 0.1
"""hivemind takes seconds to load, on a busy host many."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_LONGEST_LINE = 1 << 16
_LONGEST_FOLDER = 60
"""Bytes of a path in which Unix sockets can have names: 107 with those of the daemon."""


def check_available() -> None:
    """Raises DirectoryError where hivemind or its daemon is not; imports neither."""
    spec = importlib.util.find_spec("hivemind")
    if spec is None or spec.origin is None:
        raise DirectoryError(
            "--swarm needs hivemind, which is not installed here: pip install 'shoal[swarm]' on "
            "x86-64 Linux; elsewhere give the broker's HOST:PORT in place of --swarm"
        )
    daemon = Path(spec.origin).parent / "hivemind_cli" / "p2pd"
    if sys.platform != "linux" or not os.access(daemon, os.X_OK):
        raise DirectoryError(
            f"--swarm needs hivemind's daemon, and {daemon} cannot be run here: its wheels have it "
            "for x86-64 Linux; elsewhere give the broker's HOST:PORT in place of --swarm"
        )


@dataclass(frozen=True, kw_only=True)
class NodeConfig:
    """One node of the DHT."""

    swarm: str
    fingerprint: str
    """Of the authority whose records it keeps, in hexadecimal."""
    folder: str
    """Of its key, its port, and what it knew last."""
    host: str = "0.0.0.0"
    """Where it listens."""
    port: int = 0
    """0: the one that it had before, or any free one."""
    public_host: str = ""
    """Under which others reach it; empty: the address that packets leave from."""
    public_port: int = 0
    """0: the one on which it listens."""
    bootstrap: tuple[str, ...] = ()
    """Multiaddrs of nodes; those that it knew before are tried as well."""
    serves: bool = False
    """Keeps records for others from the start; else once a record names it as a way in."""
    sockets: str = ""
    """Private folder of its Unix sockets."""
    parent: int = 0
    """Process that it ends with."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> NodeConfig:
        table = json.loads(text)
        return cls(**table | {"bootstrap": tuple(table["bootstrap"])})

    @property
    def socket(self) -> str:
        return os.path.join(self.sockets, "node")


class NodeState(NamedTuple):
    """How a node stands."""

    multiaddr: str
    neighbours: int
    serves: bool


class DhtDirectory:
    """The directory of a swarm, by the node that listens at the socket. See `Directory`."""

    def __init__(self, socket: str) -> None:
        self._socket = socket
        self.state: NodeState | None = None
        """As the node last said."""

    async def publish(self, record: bytes) -> None:
        await self._ask({"do": "publish", "record": base64.b64encode(record).decode()})

    async def find(self) -> list[bytes]:
        answer = await self._ask({"do": "find"})
        return [base64.b64decode(record) for record in answer["records"]]

    async def look(self) -> NodeState:
        """The node itself. Raises DirectoryError when it is not there (yet)."""
        await self._ask({"do": "look"})
        assert self.state is not None
        return self.state

    async def _ask(self, question: dict[str, str]) -> dict[str, Any]:
        try:
            async with asyncio.timeout(_ANSWER_S):
                reader, writer = await asyncio.open_unix_connection(
                    self._socket, limit=_LONGEST_LINE
                )
                try:
                    writer.write(json.dumps(question).encode() + b"\n")
                    answer: dict[str, Any] = json.loads(await reader.readline() or b"{}")
                finally:
                    writer.close()
        except (OSError, ValueError) as error:
            why = str(error) or type(error).__name__
            raise DirectoryError(f"the swarm's node does not answer: {why}") from None
        if "node" not in answer:
            raise DirectoryError(answer.get("error") or "the swarm's node ended")
        self.state = NodeState(answer["node"], answer["neighbours"], answer["serves"])
        return answer


class NodeProcess:
    """`with NodeProcess(config) as node:` runs one until the end of the block; `node.directory`
    speaks with it. Start it from a thread that lives as long. Raises DirectoryError where it cannot
    run."""

    def __init__(self, config: NodeConfig) -> None:
        self.config = config
        self._process: subprocess.Popen[bytes] | None = None
        self._temporary: TemporaryFolder | None = None
        self._pause_s, self._start_at = _FIRST_PAUSE_S, 0.0

    def __enter__(self) -> Self:
        check_available()
        sockets = Path(os.path.abspath(self.config.folder), "sockets")
        if len(os.fsencode(sockets)) > _LONGEST_FOLDER:
            self._temporary = TemporaryFolder("shoal-swarm-")
            sockets = self._temporary.path
        else:
            shutil.rmtree(sockets, ignore_errors=True)  # of a process that was killed
            sockets.mkdir(mode=0o700, parents=True)
        self.config = replace(self.config, sockets=str(sockets), parent=os.getpid())
        self.directory = DhtDirectory(self.config.socket)
        self._start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._process is not None:
            _let_go(self._process)
            try:
                self._process.wait(_END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        shutil.rmtree(self.config.sockets, ignore_errors=True)
        if self._temporary is not None:
            self._temporary.close()

    async def started(self, patience_s: float = _START_S) -> NodeState:
        """The node, when it is there for the first time. Raises DirectoryError when it ends before,
        or takes longer than `patience_s`."""
        until = time.monotonic() + patience_s
        while True:
            try:
                return await self.directory.look()
            except DirectoryError as error:
                code = None if self._process is None else self._process.poll()
                if code is not None or time.monotonic() > until:
                    how = "did not come up" if code is None else f"ended with code {code}"
                    raise DirectoryError(f"the swarm's node {how}: {error}") from None
            await asyncio.sleep(_LOOK_S)

    @property
    def pid(self) -> int | None:
        """The id of the node's process while it runs, else None."""
        if self._process is None or self._process.poll() is not None:
            return None
        return self._process.pid

    def keep(self) -> None:
        """Starts it again when it has ended, after a pause that grows. Call it now and then."""
        now = time.monotonic()
        if self._process is not None and (code := self._process.poll()) is not None:
            _let_go(self._process)
            self._process = None
            self._start_at = now + self._pause_s
            log.warning("swarm_node_ended code=%s again_in_s=%.0f", code, self._pause_s)
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        if self._process is None and now >= self._start_at:
            self._start()

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "shoal.net.discovery.node"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C in the terminal is for us
        )
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it ended at once: `keep` tells
            self._process.stdin.write(f"{self.config.to_json()}\n".encode())
            self._process.stdin.flush()


def _let_go(process: subprocess.Popen[bytes]) -> None:
    """Closes its standard input, with which it ends."""
    assert process.stdin is not None
    with suppress(BrokenPipeError):
        process.stdin.close()
