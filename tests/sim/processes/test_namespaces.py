"""Peers in network namespaces of their own, with a way to the broker and to nobody else.

    one  10.77.1.2 ──── 10.77.1.1  broker  10.77.2.1 ──── 10.77.2.2  two

Nothing is forwarded between the two networks. The broker reaches both peers, but `two` cannot dial
the address that `one` announced, and must fall back to the relay; or neither announces any. Or
`two` gets another address in the middle of a run, as behind a router that was started again.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import pytest

from shoal.sim.processes import LocalCluster

JOB = """
version = 1
[model]
factory = "shoal.examples.gpt:gpt"
args = { layers = 2, width = 16, heads = 2, length = 8, dropout = 0.0 }
[data]
length = 8
source = "text.txt"
[train]
steps = %d
batch = 4
microbatch = 2
eval_every = 0
[plan]
stages = %d
scheduler = "uniform"
"""
SUBMIT = """
import json, sys
import shoal
from shoal.job import Job
client = shoal.connect(sys.argv[1])
run = client.submit(Job.from_toml("job.toml"))
for event in run.watch():
    if event.HasField("step"):
        print(json.dumps([event.step.step, event.step.outcome.loss]), flush=True)
"""
STEPS, MANY_STEPS = 5, 300


def _allowed() -> bool:
    if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    name = f"shoal-try-{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode:
        return False
    return subprocess.run(["ip", "netns", "del", name], capture_output=True).returncode == 0


pytestmark = [
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.skipif(not _allowed(), reason="needs root and network namespaces"),
]


class Networks:
    """Three namespaces and what runs in them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._prefix = f"shoal-{os.getpid()}"
        self._running: list[tuple[subprocess.Popen[str], IO[str]]] = []

    def name(self, which: str) -> str:
        return f"{self._prefix}-{which}"

    def make(self) -> None:
        for which in ("broker", "one", "two"):
            self._ip("netns", "add", self.name(which))
            self._in(which, "link", "set", "lo", "up")
        for number, which in ((1, "one"), (2, "two")):
            inside, outside = f"v{number}", f"w{number}"
            self._in("broker", "link", "add", outside, "type", "veth", "peer", "name", inside)
            self._in("broker", "link", "set", inside, "netns", self.name(which))
            for where, device, host in (("broker", outside, 1), (which, inside, 2)):
                self._in(where, "addr", "add", f"10.77.{number}.{host}/24", "dev", device)
                self._in(where, "link", "set", device, "up")

    def _ip(self, *arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)

    def _in(self, which: str, *arguments: str) -> None:
        self._ip("-n", self.name(which), *arguments)

    def move(self, which: str, old: str, new: str) -> None:
        """Its only device gets another address."""
        device = {"one": "v1", "two": "v2"}[which]
        self._in(which, "addr", "del", f"{old}/24", "dev", device)
        self._in(which, "addr", "add", f"{new}/24", "dev", device)

    def command(self, which: str, *arguments: str) -> list[str]:
        return ["ip", "netns", "exec", self.name(which), sys.executable, *arguments]

    def start(self, which: str, *arguments: str) -> subprocess.Popen[str]:
        log = open(self.folder / f"{which}.log", "w")  # noqa: SIM115  # closed by `end`
        process = subprocess.Popen(
            self.command(which, "-m", "shoal.cli", *arguments),
            stdout=subprocess.PIPE,
            stderr=log,
            stdin=subprocess.DEVNULL,
            text=True,
            cwd=self.folder,
            env=self.environment(),
            start_new_session=True,
        )
        self._running.append((process, log))
        return process

    def environment(self) -> dict[str, str]:
        return os.environ | {
            "XDG_CONFIG_HOME": str(self.folder / "config"),
            "HOME": str(self.folder),
            "OMP_NUM_THREADS": "1",
        }

    def end(self) -> None:
        for process, log in reversed(self._running):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
            log.close()
        for which in ("broker", "one", "two"):
            subprocess.run(["ip", "netns", "del", self.name(which)], capture_output=True)


@pytest.fixture
def networks(tmp_path: Path) -> Iterator[Networks]:
    found = Networks(tmp_path)
    try:
        found.make()
        yield found
    finally:
        found.end()


