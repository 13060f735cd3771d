"""I10: what the broker told anyone survives its restart.

What is on its disk is replayed here, record by record, beside the machine. Whatever leaves the
broker must follow from that: an event from a history with that event in it, an Assign from a run
that is being built in that term, a Start from one that runs, and so on. When a process begins, what
it knows must be what is on the disk, and that every event that was told.
"""

from __future__ import annotations

from ...broker import events as b
from ...broker.journal.decided import DurableState
from ...broker.options import BrokerOptions
from ...broker.records.replica import ReplicaRecord
from ...broker.records.run import RunRecord
from ...broker.records.submitted import run_of
from ...proto import broker_pb2, journal_pb2
from ..virtual.clock import Observed
from ..virtual.world import World
from .violation import Broken, Check

__all__ = ["JournalCheck"]


class JournalCheck(Check):
    """Checks I10: what the broker told anyone survives its restart."""

    wants = (b.Started, b.Tell, b.Publish, b.Answer)

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._disk = DurableState(BrokerOptions())
        self._read = 0
        self._told: dict[str, int] = {}
        """By run: events that watchers were told of."""
        self._catch_up()

    def observe(self, seen: Observed) -> None:
        self._catch_up()
        match seen.record:
            case b.Started():
                self._restarted()
            case b.Publish(run, event):
                self._published(run, event)
            case b.Tell(_, message):
                self._said(message)
            case b.Answer(_, broker_pb2.Submitted(run=run)):
                self._known(run, "is told to whoever submitted it")
            case b.Answer(_, broker_pb2.RunState() as state):
                known = self._known(state.run, "has its state told")
                if known.state.phase != state.phase:
                    raise _lost(
                        state.run, f"is told to be {broker_pb2.Phase.Name(state.phase)}", known
                    )

    def _catch_up(self) -> None:
        journal = self.world.broker.journal
        for data in journal[self._read :]:
            for decision in journal_pb2.Record.FromString(data).decisions:
                self._disk.apply(decision)
        self._read = len(journal)

    def _restarted(self) -> None:
        here = [r.SerializeToString() for r in self.world.broker.machine.decided.snapshot()]
        disk = [r.SerializeToString() for r in self._disk.snapshot()]
        if here != disk:
            raise Broken("I10", "the broker was started again and knows other than its journal")
        for run, told in self._told.items():
            known = self._known(run, "has events that were told")
            if known.history.numbered < told:
                raise _lost(run, f"has {told} events that were told", known)

    def _published(self, run: str, event: broker_pb2.RunEvent) -> None:
        known = self._known(run, f"has event {event.number} told")
        if event not in known.watched(event.number).events[:1]:
            raise _lost(run, f"has event {event.number} told", known)
        self._told[run] = max(self._told.get(run, 0), event.number + 1)

    def _said(self, message: broker_pb2.BrokerMessage) -> None:
        kind = str(message.WhichOneof("kind"))
        if kind not in ("assign", "start", "committed", "leave"):
            return
        about = getattr(message, kind)
        known = self._replica(about.run)
        if kind == "leave":  # of an older term, or of a run that nobody remembers, always
            over = not about.goes_on
            if over and known is not None and known.active and known.term == about.term:
                raise _lost(about.run, "is over for a holder", known)
            return
        if known is None:
            raise Broken("I10", f"{about.run} has its {kind} told, and no journal has it")
        builds = kind == "assign" and not (
            known.phase == broker_pb2.RUNNING
            and not about.slice.visits  # a keeper, which came late
        )
        phase = broker_pb2.BUILDING if builds else broker_pb2.RUNNING
        late = kind != "assign" and known.phase == broker_pb2.EXPORTING
        if known.term != about.term or (known.phase != phase and not late):
            raise _lost(about.run, f"has its {kind} of term {about.term} told", known)
        if kind == "committed" and known.committed < about.step:
            raise _lost(about.run, f"is told to have {about.step} committed steps", known)

    def _replica(self, name: str) -> ReplicaRecord | None:
        run, number = run_of(name)
        found = self._disk.runs.get(run)
        return found.replicas[number] if found is not None else None

    def _known(self, run: str, what: str) -> RunRecord:
        known = self._disk.runs.get(b.RunId(run))
        if known is None:
            raise Broken("I10", f"{run} {what}, and the journal does not have it")
        return known


def _lost(run: str, what: str, known: RunRecord | ReplicaRecord) -> Broken:
    return Broken("I10", f"{run} {what}, and by the journal it is {known!r}")
