"""What holders of a replica are told of rounds: their work, their part of the exchange, and to
stay where they are. Functions that make messages, and change nothing."""

from __future__ import annotations

from collections.abc import Mapping

from ...dag.plan.plan import PeerId
from ...proto.broker_pb2 import BrokerMessage, RoundHold, RoundPlan, RoundStart, RoundWork
from ..events import Instruction, Tell
from ..runs.replica import Replica
from ..runs.run import Run
from .windows import RoundWindow

__all__ = ["start_of", "tell_ahead", "tell_hold", "tell_plan", "tell_start"]


def start_of(run: Run, replica: Replica, work: RoundWork) -> RoundStart:
    assert run.record.rounds is not None, f"run {run.id} has no rounds"
    apart = run.submitted.requirements.sync.apart
    return run.record.rounds.start_of(replica.id, work, apart=apart)


def tell_start(run: Run, number: int) -> list[Instruction]:
    """Its work of the round under way."""
    replica, rounds = run.replicas[number], run.record.rounds
    assert rounds is not None, f"run {run.id} has no rounds"
    return _tell(replica, BrokerMessage(round_start=start_of(run, replica, rounds.work[number])))


def tell_plan(run: Run, number: int, plans: Mapping[PeerId, RoundPlan]) -> list[Instruction]:
    """`plans`: of the present attempt, by peer."""
    holders = run.replicas[number].context.holders()
    return [Tell(m.stream, BrokerMessage(round_plan=plans[m.id])) for m in holders if m.id in plans]


def tell_hold(run: Run, number: int, order: int) -> list[Instruction]:
    """`order`: its number, with which they answer."""
    replica = run.replicas[number]
    hold = RoundHold(run=replica.id, term=replica.record.term, number=order)
    return _tell(replica, BrokerMessage(round_hold=hold))


def tell_ahead(run: Run, number: int, window: RoundWindow) -> list[Instruction]:
    """Rounds behind the one under way, while they hold."""
    holders = run.replicas[number].context.holders()
    return [Tell(m.stream, ahead) for m in holders for ahead in window.told(m.id)]


def _tell(replica: Replica, message: BrokerMessage) -> list[Instruction]:
    return [Tell(m.stream, message) for m in replica.context.holders()]
