"""Data that asks for what the model does not have, found by nobody before a step: the run fails at
once, and says so, in a virtual world."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from shoal.client.front import SimulationFront
from shoal.sim.simulate import SimOptions, simulate

CODE = """
import torch.nn.functional as F
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(__import__("torch").ones(1))
        self.table, self.head = nn.Embedding(11, 4), nn.Linear(4, 3)

    def forward(self, x, y):
        row = (x * self.scale).long()  # no data alone says which row that is
        return F.cross_entropy(self.head(self.table(row)), y)

def make():
    return Net()
"""
JOB = """
version = 1
[model]
factory = "model.py:make"
[data]
kind = "arrays"
source = "d.npz"
holdout = 0.0
[train]
steps = 4
batch = 8
microbatch = 2
lr = 0.0
"""
SCENARIO = """
version = 1
name = "bad"
job = "job.toml"
mode = "virtual"
limit = "20min"
[[peers]]
name = "p-{1..2}"
place = "a"
device = {flops = 1e10, memory_bandwidth = "10GB/s", overhead = "10us"}
memory = "1GiB"
up = "100Mbit"
down = "100Mbit"
"""


def test_a_row_that_only_an_operator_sees_to_lack_ends_the_run_with_its_sample(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(0)
    x = rng.integers(0, 11, 32).astype(np.float32)
    x[17] = 11
    np.savez(tmp_path / "d.npz", x=x, y=rng.integers(0, 3, 32))
    for name, text in (("model.py", CODE), ("job.toml", JOB), ("sc.toml", SCENARIO)):
        (tmp_path / name).write_text(text)
    with closing(SimulationFront()) as front:
        assert simulate(SimOptions(scenario=str(tmp_path / "sc.toml"), quiet=True), front) == 1
    said = capsys.readouterr().out
    assert "sample 17 of the data, in step " in said
    assert "module 'table' (embedding) is asked for row 11, and has 0 to 10" in said
    assert "run" in said
