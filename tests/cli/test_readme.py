"""Every command that the README shows runs. `HOW` says by what; a command that is new there and
has no entry fails at once, and so does an entry whose command is gone."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue
from threading import Thread

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SCENARIO = """
version = 1
job = "job.toml"
[[peers]]
name = "a{1..2}"
place = "here"
device = { flops = 10e9, memory_bandwidth = "2GB/s", overhead = "20us" }
"""
"""What stands in my.toml: the reader's own."""
MODULE = """
from shoal.examples.gpt import gpt
module = gpt(layers=1, width=16, heads=2, length=128)
"""
"""What the reader has before the lines of Python."""
LONG_S = 900.0


def commands() -> Iterator[str]:
    """Commands of the README's blocks, without their comments."""
    for language, text in BLOCK.findall(README):
        if language == "":
            for line in text.splitlines():
                for command in line.partition("#")[0].split(" · "):
                    if command.startswith(("shoal ", "pip ")):
                        yield command.strip()


CI = ".ci/run runs it"
SIM = "test_a_simulation_of_the_readme_runs"
GRID = "test_a_grid_of_the_readme_is_compared"
HAND = "test_what_is_done_by_hand_runs"
PLAN = "test_a_plan_over_a_file_is_shown"
HOW = {
    "pip install -c constraints.txt -e . && shoal sim": CI,
    "pip install -c constraints.txt -e '.[test]' && pytest": CI,
    "shoal sim --list": SIM,
    "shoal sim flaky-peer --report out": SIM,
    "shoal sim testbed-8 --ghost": SIM,
    "shoal sim my.toml --virtual": SIM,
    "shoal sim my.toml --set train.lr=1e-3,3e-3 --seeds 3": GRID,
    "shoal broker": HAND,
    "shoal join HOST:7077 --token shl1.…": HAND,
    "shoal train examples/gpt_bytes.toml": HAND,
    "shoal pause RUN": HAND,
    "shoal resume RUN": HAND,
    "shoal invite --role submitter": HAND,
    "shoal logs RUN": HAND,
    "shoal doctor HOST:7077": HAND,
    "shoal page": HAND,
    "shoal plan examples/gpt_bytes.toml --cluster sim/scenarios/testbed-8.toml": PLAN,
    "shoal plan examples/gpt_bytes.toml --broker 127.0.0.1:7077": HAND,
}


def test_every_command_of_the_readme_is_run_by_something() -> None:
    assert list(commands()) == list(HOW)
    assert {how for how in HOW.values() if how != CI} <= globals().keys()
    assert "README.md" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


# -------------------------------------------------------------------- as a reader runs them


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """The folder in which a reader stands, with settings and state of its own."""
    (tmp_path / "sim").symlink_to(ROOT / "sim")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "my.toml").write_text(SCENARIO)
    job = (ROOT / "sim" / "builtin.toml").read_text(encoding="utf-8")
    (tmp_path / "job.toml").write_text(job.replace("steps = 350", "steps = 3"))
    (tmp_path / "home").mkdir()
    return tmp_path


def started(clone: Path, words: list[str], broker: str = "") -> subprocess.Popen[str]:
    """`broker`: where it is, since it has not the port that the README has."""
    home = clone / "home"
    own = {"HOME": str(home), "XDG_CONFIG_HOME": str(home / "config")}
    own |= {"XDG_STATE_HOME": str(home / "state"), "XDG_CACHE_HOME": str(home / "cache")}
    own |= {"SHOAL_BROKER": broker} if broker else {}
    program = [sys.executable, "-m", "shoal.cli", *words[1:]]
    if words[0] != "shoal":
        program = words
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(program, cwd=clone, env=os.environ | own, text=True, **pipes)


def run(clone: Path, command: str, broker: str = "", **instead: str) -> str:
    """Runs a command to its end, which must be a good one, with the reader's own words in the
    places of those in capitals; returns what it printed."""
    assert command in HOW, f"the README does not show {command}"
    for word, own in instead.items():
        command = command.replace(word, own)
    process = started(clone, shlex.split(command), broker)
    try:
        text, _ = process.communicate(timeout=LONG_S)
    finally:
        process.kill()
    assert process.returncode == 0, f"{command}: exit {process.returncode}\n{text}"
    return text


SIMULATIONS = [
    pytest.param(command, marks=() if "--list" in command else pytest.mark.slow)
    for command, how in HOW.items()
    if how == SIM
]
"""All are slow but one, the sample of `.ci/run`."""


