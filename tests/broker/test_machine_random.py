"""Any events in any order: no exception ever, and the invariants hold after each of them."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import hypothesis.strategies as st
from google.protobuf.message import DecodeError
from hypothesis import given, settings

from shoal.broker.events import (
    Answer,
    CohortAsked,
    DescribeAsked,
    DrainAsked,
    MakePlan,
    PeerSaid,
    PlanFailed,
    PlanReady,
    Reject,
    RequestId,
    RunAsked,
    RunId,
    RunSubmitted,
    SetTimer,
    StopAsked,
    StreamClosed,
    StreamId,
    StreamOpened,
    TimerFired,
    WatchAsked,
)
from shoal.broker.machine import BrokerMachine
from shoal.broker.options import BrokerOptions
from shoal.broker.validate import validate
from shoal.dag.plan.cut import bare_stages
from shoal.dag.plan.plan import PeerId, Plan, StageSlot, Visit
from shoal.dag.schedule.schedule import listed
from shoal.job import Job
from shoal.planner.requests.requirements import read_spec
from shoal.planner.requests.run_spec import RunSpecError
from shoal.proto.broker_pb2 import (
    Cohort,
    Drained,
    Exported,
    Fault,
    Goodbye,
    Heartbeat,
    Hello,
    LinkReport,
    PeerMessage,
    Phase,
    Profile,
    Ready,
    RunSpec,
    Snapshot,
    SnapshotReport,
    StepReport,
)
from shoal.proto.common_pb2 import BlobRef, Reason
from shoal.tests.broker.conftest import chain_outline

PEERS = ["a", "b", "c", ""]
OPERATORS = 6
STREAMS = [StreamId(f"s{i}") for i in range(8)]
REF = BlobRef(hash="ab" * 32, size_bytes=1)

MUTATIONS = st.lists(st.tuples(st.integers(0, 200), st.integers(0, 255)), max_size=6)


def mutated(data: bytes, changes: list[tuple[int, int]]) -> bytes:
    """Bytes with some of them replaced."""
    out = bytearray(data or b"\0")
    for at, value in changes:
        out[at % len(out)] = value
    return bytes(out)


def valid_spec(stages: int, steps: int, by_hand: bool) -> RunSpec:
    plan: dict[str, Any] = {"stages": stages} if stages else {}
    job = Job(model="m:f", steps=steps, batch=2, microbatch=1, eval_every=0, plan=plan)
    spec = RunSpec(version=1, job=job.to_json(), graph=REF, data=REF, steps=steps)
    spec.microbatches, spec.microbatch_size = 2, 1
    if by_hand:
        spec.plan.microbatch_size = 1
        spec.plan.stages.add(start=0, stop=1, holders=["a", "b"])
        for peer in "ab":
            spec.plan.routes.add().visits.add(stage=0, peer=peer)
    return spec


def make_plan(peers: list[str]) -> Plan:
    """Some of OPERATORS on each peer."""
    n = len(peers)
    slots = tuple(
        StageSlot(i * OPERATORS // n, (i + 1) * OPERATORS // n, (PeerId(p),))
        for i, p in enumerate(peers)
    )
    route = tuple(Visit(i, PeerId(p)) for i, p in enumerate(peers))
    plan = Plan(slots, (route,) * 2, 1, outline=chain_outline(n))
    return listed(plan, bare_stages(plan))


class Driver:
    """Does one thing after the other; most are likely ones, some are nonsense."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.sense = self.pick(0.85, 0.97)
        self.machine = BrokerMachine(
            "broker-1",
            BrokerOptions(
                kept_events=20,
                kept_runs=3,
                most_waiting=4,
                most_streams=6,
                most_lead=2,
                probe_s=self.pick(0.0, 0.2, 5.0),
            ),
        )
        self.now = 0.0
        self.asked: list[MakePlan] = []
        self.timers: list[str] = []
        self.kept: list[Snapshot] = []
        self.requests = 0
        self.seen: set[str] = set()  # Phases and states that were reached.

    def pick(self, *options: Any) -> Any:
        return self.rng.choice(options)

    def often(self, likely: Any, *others: Any) -> Any:
        sense = others == () or self.rng.random() < self.sense
        return likely if sense else self.rng.choice(others)

    def run(self) -> RunId:
        return self.pick(*list(self.machine.runs)[-3:], RunId("r-none"))

    def stream(self) -> StreamId:
        return self.often(self.pick(*(self.machine.members.streams or STREAMS)), *STREAMS)

    def next_step(self, run: Any, peer: PeerId | None) -> int:
        holds = run is not None and run.ledger is not None and peer in run.ledger.peers
        return run.ledger.next_of(peer) if holds else 0

    def request(self) -> RequestId:
        self.requests += 1
        return RequestId(f"q{self.requests}")

    def said(self) -> PeerSaid:
        """Something that fits what its speaker does, or that does not."""
        members = self.machine.members.members
        stream = self.stream()
        if len(members) == len(PEERS) - 1:  # else one incarnation would only replace the other
            stream = self.often(self.pick(*(m.stream for m in members.values())), stream)
        peer = self.machine.members.streams.get(stream)
        if peer is None and self.rng.random() < 0.9:
            return PeerSaid(stream, self.hello())
        member = self.machine.members.members.get(peer) if peer else None
        mine = (member and member.run) or self.run()
        known = self.machine.replica(mine)
        run = known.record if known else None
        term = self.often(run.term if run else 1, 0, 1, 2)
        step = self.often(self.next_step(run, peer), 0, 1, 7)
        report = PeerMessage(step=StepReport(run=mine, term=term, step=step))
        steps = run.run.spec.steps if run else 1
        weights = Exported(run=mine, term=term, step=self.often(steps, 0, 1), weights=REF)
        likely = self.pick(
            PeerMessage(heartbeat=Heartbeat()),
            PeerMessage(ready=Ready(run=mine, term=term)),
            report,
            report,
            PeerMessage(exported=weights),
            PeerMessage(drained=Drained(run=mine)),
            PeerMessage(link=self.link()),
            self.snapshot(run, mine, term, peer),
            self.snapshot(run, mine, term, peer),
        )
        return PeerSaid(
            stream,
            self.often(
                likely,
                likely,
                PeerMessage(),
                self.hello(),
                PeerMessage(fault=self.fault(mine, term, step)),
                PeerMessage(goodbye=Goodbye(reason=Reason(text="\x1b"))),
            ),
        )

    def fault(self, run: str, term: int, step: int) -> Fault:
        code = self.pick("link", "snapshot", "memory", "plan")
        about = self.pick(*PEERS)
        return Fault(run=run, term=term, step=step, about=about, reason=Reason(code=code))

    def snapshot(self, run: Any, mine: str, term: int, peer: Any) -> PeerMessage:
        """Most often of the set that is ordered, of its own stages or of those that it keeps."""
        plan = run.plan if run else None
        pending = self.machine.replica(mine).snapshots.cadence.pending if run else None
        keepers = plan.keepers if plan else ()
        whose = self.often(self.pick(peer, *(k.holder for k in keepers if k.peer == peer)), *PEERS)
        found = Snapshot(
            run=mine, term=term, step=self.often(pending or 0, 0, 1, 2**64 - 1), holder=whose
        )
        for stage in plan.stages_of(whose) if plan else ():
            found.spans.add(start=plan.stages[stage].start, stop=plan.stages[stage].stop)
        if self.rng.random() < 0.1:
            found.spans.add(start=self.rng.randrange(4), stop=self.rng.randrange(4))
        self.kept.append(found)
        return PeerMessage(snapshot=SnapshotReport(snapshot=found, held=self.often(True, False)))

    def link(self) -> LinkReport:
        """Most often of a probe that is under way."""
        report = LinkReport(
            peer=self.pick(*PEERS),
            probe=self.often(max(0, self.machine.probing._number - self.rng.randrange(3)), 0, 99),
            latency_s=self.often(0.01, float("nan"), -1.0),
            bytes_per_s=self.often(1e6, float("inf"), 0.0),
            size_bytes=self.often(1000, 2**60),
        )
        if self.rng.random() < 0.3:
            report.problem.CopyFrom(Reason(code=self.pick("assigned", "x"), text="\x1b no"))
        return report

    def hello(self) -> PeerMessage:
        absent = [p for p in PEERS[:-1] if p not in self.machine.members.members]
        return PeerMessage(
            hello=Hello(
                version=self.often(3, 4),
                peer=self.often(self.pick(*(absent or PEERS)), *PEERS),
                boot=self.pick("x", "y"),
                counter=self.often(self.requests + 3, self.rng.randrange(self.requests + 3)),
                profile=Profile(name=self.pick(*PEERS), operator_set=self.often(1, 2)),
                address=self.often("h:1", ""),
                snapshots=self.rng.sample(self.kept, min(len(self.kept), self.rng.randrange(4))),
            )
        )

    def planned(self) -> PlanReady | PlanFailed:
        ask = self.often(self.asked[-1], *self.asked[-3:])
        if self.rng.random() < 0.15:
            code = self.pick("memory", "peers", "model")
            return PlanFailed(ask.replica, ask.version, "no", code)
        offered = [o.peer for o in ask.peers]
        some = self.rng.sample(offered, self.rng.randrange(len(offered) + 1))
        peers = self.often(offered, some, ["z"], [])
        pairs = self.often((), ((self.pick(*PEERS), self.pick(*PEERS)),))
        return PlanReady(ask.replica, ask.version, make_plan(peers), pairs)

    def event(self) -> Any:
        rng = self.rng
        kind = rng.randrange(100)
        if kind < 10:
            return StreamOpened(self.pick(*STREAMS))
        if kind < 60:
            return self.said()
        if kind < 63:
            return StreamClosed(self.stream(), "gone")
        if kind < 68:
            spec = valid_spec(rng.randrange(4), rng.randrange(1, 9), rng.random() < 0.2)
            return RunSubmitted(self.request(), spec)
        if kind < 70:
            wanted = self.pick("cancel", "pause", "pause", "resume", "finish")
            return RunAsked(self.request(), self.often(RunId("r-none"), self.run()), wanted)
        if kind < 90 and self.asked:
            return self.planned()
        if kind < 96:
            self.now += self.often(self.pick(0.1, 1.0), 700.0)
            return TimerFired(self.pick(*self.timers[-9:], "x", "run:", "peer:z", "hello:s1"))
        if kind < 99:
            return self.pick(
                DescribeAsked,
                partial(WatchAsked, run=self.run(), from_event=3),
                partial(CohortAsked, run=self.run(), cohort=Cohort(clients=[0])),
            )(self.request())
        return DrainAsked() if rng.random() < 0.3 else StreamOpened(StreamId("s0"))

    def step(self) -> None:
        event = self.event()
        out = self.machine.handle(event, self.now)
        validate(self.machine)
        self.asked += [i for i in out if isinstance(i, MakePlan)]
        self.timers += [i.name for i in out if isinstance(i, SetTimer)]
        replicas = self.machine.registry.replicas()
        self.seen |= {Phase.Name(replica.record.phase) for replica in replicas}
        later = [r for r in replicas if r.record.term > 1 and r.record.active]
        self.seen |= {"resumed" if r.context.term.begun_from else "replay" for r in later}
        self.seen |= {member.state for member in self.machine.members.members.values()}
        answers = [i for i in out if isinstance(i, Answer | Reject)]
        assert [i.request for i in answers] == (
            [event.request] if hasattr(event, "request") else []
        )


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32))
def test_any_events_in_any_order_keep_the_invariants(seed) -> None:
    driver = Driver(seed)
    for _ in range(150):
        driver.step()
    driver.machine.handle(StopAsked(), driver.now)
    validate(driver.machine)
    assert all(run.ended for run in driver.machine.runs.values())


