"""What a host offers, and who a peer is across restarts."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from shoal.dag.cost.speed import Speeds
from shoal.peer.host import profile
from shoal.peer.host.identity import Identity, IdentityError
from shoal.peer.shell.lane import SerialExecutor
from shoal.proto import graph_pb2


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the first measurement of this file stays."""
    return tmp_path_factory.mktemp("speeds") / "speeds.json"


def test_a_profile_says_what_the_device_offers(measured: Path) -> None:
    found = profile.measure("cpu", name="home-1", place="eu", core=True, speeds=measured)
    assert (found.name, found.place) == ("home-1", "eu")
    assert found.operator_set == graph_pb2.CORE
    assert found.device.startswith("cpu ")
    free = profile.available_host_bytes()
    assert 0 < found.device_memory_bytes + found.host_memory_bytes < free * 1.5
    assert found.flops_per_s > 1e6
    assert f"torch {torch.__version__.split('+')[0]}" in found.software


@pytest.mark.parametrize(
    ("owner", "offered"),
    [(None, 900_000_000 - profile.WORKSPACE_BYTES), (500 << 20, 428 << 20), (1 << 20, 0)],
)
def test_a_card_offers_what_its_libraries_leave(
    owner: int | None, offered: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    speeds = Speeds.of_flops(1e12)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda at: "a card")
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda at: (1_000_000_000, 2_000_000_000))
    monkeypatch.setattr("shoal.peer.host.speeds_file.known_speeds", lambda *a, **k: speeds)
    found = profile.measure("cuda:0", name="a", memory_bytes=owner)
    assert found.device == "cuda a card"
    assert found.device_memory_bytes == offered


def test_a_profile_has_speeds_by_class_and_says_which_machine_it_is(measured: Path) -> None:
    found = profile.measure("cpu", name="a", speeds=measured)
    assert found.speeds.product_flops_per_s == found.flops_per_s
    assert found.speeds.special_bytes_per_s < found.speeds.memory_bytes_per_s
    assert 0 < found.speeds.call_s < 1e-2
    assert (found.cores, found.threads) == (os.cpu_count(), torch.get_num_threads())
    assert profile.measure("cpu", name="b", speeds=measured).host == found.host