@pytest.mark.process
@pytest.mark.timeout(LONG_S)
@pytest.mark.parametrize("command", SIMULATIONS)
def test_a_simulation_of_the_readme_runs(clone: Path, command: str) -> None:
    text = run(clone, command)
    assert "--list" in command or "· OK" in text
    assert ("--report" in command) == (clone / "out" / "report.html").is_file()


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(LONG_S)
def test_a_grid_of_the_readme_is_compared(clone: Path) -> None:
    [command] = [c for c, how in HOW.items() if how == GRID]
    text = run(clone, command)
    assert "6 of 6 · train.lr=3e-3" in text
    assert (clone / "runs" / "grid-my" / "compare.png").is_file()
    again = started(clone, ["shoal", "compare", *map(str, clone.glob("runs/grid-my/*/"))])
    assert "train.lr" in again.communicate(timeout=LONG_S)[0]


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(LONG_S)
def test_a_plan_over_a_file_is_shown(clone: Path) -> None:
    [command] = [c for c, how in HOW.items() if how == PLAN]
    assert "a step, " in run(clone, command)


class Followed:
    """A program that goes on. Its output is read at once, so that it never waits for its reader."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []
        self._left: SimpleQueue[str | None] = SimpleQueue()
        self._reader = Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self.lines.append(line)
                self._left.put(line)
        self._left.put(None)

    def line(self, pattern: str) -> re.Match[str]:
        """The next line that has it; fails where the output ends before."""
        while (line := self._left.get(timeout=LONG_S)) is not None:
            if found := re.search(pattern, line):
                return found
        raise AssertionError(f"no line with {pattern} in:\n{''.join(self.lines)}")

    def ended(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(60)
        finally:
            self.process.kill()
        self._reader.join(60)


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(LONG_S)
def test_what_is_done_by_hand_runs(clone: Path) -> None:
    """In the README's order, with one broker and one peer; a free port in place of 7077."""
    with ExitStack() as running:

        def begun(command: str, *more: str, at: str = "") -> Followed:
            found = Followed(started(clone, [*shlex.split(command), *more], at))
            running.callback(found.ended)
            return found

        broker = begun("shoal broker", "--host", "127.0.0.1", "--port", "0")
        # The line of the README, to its end.
        join = broker.line(r"(shoal join (\S+) --token shl1\.\S+)$")
        address = join[2]
        begun(join[1]).line("joined")
        plan = "shoal plan examples/gpt_bytes.toml --broker 127.0.0.1:7077"
        assert "a step, " in run(clone, plan, **{"127.0.0.1:7077": address})
        train = begun("shoal train examples/gpt_bytes.toml", at=address)
        number = train.line(r"^run (r-\S+):")[1]
        train.line("^step ")
        run(clone, "shoal pause RUN", address, RUN=number)
        assert f"run {number} is done" in run(clone, "shoal resume RUN", address, RUN=number)
        assert train.process.wait(LONG_S) == 0, "".join(train.lines)
        folder = clone / "runs" / number
        assert (folder / "model.safetensors").is_file()
        # Both followed it, in one folder.
        assert len((folder / "metrics.jsonl").read_text().splitlines()) == 300
        assert "shl1." in run(clone, "shoal invite --role submitter", address)
        assert "300" in run(clone, "shoal logs RUN", address, RUN=number)
        run(clone, "shoal doctor HOST:7077", **{"HOST:7077": address})
        assert "http" in run(clone, "shoal page", address)


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(LONG_S)
def test_the_lines_of_python_run(tmp_path: Path) -> None:
    """With a module, a broker of the test's own and fewer steps."""
    from shoal.sim.processes import LocalCluster

    [lines] = [text for language, text in BLOCK.findall(README) if language == "python"]
    assert "127.0.0.1:7077" in lines
    assert "steps=200" in lines
    with LocalCluster(peers=1, folder=tmp_path / "cluster") as cluster:
        lines = lines.replace("127.0.0.1:7077", cluster.address).replace("steps=200", "steps=3")
        program = [sys.executable, "-c", MODULE + lines]
        found = subprocess.run(
            program, cwd=tmp_path, capture_output=True, text=True, timeout=LONG_S, check=False
        )
    assert found.returncode == 0, found.stderr
    assert "step" in found.stdout
