"""What a report of a step costs the broker's machine with one open run and with 800, and with a run
of 8 replicas and of 128: what others do should not matter to it. Runs have two holders over a
chain, as a machine without a shell; replicas are ghosts that train apart and meet every 20 steps.

    python benchmarks/service/reports.py [--json FILE] [--runs 800] [--replicas 128]
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from unittest import mock

from shoal.benchmarks.table import Figure, arguments, report
from shoal.broker.events import (
    Event,
    Instruction,
    MakePlan,
    PeerSaid,
    PlanReady,
    ReplicaId,
    RequestId,
    RunSubmitted,
    Started,
    StreamId,
    StreamOpened,
)
from shoal.broker.machine import BrokerMachine
from shoal.broker.membership.member import PROTOCOL
from shoal.broker.options import BrokerOptions
from shoal.client.front import SimulationFront
from shoal.dag.plan.cut import bare_stages
from shoal.dag.plan.outline import Crossed, Outline, StageOutline
from shoal.dag.plan.plan import PeerId, Plan, StageSlot, Visit
from shoal.dag.schedule.schedule import listed
from shoal.job import Job
from shoal.proto.broker_pb2 import Hello, Outcome, PeerMessage, Profile, Ready, RunSpec, StepReport
from shoal.proto.common_pb2 import BlobRef
from shoal.proto.graph_pb2 import FULL
from shoal.sim.options import BUILTIN, SimOptions
from shoal.sim.simulate import simulate

HOLDERS, STEPS, MANY = 2, 400, 800
FEW_REPLICAS, MANY_REPLICAS = 8, 128
APART = """
version = 1
name = "apart"
seed = 5
mode = "ghost"
job = "JOB"
[[peers]]
name = "p-{1..COUNT}"
place = "a"
device = "rtx-3060"
memory = "12GiB"
up = "200Mbit"
down = "200Mbit"
[places.a]
at = [55.7, 12.6]
latency = "1ms"
bandwidth = "200Mbit"
[job_overrides]
plan.replicas = COUNT
sync = { kind = "local", every = 20 }
train = { steps = 40, batch = BATCH, microbatch = 2, eval_every = 0 }
"""
"""COUNT replicas of one peer, two samples each a step."""


def chain(peers: list[PeerId], microbatches: int) -> Plan:
    """A stage of one operator on each, which gives one value to the next."""
    last = len(peers) - 1
    stages = (
        StageOutline(
            k,
            (Crossed(f"v{k}", (k + 1,), (k + 1,)),) if k < last else (),
            trainable=True,
            makes_loss=k == last,
            has_backward=True,
        )
        for k in range(last + 1)
    )
    slots = tuple(StageSlot(k, k + 1, (peer,)) for k, peer in enumerate(peers))
    route = tuple(Visit(k, peer) for k, peer in enumerate(peers))
    plan = Plan(slots, (route,) * microbatches, 1, outline=Outline(tuple(stages)))
    return listed(plan, bare_stages(plan))


class Broker:
    """A machine, and who speaks to it."""

    def __init__(self, runs: int) -> None:
        streams = HOLDERS * runs + 1
        options = BrokerOptions(probe_s=0.0, most_waiting=runs, most_streams=streams)
        self.machine = BrokerMachine("broker", options)
        self.now = 0.0
        self.handle(Started())
        self.runs: dict[ReplicaId, list[PeerId]] = {}
        for i in range(runs):
            peers = [PeerId(f"p{i}-{k}") for k in range(HOLDERS)]
            for peer in peers:
                self._join(peer)
            self._begin(peers)

    def handle(self, event: Event) -> list[Instruction]:
        return self.machine.handle(event, self.now)

    def say(self, peer: PeerId, message: PeerMessage) -> None:
        self.handle(PeerSaid(StreamId(peer), message))

    def _join(self, peer: PeerId) -> None:
        self.handle(StreamOpened(StreamId(peer)))
        profile = Profile(name=peer, device_memory_bytes=1 << 30, operator_set=FULL)
        hello = Hello(version=PROTOCOL, peer=peer, boot="1", profile=profile, address=f"{peer}:1")
        self.say(peer, PeerMessage(hello=hello))

    def _begin(self, peers: list[PeerId]) -> None:
        plan = {"stages": HOLDERS, "replan": False}
        job = Job(
            model="m:f",
            steps=2 * STEPS,
            batch=4,
            microbatch=1,
            eval_every=0,
            plan=plan,
            recovery={"warm_spares": 0},  # the next run's peers are no keepers of this one
        )
        ref = BlobRef(hash="ab" * 32, size_bytes=1)
        spec = RunSpec(version=1, job=job.to_json(), graph=ref, data=ref, steps=2 * STEPS)
        spec.microbatches, spec.microbatch_size = 4, 1
        out = self.handle(RunSubmitted(RequestId("q"), spec))
        ask = next(i for i in out if isinstance(i, MakePlan))
        self.handle(PlanReady(ask.replica, ask.version, chain(peers, 4)))
        self.runs[ask.replica] = peers
        for peer in peers:
            self.say(peer, PeerMessage(ready=Ready(run=ask.replica, term=1)))

    def report_us(self) -> float:
        """Microseconds of a report, over the steps of one run."""
        run, peers = next(iter(self.runs.items()))
        outcome = Outcome(loss=2.0, weight=4.0)
        messages = [
            (p, PeerMessage(step=StepReport(run=run, term=1, step=step, outcome=outcome)))
            for step in range(STEPS)
            for p in peers
        ]
        began = time.process_time()
        for peer, message in messages:
            self.now += 0.01
            self.say(peer, message)
        spent = time.process_time() - began
        found = self.machine.replica(run)
        assert found is not None
        assert found.record.committed == STEPS
        return 1e6 * spent / len(messages)


class TimedMachine(BrokerMachine):
    """A machine that knows how long reports of steps took. spent_s, reports: of all of them."""

    spent_s, reports = 0.0, 0

    def handle(self, event: Event, now: float) -> list[Instruction]:
        if not isinstance(event, PeerSaid) or not event.message.HasField("step"):
            return super().handle(event, now)
        began = time.process_time()
        out = super().handle(event, now)
        TimedMachine.spent_s += time.process_time() - began
        TimedMachine.reports += 1
        return out


def apart_us(replicas: int) -> float:
    """Microseconds of a report, over two rounds of a run with so many replicas."""
    TimedMachine.spent_s, TimedMachine.reports = 0.0, 0
    text = APART.replace("COUNT", str(replicas)).replace("BATCH", str(2 * replicas))
    text = text.replace("JOB", str(BUILTIN))
    with tempfile.TemporaryDirectory() as folder:
        scenario = Path(folder) / "apart.toml"
        scenario.write_text(text)
        options = SimOptions(scenario=str(scenario), quiet=True, json=Path(folder) / "summary.json")
        with mock.patch("shoal.sim.virtual.broker_shell.BrokerMachine", TimedMachine):
            assert simulate(options, SimulationFront()) == 0
    assert TimedMachine.reports == 40 * replicas, TimedMachine.reports
    return 1e6 * TimedMachine.spent_s / TimedMachine.reports


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--runs", type=int, default=MANY, help="open at once")
    parser.add_argument("--replicas", type=int, default=MANY_REPLICAS, help="of one run")
    options = parser.parse_args()
    one, many = Broker(1).report_us(), Broker(options.runs).report_us()
    few, more = apart_us(FEW_REPLICAS), apart_us(options.replicas)
    figures = [
        Figure("report_us_with_1_run", one, "us", "lower"),
        Figure(f"report_us_with_{options.runs}_runs", many, "us", "lower"),
        Figure("report_many_over_one", many / one, "ratio", "lower"),
        Figure(f"report_us_of_{FEW_REPLICAS}_replicas", few, "us", "lower"),
        Figure(f"report_us_of_{options.replicas}_replicas", more, "us", "lower"),
        Figure("report_of_many_replicas_over_few", more / few, "ratio", "lower"),
    ]
    report("reports", figures, options.json)


if __name__ == "__main__":
    main()
