"""Data that stays with its peer: trained on, and never seen by anybody else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.broker.options import BrokerOptions
from shoal.broker.service.server import Broker, BrokerConfig
from shoal.client import Client, Refused, RunFailed, connect
from shoal.job import Job
from shoal.peer.entry.worker import work
from shoal.peer.host.config import PeerConfig
from shoal.peer.shell.daemon import Worker
from shoal.proto import broker_pb2


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return F.cross_entropy(self.head(x), y)


@dataclass
class Lab:
    """A broker and peers in this loop, and a hospital's file."""

    broker: Broker
    folder: Path
    file: Path
    workers: list[Worker] = field(default_factory=list)
    ends: dict[str, asyncio.Task[int]] = field(default_factory=dict)

    async def join(self, name: str, **settings: Any) -> None:
        table = {"broker": self.broker.address, "state": self.folder / name, "threads": 1}
        config = PeerConfig(name=name, insecure=True, **table | settings)
        self.ends[name] = asyncio.create_task(work(config, self.workers.append))
        members = self.broker.shell.machine.members.members
        while not any(m.profile.name == name for m in members.values()):
            await asyncio.to_thread(lambda: None)  # a turn of the loop, and no more

    def job(self, **data: Any) -> Job:
        return Job(
            model=Classifier(),
            data={"kind": "arrays", "holdout": 0.25, **data},
            train={"steps": 4, "batch": 8, "microbatch": 2, "eval_every": 2, "eval_batches": 1},
            output={"to": str(self.folder / "runs")},
        )

    async def train(self, job: Job) -> tuple[list[broker_pb2.StepDone], broker_pb2.Plan]:
        def follow() -> tuple[list[broker_pb2.StepDone], broker_pb2.Plan]:
            with connect(self.broker.address) as client:
                run = client.submit(job)
                steps, plan, state = [], broker_pb2.Plan(), broker_pb2.RunState()
                for event in run.watch():
                    steps += [event.step] if event.HasField("step") else []
                    plan = event.plan if event.HasField("plan") else plan
                    state = event.state if event.HasField("state") else state
                run.checked(state)
                return steps, plan

        return await asyncio.to_thread(follow)

    async def ask(self, job: Job) -> Any:
        def ask() -> Any:
            with Client(self.broker.address) as client:
                return client.preview(job)

        return await asyncio.to_thread(ask)


@pytest.fixture
async def lab(tmp_path: Path) -> AsyncIterator[Lab]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 6)).astype(np.float32)
    file = tmp_path / "patients.npz"
    np.savez(file, x=x, y=(x.sum(1) > 0).astype(np.int64))
    options = BrokerOptions(probe_s=0.0)
    async with Broker(BrokerConfig(port=0, insecure=True, options=options)) as broker:
        made = Lab(broker, tmp_path, file)
        yield made
        for worker in made.workers:
            worker.stop(now=True)
        assert await asyncio.gather(*made.ends.values()) == [0] * len(made.ends)


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def losses(steps: list[broker_pb2.StepDone]) -> list[float]:
    return [s.outcome.loss for s in steps] + [s.evaluation.loss for s in steps]


@pytest.mark.parametrize("leaves", [(), pytest.param(("y",), marks=pytest.mark.slow)])
async def test_the_losses_are_those_of_data_that_was_handed_over(
    lab: Lab, leaves: tuple[str, ...]
) -> None:
    """With the whole model in parts at two peers, of which one has the data."""
    await lab.join("home")
    own = {"patients": {"path": str(lab.file), "leaves": leaves}}
    await lab.join("clinic", data=own, memory_bytes=2600)
    before = contents(lab.broker.blobs.folder)
    steps, plan = await lab.train(lab.job(where="peer", source="patients", keep_local="inputs"))
    holders = [s.holders for s in plan.stages]
    clinic, home = (w.me.peer for w in sorted(lab.workers, key=lambda w: w.config.name))
    assert list(holders[0]) == [clinic], "reads the inputs"
    assert (list(holders[-1]) == [clinic]) == (not leaves), "reads the labels"
    assert any(list(h) == [home] for h in holders), "the model is in parts"

    stored = [d for n, d in contents(lab.broker.blobs.folder).items() if n not in before]
    with np.load(lab.file) as file:
        arrays = dict(file)
    rows = [r.tobytes() for r in arrays["x"]]
    assert not any(row in data for row in rows for data in stored), "no input is at the broker"
    labels = arrays["y"].tobytes()
    assert any(labels in data for data in stored) == bool(leaves)

    handed_over, _ = await lab.train(lab.job(source=str(lab.file)))
    assert losses(steps) == pytest.approx(losses(handed_over), abs=1e-6)


async def test_what_cannot_be_is_said_in_one_line_before_anything_starts(lab: Lab) -> None:
    own = {
        "patients": {"path": str(lab.file)},
        "closed": {"path": str(lab.file), "users": ["ann-k3xq"]},
        "words": {"path": str(lab.folder / "*.txt")},
    }
    await lab.join("clinic", data=own)
    for source, inputs, said in (
        ("patience", "x", r"no peer here has data called 'patience'; there is 'patients' \(clinic"),
        ("closed", "x", r"does not let somebody without an identity .* use its data 'closed'"),
        ("patients", "z", r"clinic.*: patients has no array 'z', it has \['x', 'y'\]"),
        ("words", "x", r"clinic.*: words: expected a file that ends in"),
    ):
        with pytest.raises(Refused, match=said) as refused:
            await lab.ask(lab.job(where="peer", source=source, inputs=inputs))
        assert str(lab.folder) not in str(refused.value), "paths of a peer are its own"


async def test_bad_data_that_only_a_peer_has_ends_the_run_at_once(lab: Lab) -> None:
    """The submitter cannot look at it; nobody waits for other peers, and no value is told."""
    with np.load(lab.file) as file:
        arrays = dict(file)
    arrays["y"][37] = 4711  # held out
    np.savez(lab.file, **arrays)
    await lab.join("home")
    await lab.join("clinic", data={"patients": {"path": str(lab.file)}})
    wanted = (
        r"sample 37 of the data: the model itself \(cross_entropy_loss\) is asked for class that"
    )
    with pytest.raises(RunFailed, match=wanted) as failed:
        await lab.train(lab.job(where="peer", source="patients"))
    assert "4711" not in str(failed.value)


@pytest.mark.slow  # held by tests/broker/placement/test_datasets.py, too
async def test_a_run_whose_data_has_left_waits_for_it_and_says_so(lab: Lab) -> None:
    own = {"patients": {"path": str(lab.file)}}
    await lab.join("clinic", data=own)
    await lab.join("home")
    answer = await lab.ask(lab.job(where="peer", source="patients"))
    assert answer.HasField("plan"), answer.reason
    assert list(answer.plan.stages[0].holders) == [lab.workers[0].me.peer]

    clinic = lab.workers[0]

    def gone_before_it_is_submitted() -> str:
        with connect(lab.broker.address) as client:
            submit = client.submit_prepared

            def late(*args: Any) -> Any:
                clinic._loop.call_soon_threadsafe(clinic.stop, True)
                while len(client.describe().peers) > 1:
                    pass
                return submit(*args)

            client.submit_prepared = late  # type: ignore[method-assign]
            run = client.submit(lab.job(where="peer", source="patients"))
            for event in run.watch():
                if "data" in event.state.reason.code:
                    run.cancel()
                    return event.state.reason.text
        raise AssertionError("it did not wait")

    text = await asyncio.to_thread(gone_before_it_is_submitted)
    assert text == "no peer that could take part has its data 'patients': it waits until one joins"
