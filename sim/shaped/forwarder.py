"""Paths between real processes of this machine: each pair with its own latency and bandwidth.

    with Forwarder(shaping, {"broker": "127.0.0.1:7077"}) as paths:
        paths.port("eu-1")              where `shoal join --port` has that peer listen
        paths.via("eu-1")               what `shoal join --via` has it dial instead

One process (forwarding.py) carries every connection; neither root nor anything of the kernel's is
needed. It ends with this one, whatever ends that, and leaves nothing behind.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from select import select
from typing import Any

from ...net.interrupts import uninterrupted
from ..processes import ClusterError
from .shaping import Shaping

__all__ = ["ForwardedTraffic", "Forwarder"]

_PATIENCE_S = 30.0
"""For an answer of a process that may share its core with many."""


@dataclass(frozen=True, slots=True)
class ForwardedTraffic:
    """What a Forwarder did so far."""

    bytes: Mapping[tuple[str, str], int]
    """By sender and receiver, what was delivered; pairs with nothing are left out."""
    pieces: int
    late: int
    """Pieces that were delivered over 5 ms late, as another process had the core."""
    latest_s: float
    spared: frozenset[tuple[str, str]]
    """Pairs whose next large piece is still to be changed."""


class Forwarder:
    """Forwards bytes between real processes of this machine, each pair with its own latency and
    bandwidth. `targets` are HOST:PORT of those ends that listen already; every other end of the
    shaping has a port reserved for it."""

    def __init__(self, shaping: Shaping, targets: Mapping[str, str] | None = None) -> None:
        self.shaping = shaping
        self._given = {name: _split(address) for name, address in (targets or {}).items()}
        for name in self._given:
            shaping.number(name)  # raises
        self._process: subprocess.Popen[bytes] | None = None
        self._read = b""
        self._turn = threading.Lock()  # one question at a time: faults come from other threads
        self._targets: list[str] = []
        self._addresses: dict[tuple[int, int], str] = {}

    def __enter__(self) -> Forwarder:
        with uninterrupted():
            self._process = subprocess.Popen(
                [sys.executable, "-m", "shoal.sim.shaped.forwarding"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
                bufsize=0,
            )
        try:
            said = self._ask({"shaping": self.shaping.to_json(), "targets": self._given})
        except BaseException:
            self.stop()
            raise
        self._targets = [f"{host}:{port}" for host, port in said["targets"]]
        self._addresses = {(a, b): f"127.0.0.1:{port}" for a, b, port in said["pairs"]}
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Ends the process, and with it every connection."""
        with uninterrupted():
            if (process := self._process) is None:
                return
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.close()
            try:
                process.wait(_PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()
            self._process = None

    def check(self) -> None:
        """Raises ClusterError when the process has ended."""
        if self._process is None or self._process.poll() is not None:
            code = None if self._process is None else self._process.returncode
            raise ClusterError(f"the forwarding process is not running (exit code {code})")

    # ------------------------------------------------------------ addresses

    def port(self, name: str) -> int:
        """Where an end listens, or should."""
        return int(self._targets[self.shaping.number(name)].rpartition(":")[2])

    def address_for(self, a: str, b: str) -> str:
        """What a dials to reach b over the shaped path."""
        return self._addresses[self.shaping.number(a), self.shaping.number(b)]

    def via(self, a: str) -> dict[str, str]:
        """What a dials in the place of each other end's own address."""
        return {
            self._targets[self.shaping.number(b)]: self.address_for(a, b)
            for b in self.shaping.names
            if b != a
        }

    def write_via(self, a: str, path: Path) -> Path:
        """`via` as a file for `shoal join --via`; the name must end in .json."""
        path.write_text(json.dumps(self.via(a), indent=1))
        return path

    # ------------------------------------------------------------ faults

    def part(self, a: str, b: str) -> None:
        """From now on nothing that a sends leaves for b: open connections hang, as without an
        answer, and between the two none can be opened."""
        self._pair("part", a, b)

    def mend(self, a: str, b: str) -> None:
        """What hung goes on."""
        self._pair("mend", a, b)

    def slow(self, a: str, b: str, factor: float) -> None:
        """The path from a to b has 1/factor of its bandwidth. Raises ValueError unless the factor
        is positive."""
        if not 0 < factor < float("inf"):
            raise ValueError(f"factor is {factor}: expected a positive number")
        self._pair("slow", a, b, factor=factor)

    def corrupt(self, a: str, b: str) -> None:
        """One bit changes in the middle of the next piece of at least 1 KiB that a sends to b."""
        self._pair("corrupt", a, b)

    def carried(self) -> ForwardedTraffic:
        said, names = self._ask({"do": "count"}), self.shaping.names
        pairs = {(names[a], names[b]): size for a, b, size in said["pairs"]}
        spared = frozenset((names[a], names[b]) for a, b in said["spared"])
        return ForwardedTraffic(pairs, said["pieces"], said["late"], said["latest_s"], spared)

    def _pair(self, what: str, a: str, b: str, **more: float) -> None:
        if a == b:
            raise ValueError(f'"{a}" has no path to itself')
        numbers = {"from": self.shaping.number(a), "to": self.shaping.number(b)}
        self._ask({"do": what, **numbers, **more})

    def _ask(self, table: Mapping[str, Any]) -> Any:
        """A line down the rope and the answer to it. Raises ClusterError without one."""
        with self._turn:
            self.check()
            assert self._process is not None
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            end = time.monotonic() + _PATIENCE_S
            try:
                data = memoryview(json.dumps(table).encode() + b"\n")
                while data:
                    data = data[self._process.stdin.write(data) :]
                while b"\n" not in self._read:
                    ready, _, _ = select([self._process.stdout], [], [], end - time.monotonic())
                    got = self._process.stdout.read(65536) if ready else b""
                    if not got:
                        raise ClusterError("the forwarding process gives no answer")
                    self._read += got
            except BrokenPipeError:
                raise ClusterError("the forwarding process has ended") from None
            line, _, self._read = self._read.partition(b"\n")
        said = json.loads(line)
        if "error" in said:
            raise ClusterError(f"the forwarding process: {said['error']}")
        return said


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f'"{address}" is no address: expected HOST:PORT')
    return host, int(port)