def losses(text: str) -> list[float]:
    """Of each step once, in order."""
    steps, found = zip(*map(json.loads, text.splitlines()), strict=True)
    assert list(steps) == list(range(len(steps)))
    return list(found)


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return alone(tmp_path_factory.mktemp("alone"), STEPS)


def alone(folder: Path, steps: int) -> list[float]:
    """The same job as one stage on one peer, without any network in between."""
    folder.mkdir(exist_ok=True)
    write_job(folder, stages=1, steps=steps)
    with LocalCluster(peers=1) as cluster:
        done = subprocess.run(
            [sys.executable, "-c", SUBMIT, cluster.address],
            cwd=folder,
            env=os.environ | {"XDG_CONFIG_HOME": str(folder), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=110,
            check=True,
        )
    return losses(done.stdout)


def write_job(folder: Path, stages: int, steps: int) -> None:
    (folder / "text.txt").write_text("all fish swim in one sea. " * 60)
    (folder / "job.toml").write_text(JOB % (steps, stages))


def start(networks: Networks, public: Sequence[str]) -> None:
    """A broker and both peers."""
    at = ("--port", "7077", "--public", "10.77.1.1:7077")
    broker = networks.start("broker", "broker", "--state", "state", *at)
    assert broker.stdout is not None
    token = broker.stdout.readline().split()[-1]
    for number, which in ((1, "one"), (2, "two")):
        flags = ("--name", which, "--state", which, "--device", "cpu", "--threads", "1")
        networks.start(which, "join", f"10.77.{number}.1:7077", "--token", token, *flags, *public)


@pytest.mark.parametrize(
    "public",
    [
        pytest.param((), id="half open"),
        pytest.param(("--public", "none"), id="outbound only", marks=pytest.mark.slow),
    ],
)
def test_peers_that_reach_only_the_broker_train_to_the_same_losses(
    networks: Networks, tmp_path: Path, wanted: list[float], public: Sequence[str]
) -> None:
    write_job(tmp_path, stages=2, steps=STEPS)
    start(networks, public)
    done = subprocess.run(
        networks.command("broker", "-c", SUBMIT, "127.0.0.1:7077"),
        cwd=tmp_path,
        env=networks.environment(),
        capture_output=True,
        text=True,
        timeout=110,
    )
    logs = "".join(f.read_text() for f in tmp_path.glob("*.log"))
    assert done.returncode == 0, done.stderr + logs
    found = losses(done.stdout)
    assert len(found) == STEPS
    assert all(abs(a - b) < 1e-5 for a, b in itertools.zip_longest(found, wanted, fillvalue=9.0))
    # Only one of them has a way to that address, and says so.
    assert logs.count("public_confirmed address=10.77.1.1:7077 by=one-") == 1
    assert "peer_not_reached" not in logs  # the broker reaches what was announced


@pytest.mark.timeout(300)
def test_a_peer_whose_address_changes_in_mid_run_comes_back_and_trains_to_the_same_losses(
    networks: Networks, tmp_path: Path
) -> None:
    """Nothing is closed: what was sent from the old address is never answered. It is lost when its
    lease ends, dials again from the new address, and the run goes on from the snapshots."""
    wanted = alone(tmp_path / "alone", MANY_STEPS)
    write_job(tmp_path, stages=2, steps=MANY_STEPS)
    start(networks, ())
    watching = subprocess.Popen(
        networks.command("broker", "-c", SUBMIT, "127.0.0.1:7077"),
        cwd=tmp_path,
        env=networks.environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert watching.stdout is not None
    lines = []
    try:
        for line in watching.stdout:
            lines.append(line)
            if len(lines) == 20:
                networks.move("two", "10.77.2.2", "10.77.2.3")
    finally:
        watching.kill()
        watching.wait()
        watching.stdout.close()
    logs = "".join(f.read_text() for f in tmp_path.glob("*.log"))
    found = losses("".join(lines))
    assert len(found) == MANY_STEPS, logs
    assert all(abs(a - b) < 1e-5 for a, b in zip(found, wanted, strict=True))
    assert logs.count("peer_joined peer=two-") == 2
    assert "was lost at step" in logs
