"""`shoal sim --verify` of a job with a lossy codec: it is said that the run is not exact."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shoal import cli

JOB = """
version = 1
[model]
factory = "shoal.examples.gpt:gpt"
args = { layers = 2, width = 32, heads = 2, length = 8, dropout = 0.0 }
[data]
length = 8
source = "text.txt"
[train]
steps = 4
batch = 4
microbatch = 2
eval_every = 0
[plan]
stages = 2
pipelines = 2
scheduler = "uniform"
[codec]
activation = "int8"
grad = "topk:ratio=20"
feedback = "ahead"
"""


@pytest.mark.slow  # its fast siblings: test_ahead_world.py, test_codecs_world.py, test_report.py
@pytest.mark.process
def test_verify_names_lossy_codecs_and_compares_the_end(tmp_path: Path) -> None:
    """Two pipelines of two, whose holders step ahead; the output layer is the embedding, on another
    peer."""
    (tmp_path / "text.txt").write_text("all fish swim in one sea. " * 60)
    (tmp_path / "job.toml").write_text(JOB)
    arguments = ["sim", "--job", str(tmp_path / "job.toml"), "--peers", "4", "--verify"]
    result = CliRunner().invoke(cli.app, [*arguments, "--json", str(tmp_path / "out.json")])
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["verified_against"] == "single process"
    assert found["peers"] == 4
    assert {text.partition(":")[0] for text in found["lossy"]} == {"int8/1", "ef/1+topk/1"}
    assert found["loss_ratio"] == pytest.approx(1, abs=0.05)
    assert 0 < found["max_loss_difference"] < 0.1
    assert "not meant to be equal: " in result.output
