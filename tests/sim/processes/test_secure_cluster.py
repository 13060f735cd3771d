"""Real processes with identities and mutual TLS, of which none can be dialled: the same losses."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shoal.client.front import SimulationFront
from shoal.job import Job
from shoal.sim.cluster import train, wait_for_peers
from shoal.sim.live import LiveState, LiveView
from shoal.sim.processes import LocalCluster
from shoal.sim.report import Summary
from shoal.sim.verify import verify

JOB = """
version = 1
[model]
factory = "shoal.examples.gpt:gpt"
args = { layers = 2, width = 16, heads = 2, length = 8, dropout = 0.0 }
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
scheduler = "uniform"
"""


@pytest.mark.process
@pytest.mark.parametrize(
    "public",
    [
        pytest.param(["--public", "none"], id="by relay"),
        pytest.param([], id="dialled", marks=pytest.mark.slow),
    ],
)
def test_the_losses_are_those_of_the_plain_loop(tmp_path: Path, public: list[str]) -> None:
    (tmp_path / "text.txt").write_text("all fish swim in one sea. " * 60)
    (tmp_path / "job.toml").write_text(JOB)
    settings = os.environ.get("XDG_CONFIG_HOME")
    job = Job.from_toml(tmp_path / "job.toml")
    summary = Summary(name="secure", world="real", seed=0)
    front = SimulationFront()
    try:
        with LocalCluster(peers=[public, public], folder=tmp_path / "run", secure=True) as cluster:
            shown = LiveView(LiveState("secure"), "nothing")
            names = wait_for_peers(cluster, front, 2)
            trained = train(cluster, front, job, tmp_path / "run", summary, shown, names)
            logs = cluster.log("broker") + "".join(
                (tmp_path / "run" / f"sim-{i}.log").read_text() for i in (1, 2)
            )
        verify(job, trained.followed, trained.facts, front, lambda _: [], shown.say)
    finally:
        front.close()
    assert summary.exit == 0, summary.error
    assert summary.max_loss_difference < 1e-5
    assert "Traceback" not in logs
    assert os.environ.get("XDG_CONFIG_HOME") == settings
    # No token and no key is in any log.
    token = (tmp_path / "run" / "broker" / "join-token").read_text()
    assert token.split(".")[2] not in logs
    assert "PRIVATE" not in logs
