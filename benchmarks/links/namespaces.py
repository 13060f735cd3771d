"""Hosts in network namespaces of their own, on one bridge, for links.py and plans.py.

    core  10.78.0.1 ──┬── a  10.78.0.2        `tc` shapes what a host sends
                      ├── b  10.78.0.3        delay is added by a process in core, since not every
                      └── c  10.78.0.4        kernel has netem

Run as a script it is one of the small processes that the hosts need; see `main`.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

__all__ = ["CORE", "PYTHON", "Hosts", "usable"]

CORE = "10.78.0.1"
PYTHON = sys.executable
_PIECE = 64 * 1024
_PINGS = 20


def usable() -> str:
    """Why namespaces cannot be made here; empty: they can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "needs Linux and root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"needs {' and '.join(missing)}"
    name = f"links-try-{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode:
        return "may not make network namespaces"
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return ""


class Hosts:
    """`with Hosts(("a", "b")) as hosts:` makes them and takes them away, with all that runs there
    by `start`. Needs root."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        self._prefix = f"links-{os.getpid()}"
        self._running: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Hosts:
        self._ip("netns", "add", self._of("core"))
        self._in("core", "link", "set", "lo", "up")
        self._in("core", "link", "add", "br0", "type", "bridge")
        self._in("core", "addr", "add", f"{CORE}/24", "dev", "br0")
        self._in("core", "link", "set", "br0", "up")
        for name in self.names:
            self._ip("netns", "add", self._of(name))
            self._in(name, "link", "set", "lo", "up")
            self._in("core", "link", "add", f"to-{name}", "type", "veth", "peer", "name", "eth")
            self._in("core", "link", "set", "eth", "netns", self._of(name))
            self._in("core", "link", "set", f"to-{name}", "master", "br0", "up")
            self._in(name, "addr", "add", f"{self.address(name)}/24", "dev", "eth")
            self._in(name, "link", "set", "eth", "up")
        return self

    def __exit__(self, *_: object) -> None:
        for process in reversed(self._running):
            self.end(process)
        for name in (*self.names, "core"):
            subprocess.run(["ip", "netns", "del", self._of(name)], capture_output=True)

    def address(self, name: str) -> str:
        return CORE if name == "core" else f"10.78.0.{self.names.index(name) + 2}"

    def shape(self, name: str, *lines: str) -> None:
        """What a host sends goes through these, e.g. "qdisc add dev eth root tbf rate …"; none: as
        fast as it can."""
        tc = ["tc", "-n", self._of(name)]
        subprocess.run([*tc, "qdisc", "del", "dev", "eth", "root"], capture_output=True)
        for line in lines:
            subprocess.run([*tc, *line.split()], check=True, capture_output=True, text=True)

    def shape_down(self, name: str, *lines: str) -> None:
        """The same of what a host receives, of "dev to-NAME"."""
        tc = ["tc", "-n", self._of("core")]
        subprocess.run([*tc, "qdisc", "del", "dev", f"to-{name}", "root"], capture_output=True)
        for line in lines:
            subprocess.run([*tc, *line.split()], check=True, capture_output=True, text=True)

    def start(
        self,
        name: str,
        *command: str,
        log: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> subprocess.Popen[str]:
        said = subprocess.DEVNULL if log is None else log.open("a")
        process = subprocess.Popen(
            ["ip", "netns", "exec", self._of(name), *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
            env={**os.environ, **(env or {})},
            start_new_session=True,
        )
        if log is not None:
            said.close()  # type: ignore[union-attr]
        self._running.append(process)
        return process

    def helper(self, name: str, *arguments: object) -> subprocess.Popen[str]:
        """One of `main`'s; it listens once it has said so."""
        process = self.start(name, PYTHON, __file__, *map(str, arguments))
        if arguments[0] != "send":
            assert process.stdout is not None
            process.stdout.readline()
        return process

    def kill(self, name: str) -> None:
        """End all that runs on a host at once, as a power cut would."""
        command = ["ip", "netns", "pids", self._of(name)]
        found = subprocess.run(command, check=True, capture_output=True, text=True)
        for process in map(int, found.stdout.split()):
            with suppress(ProcessLookupError):
                os.kill(process, 9)

    def sent_bytes(self, name: str) -> int:
        """Bytes that a host has sent since it was made, with the headers of their packets."""
        command = ["ip", "-n", self._of(name), "-s", "-j", "link", "show", "dev", "eth"]
        found = subprocess.run(command, check=True, capture_output=True, text=True)
        return int(json.loads(found.stdout)[0]["stats64"]["tx"]["bytes"])

    def end(self, process: subprocess.Popen[str]) -> None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
        if process in self._running:
            self._running.remove(process)

    def _of(self, name: str) -> str:
        return f"{self._prefix}-{name}"

    def _ip(self, *arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)

    def _in(self, name: str, *arguments: str) -> None:
        self._ip("-n", self._of(name), *arguments)


