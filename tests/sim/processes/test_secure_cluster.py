"""Real processes with identities and mutual TLS, of which none can be dialled: the same losses."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from shoal.client.front import SimulationFront
from shoal.job import Job
from shoal.sim.cluster import train, wait_for_peers
from shoal.sim.live import LiveState, LiveView
from shoal.sim.processes import LocalCluster
from shoal.sim.report import Summary
from shoal.sim.verify import verify
from shoal.tests.sim.clients.test_federated_world import MODEL

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


CLIENTS = """
version = 1
[model]
factory = "model.py:small"
[data]
kind = "arrays"
source = "data.npz"
partition = { kind = "dirichlet", alpha = 0.5, clients = 12, seed = 3 }
[sync]
kind = "federated"
method = "fedavg"
per_round = 6
secure = true
[plan]
replicas = 3
[train]
rounds = 3
batch = 4
lr = 0.2
optimizer = "sgd"
momentum = 0.5
schedule = "constant"
warmup = 0
clip = 0.0
weight_decay = 0.0
eval_every = 1
"""


@pytest.mark.process
@pytest.mark.slow
def test_sums_are_masked_by_keys_that_certificates_sign(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    x = np.random.default_rng(0).normal(size=(120, 6)).astype(np.float32)
    np.savez(tmp_path / "data.npz", x=x, y=(x[:, 0] > 0).astype(np.int64) + (x[:, 1] > 0))
    (tmp_path / "job.toml").write_text(CLIENTS)
    job = Job.from_toml(tmp_path / "job.toml")
    summary, front = Summary(name="masked", world="real", seed=0), SimulationFront()
    try:
        with LocalCluster(peers=[[]] * 3, folder=tmp_path / "run", secure=True) as cluster:
            shown = LiveView(LiveState("masked"), "nothing")
            names = wait_for_peers(cluster, front, 3)
            trained = train(cluster, front, job, tmp_path / "run", summary, shown, names)
        verify(job, trained.followed, trained.facts, front, lambda _: [], shown.say)
    finally:
        front.close()
    assert summary.exit == 0, summary.error
    done = [e.round_done for e in trained.followed.events if e.HasField("round_done")]
    assert [len(d.members) for d in done] == [3] * 3
    assert all(d.drift == 0.0 for d in done), "nothing of a single peer is told"


@pytest.mark.process
@pytest.mark.slow
def test_what_is_given_in_rounds_is_signed_with_certificates(tmp_path: Path) -> None:
    """The broker counts no version that is not signed, and no peer a frame without a receipt."""
    (tmp_path / "text.txt").write_text("all fish swim in one sea. " * 60)
    rounds = JOB.replace("stages = 2", "replicas = 2").replace("steps = 4", "steps = 8")
    (tmp_path / "job.toml").write_text(rounds + '[sync]\nkind = "local"\nevery = 2\n')
    job = Job.from_toml(tmp_path / "job.toml")
    summary, front = Summary(name="signed", world="real", seed=0), SimulationFront()
    try:
        with LocalCluster(peers=[[]] * 2, folder=tmp_path / "run", secure=True) as cluster:
            shown = LiveView(LiveState("signed"), "nothing")
            names = wait_for_peers(cluster, front, 2)
            trained = train(cluster, front, job, tmp_path / "run", summary, shown, names)
            log = cluster.log("broker")
        verify(job, trained.followed, trained.facts, front, lambda _: [], shown.say)
    finally:
        front.close()
    assert summary.exit == 0, summary.error
    done = [e.round_done for e in trained.followed.events if e.HasField("round_done")]
    assert [(d.attempt, len(d.members)) for d in done] == [(1, 2)] * 4
    assert "message=round" not in log
