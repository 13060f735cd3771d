"""Federated training on data that never leaves its hosts: over a broker and peers, against a plain
loop that has all of their files."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from shoal.client import Client, Refused, connect
from shoal.dag.rounds.cohorts import cohort_of, places_of
from shoal.job import Job
from shoal.job.clients.partitioning import Partitioning
from shoal.peer.federated.batches import Participant, batches
from shoal.proto import broker_pb2
from shoal.sim.plain.client_loops import ClientWork, train_cohorts
from shoal.sim.plain.client_methods import FedAvg

from .test_private_data import Classifier, Lab, contents, lab

__all__ = ["lab"]

SAMPLES = {"north": 24, "east": 41, "south": 32}
HELD_OUT = 0.25


def write(folder: Path, name: str, count: int, width: int = 6) -> Path:
    rng = np.random.default_rng(count)
    x = rng.normal(size=(count, width)).astype(np.float32)
    np.savez(folder / f"{name}.npz", x=x, y=(x.sum(1) > 0).astype(np.int64))
    return folder / f"{name}.npz"


def job_of(lab: Lab, **sync: Any) -> Job:
    return Job(
        model=Classifier(),
        data={"kind": "arrays", "where": "peer", "source": "patients", "holdout": HELD_OUT},
        train={
            **{"steps": 4, "batch": 5, "lr": 0.2, "optimizer": "sgd", "momentum": 0.5},
            **{"schedule": "constant", "warmup": 0, "clip": 0.0, "weight_decay": 0.0},
            **{"eval_every": 2, "eval_batches": 1},
        },
        sync={"kind": "federated", "per_round": 2, "local": {"passes": 2}, **sync},
        output={"to": str(lab.folder / "runs")},
    )


@dataclass
class Followed:
    """What a run told, and its weights."""

    events: list[broker_pb2.RunEvent] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)


async def follow(lab: Lab, job: Job) -> Followed:
    def followed() -> Followed:
        found = Followed()
        with connect(lab.broker.address) as client:
            run = client.submit(job)
            found.events = [*run.watch()]
            run.checked(found.events[-1].state)
            found.weights = dict(run.weights())
        return found

    return await asyncio.to_thread(followed)


def expected(lab: Lab, job: Job, events: list[broker_pb2.RunEvent]) -> dict[str, Tensor]:
    """The weights of a plain loop over the clients that rounds committed."""
    formed = next(e.formed for e in events if e.HasField("formed"))
    names = {w.me.peer: w.config.name for w in lab.workers}
    client_of = [r.client for r in formed.replicas]
    host_of = {r.client: names[r.peers[0]] for r in formed.replicas if r.peers}
    arrays = {h: dict(np.load(lab.folder / f"{h}.npz")) for h in host_of.values()}
    first = dict(zip(arrays, np.cumsum([0, *(len(a["y"]) for a in arrays.values())]), strict=False))
    whole = {k: torch.tensor(np.concatenate([a[k] for a in arrays.values()])) for k in "xy"}
    work: dict[int, broker_pb2.RoundWork] = {}
    cohorts = list[list[ClientWork]]()
    for event in events:
        if event.HasField("round_begun"):
            work = {w.replica: w for w in event.round_begun.work}
        elif event.HasField("round_done"):
            number, came = event.round_done.round, list[ClientWork]()
            for member in event.round_done.members:
                client = client_of[member.replica]
                places = places_of(work[member.replica].cohort)
                assert cohort_of(len(client_of), job.seed, number, places) == [client]
                host = host_of[client]
                mine = round(SAMPLES[host] * (1 - HELD_OUT))
                one = Participant(client, first[host] + np.arange(mine))
                (plan,) = batches([one], seed=job.seed, round_=number, batch=5, passes=2)
                assert member.weight == mine
                came.append(ClientWork(client, [b.tolist() for b in plan], mine))
            cohorts.append(came)
    made = train_cohorts(
        Classifier(),
        cohorts,
        lambda at: {k: t[list(at)] for k, t in whole.items()},
        FedAvg(),
        lr=job.train.lr,
        momentum=job.train.momentum,
    )
    return made.shared


async def test_each_host_is_a_client_and_its_data_stays_there(lab: Lab) -> None:
    for name, count in SAMPLES.items():
        own = {"patients": {"path": str(write(lab.folder, name, count))}}
        await lab.join(name, data=own)
    await lab.join("without")
    before, job = contents(lab.broker.blobs.folder), job_of(lab, method="fedavg")
    shown = await lab.ask(job)
    assert [len(r.peers) for r in shown.formation.replicas] == [1, 1, 1], shown.reason
    found = await follow(lab, job)
    done = [e.round_done for e in found.events if e.HasField("round_done")]
    assert len(done) == 4
    assert all(len(d.members) == 2 for d in done)
    assert len({tuple(sorted(m.replica for m in d.members)) for d in done}) > 1, "they take turns"
    for name, tensor in expected(lab, job, found.events).items():
        torch.testing.assert_close(found.weights[name], tensor.float(), rtol=1e-4, atol=1e-6)
    told = [e.evaluated for e in found.events if e.HasField("evaluated")]
    assert [t.replicas for t in told][:1] == [2], "those of the round, on samples of their own"

    stored = [d for n, d in contents(lab.broker.blobs.folder).items() if n not in before]
    for name in SAMPLES:
        rows = [row.tobytes() for row in np.load(lab.folder / f"{name}.npz")["x"]]
        assert not any(row in data for row in rows for data in stored), f"{name}: it left"


async def test_what_cannot_be_is_said_before_anything_starts(lab: Lab) -> None:
    await lab.join("north", data={"patients": {"path": str(write(lab.folder, "north", 24))}})
    odd = write(lab.folder, "odd", 30, width=5)

    def submit(job: Job) -> None:
        with Client(lab.broker.address) as client:
            client.submit(job)

    with pytest.raises(ValueError, match="is 2, and there are 1 clients"):
        await asyncio.to_thread(submit, job_of(lab))
    one, five = job_of(lab, per_round=1), Partitioning(kind="by-peer", clients=5)
    with pytest.raises(ValueError, match=r"partition\.clients. is 5, and 1 host of .* answered"):
        await asyncio.to_thread(submit, replace(one, data=replace(one.data, partition=five)))
    await lab.join("odd", data={"patients": {"path": str(odd)}})
    with pytest.raises(ValueError, match=r"different forms: x float32\[6\].* and x float32\[5\]"):
        await asyncio.to_thread(submit, job_of(lab))
    job = job_of(lab)
    with pytest.raises(ValueError, match=r"plan\.replicas. is 2, .* each host with the data is"):
        await asyncio.to_thread(submit, replace(job, plan=replace(job.plan, replicas=2)))
    elsewhere = replace(job, data=replace(job.data, source="elsewhere"))
    with pytest.raises(Refused, match="no peer here has data called 'elsewhere'"):
        await asyncio.to_thread(submit, elsewhere)