@pytest.fixture
def boot(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    path = tmp_path / "boot_id"
    path.write_text("3dfc3cc4-0b53-47f7-98fb-c643d3571e2b\n")
    monkeypatch.setattr(profile, "_BOOT", path)
    return path


def test_a_machine_is_known_by_its_boot_in_one_network_only(boot: Path) -> None:
    here = profile.host_id(b"net")
    assert len(here) == 32
    assert here == profile.host_id(b"net")
    assert here != profile.host_id(b"other"), "it could be recognised elsewhere"
    assert boot.read_text()[:8] not in here
    boot.write_text("11111111-0b53-47f7-98fb-c643d3571e2b\n")
    assert here != profile.host_id(b"net")


def test_neither_a_name_nor_an_address_says_which_machine_it_is(
    boot: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = profile.host_id(b"net")
    monkeypatch.setattr("socket.gethostname", lambda: "another")
    monkeypatch.setattr("platform.node", lambda: "another")
    assert profile.host_id(b"net") == here
    boot.unlink()
    monkeypatch.setattr("platform.system", lambda: "Plan9")
    assert profile.host_id(b"net") == "", "where nothing is known it is alone"


@pytest.mark.parametrize(
    ("system", "said"),
    [("Darwin", "AB-CD\n"), ("Windows", "\n  MachineGuid    REG_SZ    ab-cd\n\n")],
)
def test_other_systems_are_asked_for_theirs(
    boot: Path, monkeypatch: pytest.MonkeyPatch, system: str, said: str
) -> None:
    boot.unlink()
    monkeypatch.setattr("platform.system", lambda: system)
    monkeypatch.setattr(
        profile.subprocess, "run", lambda *a, **k: subprocess.CompletedProcess(a, 0, stdout=said)
    )
    assert profile._boot() == said.split()[-1]
    assert len(profile.host_id(b"net")) == 32


def test_the_owners_limit_replaces_the_share(measured: Path) -> None:
    found = profile.measure("cpu", name="x", memory_bytes=12345, speeds=measured)
    assert found.device_memory_bytes == 12345


@pytest.mark.parametrize("device", ["meta", "cuda:99"])
def test_a_device_that_is_not_here_is_refused_by_name(device: str) -> None:
    with pytest.raises(ValueError, match=device):
        profile.measure(device, name="x")


def test_an_identity_stays_and_its_counter_grows(tmp_path: Path) -> None:
    with Identity(tmp_path / "a", "my laptop!") as first:
        (first.scratch / "blob").write_text("x")
    with Identity(tmp_path / "a", "other name") as second:
        assert second.peer == first.peer
        assert second.peer.startswith("my-laptop-")
        assert (first.counter, second.counter) == (1, 2)
        assert first.boot != second.boot
        assert list(second.scratch.iterdir()) == []
    assert not second.scratch.exists()


def test_what_was_fetched_outlives_a_kill_and_no_good_end(tmp_path: Path) -> None:
    killed = """
import os, sys
from pathlib import Path
from shoal.peer.host.identity import Identity

with Identity(Path(sys.argv[1]), "a") as me:
    for folder in (me.scratch, me.blobs):
        (folder / "left").write_text("x")
    os.kill(os.getpid(), 9)
"""
    ended = subprocess.run([sys.executable, "-c", killed, str(tmp_path)], check=False)
    assert ended.returncode == -9
    with Identity(tmp_path, "a") as me:
        assert not list(me.scratch.iterdir()), "copies of private data"
        assert [p.name for p in me.blobs.iterdir()] == ["left"]
        assert {f.stat().st_mode & 0o777 for f in (me.scratch, me.blobs)} == {0o700}
    assert not me.blobs.exists()


def test_two_processes_on_one_identity_are_told_apart(tmp_path: Path) -> None:
    with (
        Identity(tmp_path, "a"),
        pytest.raises(IdentityError, match=r"process \d+ on \S+ already runs .* --state"),
        Identity(tmp_path, "a"),
    ):
        pass


@pytest.mark.parametrize("text", ["", "[]", '{"peer": 3, "starts": 1}', '{"peer": "a"}'])
def test_a_damaged_identity_is_an_error_that_names_the_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "peer.json").write_text(text)
    with pytest.raises(IdentityError, match=r"peer\.json"), Identity(tmp_path, "a"):
        pass
    (tmp_path / "peer.json").write_text(json.dumps({"peer": "p", "starts": 4}))
    with Identity(tmp_path, "a") as me:
        assert (me.peer, me.counter) == ("p", 5)


async def test_a_lane_does_jobs_in_order_and_answers_in_the_loop() -> None:
    loop, done = asyncio.get_running_loop(), asyncio.Event()
    lane, found = SerialExecutor("test", loop), []
    here = threading.get_ident()

    def note(value: object) -> None:
        assert threading.get_ident() == here
        found.append(value)
        if len(found) == 3:
            done.set()

    def fail() -> None:
        raise ValueError("two")

    lane.do(lambda: 1, note, note)
    lane.do(fail, note, lambda error: note(str(error)))
    lane.do(lambda: 3, note, note)
    await done.wait()
    assert found == [1, "two", 3]
    assert await lane.close()


async def test_a_lane_drops_what_waits_when_it_closes() -> None:
    lane, gate, ran = SerialExecutor("test", asyncio.get_running_loop()), threading.Event(), []
    started = threading.Event()

    def block() -> None:
        started.set()
        gate.wait()

    lane.do(block, ran.append, ran.append)
    lane.do(lambda: ran.append("late"), ran.append, ran.append)
    await asyncio.to_thread(started.wait)
    closing = asyncio.create_task(lane.close())
    await asyncio.sleep(0)
    gate.set()
    assert await closing
    assert "late" not in ran
