"""Clients that train on features of all as well (FedImpro), in the simulated world: through broker
and peers, against a plain loop over the same cohorts that draws the features once more."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from shoal.broker.events import Persist
from shoal.dag.transforms.feature_statistics import COUNT, SQUARE, SUM
from shoal.job import Job
from shoal.peer.core.events import BeginRound
from shoal.proto.broker_pb2 import DONE
from shoal.sim.plain.client_loops import ClientWork, FederatedResult, train_cohorts
from shoal.sim.plain.client_methods import FedAvg
from shoal.sim.plain.plain_cohorts import committed_cohorts, expected_versions
from shoal.sim.plain.plain_impro import ImproClient
from shoal.sim.plain.plain_vhl import with_places
from shoal.tests.sim.conftest import Laboratory

from .test_federated_world import exported, world_of
from .test_hosts_world import Hosts

MODEL = """
from torch import nn

def small():
    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.low = nn.Sequential(nn.Linear(6, 8), nn.Tanh())
            self.high = nn.Sequential(nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 3))

        def forward(self, x, y):
            logits = self.high(self.low(x))
            right = (logits.argmax(1) == y).float().mean()
            return {"loss": nn.functional.cross_entropy(logits, y), "right": right}

    return Classifier()
"""
OPTIONS = {"features": "low", "weight": 0.8, "share": 0.3, "batch": 5, "most_std": 0.4}
SENDS = {
    "compression": "bcrs+opwa",
    "compression_options": {"least_ratio": 0.1, "gamma": 3.0, "overlap_degree": 2},
    "client_links": {"up": "uniform:2kB/s,20kB/s", "latency": "uniform:10ms,20ms", "seed": 5},
}


def job_of(folder: Path, options: Mapping[str, Any] | None = OPTIONS) -> Job:
    rng = np.random.default_rng(0)
    (folder / "model.py").write_text(MODEL)
    x = rng.normal(size=(90, 6)).astype(np.float32)
    np.savez(folder / "data.npz", x=x, y=(x[:, 0] > 0).astype(np.int64) + (x[:, 1] > 0))
    method = {"method": "fedavg"}
    if options is not None:
        method = {"method": "fedimpro", "options": options}
    return Job.from_table(
        {
            "version": 1,
            "name": f"fedimpro {options}",
            "model": {"factory": str(folder / "model.py") + ":small"},
            "data": {
                **{"kind": "arrays", "source": str(folder / "data.npz"), "holdout": 0.1},
                "partition": {"kind": "dirichlet", "alpha": 0.5, "clients": 8, "seed": 3},
            },
            "sync": {"kind": "federated", "per_round": 5, "local": {"passes": 2}, **method},
            "plan": {"replicas": 2},
            "train": {
                **{"rounds": 4, "batch": 4, "lr": 0.1, "optimizer": "sgd", "momentum": 0.5},
                **{"schedule": "constant", "warmup": 0, "clip": 2.0, "weight_decay": 0.0},
                **{"eval_every": 4, "eval_batches": 1},
            },
        }
    )


@pytest.fixture(scope="module")
def base(
    laboratory: Callable[[Job], Laboratory], tmp_path_factory: pytest.TempPathFactory
) -> Laboratory:
    return laboratory(job_of(tmp_path_factory.mktemp("impro")))


def by(base: Laboratory, options: Mapping[str, Any], every: int = 0, **sync: Any) -> Laboratory:
    """The same model and data, by another [sync]."""
    job = base.prepared.job
    table = replace(job.sync, options={**job.sync.options, **options}, **sync)
    job = replace(job, sync=table, output=replace(job.output, every=every))
    return Laboratory(job, replace(base.prepared, job=job), base.module)


def plain_of(
    lab: Laboratory, cohorts: Iterable[Sequence[ClientWork]], reader: Any
) -> FederatedResult:
    """What a plain loop comes to."""
    job, client = lab.job, ImproClient.of(lab.module, lab.job, reader)
    return train_cohorts(
        client,
        with_places(cohorts, job.train.batch),
        client.reading(reader),
        FedAvg(),
        lr=job.train.lr,
        momentum=job.train.momentum,
        clip=job.train.clip,
        overlap=job.sync.client_compression.overlap,
        averaged=ImproClient.AVERAGED,
    )


def assert_close(got: Mapping[str, Tensor], wanted: FederatedResult) -> None:
    """All that was exported, statistics among it, within rounding."""
    own = {n.removeprefix("module."): t.float() for n, t in wanted.shared.items()}
    own |= {f"feature_statistics.{n}": t for n, t in wanted.buffers.items()}
    assert own.keys() == got.keys() >= {COUNT, SUM, SQUARE}
    for name, tensor in own.items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-4, atol=1e-5, msg=name)


def assert_expected(lab: Laboratory, world: Any, run: str) -> list[Any]:
    """It is done, and its weights are those of a plain loop over what it committed. Returns the
    rounds."""
    events = world.events(run)
    assert events[-1].state.phase == DONE, events[-1].state.reason.text
    reader = lab.reader()
    assert_close(
        exported(world, run), plain_of(lab, committed_cohorts(events, lab.job, reader), reader)
    )
    return [e.round_done for e in events if e.HasField("round_done")]


@dataclass
class Played:
    """A run that has ended. records: how many the broker wrote. begun: how many things happened
    since the first round began."""

    world: Any
    run: str
    records: int = 0
    begun: int = 0


def played(lab: Laboratory, *, restart: int = 0, kill: int = 0) -> Played:
    """Play a run. `restart`: the broker is started again at so many records; `kill`: p1 is lost
    when so many things have happened."""
    world = world_of(lab, 2)
    found, checks = Played(world, world.submit(lab.spec)), world.observe

    def observe(seen: Any) -> None:
        checks(seen)
        written = isinstance(seen.record, Persist)
        found.records += written
        found.begun += bool(found.begun) or isinstance(seen.record, BeginRound)
        if written and found.records == restart:
            world.restart_broker(1.0)
        if found.begun == kill > 0 and world.peers["p1"].alive:
            world.kill("p1")

    world.observe = observe
    world.finish(found.run)
    return found


@pytest.fixture(scope="module")
def whole(base: Laboratory) -> Played:
    """A run with nobody lost."""
    return played(base)


def test_versions_are_those_of_a_plain_loop(base: Laboratory, whole: Played) -> None:
    done = assert_expected(base, whole.world, whole.run)
    assert [len(d.members) for d in done] == [2] * 4
    events = whole.world.events(whole.run)
    wanted = expected_versions(base.module, base.job, events, base.reader(), size=4)
    (found,) = [e.evaluated for e in events if e.HasField("evaluated")]
    assert wanted.keys() == {found.step} == {4}
    assert found.evaluation.loss == pytest.approx(wanted[4], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "sync"),
    [({"rise": 3, "batch": 0, "most_std": 0.0}, {"weight": "equal"}), ({}, SENDS)],
    ids=["rising", "sparse"],
)
def test_versions_by_other_options_are_too(
    base: Laboratory, options: Mapping[str, Any], sync: Mapping[str, Any]
) -> None:
    lab = by(base, options, **sync)
    found = played(lab)
    done = assert_expected(lab, found.world, found.run)
    assert [len(d.members) for d in done] == [2] * 4


def test_whoever_is_lost_its_clients_are_left_out(base: Laboratory, whole: Played) -> None:
    found = played(base, kill=whole.begun * 3 // 5)
    done = assert_expected(base, found.world, found.run)
    assert {len(d.members) for d in done} == {1, 2}


def test_whenever_the_broker_is_started_again_nothing_changes(
    base: Laboratory, whole: Played
) -> None:
    found = played(base, restart=whole.records * 2 // 3)
    done = assert_expected(base, found.world, found.run)
    before = [e.round_done for e in whole.world.events(whole.run) if e.HasField("round_done")]
    assert [d.hash for d in done] == [d.hash for d in before]


@pytest.mark.slow
def test_who_goes_on_from_a_checkpoint_has_the_statistics_too(base: Laboratory) -> None:
    lab = by(base, {}, every=1)
    found = played(lab)
    world, whole = found.world, found.world.events(found.run)
    first = next(e.checkpoint for e in whole if e.HasField("checkpoint"))
    again = world_of(lab, 2)
    again.saved |= world.saved
    lab.spec.resumed.CopyFrom(first)
    rest = again.finish(again.submit(lab.spec))
    assert rest[-1].state.phase == DONE, rest[-1].state.reason.text

    def hashes(events: list[Any]) -> list[int]:
        return [e.round_done.hash for e in events if e.HasField("round_done")]

    assert hashes(rest) == hashes(whole)[first.step :], "to the bit"
    assert 0 < len(hashes(rest)) < 4


def test_hosts_share_statistics_of_data_of_their_own(base: Laboratory, tmp_path: Path) -> None:
    hosts = Hosts.of(by(base, {}), tmp_path)
    world = hosts.world()
    run = world.submit(hosts.spec)
    events = world.finish(run)
    assert events[-1].state.phase == DONE, events[-1].state.reason.text
    client_of = [r.client for e in events if e.HasField("formed") for r in e.formed.replicas]
    cohorts = hosts.cohorts(events, client_of)
    assert len(cohorts) == 4
    whole = {k: torch.tensor(np.concatenate([a[k] for a in hosts.arrays])) for k in "xy"}
    reader = SimpleNamespace(samples=lambda at: {k: t[at] for k, t in whole.items()})
    assert_close(exported(world, run), plain_of(base, cohorts, reader))


@pytest.mark.slow
def test_without_weight_on_drawn_features_it_is_fedavg(
    base: Laboratory, laboratory: Callable[[Job], Laboratory], tmp_path: Path
) -> None:
    one, other = (
        played(lab) for lab in (by(base, {"weight": 0.0}), laboratory(job_of(tmp_path, None)))
    )
    got = exported(one.world, one.run)
    for name, tensor in exported(other.world, other.run).items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-4, atol=1e-6, msg=name)
