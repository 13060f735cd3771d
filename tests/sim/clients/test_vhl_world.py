"""Clients that train on virtual data as well (VHL), in the simulated world: through broker and
peers, against a plain loop over the same cohorts that makes the noise once more."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from shoal.client.files.exported import state_of
from shoal.job import Job
from shoal.job.clients.local_work import LocalWork, VhlOptions
from shoal.peer.data.partition import partition_of
from shoal.proto.broker_pb2 import DONE
from shoal.sim.plain.client_loops import ClientWork, train_cohorts
from shoal.sim.plain.client_methods import FedAdam, FedAvg, FedNova, FedProx
from shoal.sim.plain.plain_cohorts import aggregate_of, committed_cohorts, expected_versions
from shoal.sim.plain.plain_vhl import VhlClient, with_places
from shoal.tests.sim.clients.moments import losing
from shoal.tests.sim.conftest import Laboratory

from .test_federated_world import exported, world_of
from .test_hosts_world import Hosts

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
VHL = VhlOptions(
    **{"alpha": 0.7, "l1": 0.6, "l2": 0.3, "temperature": 0.5, "spread": 0.4},
    **{"batch": 5, "per_class": 7, "classes": 4, "calibrate": LocalWork(passes=1)},
)
SENDS = {
    "compression_options": {"least_ratio": 0.1, "gamma": 3.0, "overlap_degree": 2},
    "client_links": {"up": "uniform:2kB/s,20kB/s", "latency": "uniform:10ms,20ms", "seed": 5},
}
NOTHING = VhlOptions(alpha=0.0, l1=0.0, l2=0.0)
METHODS: Mapping[str, tuple[dict[str, Any], FedAvg]] = {
    "fedavg": ({}, FedAvg()),
    "fedprox": ({"mu": 0.3}, FedProx(0.3)),
    "fednova": ({}, FedNova()),
    "fedadam": ({"lr": 0.02}, FedAdam(0.02)),
}


def job_of(folder: Path, vhl: VhlOptions | None = VHL) -> Job:
    rng = np.random.default_rng(0)
    (folder / "model.py").write_text(MODEL)
    x = rng.normal(size=(90, 6)).astype(np.float32)
    np.savez(folder / "data.npz", x=x, y=(x[:, 0] > 0).astype(np.int64) + (x[:, 1] > 0))
    virtual = {} if vhl is None else {"virtual_data": "vhl", "vhl": vhl}
    return Job.from_table(
        {
            "version": 1,
            "name": f"vhl {vhl}",
            "model": {"factory": str(folder / "model.py") + ":small"},
            "data": {
                **{"kind": "arrays", "source": str(folder / "data.npz"), "holdout": 0.1},
                "partition": {
                    **{"kind": "dirichlet", "alpha": 0.5, "clients": 8, "seed": 3},
                    "held_out": 0.2,
                },
            },
            "sync": {"kind": "federated", "per_round": 5, "local": {"passes": 2}, **virtual},
            "plan": {"replicas": 2},
            "train": {
                **{"rounds": 3, "batch": 4, "lr": 0.1, "optimizer": "sgd", "momentum": 0.5},
                **{"schedule": "constant", "warmup": 0, "clip": 2.0, "weight_decay": 0.0},
                **{"eval_every": 3, "eval_batches": 1},
            },
        }
    )


@pytest.fixture(scope="module")
def base(
    laboratory: Callable[[Job], Laboratory], tmp_path_factory: pytest.TempPathFactory
) -> Laboratory:
    return laboratory(job_of(tmp_path_factory.mktemp("vhl")))


def by(base: Laboratory, method: str = "fedavg", every: int = 0, **sync: Any) -> Laboratory:
    """The same model and data, by another [sync]."""
    job = base.prepared.job
    options, _ = METHODS[method]
    job = replace(
        job,
        sync=replace(job.sync, method=method, options=options, **sync),
        output=replace(job.output, every=every),
    )
    return Laboratory(job, replace(base.prepared, job=job), base.module)


def plain_of(
    lab: Laboratory, cohorts: Iterable[Sequence[ClientWork]], reader: Any, **how: Any
) -> dict[str, Tensor]:
    """What a plain loop comes to, under the names of the model."""
    job, client = lab.job, VhlClient.of(lab.module, lab.job, reader)
    made = train_cohorts(
        client,
        with_places(cohorts, job.train.batch),
        client.reading(reader, job.seed),
        METHODS[job.sync.chosen][1],
        lr=job.train.lr,
        momentum=job.train.momentum,
        clip=job.train.clip,
        **how,
    )
    own = {n: t for n, t in made.shared.items() if n.startswith("module.")}
    return {n.removeprefix("module."): t.float() for n, t in own.items()}


def assert_close(got: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    """All that was exported of the model, within rounding."""
    assert wanted.keys() <= got.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-3, atol=1e-5)


def assert_expected(lab: Laboratory, world: Any, run: str) -> list[Any]:
    """It is done, and its weights are those of a plain loop over what it committed. Returns the
    rounds."""
    events = world.events(run)
    assert events[-1].state.phase == DONE, events[-1].state.reason.text
    job, reader = lab.job, lab.reader()
    how = {"aggregate": aggregate_of(job, events), "overlap": job.sync.client_compression.overlap}
    cohorts = committed_cohorts(events, job, reader)
    assert_close(exported(world, run), plain_of(lab, cohorts, reader, **how))
    return [e.round_done for e in events if e.HasField("round_done")]


def played(lab: Laboratory) -> tuple[Any, str]:
    world = world_of(lab, 2)
    run = world.submit(lab.spec)
    world.finish(run)
    return world, run


@pytest.mark.parametrize(
    ("method", "sync"),
    [
        ("fedprox", {"vhl": replace(VHL, source="generator")}),
        pytest.param("fednova", {}, marks=pytest.mark.slow),
        ("fedadam", {"compression": "topk", "compression_options": {"least_ratio": 0.3}}),
        ("fedavg", {"compression": "bcrs+opwa", **SENDS}),
        pytest.param(
            *("fedavg", {"aggregate": "median", "weight": "equal"}), marks=pytest.mark.slow
        ),
        ("fedadam", {"aggregate": "krum", "weight": "equal"}),
    ],
)
def test_versions_are_those_of_a_plain_loop(
    base: Laboratory, method: str, sync: Mapping[str, Any]
) -> None:
    lab = by(base, method, **sync)
    world, run = played(lab)
    assert [len(d.members) for d in assert_expected(lab, world, run)] == [2, 2, 2]


def test_versions_are_judged_by_the_models_own_classes(base: Laboratory) -> None:
    world, run = played(base)
    events, got = world.events(run), exported(world, run)
    own = {name: got[there] for name, there, _ in state_of(base.graph)}
    assert own.keys() == base.module.state_dict().keys()
    assert [e.weights for e in events if e.HasField("weights")][-1].HasField("graph")
    wanted = expected_versions(base.module, base.job, events, base.reader(), size=4)
    (found,) = [e.evaluated for e in events if e.HasField("evaluated")]
    assert wanted.keys() == {found.step} == {3}
    assert found.evaluation.loss == pytest.approx(wanted[3], rel=1e-4)
    reader = base.reader()

    def of(samples: Mapping[str, Tensor]) -> Mapping[str, float]:
        with torch.no_grad():
            out = torch.func.functional_call(base.module, own, (), dict(samples))
        return {name: float(value) for name, value in out.items()}

    assert of(reader.held_out(0, 4))["loss"] == pytest.approx(found.evaluation.loss, rel=1e-5)
    assert base.job.data.partition is not None
    divided = partition_of(base.job.data.partition, "y", reader)
    mine = [at for at in map(divided.held_out, range(8)) if len(at)]
    each = [of(reader.samples(at)) for at in mine]
    numbers = found.evaluation.clients
    assert [n.name for n in numbers] == ["loss", "right"]
    for n in numbers:
        assert n.clients == len(mine)
        assert n.most == pytest.approx(max(e[n.name] for e in each), rel=1e-4)


def test_whoever_is_lost_its_clients_are_left_out(base: Laboratory) -> None:
    def play(deadly: int) -> tuple[Any, str, int]:
        world = world_of(base, 2)
        run, count = losing(world, base.spec, deadly)
        return world, run, count

    _, _, records = play(0)
    came = set[int]()
    for part in (1, 4):
        world, run, _ = play(records * part // 6)
        came |= {len(d.members) for d in assert_expected(base, world, run)}
    assert came == {1, 2}


def test_who_goes_on_from_a_checkpoint_has_the_further_classes_too(base: Laboratory) -> None:
    lab = by(base, "fedadam", every=1)
    world, run = played(lab)
    whole = world.events(run)
    first = next(e.checkpoint for e in whole if e.HasField("checkpoint"))
    again = world_of(lab, 2)
    again.saved |= world.saved
    lab.spec.resumed.CopyFrom(first)
    rest = again.finish(again.submit(lab.spec))
    assert rest[-1].state.phase == DONE, rest[-1].state.reason.text

    def hashes(events: list[Any]) -> list[int]:
        return [e.round_done.hash for e in events if e.HasField("round_done")]

    assert hashes(rest) == hashes(whole)[first.step :], "to the bit"
    assert 0 < len(hashes(rest)) < 3


def test_hosts_make_the_same_noise_beside_data_of_their_own(
    base: Laboratory, tmp_path: Path
) -> None:
    hosts = Hosts.of(by(base), tmp_path)
    world = hosts.world()
    run = world.submit(hosts.spec)
    events = world.finish(run)
    assert events[-1].state.phase == DONE, events[-1].state.reason.text
    client_of = [r.client for e in events if e.HasField("formed") for r in e.formed.replicas]
    cohorts = hosts.cohorts(events, client_of)
    assert len(cohorts) == 3
    whole = {k: torch.tensor(np.concatenate([a[k] for a in hosts.arrays])) for k in "xy"}
    reader = SimpleNamespace(samples=lambda at: {k: t[at] for k, t in whole.items()})
    assert_close(exported(world, run), plain_of(base, cohorts, reader))


def test_without_weight_on_noise_it_is_fedavg(
    laboratory: Callable[[Job], Laboratory], tmp_path: Path
) -> None:
    with_it, without = (laboratory(job_of(tmp_path, vhl)) for vhl in (NOTHING, None))
    assert with_it.graph.trained_elements > without.graph.trained_elements
    assert_close(exported(*played(with_it)), exported(*played(without)))
