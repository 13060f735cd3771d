"""What the broker has decided and must not forget: its runs, and counters that only grow.

All of it changes by decisions only. `decide` applies one and remembers it for the record that the
machine persists; `apply` is the same without remembering: records applied in their order to an
empty state give the state that wrote them (I10). Nothing else is durable: members, leases, links,
speeds, plans that are being made, and reports of steps that are not committed (peers keep these).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

from ...dag.plan.plan import PeerId
from ...dag.plan.report import PlanWithReport
from ...dag.schedule.convert_plan import plan_from_proto, plan_to_proto
from ...dag.schedule.convert_report import report_from_proto, report_to_proto
from ...proto.broker_pb2 import Renamed, RunSpec
from ...proto.journal_pb2 import (
    BrokerStarted,
    Decision,
    Record,
    RenamedSince,
    RunAdded,
    RunForgotten,
    RunKept,
    RunPast,
)
from ..events import RunId
from ..options import BrokerOptions
from ..runs.runs import Run
from ..runs.space import share
from ..wish import read_spec

__all__ = ["DurableState"]


class DurableState:
    """runs: by id, in order of submission, the newest ended ones included. starts: of this broker.
    submitted: runs so far. clock_s: the time of the newest decision that has one.
    """

    def __init__(self, options: BrokerOptions, records: Iterable[Record] = ()) -> None:
        """Raises ValueError for records that cannot be of one journal, or not of this version."""
        self.options = options
        self.starts = 0
        self.submitted = 0
        self.clock_s = 0.0
        self.runs: dict[RunId, Run] = {}
        self._new: list[Decision] = []
        for record in records:
            for decision in record.decisions:
                self.apply(decision)
        share(self.runs.values(), options)

    def __repr__(self) -> str:
        return f"<DurableState {len(self.runs)} runs of {self.submitted}, start {self.starts}>"

    # ------------------------------------------------------------ decisions

    def start(self, now: float) -> None:
        """The broker began to work."""
        number = self.starts + 1
        started = BrokerStarted(number=number, submitted=self.submitted, at_s=now)
        self._decide(Decision(started=started))

    def add(self, run: RunId, spec: RunSpec, owner: str = "") -> None:
        """A run was submitted; raises RunSpecError."""
        added = RunAdded(run=run, number=self.submitted + 1, spec=spec, owner=owner)
        self._decide(Decision(added=added))
        share(self.runs.values(), self.options)

    def forget(self, run: RunId) -> None:
        """An ended run is no longer kept."""
        self._decide(Decision(forgotten=RunForgotten(run=run)))
        share(self.runs.values(), self.options)

    def _decide(self, decision: Decision) -> None:
        self.apply(decision)
        self._new.append(decision)

    def taken(self) -> Record | None:
        """What was decided since the last time; None: nothing."""
        if not self._new:
            return None
        record = Record(decisions=self._new)
        for decision in self._new:  # runs apply their events themselves
            self.clock_s = max(self.clock_s, decision.happened.event.at_s)
        self._new.clear()
        return record

    # ------------------------------------------------------------ state

    def apply(self, decision: Decision) -> None:
        """Raises ValueError for a decision that cannot follow what was decided before."""
        match decision.WhichOneof("kind"):
            case "started":
                started = decision.started
                self.starts, self.submitted = started.number, started.submitted
                self.clock_s = max(self.clock_s, started.at_s)
                for run in self.runs.values():
                    run.broker_started()
            case "added":
                self._add(decision.added)
            case "happened":
                event = decision.happened.event
                self._known(decision.happened.run).happened(event)
                self.clock_s = max(self.clock_s, event.at_s)
            case "forgotten":
                del self.runs[self._known(decision.forgotten.run).id]
            case "kept":
                self._restore(decision.kept)
            case "past":
                past = decision.past
                self._known(past.run).history.restore_past(past.first, past.packed)
            case _:
                raise ValueError("a decision of no known kind: is it of a newer version of shoal?")

    def _known(self, run: str) -> Run:
        found = self.runs.get(RunId(run))
        if found is None:
            raise ValueError(f"a decision about run {run!r}, which was never submitted")
        return found

    def _add(self, added: RunAdded) -> Run:
        if RunId(added.run) in self.runs:
            raise ValueError(f"run {added.run} is submitted twice")
        spec, options = RunSpec(), self.options
        spec.CopyFrom(added.spec)
        run = Run(
            *(RunId(added.run), added.number, spec, read_spec(spec), options, self._new),
            owner=added.owner,
        )
        self.runs[run.id] = run
        self.submitted = max(self.submitted, added.number)
        return run

    def _restore(self, kept: RunKept) -> None:
        run = self._add(kept.added)
        run.history.restore(kept.events, kept.numbered)
        plan = None
        if kept.HasField("plan"):
            plan = PlanWithReport(plan_from_proto(kept.plan), report_from_proto(kept.report))
        run.plan_bytes = kept.plan.ByteSize() + kept.report.ByteSize()
        names = {
            since.term: {PeerId(r.old): PeerId(r.to) for r in since.holders}
            for since in kept.renamed
        }
        run.restored(kept.state, plan, kept.peaks, kept.checkpoints, names)
        run.interrupted = kept.interrupted

    def snapshot(self) -> Iterator[Record]:
        """Records that give this state when they are applied to an empty one: one with the
        counters, one for each run, then what is packed of their past, a block in each. Of the state
        as it is now, whatever happens until they are read, and in whatever thread they are."""
        started = BrokerStarted(number=self.starts, submitted=self.submitted, at_s=self.clock_s)
        kept = [Decision(started=started), *(Decision(kept=_kept(r)) for r in self.runs.values())]
        past = [(run.id, run.history.past) for run in self.runs.values()]
        blocks = (
            Decision(past=RunPast(run=run, first=first, packed=packed))
            for run, packs in past
            for first, packed in packs
        )
        return (Record(decisions=[decision]) for decision in chain(kept, blocks))


def _kept(run: Run) -> RunKept:
    return RunKept(
        added=RunAdded(run=run.id, number=run.number, spec=run.spec, owner=run.owner),
        state=run.state,
        plan=plan_to_proto(run.plan) if run.plan is not None else None,
        report=report_to_proto(run.report) if run.plan is not None else None,
        events=run.history.unpacked,
        numbered=run.history.numbered,
        peaks=run.ledger.peaks if run.ledger is not None else (),
        checkpoints=run.checkpoints.kept,
        interrupted=run.interrupted,
        renamed=[
            RenamedSince(term=term, holders=[Renamed(old=a, to=b) for a, b in names.items()])
            for term, names in run.names.items()
        ],
    )
