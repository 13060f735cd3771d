"""The broker of a run is killed and comes back at another port with its state: its peers find it by
the name of their swarm, without a restart, and the run ends with the losses of one peer alone. Its
fast siblings: tests/peer/entry/test_swarm.py, tests/broker/service/door/test_swarm.py and
test_restart.py there."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import pytest

from shoal.net.discovery.process import check_available
from shoal.net.discovery.record import DirectoryError
from shoal.sim.processes import LocalCluster, tied
from shoal.tests.sim.processes.test_namespaces import JOB, SUBMIT, losses

Popen = subprocess.Popen[str]
STEPS = 200
FOLLOW = """
import json, sys
import shoal
from shoal.job import Job
client = shoal.connect(sys.argv[1])
run = client.run(sys.argv[2]) if len(sys.argv) > 2 else client.submit(Job.from_toml("job.toml"))
print(run.id, flush=True)
for event in run.watch():
    if event.HasField("step"):
        print(json.dumps([event.step.step, event.step.outcome.loss]), flush=True)
"""


INVITE = """
import sys
sys.argv = ["shoal", "invite", "--broker", sys.argv[1]]
from shoal.cli import main
main()
"""


def _missing() -> str:
    try:
        check_available()
    except DirectoryError as error:
        return str(error)
    return ""


pytestmark = [
    pytest.mark.slow,
    pytest.mark.process,
    pytest.mark.timeout(400),
    pytest.mark.skipif(bool(_missing()), reason=_missing()),
]


def shoal(folder: Path, log: str, *arguments: str) -> AbstractContextManager[Popen]:
    """A verb that keeps running."""
    return program(folder, log, "-m", "shoal.cli", *arguments)


@contextmanager
def program(folder: Path, log: str, *arguments: str) -> Iterator[Popen]:
    with open(folder / log, "w") as out:
        process = subprocess.Popen(
            tied([sys.executable, *arguments]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=out,
            text=True,
            cwd=folder,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.terminate()
            process.wait(60)
            assert process.stdout is not None
            process.stdout.close()


def told(process: Popen, folder: Path) -> str:
    """The next line that a program prints."""
    assert process.stdout is not None
    line = process.stdout.readline()  # ends at the test's timeout
    assert line, "\n".join(f.read_text() for f in folder.glob("*.log"))
    return line


def python(folder: Path, text: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", text, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
    )
    logs = "".join(f"\n{f.name}\n{f.read_text()}" for f in folder.glob("*.log"))
    assert done.returncode == 0, done.stderr + logs
    return done.stdout


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where processes put what is to be gone after them; Unix sockets need a short name."""
    with tempfile.TemporaryDirectory(prefix="sea-", dir="/tmp") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


def test_a_run_goes_on_when_its_broker_has_moved(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text.txt").write_text("all fish swim in one sea. " * 60)
    job = JOB % (STEPS, 1)
    (tmp_path / "job.toml").write_text(job)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    with LocalCluster(peers=1) as alone:
        wanted = losses(python(tmp_path, SUBMIT, alone.address))
    (tmp_path / "job.toml").write_text(job.replace("stages = 1", "stages = 2"))
    at = ("broker", "--host", "127.0.0.1", "--port", "0", "--swarm", "fish", "--state", "state")
    with ExitStack() as running:
        with shoal(tmp_path, "broker.log", *at) as broker:
            line = told(broker, tmp_path).split()
            assert line[:5] == ["shoal", "join", line[2], "--swarm", "fish"]
            for name in ("one", "two"):
                # One with the whole line, one that knows only the swarm.
                flags = line[2:] if name == "one" else line[3:]
                own = ("--name", name, "--state", name, "--device", "cpu", "--threads", "1")
                running.enter_context(shoal(tmp_path, f"{name}.log", "join", *flags, *own))
            with program(tmp_path, "first.log", "-c", FOLLOW, line[2]) as following:
                run = told(following, tmp_path).strip()
                seen = json.loads(told(following, tmp_path))
                os.kill(broker.pid, signal.SIGKILL)
        assert seen[0] == 0
        with shoal(tmp_path, "moved.log", *at) as broker:
            moved = told(broker, tmp_path).split()
            assert moved[2] != line[2]
            assert len(re.findall("--bootstrap", " ".join(moved))) == 3  # through both peers, too
            text = python(tmp_path, FOLLOW, moved[2], run).splitlines()
            steps = [json.loads(row) for row in text[1:]]
            invited = python(tmp_path, INVITE, moved[2]).split()
            assert invited[:-1] == moved[:-1]
    assert not list(temporary.glob("shoal-swarm-*"))  # not even of the broker that was killed
    logs = {f.name: f.read_text() for f in tmp_path.glob("*.log")}
    assert "phase=DONE" in logs["moved.log"], logs["moved.log"]  # it was not over before
    assert all(logs[name].count("worker crashed") == 0 for name in ("one.log", "two.log"))
    assert [step for step, _ in steps] == list(range(STEPS))
    found = [loss for _, loss in steps]
    assert all(abs(a - b) < 1e-5 for a, b in itertools.zip_longest(found, wanted, fillvalue=9.0))
    assert not [name for name, text in logs.items() if "Traceback" in text and name != "first.log"]