def test_the_random_events_reach_every_phase_and_state() -> None:
    seen: set[str] = set()
    phases = set(Phase.keys()) - {"PHASE_UNSPECIFIED"}
    wanted = phases | {"pool", "assigned", "draining", "replay", "resumed"}
    for seed in range(60):
        driver = Driver(seed)
        for _ in range(400):
            driver.step()
        seen |= driver.seen
        if seen >= wanted:
            break
    assert seen == wanted


@settings(max_examples=200)
@given(data=st.binary(max_size=200), changes=MUTATIONS, which=st.integers(0, 2))
def test_bytes_of_any_kind_reach_a_member_s_stream_without_harm(data, changes, which) -> None:
    """What parses is handled; what does not is refused before (see services)."""
    hello = Hello(version=3, peer="a", boot="x", counter=1, profile=Profile(operator_set=1))
    report = StepReport(run="r", term=1, step=0, seconds=1.0)
    valid = [PeerMessage(hello=hello), PeerMessage(step=report), None][which]
    message = PeerMessage()
    try:
        message.ParseFromString(mutated(valid.SerializeToString(), changes) if valid else data)
    except DecodeError:
        return
    machine = BrokerMachine("broker-1")
    for stream in STREAMS[:2]:
        machine.handle(StreamOpened(stream), 0.0)
    machine.handle(PeerSaid(STREAMS[1], PeerMessage(hello=hello)), 0.0)
    for stream in STREAMS[:2]:
        machine.handle(PeerSaid(stream, message), 0.0)
        validate(machine)


@settings(max_examples=200)
@given(data=st.binary(max_size=300), changes=MUTATIONS, whole=st.booleans())
def test_a_spec_of_any_bytes_is_read_or_refused_with_words(data, changes, whole) -> None:
    spec = RunSpec()
    try:
        valid = valid_spec(2, 3, True).SerializeToString()
        spec.ParseFromString(mutated(valid, changes) if whole else data)
    except DecodeError:
        return
    try:
        read_spec(spec)
    except RunSpecError as error:
        assert str(error)  # noqa: PT017 (either outcome is right)


@settings(max_examples=100)
@given(text=st.text(max_size=80))
def test_a_job_of_any_text_is_refused_with_words(text) -> None:
    spec = valid_spec(0, 1, False)
    spec.job = text.encode("utf-8", "replace").decode()
    try:
        read_spec(spec)
    except RunSpecError as error:
        assert "job of the run" in str(error)  # noqa: PT017
