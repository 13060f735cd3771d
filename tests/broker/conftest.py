"""A small world around one broker machine: peers that say things, clients that ask."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from shoal.broker.events import (
    Answer,
    CloseStream,
    Event,
    Instruction,
    MakePlan,
    PeerSaid,
    Persist,
    PlanReady,
    Publish,
    Reject,
    RequestId,
    RunAsked,
    RunId,
    RunSubmitted,
    SetTimer,
    Started,
    StreamClosed,
    StreamId,
    StreamOpened,
    Tell,
    TimerFired,
    Watched,
)
from shoal.broker.journal.decided import DurableState
from shoal.broker.machine import BrokerMachine
from shoal.broker.membership.member import PROTOCOL
from shoal.broker.options import BrokerOptions
from shoal.broker.validate import validate
from shoal.dag.plan.cut import bare_stages
from shoal.dag.plan.outline import Crossed, Outline, StageOutline
from shoal.dag.plan.plan import PeerId, Plan, StageSlot, Visit
from shoal.dag.schedule.schedule import listed
from shoal.job import Job
from shoal.proto.broker_pb2 import (
    BrokerMessage,
    Drained,
    Exported,
    Hello,
    LinkStatus,
    Outcome,
    PeerMessage,
    Profile,
    Ready,
    RunSpec,
    RunState,
    StepReport,
)
from shoal.proto.common_pb2 import BlobRef
from shoal.proto.graph_pb2 import FULL
from shoal.proto.journal_pb2 import Record
from shoal.tests.planner.service.sharing import SHARING

HASH = "ab" * 32


def make_spec(steps: int = 3, microbatches: int = 2, **job_keys: Any) -> RunSpec:
    priority, eval_every = job_keys.pop("priority", 0), job_keys.pop("eval_every", 0)
    job = Job(
        model="m.py:f",
        steps=steps,
        batch=2 * microbatches,
        microbatch=2,
        eval_every=eval_every,
        **job_keys,
    )
    text = job.to_json().replace('"priority": 0', f'"priority": {priority}')
    return RunSpec(
        version=1,
        name="test",
        job=text,
        graph=BlobRef(hash=HASH, size_bytes=10),
        data=BlobRef(hash=HASH, size_bytes=10),
        microbatches=microbatches,
        microbatch_size=2,
        steps=steps,
    )


def make_plan(*peers: str, microbatches: int = 2, size: int = 2) -> Plan:
    """One stage of one operator on each peer."""
    slots = tuple(StageSlot(i, i + 1, (PeerId(p),)) for i, p in enumerate(peers))
    route = tuple(Visit(i, PeerId(p)) for i, p in enumerate(peers))
    plan = Plan(slots, (route,) * microbatches, size, outline=chain_outline(len(peers)))
    return listed(plan, bare_stages(plan))


def chain_outline(stages: int) -> Outline:
    """Of stages that each give one value to the next."""
    return Outline(
        tuple(
            StageOutline(
                k,
                (Crossed(f"v{k}", (k + 1,), (k + 1,)),) if k + 1 < stages else (),
                trainable=True,
                makes_loss=k == stages - 1,
                has_backward=True,
            )
            for k in range(stages)
        )
    )


@dataclass
class World:
    """Drives one machine and validates it after every event."""

    machine: BrokerMachine
    now: float = 0.0
    timers: dict[str, float] = field(default_factory=dict)
    streams: dict[str, StreamId] = field(default_factory=dict)
    journal: list[Record] = field(default_factory=list)
    _count: int = 0

    def handle(self, event: Event) -> list[Instruction]:
        out = self.machine.handle(event, self.now)
        validate(self.machine)
        assert not any(isinstance(i, Persist) for i in out[1:]), "one, in front of all else"
        self.journal += [i.record for i in out if isinstance(i, Persist)]
        for item in out:
            if isinstance(item, SetTimer):
                self.timers[item.name] = item.at
        return out

    def wait(self, seconds: float) -> list[Instruction]:
        """Lets time pass and fires what is due, in order."""
        until = self.now + seconds
        out: list[Instruction] = []
        while self.timers and min(self.timers.values()) <= until:
            name = min(self.timers, key=lambda n: (self.timers[n], n))
            self.now = max(self.now, self.timers.pop(name))
            out += self.handle(TimerFired(name))
        self.now = until
        return out

    def restart(self) -> list[Instruction]:
        """Another process with the journal alone."""
        options = self.machine.options
        self.machine = BrokerMachine(
            "broker-1", options, decided=DurableState(options, self.journal)
        )
        self.timers, self.streams = {}, {}
        return self.handle(Started())

    # peers

    def join(self, peer: str, counter: int = 1, boot: str = "", **keys: Any) -> list[Instruction]:
        """A new stream with a Hello; it becomes the stream of that peer here."""
        self._count += 1
        stream = StreamId(f"s{self._count}")
        self.streams[peer] = stream
        version = keys.pop("version", PROTOCOL)
        address = keys.pop("address", f"{peer}:1")
        holding, closed = keys.pop("holding", None), keys.pop("closed", None)
        profile = {"name": peer, "device_memory_bytes": 2**30, "operator_set": FULL, **keys}
        hello = Hello(
            version=version,
            peer=peer,
            boot=boot or f"boot-{counter}",
            counter=counter,
            profile=Profile(**profile),
            address=address,
            holding=holding,
            closed=closed,
        )
        out = self.handle(StreamOpened(stream))
        return out + self.handle(PeerSaid(stream, PeerMessage(hello=hello)))

    def say(self, peer: str, **kind: Any) -> list[Instruction]:
        return self.handle(PeerSaid(self.streams[peer], PeerMessage(**kind)))

    def close(self, peer: str, why: str = "connection reset") -> list[Instruction]:
        """Its process ends: those that have links with it see them break, too."""
        member = self.machine.members.members.get(PeerId(peer))
        known = self.machine.replica(member.run) if member else None
        for other in known.context.parts if known else ():
            if other != peer and other in self.machine.members.members:
                self.say(
                    other, link_status=LinkStatus(run=known.id, term=known.record.term, peer=peer)
                )
        return self.break_stream(peer, why)

    def break_stream(self, peer: str, why: str = "connection reset") -> list[Instruction]:
        """Nothing else is known of it."""
        return self.handle(StreamClosed(self.streams[peer], why))

    # clients

    def submit(self, spec: RunSpec | None = None) -> tuple[RunId, list[Instruction]]:
        out = self.handle(RunSubmitted(self.request(), spec or make_spec()))
        answers = [i for i in out if isinstance(i, Answer)]
        assert len(answers) == 1, [i for i in out if isinstance(i, Reject)]
        return RunId(answers[0].message.run), out

    def cancel(self, run: RunId) -> list[Instruction]:
        return self.handle(RunAsked(self.request(), run, "cancel"))

    def request(self) -> RequestId:
        self._count += 1
        return RequestId(f"q{self._count}")

    def state(self, run: RunId) -> RunState:
        return self.machine.runs[run].state

    def watched(self, run: RunId, start: int = 0) -> Watched:
        return self.machine.runs[run].record.watched(start)

    # makers and readers

    spec = staticmethod(make_spec)
    plan = staticmethod(make_plan)

    @staticmethod
    def only(out: list[Instruction], kind: type[Any]) -> Any:
        """The one instruction of a kind."""
        found = [i for i in out if isinstance(i, kind)]
        assert len(found) == 1, f"expected one {kind.__name__}, got {found}"
        return found[0]

    def told(self, out: list[Instruction], peer: str) -> list[BrokerMessage]:
        """What a peer was told, in order."""
        return [i.message for i in out if isinstance(i, Tell) and i.stream == self.streams[peer]]

    def kinds(self, out: list[Instruction], peer: str) -> list[str]:
        """The kinds of what a peer was told, and "close" where its stream was closed."""
        found: list[str] = []
        for i in out:
            if isinstance(i, Tell) and i.stream == self.streams[peer]:
                found.append(str(i.message.WhichOneof("kind")))
            if isinstance(i, CloseStream) and i.stream == self.streams[peer]:
                found.append("close")
        return found

    @staticmethod
    def published(out: list[Instruction]) -> list[Any]:
        return [i.event for i in out if isinstance(i, Publish)]

    # whole chapters

    def start(self, *peers: str, steps: int = 3, **job: Any) -> RunId:
        """A run of one stage per peer that has just begun RUNNING; joins peers that are missing."""
        for peer in peers:
            if peer not in self.machine.members.members:
                self.join(peer)
        run, out = self.submit(make_spec(steps, plan={"stages": len(peers)}, **job))
        ask = self.only(out, MakePlan)
        self.handle(PlanReady(run, ask.version, make_plan(*peers)))
        for peer in peers:
            self.say(peer, ready=Ready(run=run, term=1))
        return run

    def report(self, peer: str, run: RunId, step: int, loss: float = 1.0, term: int = 1) -> Any:
        message = StepReport(run=run, term=term, step=step, sent_bytes=10, compute_s=0.5)
        message.outcome.CopyFrom(Outcome(loss=loss, weight=1.0))
        return self.say(peer, step=message)

    def export(self, peer: str, run: RunId, step: int, term: int = 1) -> list[Instruction]:
        weights = BlobRef(hash=HASH, size_bytes=5)
        return self.say(peer, exported=Exported(run=run, term=term, step=step, weights=weights))

    def drained(self, peer: str, run: RunId) -> list[Instruction]:
        return self.say(peer, drained=Drained(run=run))


@pytest.fixture(scope="session", autouse=True)
def warm_planner(one_warm_planner: None) -> None:
    """Scripted peers send no heartbeats: none waits out its lease while torch is imported."""
    SHARING.get().wait(lambda: False)


@pytest.fixture
def make_world() -> Iterator[Callable[..., World]]:
    worlds: list[World] = []

    def make(**options: Any) -> World:
        # Peers of this world answer no probes, unless the test is about them.
        worlds.append(World(BrokerMachine("broker-1", BrokerOptions(**{"probe_s": 0.0} | options))))
        return worlds[-1]

    yield make
    for world in worlds:
        validate(world.machine)


@pytest.fixture
def world(make_world: Callable[..., World]) -> World:
    return make_world()
