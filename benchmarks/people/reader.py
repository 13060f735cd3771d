"""Somebody who types what a page says: commands of ```console and ```python blocks, in order.

A line `$ COMMAND` of a ```console block is run in the shell's folder, which `cd` changes; the lines
below it must come back in that order, "…" standing for anything, others may stand between them. A
block with title="terminal N" has a terminal of its own, where its command goes on to the end. A
```python block is a program. `pip` is left out. The port 7077 is a free one.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import NamedTuple

__all__ = ["Line", "PageError", "Reader", "Typed", "lines", "missing", "pattern"]

BLOCK = re.compile(r"^```(console|python)([^\n]*)\n(.*?)^```$", re.M | re.S)
COMMAND_S = 900.0


class PageError(AssertionError):
    """A page that does not run as it is written; says which command, and what came back."""


class Line(NamedTuple):
    """A command of a page. stays: it goes on in a terminal of its own."""

    command: list[str]
    shown: list[str]
    stays: bool


def lines(text: str, python: str = sys.executable) -> Iterator[Line]:
    """Return the commands of a page, in order. python: that runs its programs."""
    for kind, title, body in BLOCK.findall(text):
        if kind == "python":
            yield Line([python, "-c", body], [], False)
            continue
        stays = 'title="terminal' in title
        for part in re.split(r"^\$ ", body, flags=re.M)[1:]:
            command, *shown = part.rstrip("\n").replace("\\\n", "").split("\n")
            yield Line([command], [row for row in shown if row.strip("… ")], stays)


def pattern(row: str) -> str:
    """Return a row of a page as an expression."""
    return ".*".join(map(re.escape, row.split("…")))


def missing(shown: Sequence[str], output: str) -> list[str]:
    """Return the rows of a page that do not come back, in order."""
    rows = iter(output.splitlines())
    return [row for row in shown if not any(re.search(pattern(row), found) for found in rows)]


@dataclass
class Typed:
    """A command as it went. stays: in a terminal of its own. silent_s: the longest that nothing was
    to be seen, behind the row silent_after (empty: the command)."""

    command: str
    stays: bool = False
    rows: list[str] = field(default_factory=list)
    seconds: float = 0.0
    silent_s: float = 0.0
    silent_after: str = ""

    @property
    def output(self) -> str:
        return "".join(self.rows)


class _Terminal:
    """A program whose output is read at once, with the time of each row."""

    def __init__(self, program: Sequence[str], folder: Path, env: Mapping[str, str]) -> None:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        self.typed = Typed(program[-1])
        self.process = subprocess.Popen(program, cwd=folder, env=env, **pipes)  # type: ignore[call-overload]
        self._began = self._seen = time.monotonic()
        self._rows: SimpleQueue[str | None] = SimpleQueue()
        self._thread = Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as rows:
            for row in rows:
                self._saw()
                self.typed.rows.append(row)
                self._rows.put(row)
        self._saw()
        self._rows.put(None)

    def _saw(self) -> None:
        now, typed = time.monotonic(), self.typed
        if now - self._seen > typed.silent_s:
            typed.silent_s, typed.silent_after = now - self._seen, "".join(typed.rows[-1:]).strip()
        self._seen, typed.seconds = now, now - self._began

    def waits_for(self, row: str) -> None:
        """Read on until a row of the page comes. Raises PageError."""
        while True:
            try:
                found = self._rows.get(timeout=COMMAND_S)
            except Empty:
                found = None
            if found is None:
                raise PageError(f"{self.typed.command}: no {row!r} in\n{self.typed.output}")
            if re.search(pattern(row), found):
                return

    def ends(self) -> None:
        """Wait for the program's own end. Raises PageError for a bad one."""
        try:
            code = self.process.wait(COMMAND_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = -1
        self._thread.join(60)
        if code:
            raise PageError(f"{self.typed.command}: exit {code}\n{self.typed.output}")

    def is_ended(self) -> None:
        """Send what Ctrl-C's sibling does, and wait."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(60)
        finally:
            self.process.kill()
        self._thread.join(60)


class Reader:
    """Somebody in an empty folder with a home of its own. python: of the environment with Shoal;
    `shoal` is its program there, whatever is on the path."""

    def __init__(self, folder: Path, python: str = sys.executable) -> None:
        self.home = self.folder = folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = str(free.getsockname()[1])
        programs = folder / "bin"
        programs.mkdir(parents=True)
        for name, words in (("shoal", " -m shoal.cli"), ("python", "")):
            (programs / name).write_text(f'#!/bin/sh\nexec "{python}"{words} "$@"\n')
            (programs / name).chmod(0o755)
        # In another environment than this one nothing of this one's may be found.
        others = ("XDG_", "SHOAL_", *(() if python == sys.executable else ("PYTHON", "OMP_")))
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(others)}
        self.env |= {"HOME": str(folder), "SHOAL_BROKER": f"127.0.0.1:{self.port}"}
        self.env["PATH"] = f"{programs}{os.pathsep}{self.env['PATH']}"
        self.typed: list[Typed] = []
        self._running: list[_Terminal] = []

    def types(self, line: Line) -> None:
        """Run a command. Raises PageError where it or what it shows is not as the page says."""
        command = [x.replace("127.0.0.1:7077", self.env["SHOAL_BROKER"]) for x in line.command]
        shown = [row.replace("7077", self.port) for row in line.shown]
        if command[0].startswith("pip "):
            return
        if command[0].startswith("cd "):
            self.folder = (self.folder / command[0].removeprefix("cd ")).resolve(strict=True)
            return
        if command[0].startswith("shoal broker"):
            command[0] += f" --port {self.port}"
        program = command if len(command) > 1 else ["sh", "-c", f"exec {command[0]}"]
        terminal = _Terminal(program, self.folder, self.env)
        self.typed.append(terminal.typed)
        if line.stays:
            terminal.typed.stays = True
            self._running.append(terminal)
            for row in shown:
                terminal.waits_for(row)
            return
        terminal.ends()
        if lacking := missing(shown, terminal.typed.output):
            raise PageError(f"{command[-1]}: no {lacking[0]!r} in\n{terminal.typed.output}")

    def leaves(self) -> None:
        """End what still runs."""
        for terminal in reversed(self._running):
            terminal.is_ended()
