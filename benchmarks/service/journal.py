"""What a decision costs the broker until it may be told: making its record, and the disk.

One run of 20 holders over a chain, whose steps are committed one after the other, as a machine
without a shell; then the same records through the journal, alone and sixteen at a time, with an
fsync each (synchronous=FULL, what the broker uses) and without (NORMAL); then a restart from them.

    python benchmarks/service/journal.py [--folder DISK] [--json FILE]
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from shoal.benchmarks.service.reports import chain
from shoal.benchmarks.table import Figure, arguments, report
from shoal.broker.events import (
    Event,
    Instruction,
    MakePlan,
    PeerSaid,
    Persist,
    PlanReady,
    ReplicaId,
    RequestId,
    RunSubmitted,
    Started,
    StreamId,
    StreamOpened,
)
from shoal.broker.journal.decided import DurableState
from shoal.broker.journal.journal import Journal
from shoal.broker.machine import BrokerMachine
from shoal.broker.options import BrokerOptions
from shoal.dag.plan.plan import PeerId
from shoal.job import Job
from shoal.proto.broker_pb2 import (
    Hello,
    LinkUse,
    Outcome,
    PeerMessage,
    Profile,
    Ready,
    RunSpec,
    StepReport,
)
from shoal.proto.common_pb2 import BlobRef
from shoal.proto.graph_pb2 import FULL
from shoal.proto.journal_pb2 import Decision, Record, RunHappened

PEERS, STEPS, GROUP = 20, 2000, 16
OPTIONS = BrokerOptions(probe_s=0.0)


def played() -> tuple[list[Record], float]:
    """The records of a run, and microseconds of the machine for each step, Persist included."""
    machine = BrokerMachine("broker", OPTIONS)
    records: list[Record] = []
    spent = 0.0

    def handle(event: Event) -> list[Instruction]:
        nonlocal spent
        began = time.perf_counter()
        out = machine.handle(event, now)
        spent += time.perf_counter() - began
        records.extend(i.record for i in out if isinstance(i, Persist))
        return list(out)

    now = 0.0
    handle(Started())
    peers = [PeerId(f"p{i}") for i in range(PEERS)]
    for peer in peers:
        handle(StreamOpened(StreamId(peer)))
        profile = Profile(name=peer, device_memory_bytes=1 << 30, operator_set=FULL)
        hello = Hello(version=2, peer=peer, boot="1", profile=profile, address=f"{peer}:1")
        handle(PeerSaid(StreamId(peer), PeerMessage(hello=hello)))
    plan = {"stages": PEERS, "replan": False}
    job = Job(model="m:f", steps=STEPS, batch=4, microbatch=1, eval_every=0, plan=plan)
    ref = BlobRef(hash="ab" * 32, size_bytes=1)
    spec = RunSpec(version=1, job=job.to_json(), graph=ref, data=ref, steps=STEPS)
    spec.microbatches, spec.microbatch_size = 4, 1
    out = handle(RunSubmitted(RequestId("q"), spec))
    ask = next(i for i in out if isinstance(i, MakePlan))
    handle(PlanReady(ask.replica, ask.version, chain(peers, 4)))
    for peer in peers:
        ready = PeerMessage(ready=Ready(run=ask.replica, term=1))
        handle(PeerSaid(StreamId(peer), ready))
    spent = 0.0
    for step in range(STEPS):
        now += 1.0
        for peer in peers:
            said = PeerMessage(step=_report(ask.replica, step, peer, peers))
            handle(PeerSaid(StreamId(peer), said))
    return records, 1e6 * spent / STEPS


def _report(run: ReplicaId, step: int, peer: PeerId, peers: list[PeerId]) -> StepReport:
    at = peers.index(peer)
    neighbours = (*peers[max(0, at - 1) : at], *peers[at + 1 : at + 2])
    links = [
        LinkUse(source=peer, destination=other, role="activation", codec="raw/1", bytes=1 << 20)
        for other in neighbours
    ]
    outcome = Outcome(loss=2.0, weight=4.0, grad_norm=1.0, lr=0.1) if at == PEERS - 1 else None
    return StepReport(run=run, term=1, step=step, seconds=1.0, outcome=outcome, links=links)


def median_us(call: Callable[[list[Record]], None], groups: Iterable[list[Record]]) -> float:
    found = []
    for group in groups:
        began = time.perf_counter()
        call(group)
        found.append(1e6 * (time.perf_counter() - began))
    return statistics.median(found)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: temporary")
    options = parser.parse_args()
    records, machine_us = played()
    steps = records[-STEPS:]
    size = statistics.mean(r.ByteSize() for r in steps)
    events = [r.decisions[0].happened.event for r in steps]
    began = time.perf_counter()
    for event in events:
        decision = Decision(happened=RunHappened(run="r-1234"))
        decision.happened.event.CopyFrom(event)
        Record(decisions=[decision])
    figures = [
        Figure("machine_us_per_step", machine_us, "us", "lower"),
        _since("record_us_per_step", began, STEPS),
        Figure("bytes_per_step", size, "bytes", "lower"),
    ]
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for mode in ("FULL", "NORMAL"):
            with Journal(Path(folder) / f"{mode}.sqlite") as journal:
                journal._db.execute(f"PRAGMA synchronous = {mode}")
                alone = median_us(journal.append, [[r] for r in steps[:500]])
                groups = [steps[i : i + GROUP] for i in range(0, STEPS, GROUP)]
                together = median_us(journal.append, groups) / GROUP
            figures += [
                Figure(f"append_us_{mode.lower()}", alone, "us", "lower"),
                Figure(f"append_us_{mode.lower()}_of_{GROUP}", together, "us", "lower"),
            ]
        with Journal(Path(folder) / "whole.sqlite") as journal:
            journal.append(records)
            began = time.perf_counter()
            decided = DurableState(OPTIONS, journal.records())
            figures.append(_since("restart_us_per_record", began, len(records)))
            began = time.perf_counter()
            snapshot = decided.snapshot()
            figures.append(_since("snapshot_us_per_event", began, len(records)))
            began = time.perf_counter()
            journal.replace(snapshot)
            figures.append(_since("replace_us_per_event", began, len(records)))
    report("journal", figures, options.json)


def _since(name: str, began: float, count: int) -> Figure:
    return Figure(name, 1e6 * (time.perf_counter() - began) / count, "us", "lower")


if __name__ == "__main__":
    main()
