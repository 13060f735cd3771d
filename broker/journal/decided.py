"""What the broker has decided and must not forget: its runs, and counters that only grow.

All of it changes by decisions only. `decide` applies one and remembers it for the record that the
machine persists; `apply` is the same without remembering: records applied in their order to an
empty state give the state that wrote them (I10). Nothing else is durable: members, leases, links,
speeds, plans that are being made, and reports of steps that are not committed (peers keep these).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

from ...planner.requests.requirements import read_spec
from ...proto.broker_pb2 import RunSpec
from ...proto.journal_pb2 import (
    BrokerStarted,
    Decision,
    Record,
    RunAdded,
    RunForgotten,
    RunHappened,
    RunPast,
)
from ..events import RunId
from ..options import BrokerOptions
from ..records.peer_shares import PeerShares
from ..records.run import RunRecord
from ..records.space import share
from ..records.submitted import SubmittedRun

__all__ = ["DurableState"]


class DurableState:
    """runs: by id, in order of submission, the newest ended ones included. starts: of this broker.
    submitted: runs so far. shares: what peers have given to runs. clock_s: the time of the newest
    decision that has one.
    """

    def __init__(self, options: BrokerOptions, records: Iterable[Record] = ()) -> None:
        """Raises ValueError for records that cannot be of one journal, or not of this version."""
        self.options = options
        self.starts = 0
        self.submitted = 0
        self.clock_s = 0.0
        self.runs: dict[RunId, RunRecord] = {}
        self.shares = PeerShares()
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

    @property
    def happened(self) -> list[RunHappened]:
        """Events of runs that were decided since the last record."""
        return [d.happened for d in self._new if d.HasField("happened")]

    def add(self, run: RunId, spec: RunSpec, owner: str = "") -> RunRecord:
        """A run was submitted; raises RunSpecError."""
        added = RunAdded(run=run, number=self.submitted + 1, spec=spec, owner=owner)
        self._decide(Decision(added=added))
        share(self.runs.values(), self.options)
        return self.runs[run]

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
                self._known(decision.happened.run).apply(event)
                self.clock_s = max(self.clock_s, event.at_s)
            case "forgotten":
                del self.runs[self._known(decision.forgotten.run).id]
            case "kept":
                self._add(decision.kept.added).restore(decision.kept)
            case "share":
                self.shares.restore(decision.share)
            case "past":
                past = decision.past
                self._known(past.run).history.restore_past(past.first, past.packed)
            case _:
                raise ValueError("a decision of no known kind: is it of a newer version of shoal?")

    def _known(self, run: str) -> RunRecord:
        found = self.runs.get(RunId(run))
        if found is None:
            raise ValueError(f"a decision about run {run!r}, which was never submitted")
        return found

    def _add(self, added: RunAdded) -> RunRecord:
        if RunId(added.run) in self.runs:
            raise ValueError(f"run {added.run} is submitted twice")
        spec = RunSpec()
        spec.CopyFrom(added.spec)
        wanted = read_spec(spec)
        run = SubmittedRun(RunId(added.run), added.number, added.owner, spec, wanted, self.options)
        record = self.runs[run.id] = RunRecord(run, self._new, self.shares)
        self.submitted = max(self.submitted, added.number)
        return record

    def snapshot(self) -> Iterator[Record]:
        """Records that give this state when they are applied to an empty one: one with the
        counters, one for each run and each share of a peer, then what is packed of their past,
        a block in each. Of the state as it is now, whatever happens until they are read, and in
        whatever thread they are."""
        started = BrokerStarted(number=self.starts, submitted=self.submitted, at_s=self.clock_s)
        kept = [Decision(started=started), *(Decision(kept=r.kept()) for r in self.runs.values())]
        kept += [Decision(share=share) for share in self.shares.kept()]
        past = [(run.id, run.history.past) for run in self.runs.values()]
        blocks = (
            Decision(past=RunPast(run=run, first=first, packed=packed))
            for run, packs in past
            for first, packed in packs
        )
        return (Record(decisions=[decision]) for decision in chain(kept, blocks))
