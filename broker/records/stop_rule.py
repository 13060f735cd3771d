"""The rule by which a run ends before its length does (`train.stop`), over committed events."""

from __future__ import annotations

import math

from ...job.training import Stop
from ...proto.broker_pb2 import RUNNING, Evaluation, RunEvent
from ...proto.journal_pb2 import StopKept

__all__ = ["StopRule"]


class StopRule:
    """Changes by events only, so that it says the same after a restart. why: what it has found, for
    people; empty: nothing. A loss that is no number is no better than any, but where nothing counts
    there is none, and nothing is said by it."""

    def __init__(self, wanted: Stop) -> None:
        self.wanted, self.why = wanted, ""
        self._began_s, self._best, self._worse = 0.0, math.inf, 0

    def apply(self, event: RunEvent) -> None:
        """See an event of the run; what was found once stays."""
        kind = event.WhichOneof("kind")
        if not self.wanted or self.why:
            return
        if kind == "state":
            if event.state.phase == RUNNING:
                self._began_s = self._began_s or event.at_s
        elif kind == "step" and event.step.HasField("evaluation"):
            self._evaluated(event.step.evaluation)
        elif kind == "evaluated":
            self._evaluated(event.evaluated.evaluation)
        if kind in ("step", "round_done") and not self.why:
            self._lasted(event.at_s - self._began_s)

    def _evaluated(self, found: Evaluation) -> None:
        wanted, loss = self.wanted, found.loss
        if not found.weight and math.isnan(loss):
            return
        better = loss < self._best
        self._worse = 0 if better else self._worse + 1
        self._best = loss if better else self._best
        if wanted.loss is not None and loss <= wanted.loss:
            self.why = f"its held-out loss is {loss:.6g}: train.stop.loss is {wanted.loss:g}"
        elif wanted.no_better_for is not None and self._worse >= wanted.no_better_for:
            self.why = f"{self._worse} evaluations in a row were no better than {self._best:.6g}"

    def _lasted(self, seconds: float) -> None:
        if self.wanted.time is not None and seconds >= self.wanted.time:
            self.why = f"it has lasted {seconds:.0f} s: train.stop.time is {self.wanted.time:g} s"

    def ends_at(self, began_s: float = 0.0) -> float:
        """Return when time ends the run, seconds of the broker's clock; 0: it does not, or has not
        begun. began_s: when it may begin, if it has not."""
        began_s = self._began_s or began_s
        return began_s + self.wanted.time if self.wanted.time is not None and began_s else 0.0

    def kept(self) -> StopKept:
        """Everything, for `restore`."""
        return StopKept(began_s=self._began_s, best=self._best, worse=self._worse, why=self.why)

    def restore(self, kept: StopKept) -> None:
        """As an earlier start of the broker left it."""
        self._began_s, self._best = kept.began_s, kept.best
        self._worse, self.why = kept.worse, kept.why
