"""I3: what belongs to no present assignment, or to an older term, has no effect.

Whether it does is decided here by the run and the term that a record carries and those of the
assignment that the broker gave last. Then the machine's run and steps are compared before and after
it, and what the machine wants done because of it must be a release, or a line in the log.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from ...broker import events as b
from ...dag.schedule.flow import Role
from ...peer.core import events as p
from ...peer.core.machine import PeerMachine
from ...proto import broker_pb2
from ..virtual.clock import Observed
from ..virtual.control import BROKER
from ..virtual.world import World
from .violation import EVENTS, Broken, Check

__all__ = ["TermCheck"]

_EVENTS = frozenset(EVENTS)
_OF_TERM = (
    *(p.Built, p.BuildFailed, p.DataReady, p.DataFailed, p.Computed, p.ComputeFailed),
    *(p.ExportedWeights, p.ExportFailed),
)
"""What a device answers in a term of a run."""
_ABOUT = ("ready", "step", "exported", "fault")
"""Messages of peers that carry a run and a term."""

State = Hashable


class TermCheck(Check):
    """Checks I3: what belongs to no present assignment, or to an older term, has no effect."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._present: dict[str, tuple[str, int]] = {}
        """By peer: the run and term of the newest assignment that it took and has not left."""
        self._before: dict[str, tuple[Observed, State]] = {}
        """By machine: a stale event that it handles now, and its state before that."""

    def observe(self, seen: Observed) -> None:
        who, record = seen.who, seen.record
        if type(record) not in _EVENTS:
            pending = self._before.get(who)
            if pending is not None and not _harmless(pending[0], record):
                raise Broken("I3", f"{_stale(pending[0])} makes {who} want {_word(record)}")
            return
        if isinstance(record, p.Started | b.Started):  # another process under this name
            self._present.pop(who, None)
            self._before.pop(who, None)
        if self._before:
            self._compare()
            self._before.pop(who, None)
        if who == BROKER:
            stale = self._stale_for_broker(record)
        else:
            stale = self._stale_for_peer(who, record)
        if stale:
            self._before[who] = seen, self._state(who)

    def ended(self, run: str) -> None:
        self._compare()

    def _compare(self) -> None:
        """Only a machine's next event may change it: until then it is as it was."""
        for who, (seen, before) in self._before.items():
            if self._state(who) != before:
                raise Broken("I3", f"{_stale(seen)} changed the state of {who}")

    # ------------------------------------------------------------ what is stale

    def _stale_for_peer(self, who: str, record: object) -> bool:
        present = self._present.get(who)
        match record:
            case p.FrameArrived(key) | p.FrameRefused(key):
                own = key.role not in (Role.PROBE, Role.ROUND)
                return own and (key.run, key.term) != present
            case p.BrokerSaid(message):
                return self._said(who, message, present)
            case _:
                return isinstance(record, _OF_TERM) and (record.run, record.term) != present

    def _said(
        self, who: str, message: broker_pb2.BrokerMessage, present: tuple[str, int] | None
    ) -> bool:
        """Keeps the present assignment too."""
        known = present[1] if present else -1
        match message.WhichOneof("kind"):
            case "assign":
                run, term = message.assign.run, message.assign.term
                if present and run == present[0] and term <= known:
                    return True
                machine = self.world.peers[who].machine
                held = machine.assignment
                busy = held is not None and held.alive and held.run != run
                if not busy:
                    self._present[who] = run, term
            case "leave":
                if present and message.leave.run == present[0]:
                    if message.leave.term < known:
                        return True
                    del self._present[who]
            case "start" | "export" | "committed" as kind:
                body = getattr(message, kind)
                return (body.run, body.term) != present
        return False

    def _stale_for_broker(self, record: object) -> bool:
        if not isinstance(record, b.PeerSaid):
            return False
        kind = record.message.WhichOneof("kind")
        if kind not in _ABOUT:
            return False
        machine = self.world.broker.machine
        about = getattr(record.message, kind)
        replica = machine.replica(about.run)
        peer = machine.members.streams.get(record.stream)
        member = machine.members.members.get(peer) if peer is not None else None
        if replica is None or member is None:
            return replica is not None or member is not None
        known = replica.record
        return known.ended or about.term != known.term or member.run != replica.id

    # ------------------------------------------------------------ what must not change

    def _state(self, who: str) -> State:
        if who != BROKER:
            return _peer_state(self.world.peers[who].machine)
        found = []
        for replica in self.world.broker.machine.registry.replicas():
            known, ledger = replica.record, replica.record.ledger
            reported = tuple(ledger.next_of(p) for p in ledger.peers) if ledger else ()
            stands = (known.phase, known.term, known.reason.text, known.committed)
            found.append((replica.id, *stands, reported))
        return tuple(found)


def _peer_state(machine: PeerMachine) -> State:
    part = machine.assignment
    if part is None:
        return machine.exit is None
    steps = part.steps
    where: State = None
    if steps is not None:
        where = (
            *(steps.step, steps.evaluating, steps.position, steps.in_flight),
            *(steps.data_ready, steps.progress, frozenset(steps.arrived)),
        )
    return machine.exit is None, part.run, part.term, part.phase, part.why, where


def _harmless(stale: Observed, record: object) -> bool:
    """Whether an instruction may follow from what has no effect. The broker's machine looks after
    its pool and other runs at every event."""
    if isinstance(stale.record, b.PeerSaid):
        about = getattr(stale.record.message, str(stale.record.message.WhichOneof("kind")))
        return not (isinstance(record, b.Publish) and record.run == about.run)
    return isinstance(record, p.Release | p.DropSnapshot)


def _stale(seen: Observed) -> str:
    record = seen.record
    if isinstance(record, b.PeerSaid):
        kind = str(record.message.WhichOneof("kind"))
        about = getattr(record.message, kind)
        return f"a {kind} of {about.run}, term {about.term}, which is not running there"
    if isinstance(record, p.BrokerSaid):
        return f"a {record.message.WhichOneof('kind')} of an older term"
    its: Any = getattr(record, "key", record)
    return f"{_word(record)} of {its.run}, term {its.term}, which {seen.who} does not hold"


def _word(record: object) -> str:
    return type(record).__name__
