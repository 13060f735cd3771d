"""What a report of a step costs the broker's machine with one open run and with 800: what others do
should not matter to it. Runs of two holders over a chain, as a machine without a shell.

    python benchmarks/service/reports.py [--json FILE] [--runs 800]
"""

from __future__ import annotations

import time

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
from shoal.broker.options import BrokerOptions
from shoal.dag.plan.outline import Crossed, Outline, StageOutline
from shoal.dag.plan.plan import PeerId, Plan, StageSlot, Visit
from shoal.job import Job
from shoal.proto.broker_pb2 import Hello, Outcome, PeerMessage, Profile, Ready, RunSpec, StepReport
from shoal.proto.common_pb2 import BlobRef
from shoal.proto.graph_pb2 import FULL

HOLDERS, STEPS, MANY = 2, 400, 800


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
    return Plan(slots, (route,) * microbatches, 1, outline=Outline(tuple(stages)))


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
        hello = Hello(version=2, peer=peer, boot="1", profile=profile, address=f"{peer}:1")
        self.say(peer, PeerMessage(hello=hello))

    def _begin(self, peers: list[PeerId]) -> None:
        plan = {"stages": HOLDERS, "replan": False}
        job = Job(model="m:f", steps=2 * STEPS, batch=4, microbatch=1, eval_every=0, plan=plan)
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


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--runs", type=int, default=MANY, help="open at once")
    options = parser.parse_args()
    one, many = Broker(1).report_us(), Broker(options.runs).report_us()
    figures = [
        Figure("report_us_with_1_run", one, "us", "lower"),
        Figure(f"report_us_with_{options.runs}_runs", many, "us", "lower"),
        Figure("report_many_over_one", many / one, "ratio", "lower"),
    ]
    report("reports", figures, options.json)


if __name__ == "__main__":
    main()
