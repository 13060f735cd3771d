"""Baselines of federated training, against torch written out by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shoal.dag.rounds.cohorts import cohort_of, places_of
from shoal.job import Job, SettingsError
from shoal.peer.data.partition import partition_of
from shoal.peer.federated.batches import Participant, batches
from shoal.sim.options import Setting, SimOptions
from shoal.sim.plain.client_baselines import client_baselines
from shoal.tests.sim.clients.test_federated_world import exported, job_of, world_of


def net(state: dict[str, torch.Tensor]) -> nn.Sequential:
    made = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    made.load_state_dict({n.removeprefix("layers."): t.float() for n, t in state.items()})
    return made


def judged(made: nn.Sequential, x: torch.Tensor, y: torch.Tensor) -> tuple[float, float]:
    with torch.no_grad():
        out = made(x)
    return float(F.cross_entropy(out, y)), float((out.argmax(1) == y).float().mean())


def test_they_are_what_torch_comes_to(laboratory: Callable[[Job], Any], tmp_path: Path) -> None:
    job = job_of(tmp_path, "fedavg", 3)
    divided = replace(job.data.partition, held_out=0.3)
    job = replace(job, name="baselines", data=replace(job.data, partition=divided))
    lab = laboratory(job)
    world = world_of(lab)
    run = world.submit(lab.spec)
    events, reader = world.finish(run), lab.reader()
    rows = client_baselines(lab.module.train(), lab.job, events, reader, 50)
    assert [r["name"] for r in rows] == ["run", "pooled", "local only"]

    with np.load(tmp_path / "data.npz") as found:
        x, y = torch.from_numpy(found["x"]), torch.from_numpy(found["y"])
    partition = partition_of(divided, "y", reader)
    steps: dict[int, list[list[np.ndarray]]] = {}
    for event in events:
        for work in event.round_begun.work if event.HasField("round_begun") else ():
            number = event.round_begun.round
            clients = cohort_of(12, job.seed, number, places_of(work.cohort))
            some = [Participant(c, partition.train(c)) for c in clients]
            made = batches(some, seed=job.seed, round_=number, batch=4, passes=2, steps=0)
            for client, plan in zip(clients, made, strict=True):
                steps.setdefault(client, []).append(list(plan))
    clients = sorted(c for c in steps if len(partition.held_out(c)))
    begun = {n: p.detach() for n, p in lab.module.named_parameters()}
    last, wanted = exported(world, run), {"run": {}, "local only": {}}
    for client in clients:
        alone = net(begun)
        for plan in steps[client]:
            optimizer = torch.optim.SGD(alone.parameters(), lr=0.2, momentum=0.5)
            for batch in map(np.array, plan):
                optimizer.zero_grad()
                F.cross_entropy(alone(x[batch]), y[batch]).backward()
                optimizer.step()
        held = partition.held_out(client).copy()
        wanted["local only"][client] = judged(alone, x[held], y[held])
        wanted["run"][client] = judged(net(last), x[held], y[held])
    sizes = [len(partition.held_out(c)) for c in clients]
    for row in rows:
        assert row["clients"] == len(clients)
        for k, name in enumerate(("clients_loss", "clients_accuracy")):
            if row["name"] not in wanted:
                continue
            values = [wanted[row["name"]][c][k] for c in clients]
            assert row[name] == pytest.approx(np.average(values, weights=sizes), rel=1e-4)
            assert row[f"{name}_least"] == pytest.approx(min(values), rel=1e-4, abs=1e-6)
            assert row[f"{name}_median"] == pytest.approx(median(values), rel=1e-4)
            assert row[f"{name}_most"] == pytest.approx(max(values), rel=1e-4)
    pooled, local = rows[1]["clients_loss"], rows[2]["clients_loss"]
    assert pooled < local, "with the same number of steps a client that is alone overfits"


def test_pooled_makes_as_many_steps_over_everybodys_samples(
    laboratory: Callable[[Job], Any], tmp_path: Path
) -> None:
    from shoal.sim.plain import client_baselines as module
    from shoal.sim.plain.plain_cohorts import committed_cohorts

    job = job_of(tmp_path, "fedavg", 3)
    divided = replace(job.data.partition, held_out=0.3)
    job = replace(job, name="baselines", data=replace(job.data, partition=divided))
    lab = laboratory(job)
    world = world_of(lab)
    events, reader = world.finish(world.submit(lab.spec)), lab.reader()
    cohorts = [*committed_cohorts(events, lab.job, reader)]
    partition = partition_of(divided, "y", reader)
    pooled = [*module._pooled(cohorts, partition, lab.job)]
    assert [sum(len(w.batches) for w in c) for c in pooled] == [
        sum(len(w.batches) for w in c) for c in cohorts
    ]
    every = {s for c in range(len(partition)) for s in partition.train(c).tolist()}
    first = [s for c in pooled for w in c for b in w.batches for s in b][: len(every)]
    assert set(first) == every, "each once, before one comes again"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ({}, "clients hold no samples out"),
        ({"world": "ghost"}, "clients hold no samples out|ghosts"),
    ],
)
def test_who_has_none_is_told(tmp_path: Path, text: dict[str, Any], says: str) -> None:
    office = Path(__file__).resolve().parents[3] / "examples/federated/office.toml"
    with pytest.raises(SettingsError, match=says):
        Setting.of(SimOptions(scenario=str(office), baselines=5, **text))
    with pytest.raises(SettingsError, match="needs a scenario"):
        Setting.of(SimOptions(baselines=5))
    with pytest.raises(SettingsError, match=r'sync\.kind is "allreduce"'):
        Setting.of(SimOptions(scenario="slow-homes", world="virtual", baselines=5))
