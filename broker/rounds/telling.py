"""What holders of a replica are told of rounds: their work, and their part of the exchange.
Functions that make messages, and change nothing."""

from __future__ import annotations

from collections.abc import Mapping

from ...dag.plan.plan import PeerId
from ...proto.broker_pb2 import BrokerMessage, RoundPlan, RoundStart, RoundWork
from ..events import Instruction, Tell
from ..runs.replica import Replica
from ..runs.run import Run

__all__ = ["start_of", "tell_plan", "tell_start"]


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


def _tell(replica: Replica, message: BrokerMessage) -> list[Instruction]:
    return [Tell(m.stream, message) for m in replica.context.holders()]