# ---------------------------------------------------------------- the small processes


async def delay(port: int, target: str, seconds: float) -> None:
    """Hands on what comes, so much later, both ways. What it holds is what a path of that length
    would hold, so nobody is slowed down by it."""
    host, _, there = target.rpartition(":")

    async def one_way(source: socket.socket, sink: socket.socket) -> None:
        loop, line, more = asyncio.get_running_loop(), deque[tuple[float, bytes]](), asyncio.Event()

        async def give() -> None:
            while True:
                while not line:
                    more.clear()
                    await more.wait()
                due, data = line.popleft()
                await asyncio.sleep(max(0.0, due - loop.time()))
                if not data:
                    sink.shutdown(socket.SHUT_WR)
                    return
                await loop.sock_sendall(sink, data)

        giving = asyncio.create_task(give())
        with suppress(OSError):
            while True:
                data = await loop.sock_recv(source, 4 * _PIECE)
                line.append((loop.time() + seconds, data))
                more.set()
                if not data:
                    break
            await giving

    async def serve(near: socket.socket) -> None:
        loop, far = asyncio.get_running_loop(), socket.socket()
        with near, far:
            for end in (near, far):
                end.setblocking(False)
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with suppress(OSError):
                await asyncio.sleep(2 * seconds)
                await loop.sock_connect(far, (host, int(there)))
                await asyncio.gather(one_way(near, far), one_way(far, near))

    with socket.create_server(("", port)) as server:
        server.setblocking(False)
        print("listens", flush=True)
        tasks = set()
        while True:
            near, _ = await asyncio.get_running_loop().sock_accept(server)
            tasks.add(task := asyncio.create_task(serve(near)))
            task.add_done_callback(tasks.discard)


def receive(port: int) -> None:
    """Echoes pings, then takes all that comes; says when each byte was there: the least round trip
    is the sender's to tell, the rate over the later half of the time is ours."""
    with socket.create_server(("", port)) as server:
        print("listens", flush=True)
        end, _ = server.accept()
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(_PINGS):
            end.sendall(end.recv(1))
        seen, total = [(time.monotonic(), 0)], 0
        while data := end.recv(_PIECE):
            total += len(data)
            seen.append((time.monotonic(), total))
    middle = (seen[0][0] + seen[-1][0]) / 2
    began = next(s for s in seen if s[0] >= middle)
    print((seen[-1][1] - began[1]) / (seen[-1][0] - began[0]), flush=True)


def send(target: str, seconds: float) -> None:
    """Pings, then as much as the connection takes for so long; says the latency one way."""
    host, _, port = target.rpartition(":")
    with socket.create_connection((host, int(port))) as end:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        trips = []
        for _ in range(_PINGS):
            began = time.monotonic()
            end.sendall(b".")
            end.recv(1)
            trips.append(time.monotonic() - began)
        print(json.dumps(min(trips) / 2), flush=True)
        until, piece = time.monotonic() + seconds, os.urandom(_PIECE)
        with suppress(OSError):
            while time.monotonic() < until:
                end.sendall(piece)


def main(kind: str, *rest: str) -> None:
    """`delay PORT HOST:PORT SECONDS`, `receive PORT` or `send HOST:PORT SECONDS`."""
    if kind == "delay":
        asyncio.run(delay(int(rest[0]), rest[1], float(rest[2])))
    elif kind == "receive":
        receive(int(rest[0]))
    else:
        send(rest[0], float(rest[1]))


if __name__ == "__main__":
    main(*sys.argv[1:])
