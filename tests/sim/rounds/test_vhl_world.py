"""Clients that train on virtual data as well (VHL), in the simulated world: through broker and
peers, against a plain loop over the same cohorts and the same noise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load
from torch import Tensor

from shoal.job import Job
from shoal.job.clients.local_work import LocalWork, VhlOptions
from shoal.proto.broker_pb2 import DONE
from shoal.sim.plain.client_loops import train_cohorts
from shoal.sim.plain.client_methods import FedAdam, FedAvg, FedProx
from shoal.sim.plain.plain_cohorts import committed_cohorts, expected_versions
from shoal.sim.plain.plain_vhl import VhlClient, with_noise
from shoal.sim.virtual.world import PeerSpec

MODEL = """
from torch import nn

def small():
    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh())
            self.classes = nn.Linear(8, 3)

        def forward(self, x, y):
            logits = self.classes(self.layers(x))
            right = (logits.argmax(1) == y).float().mean()
            return {"loss": nn.functional.cross_entropy(logits, y), "right": right}

    return Classifier()
"""
VHL = VhlOptions(batch=5, per_class=7, classes=4, calibrate=LocalWork(passes=1))
NOTHING = replace(VHL, alpha=0.0, l1=0.0, l2=0.0)
OPTIONS: Mapping[str, dict[str, Any]] = {
    "fedavg": {},
    "fedprox": {"mu": 0.3},
    "fedadam": {"lr": 0.02},
}
METHODS: Mapping[str, FedAvg] = {"fedprox": FedProx(0.3), "fedadam": FedAdam(0.02)}


def job_of(folder: Path, method: str = "fedavg", vhl: VhlOptions | None = VHL) -> Job:
    rng = np.random.default_rng(0)
    (folder / "model.py").write_text(MODEL)
    x = rng.normal(size=(90, 6)).astype(np.float32)
    np.savez(folder / "data.npz", x=x, y=(x[:, 0] > 0).astype(np.int64) + (x[:, 1] > 0))
    virtual = {} if vhl is None else {"virtual_data": "vhl", "vhl": vhl}
    return Job.from_table(
        {
            "version": 1,
            "name": f"vhl {method} {vhl}",
            "model": {"factory": str(folder / "model.py") + ":small"},
            "data": {
                **{"kind": "arrays", "source": str(folder / "data.npz"), "holdout": 0.1},
                "partition": {"kind": "dirichlet", "alpha": 0.5, "clients": 8, "seed": 3},
            },
            "sync": {
                **{"kind": "federated", "method": method, "per_round": 4, "local": {"passes": 2}},
                **{"options": OPTIONS[method], **virtual},
            },
            "plan": {"replicas": 2},
            "train": {
                **{"steps": 2, "batch": 4, "lr": 0.1, "optimizer": "sgd", "momentum": 0.5},
                **{"schedule": "constant", "warmup": 0, "clip": 2.0, "weight_decay": 0.0},
                **{"eval_every": 2, "eval_batches": 1},
            },
        }
    )


def run_of(lab: Any) -> tuple[list[Any], dict[str, Tensor]]:
    """Events of a finished run, and what it exports."""
    world = lab.world([PeerSpec(name=f"p{i}", place=f"s{i}") for i in range(2)])
    run = world.submit(lab.spec)
    world.finish(run)
    events, found = world.events(run), dict[str, Tensor]()
    assert events[-1].state.phase == DONE, events[-1].state.reason.text
    weights = [e.weights for e in events if e.HasField("weights")][-1]
    for file in weights.files:
        found |= load(world.blobs[file.blob.hash])
    assert weights.HasField("graph"), "what an export has of it, its state says"
    return events, {name: found[there] for name, there, _ in lab.graph.state}


def plain_of(lab: Any, events: list[Any], rule: FedAvg) -> dict[str, Tensor]:
    """What a plain loop comes to, under the names of the export."""
    job, reader = lab.job, lab.reader()
    client = VhlClient.of(lab.module, job, reader)
    made = train_cohorts(
        client,
        with_noise(committed_cohorts(events, job, reader), job),
        client.reading(reader, job.seed),
        rule,
        lr=job.train.lr,
        momentum=job.train.momentum,
        clip=job.train.clip,
    )
    own = {n: t for n, t in made.shared.items() if n.startswith("module.")}
    return {n.removeprefix("module."): t.float() for n, t in own.items()}


def assert_close(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert got.keys() == wanted.keys(), "an export has the user's tensors, and no others"
    for name, tensor in wanted.items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_versions_are_those_of_a_plain_loop_and_judged_by_masked_logits(
    laboratory: Callable[[Job], Any], tmp_path: Path, method: str
) -> None:
    lab = laboratory(job_of(tmp_path, method))
    events, got = run_of(lab)
    assert got.keys() == lab.module.state_dict().keys()
    assert got["classes.weight"].shape == (3, 8)
    assert_close(got, plain_of(lab, events, METHODS[method]))
    wanted = expected_versions(lab.module, lab.job, events, lab.reader(), size=4)
    found = {e.evaluated.step: e.evaluated for e in events if e.HasField("evaluated")}
    assert found.keys() == {2} == wanted.keys()
    assert found[2].evaluation.loss == pytest.approx(wanted[2], rel=1e-4)
    with torch.no_grad():
        held_out = lab.reader().held_out(0, 4)
        alone = torch.func.functional_call(lab.module, got, (), held_out)
    assert float(alone["loss"]) == pytest.approx(found[2].evaluation.loss, rel=1e-5)


def test_without_weight_on_noise_it_is_fedavg(
    laboratory: Callable[[Job], Any], tmp_path: Path
) -> None:
    _, got = run_of(laboratory(job_of(tmp_path, vhl=NOTHING)))
    _, wanted = run_of(laboratory(job_of(tmp_path, vhl=None)))
    assert_close(got, wanted)
