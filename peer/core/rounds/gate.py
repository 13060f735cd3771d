"""Which steps of a holder rounds let go on: the gate between its rounds and its steps. Pure."""

from __future__ import annotations

from ....dag.plan.action import Kind
from ....proto import broker_pb2
from .. import events as e
from ..step import Steps
from .rounds import Rounds

__all__ = ["RoundGate"]


class RoundGate:
    """Where one assignment, `run` and `term`, waits between rounds. Its methods return what
    is to be done, in order."""

    def __init__(self, run: str, term: int, rounds: Rounds, steps: Steps) -> None:
        self._run, self._term = run, term
        self._rounds, self._steps = rounds, steps

    def begins(self, start: broker_pb2.RoundStart) -> list[e.Instruction]:
        """More steps may be done, unless the version is still to land."""
        steps, rounds = self._steps, self._rounds
        out = rounds.begins(start)
        if out and rounds.landed:
            anew = steps.step == start.first_step
            self._open(start, evaluates=start.evaluate and anew)
            if _is_last(start) and not steps.evaluating:
                steps.end()
        return out

    def _open(self, start: broker_pb2.RoundStart, *, evaluates: bool = False) -> None:
        """Steps of the round may be done, and those that are ahead of the next one."""
        left = start.first_step + start.steps + start.ahead - self._steps.step
        self._steps.begin_round(max(0, left), evaluates=evaluates)

    def ready(self) -> list[e.Instruction]:
        """The device knows the samples of the steps that may be done. Those that are ahead have
        their data."""
        return self._data() if self._rounds.landed else []

    def _data(self) -> list[e.Instruction]:
        steps = self._steps
        if steps.over or steps.step >= steps.until:
            return []
        return [e.Prefetch(self._run, self._term, steps.step)]

    def landed(self, kind: Kind) -> list[e.Instruction]:
        """The version is in the stages, to be evaluated or to stay."""
        assert self._rounds.start is not None, "a version lands, and no round has begun"
        if kind is Kind.SHOW:
            self._steps.begin_round(0, evaluates=True)
            return []
        self._open(self._rounds.start)
        return self._data()

    def evaluated(self) -> list[e.Instruction]:
        """An evaluation of the version has ended."""
        steps, start = self._steps, self._rounds.start
        if start is None:
            return []
        out = self._rounds.evaluated(steps.take_evaluation())
        if _is_last(start):
            steps.end()
        return out

    def goes_on(self, now: float) -> list[e.Instruction]:
        """What rounds have to do in front of the next action."""
        steps, rounds = self._steps, self._rounds
        if steps.waits:
            rounds.waits(now)
        if not steps.begun and not steps.evaluating and (out := rounds.between(steps.step)):
            return out
        return rounds.exchanges()


def _is_last(start: broker_pb2.RoundStart) -> bool:
    """Whether nothing is left to be done: no steps, and no clients."""
    return not start.steps and not start.cohort
