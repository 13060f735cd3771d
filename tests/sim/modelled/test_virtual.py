"""Scenarios in the virtual world, from the file to the finished run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.job import Job
from shoal.proto import broker_pb2
from shoal.sim.modelled.virtual_run import run_virtual, specs_of, wan_of
from shoal.sim.scenario.scenario import Scenario

JOB = Job.from_table(
    {
        "version": 1,
        "name": "gpt",
        "model": {
            "factory": "shoal.examples.gpt:gpt",
            "args": {"layers": 2, "width": 16, "heads": 2, "length": 16, "dropout": 0.0},
        },
        "data": {"kind": "text", "length": 16},
        "train": {"steps": 4, "batch": 8, "microbatch": 2, "lr": 1e-2},
    }
)

PEERS = """
version = 1
job = "job.toml"
limit = "1h"
seed = 7

[[peers]]
name = "eu-{1..2}"
place = "eu"
device = {flops = 1e9, memory_bandwidth = "1GB/s"}

[[peers]]
name = "us-1"
place = "us"
device = {flops = 4e9, memory_bandwidth = "4GB/s", overhead = "20us"}
memory = "2GiB"
up = "8Mbit"
ops = "core"
owner = "ann"

[[links]]
from = "eu"
to = "us"
latency = "40ms"
bandwidth = "100Mbit"
jitter = "5ms"
loss = 0.02
"""

FAULTS = """
[[faults]]
do = "slow"
who = ["eu-1"]
with = ["eu-2"]
at = "1s"
factor = 5.0

[[faults]]
do = "cut-off"
who = ["place:eu"]
with = ["place:us"]
at_step = 1
phase = "backward"
for = "2s"
"""


def scenario(folder: Path, text: str) -> Scenario:
    path = folder / "scenario.toml"
    path.write_text(text)
    return Scenario.from_toml(path)


@pytest.fixture
def gpt(laboratory):
    return laboratory(JOB)


def run(gpt, folder, text, **options):
    return run_virtual(scenario(folder, text), JOB, gpt.spec, gpt.blobs, folder, **options)


def test_peers_are_what_the_file_says(tmp_path):
    read = scenario(tmp_path, PEERS.replace('owner = "ann"', 'joins = "3s"\nstays = "2min"'))
    eu, _, us = specs_of(read)
    assert (eu.name, us.name, us.place) == ("eu-1", "us-1", "us")
    assert us.speeds == {p.name: p for p in read.peers}["us-1"].hardware.speeds
    assert us.speeds != eu.speeds
    assert (us.memory_bytes, us.core, eu.core) == (2 << 30, True, False)
    assert (us.joins_s, us.stays_s, eu.stays_s) == (3.0, 120.0, None)
    assert us.profile.up_bytes_per_s == 1e6


def test_the_broker_is_where_the_file_puts_it(tmp_path):
    here = wan_of(scenario(tmp_path, PEERS)).network
    there = wan_of(scenario(tmp_path, PEERS + '[broker]\nplace = "us"\n')).network
    eu, broker = here.peers.index("eu-1"), here.peers.index("broker")
    assert here.latency_s[eu, broker] == pytest.approx(0.001)
    assert there.latency_s[eu, broker] == pytest.approx(0.04)


def test_a_broker_that_is_started_again_costs_no_step(gpt, tmp_path):
    calm = run(gpt, tmp_path, PEERS)
    restart = '[[faults]]\ndo = "broker_restart"\n'
    faults = restart + 'at_step = 1\nphase = "backward"\n' + restart + 'at = "1s"\n'
    found = run(gpt, tmp_path, PEERS + faults)
    assert found.state.phase == broker_pb2.DONE
    assert found.losses == pytest.approx(calm.losses, rel=1e-5)
    assert not found.faults.missed()
    assert found.world.broker.machine.decided.starts == 3
    assert [m.what for m in found.trace.marks].count("broker_restart") == 2


def test_a_scenario_trains_as_the_plain_loop_does(gpt, tmp_path):
    found = run(gpt, tmp_path, PEERS + FAULTS)
    assert found.state.phase == broker_pb2.DONE
    assert found.losses == pytest.approx(gpt.plain().losses, rel=1e-5)
    assert not found.late
    assert not found.faults.missed()
    assert all(fired.at_s is not None for fired in found.faults.fired)
    assert found.checks > 100


def test_the_same_file_gives_the_same_events_and_another_seed_gives_others(gpt, tmp_path):
    first, again = run(gpt, tmp_path, PEERS), run(gpt, tmp_path, PEERS)
    other = run(gpt, tmp_path, PEERS.replace("seed = 7", "seed = 8"))
    assert first.digest == again.digest
    assert first.digest != other.digest
    assert first.losses == other.losses


def test_ghosts_take_the_time_that_tensors_take(gpt, tmp_path):
    # Without chance on the links: a ghost's frame is one message, so it draws other delays.
    peers = PEERS.replace('jitter = "5ms"\n', "").replace("loss = 0.02\n", "")
    real, ghost = run(gpt, tmp_path, peers), run(gpt, tmp_path, peers, ghost=True)
    assert ghost.state.phase == broker_pb2.DONE

    def seconds(found):
        return [e.step.seconds for e in found.events if e.HasField("step")]

    # Names and headers of snapshots have no weight there, and the last step has one beside it.
    assert seconds(ghost) == pytest.approx(seconds(real), rel=0.04)


def test_a_run_is_cancelled_at_the_limit(gpt, tmp_path):
    found = run(gpt, tmp_path, PEERS.replace("1h", "6s"))
    assert found.late
    assert found.state.phase == broker_pb2.CANCELLED
    assert found.now == pytest.approx(6.0, abs=1.0)


def test_peers_that_come_and_go_are_in_the_trace(gpt, tmp_path):
    text = PEERS.replace('owner = "ann"', 'joins = "50ms"\nstays = "100ms"')
    found = run(gpt, tmp_path, text)
    marks = {(m.what, m.who): m.at_s for m in found.trace.marks}
    assert marks["join", "us-1"] == 0.05
    assert 0.15 <= marks["exit", "us-1"] < found.now
    assert marks["join", "eu-1"] == 0.0


CHILD = """
import sys
from pathlib import Path
from shoal.job import Job
from shoal.proto import broker_pb2
from shoal.sim.scenario.scenario import Scenario
from shoal.sim.modelled.virtual_run import run_virtual

folder = Path(sys.argv[1])
spec = broker_pb2.RunSpec.FromString((folder / "spec").read_bytes())
blobs = {path.name: path.read_bytes() for path in sorted((folder / "blobs").iterdir())}
scenario = Scenario.from_toml(folder / "scenario.toml")
found = run_virtual(scenario, Job.from_json(spec.job), spec, blobs, folder)
print(found.digest, found.world.broker.ended[found.run].phase, found.now)
"""


@pytest.mark.slow
def test_a_fresh_process_with_other_hashes_of_strings_gives_the_same_events(gpt, tmp_path):
    scenario(tmp_path, PEERS + FAULTS)
    (tmp_path / "spec").write_bytes(gpt.spec.SerializeToString())
    (tmp_path / "blobs").mkdir()
    for name, data in gpt.blobs.items():
        (tmp_path / "blobs" / name).write_bytes(data)
    said = [
        subprocess.run(
            [sys.executable, "-c", CHILD, str(tmp_path)],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert said[0] == said[1]
    assert said[0].split()[1] == str(broker_pb2.DONE)
