"""Real processes that are interrupted, killed and left: what ends, what goes on, what stays."""

from __future__ import annotations

import os
import random
import re
import select
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shoal import cli
from shoal.sim.processes import LocalCluster

pytestmark = [
    pytest.mark.process,
    pytest.mark.timeout(120),
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc to find processes"),
]

INTERRUPTED = (130, -signal.SIGINT)
"""Python makes the second of the first when the signal came inside of an `exec`."""

JOB = """
version = 1
[model]
factory = "shoal.examples.gpt:gpt"
args = {{ layers = 1, width = 16, heads = 2, length = 8, dropout = 0.0 }}
[data]
length = 8
[train]
steps = {steps}
batch = 4
eval_every = 0
[plan]
stages = 2
"""


def shoal(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "shoal.cli", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
        start_new_session=True,
    )


def call(*arguments: str) -> str:
    """What a verb that goes well says, run in this process."""
    result = CliRunner().invoke(cli.app, list(arguments))
    assert result.exit_code == 0, result.output
    return result.output


def lines_until(process: subprocess.Popen[str], pattern: str) -> list[str]:
    """What it says on stderr up to the first line that matches."""
    assert process.stderr is not None
    seen = []
    for line in process.stderr:
        seen.append(line)
        if re.search(pattern, line):
            return seen
    raise AssertionError(f"no line with {pattern!r} in {''.join(seen)}")


def alive(mark: str) -> list[int]:
    """Processes whose environment holds the mark, dead ones that nobody waited for left out."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if mark.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except (OSError, ValueError):
            pass  # no process, not ours, or gone by now
    return found


def wait_for_end(pids: list[int], seconds: float = 60.0) -> None:
    """Returns when all have ended; they are not our children."""
    for pid in pids:
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        ready, _, _ = select.select([handle], [], [], seconds)
        os.close(handle)
        assert ready, f"process {pid} goes on: {Path(f'/proc/{pid}/cmdline').read_bytes()!r}"


@pytest.fixture
def sim(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`shoal sim` and the mark of its processes; its temporary files land in `tmp_path`."""
    mark = uuid.uuid4().hex
    environment = {"TMPDIR": str(tmp_path), "SHOAL_TEST_MARK": mark, "OMP_NUM_THREADS": "1"}
    with shoal("sim", "--peers", "2", "--steps", "100000", **environment) as process:
        yield process, mark
        process.kill()
        process.communicate()
    wait_for_end(alive(mark))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_an_interrupted_simulation_leaves_nothing(sim, tmp_path: Path, seed: int) -> None:
    process, mark = sim
    rng = random.Random(seed)
    moment = rng.choice(["starting", "submitting", "^plan", "^step 0", r"^step \d\d"])
    seen = lines_until(process, moment)
    for number in rng.choice([[signal.SIGINT], [signal.SIGTERM], [signal.SIGINT] * 2]):
        process.send_signal(number)
    _, said = process.communicate()
    story = f"{moment}: {''.join(seen)}{said}"
    assert process.returncode in INTERRUPTED, story
    assert "Traceback" not in said, story
    assert alive(mark) == [], story
    assert list(tmp_path.glob("shoal-*")) == [], story


@pytest.mark.slow
def test_what_a_killed_simulation_started_ends_by_itself(sim) -> None:
    process, mark = sim
    lines_until(process, "^step 0")
    children = [pid for pid in alive(mark) if pid != process.pid]
    assert len(children) >= 5, "a broker and its planning processes, two supervisors, two workers"
    process.kill()
    wait_for_end(children)


# ---------------------------------------------------------------- a cluster that goes on


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(peers=2) as cluster:
        yield cluster


def job(folder: Path, steps: int) -> str:
    path = folder / f"{steps}-steps.toml"
    path.write_text(JOB.format(steps=steps) + f'[output]\nto = "{folder}/runs"\n')
    return str(path)


@pytest.mark.slow
def test_the_run_of_a_killed_worker_goes_on_when_it_is_back(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    """It needs two peers, and there are two: it pauses until the supervisor has started another
    worker, whose disk has what the first one kept."""
    at = ["--broker", cluster.address]
    with shoal("train", job(tmp_path, 120), *at) as train:
        lines_until(train, "^step 1/")
        assert cluster.folder is not None
        process, *_ = (cluster.folder / "sim-2" / "cpu" / "lock").read_text().split()
        os.kill(int(process), signal.SIGKILL)
        out, said = train.communicate()
    assert train.returncode == 0, said
    assert "is done: 120 steps" in out
    lost = r"peer sim-2 \(sim-2-\w+\) was lost at step \d+: its stream ended"
    assert re.search(lost, out + said), said
    cluster.check()


@pytest.mark.slow
def test_a_run_that_was_left_is_found_again_and_exported(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    at = ["--broker", cluster.address]
    with shoal("train", job(tmp_path, 60), *at) as train:
        lines_until(train, "^step 1/")
        train.send_signal(signal.SIGINT)
        out, said = train.communicate()
    run = re.findall(r"^run (\S+):", out)[0]
    assert train.returncode in INTERRUPTED
    assert f"run {run} goes on without you" in said
    watched = call("watch", run, "--to", str(tmp_path / "runs"), *at)
    assert f"run {run} is done: 60 steps" in watched
    assert len((tmp_path / "runs" / run / "metrics.jsonl").read_text().splitlines()) == 60
    call("export", run, str(tmp_path / "model.safetensors"), *at)
    assert (tmp_path / "model.safetensors").stat().st_size > 0
