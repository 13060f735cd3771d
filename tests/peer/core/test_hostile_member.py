"""A peer that was admitted, and named by the plan, sends frames that are not its to send: over real
gRPC with mutual TLS."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from shoal.broker.options import BrokerOptions
from shoal.broker.service.server import Broker, BrokerConfig
from shoal.client import connect
from shoal.client.access import remember
from shoal.job import Job
from shoal.net.identity.authority import utc
from shoal.net.identity.names import Party, PartyRole
from shoal.net.links.frame import FrameKey, Payload
from shoal.peer.entry.worker import work
from shoal.peer.host.config import PeerConfig
from shoal.peer.shell.daemon import Worker
from shoal.proto import broker_pb2
from shoal.proto.broker_pb2 import RunState, StepDone

HOUR = timedelta(hours=1)


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Embedding(256, 16), nn.Linear(16, 32), nn.ReLU())
        self.head = nn.Linear(32, 256)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.layers(x)).flatten(0, 1), y.flatten())


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.to_thread(lambda: None)  # a turn of the loop, and no more


@dataclass
class Lab:
    """A broker with identities, and peers of it in this loop."""

    broker: Broker
    folder: Path
    workers: list[Worker] = field(default_factory=list)
    ends: dict[str, asyncio.Task[int]] = field(default_factory=dict)

    async def join(self, name: str) -> None:
        token = self.broker.secured.admission.invite(PartyRole.PEER, 1, HOUR, "test", time.time())
        config = PeerConfig(
            broker=self.broker.address,
            state=self.folder / name,
            name=name,
            token=str(token),
            threads=1,
        )
        self.ends[name] = asyncio.create_task(work(config, self.workers.append))
        members = self.broker.shell.machine.members.members
        await until(lambda: any(m.profile.name == name for m in members.values()))

    async def kick(self, peer: str) -> None:
        """An operator does."""

        def kick() -> None:
            with connect(self.broker.address) as client:
                client.kick(peer)

        await asyncio.to_thread(kick)

    async def train(self) -> tuple[list[StepDone], RunState]:
        """A small run over two peers."""
        source = self.folder / "some.txt"
        source.write_text("all the world is a stage, and all of it is text. " * 200)
        job = Job(
            model=Tiny(),
            data={"kind": "text", "source": str(source), "length": 16},
            train={"steps": 6, "batch": 8, "microbatch": 2},
            plan={"stages": 2},
            output={"to": str(self.folder / "runs")},
        )

        def follow() -> tuple[list[StepDone], RunState]:
            steps, state = list[StepDone](), RunState()
            with connect(self.broker.address) as client:
                for event in client.submit(job).watch():
                    steps += [event.step] if event.HasField("step") else []
                    state = event.state if event.HasField("state") else state
            return steps, state

        return await asyncio.to_thread(follow)


@pytest.fixture
async def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Lab]:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    options = BrokerOptions(probe_s=0.0)
    async with Broker(BrokerConfig(port=0, options=options)) as broker:
        made = Lab(broker, tmp_path)
        authority = broker.secured.authority
        operator = authority.credential(Party(PartyRole.OPERATOR, "me"), utc(time.time()), HOUR)
        remember(broker.address, operator)
        yield made
        for worker in made.workers:
            worker.stop(now=True)
        await asyncio.gather(*made.ends.values())


def losses(steps: list[StepDone]) -> list[float]:
    return [s.outcome.loss for s in steps]


def refused(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Why links were, so far."""
    return [
        str(vars(r)["fields"]["why"])
        for r in list(caplog.records)  # other threads log, too
        if r.getMessage() == "link refused"
    ]


def forging(
    monkeypatch: pytest.MonkeyPatch, liar: Worker, forged: Callable[[FrameKey], list[FrameKey]]
) -> list[FrameKey]:
    """From now on the peer sends these beside each of its frames; what it sent so."""
    honest, sent = liar.links.transport.send, list[FrameKey]()

    def send(to: str, key: FrameKey, payload: Payload) -> None:
        for other in forged(key):
            honest(to, other, payload)
            sent.append(other)
        honest(to, key, payload)

    monkeypatch.setattr(liar.links.transport, "send", send)
    return sent


async def test_frames_of_another_run_or_term_are_dropped(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    await lab.join("honest")
    await lab.join("liar")
    expected, state = await lab.train()
    assert state.phase == broker_pb2.DONE
    honest, liar = sorted(lab.workers, key=lambda w: w.config.name)
    before = honest.machine.late_frames
    sent = forging(
        monkeypatch,
        liar,
        lambda key: [key._replace(run="another"), key._replace(term=key.term + 1)],
    )
    steps, state = await lab.train()
    assert state.phase == broker_pb2.DONE
    assert losses(steps) == losses(expected)
    assert len(sent) >= 2 * len(steps)
    assert honest.machine.late_frames - before == len(sent)


async def test_a_frame_for_a_port_that_the_plan_does_not_name_ends_its_link(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Who sends it holds its run up, as who sends nothing does; without it the run goes on."""
    await lab.join("honest")
    await lab.join("liar")
    expected, _ = await lab.train()
    _, liar = sorted(lab.workers, key=lambda w: w.config.name)
    forging(
        monkeypatch, liar, lambda key: [key._replace(port="S9>nowhere")] if key.step == 2 else []
    )
    training = asyncio.create_task(lab.train())
    await until(lambda: any("S9>nowhere" in why for why in refused(caplog)))
    await lab.kick(liar.me.peer)
    assert await lab.ends["liar"] == 4, "refused"
    await lab.join("spare")
    steps, state = await training
    assert state.phase == broker_pb2.DONE
    assert losses(steps) == losses(expected)


async def test_a_peer_that_was_kicked_and_did_not_hear_of_it_ends_when_it_tries_again(
    lab: Lab,
) -> None:
    """The message that says so is lost with the stream, now and then."""
    await lab.join("honest")
    (worker,) = lab.workers
    lab.broker.secured.admission.kick(worker.me.peer, time.time())
    shell = lab.broker.shell
    (stream,) = shell.machine.members.streams
    shell._end_stream(stream, "its path broke")
    assert await lab.ends["honest"] == 4
