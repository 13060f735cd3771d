"""Faults on real processes: the daemons come through, and learn what a plain loop learns."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shoal import cli

JOB = """
version = 1
[model]
factory = "shoal.examples.gpt:gpt"
args = { layers = 2, width = 32, heads = 2, length = 32, dropout = 0.0 }
[data]
kind = "text"
source = "text.txt"
length = 32
[train]
steps = 12
batch = 32
microbatch = 8
lr = 3e-3
eval_every = 0
[plan]
stages = 3
pipelines = 1
scheduler = "uniform"
"""
SCENARIO = """
version = 1
job = "job.toml"
seed = 3
[[peers]]
name = "a{1..2}"
place = "eu"
device = { flops = 5e9, memory_bandwidth = "1.5GB/s" }
[[peers]]
name = "b"
place = "us"
device = { flops = 5e9, memory_bandwidth = "1.5GB/s" }
[[links]]
from = "eu"
to = "us"
latency = "15ms"
bandwidth = "20Mbit"
jitter = "5ms"
loss = 0.01
[[faults]]
do = "stop"
who = ["b"]
at_step = 2
for = "1s"
[[faults]]
do = "cut-off"
who = ["b"]
with = ["eu"]
at_step = 4
for = "1s"
both = false
[[faults]]
do = "slow"
who = ["b"]
at_step = 5
factor = 3
for = "1s"
[[faults]]
do = "corrupt"
who = ["a1", "a2"]
with = ["b"]
at_step = 7
"""
"""The order of joining decides who has which stage: one of a1 and a2 sends to b in any order."""


@pytest.mark.slow
def test_a_run_over_a_bad_line_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frozen, half parted, slowed, with a jittering and lossy line and a bit that flips: every
    step is done once, and the losses are those of the plain loop."""
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "bad.toml").write_text(SCENARIO)
    (tmp_path / "text.txt").write_text("All work and no play makes a dull day. " * 200)
    monkeypatch.chdir(tmp_path)
    command = ["sim", "bad.toml", "--real", "--verify", "--quiet", "--json", "found.json"]
    done = CliRunner().invoke(cli.app, command)
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["faults_fired"], found["steps"]) == (4, 12)
    assert found["max_loss_difference"] < 1e-5


LEAVES = """
version = 1
job = "job.toml"
[[peers]]
name = "a{1..3}"
place = "eu"
device = { flops = 5e9, memory_bandwidth = "1.5GB/s" }
[[peers]]
name = "spare"
place = "eu"
device = { flops = 3e9, memory_bandwidth = "0.9GB/s" }
[[faults]]
do = "leave"
who = ["a2"]
at_step = 3
"""
"""The slower one is left over, whoever joins first."""


@pytest.mark.slow
@pytest.mark.process
def test_a_peer_that_leaves_hands_its_part_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`shoal join` gets its first Ctrl-C: no step is done again, by whoever takes its part."""
    (tmp_path / "job.toml").write_text(JOB.replace('scheduler = "uniform"', ""))
    (tmp_path / "leaves.toml").write_text(LEAVES)
    (tmp_path / "text.txt").write_text("All work and no play makes a dull day. " * 200)
    monkeypatch.chdir(tmp_path)
    command = ["sim", "leaves.toml", "--real", "--verify", "--json", "found.json", "--keep", "kept"]
    done = CliRunner().invoke(cli.app, command)
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["faults_fired"], found["steps"]) == (1, 12)
    assert found["max_loss_difference"] < 1e-5
    said = "".join(p.read_text() for p in (tmp_path / "kept").rglob("*") if p.suffix == ".log")
    over = re.search(r"hands over at step (\d+).*going on at step (\d+)", done.output + said)
    assert over is not None, done.output
    assert over[1] == over[2]


@pytest.mark.slow
@pytest.mark.process
def test_a_peer_dies_where_microbatches_leave_stages_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With gradients of weights apart and full steps at first; half the model is evaluated at the
    end by those who are left."""
    skips = 'skip = 0.34\nskip_warmup = 2\nschedule = "zero-bubble"\nreplan = false\n'
    job = JOB.partition("[plan]")[0].replace("eval_every = 0", "eval_every = 6")
    job = job.replace("layers = 2", "layers = 6") + "eval_batches = 1\n[plan]\n" + skips
    (tmp_path / "job.toml").write_text(job)
    dies = LEAVES.replace('"leave"', '"kill"')
    (tmp_path / "dies.toml").write_text(dies)
    (tmp_path / "text.txt").write_text("All work and no play makes a dull day. " * 200)
    monkeypatch.chdir(tmp_path)
    command = ["sim", "dies.toml", "--real", "--quiet", "--json", "found.json"]
    done = CliRunner().invoke(cli.app, command)
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["faults_fired"], found["steps"]) == (1, 12)
    assert len(found["half_without"]) == 3
    assert found["half_loss"] > 0
    assert found["half_loss"] != found["eval_loss"]
