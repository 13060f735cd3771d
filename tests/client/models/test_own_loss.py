"""A loss of the job's own, beside the module: what trains, divides, evaluates and compares agree on
it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from shoal.client.front import SimulationFront
from shoal.client.models.division import why_it_depends
from shoal.client.models.models import build, ready
from shoal.client.runs.evaluate import _evaluate
from shoal.client.submission import draft
from shoal.job import Job
from shoal.peer.data.reader import Reader
from shoal.sim.plain import oracle

CODE = """
import torch

def make():
    torch.manual_seed(0)
    return torch.nn.Linear(4, 3)  # its forward takes `input`, and knows no target

def loss(output, batch):
    return {"loss": torch.nn.functional.mse_loss(output, batch["y"]), "size": output.abs().mean()}
"""


@pytest.fixture
def job(tmp_path: Path) -> Job:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 4)).astype(np.float32)
    np.savez(tmp_path / "data.npz", input=x, y=x[:, :3].copy())
    (tmp_path / "own.py").write_text(CODE)
    file = tmp_path / "job.toml"
    file.write_text(
        """
        version = 1
        name = "own"
        [model]
        factory = "own.py:make"
        loss = "own.py:loss"
        [data]
        kind = "arrays"
        source = "data.npz"
        inputs = "input"
        targets = "y"
        [train]
        steps = 4
        batch = 8
        """
    )
    return Job.from_toml(file)


@pytest.fixture
def front() -> Iterator[SimulationFront]:
    with closing(SimulationFront()) as opened:
        yield opened


def test_a_batch_may_be_divided_and_the_module_is_as_it_was(
    job: Job, front: SimulationFront
) -> None:
    said: list[str] = []
    spec, graph = draft(job, said.append)
    facts = front.pack(job).facts
    reader = Reader(facts.manifest, facts.shards.__getitem__, seed=job.seed, microbatches=1)
    module = build(job)
    assert why_it_depends(module, job, graph, reader) == ""
    assert type(module) is torch.nn.Linear
    assert said[-1].startswith(
        "checking the capture, for"
    )  # and nothing of why it may not be divided
    assert len(spec.microbatch_sizes) > 1


def test_the_held_out_loss_is_that_of_the_plain_module(job: Job, front: SimulationFront) -> None:
    facts = front.pack(job).facts
    reader = Reader(facts.manifest, facts.shards.__getitem__, seed=job.seed, microbatches=1)
    module = build(job)
    found = _evaluate(module, job, reader, 1)
    batch = reader.held_out(0, job.train.microbatch_size)
    with torch.no_grad():
        wanted = torch.nn.functional.mse_loss(module(batch["input"]), batch["y"])
    assert found["loss"] == pytest.approx(float(wanted), rel=1e-6)
    assert found["size"] > 0


def test_the_plain_loop_has_it(job: Job, front: SimulationFront) -> None:
    facts = front.pack(job).facts
    reader = Reader(facts.manifest, facts.shards.__getitem__, seed=job.seed, microbatches=1)
    with front.module(job) as module:
        losses = oracle.train(
            module, lambda s, m: reader.batch(s, m, 8), job.train, steps=1, microbatches=1
        ).losses
    start, batch = build(job), reader.batch(0, 0, 8)
    with torch.no_grad():
        wanted = torch.nn.functional.mse_loss(start(batch["input"]), batch["y"])
    assert losses == [pytest.approx(float(wanted), rel=1e-6)]
    with ready(start, job):
        assert set(start(**batch)) == {"loss", "size"}


def test_a_size_that_is_another_computation_is_never_chosen_and_what_was_not_tried_is_said(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = CODE.replace("output, batch[", "output if output.shape[0] > 1 else 2 * output, batch[")
    (tmp_path / "own.py").write_text(alone)
    monkeypatch.setattr("shoal.client.models.models.SMALL", 0)  # divisions are not tried besides
    said: list[str] = []
    spec, _ = draft(job, said.append)
    assert spec.microbatch_sizes, said
    assert 1 not in spec.microbatch_sizes
    assert any(line.startswith("no microbatches of 1: ") for line in said), said
    assert not any(line.startswith("of the capture") for line in said), said
    monkeypatch.setattr("shoal.dag.capture.capture.PROOF_S", 0.0)
    spec, _ = draft(job, said.append)
    assert not spec.microbatch_sizes
    said = [line.split(":")[0] for line in said if line.startswith("of the capture, ")]
    assert said == [
        "of the capture, whether every call in train mode does what the first does was not tried "
        "to the end in 60 s",
        "of the capture, what it computes was not compared with the model",
    ]
