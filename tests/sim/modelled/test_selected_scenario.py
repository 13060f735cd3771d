"""A scenario whose job names a rule for who is in a round: it runs where the scenario does."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from shoal import cli
from shoal.tests.sim.clients.test_federated_world import MODEL

JOB = """
version = 1
[model]
factory = "model.py:small"
[data]
kind = "arrays"
source = "data.npz"
holdout = 0.1
partition = { kind = "dirichlet", alpha = 0.5, clients = 12, seed = 3 }
[sync]
kind = "federated"
method = "fedavg"
per_round = 5
local = { passes = 2 }
[plan]
replicas = 2
[train]
rounds = 4
batch = 4
lr = 0.2
optimizer = "sgd"
schedule = "constant"
warmup = 0
clip = 0.0
weight_decay = 0.0
eval_every = 2
eval_batches = 1
"""
SCENARIO = """
version = 1
job = "job.toml"
mode = "virtual"
[job_overrides.sync]
select = "rules.py:worst"
[[peers]]
name = "desk-{1..2}"
place = "office"
device = { flops = 10e9, memory_bandwidth = "2GB/s", overhead = "20us" }
memory = "1GiB"
up = "100Mbit"
down = "100Mbit"
[broker]
place = "office"
[[faults]]
do = "kill"
who = ["desk-2"]
at_round = 2
"""
RULES = """
import numpy as np

def worst(seen):
    if seen.round == 3:
        raise RuntimeError("has enough")
    loss = np.nan_to_num(seen.loss, nan=np.inf)
    return np.argsort(-loss, kind="stable")[:4]
"""


@pytest.mark.slow
def test_its_rounds_are_of_whom_the_rule_chose_and_a_fault_comes_in_its_round(
    tmp_path: Path,
) -> None:
    x = np.random.default_rng(0).normal(size=(120, 6)).astype(np.float32)
    np.savez(tmp_path / "data.npz", x=x, y=(x[:, 0] > 0).astype(np.int64) + (x[:, 1] > 0))
    files = {"model.py": MODEL, "job.toml": JOB, "office.toml": SCENARIO, "rules.py": RULES}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    told = tmp_path / "summary.json"
    words = ["sim", str(tmp_path / "office.toml"), "--verify", "--json", str(told)]
    result = CliRunner().invoke(cli.app, words)
    assert result.exit_code == 0, result.output
    summary = json.loads(told.read_text())
    rounds = summary["rounds"]
    assert [r["chosen_by"] for r in rounds] == ["run", "rule", "rule", "run"]
    assert [r["clients_asked"] for r in rounds] == [5, 4, 4, 5]
    assert "round 3: the rule raised RuntimeError: has enough" in result.output
    assert "clients of replicas that are lost are trained by" in result.output
    assert "did not happen" not in result.output
    assert summary["max_loss_difference"] < 1e-5
