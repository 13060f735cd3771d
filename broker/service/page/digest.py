"""What happened in one run, small enough to be sent again and again. Pure: events in, figures out.

Whatever its length, a run's curve has at most MOST_POINTS points: when they are too many, every
second one goes, and from then on only every second step is kept.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from typing import Any

from ....dag.schedule.convert_plan import microbatches_of
from ....net.printable import printable
from ....proto.broker_pb2 import (
    BUILDING,
    CANCELLED,
    EXPORTING,
    FAILED,
    RUNNING,
    WAITING,
    Phase,
    Plan,
    PlanReport,
    RunEvent,
    StepDone,
)
from ...round_rows import RoundRow, RoundRows, sentence

__all__ = ["MOST_MOMENTS", "MOST_POINTS", "Digest", "MetricTotals"]

MOST_POINTS = 400
MOST_MOMENTS = 40
"""Newest events that a person reads."""
MOST_TEXT = 600
"""Characters of a reason; some name every peer."""
_RECENT = 16
"""Steps that the present speed is a mean of."""
_ACTIVE = (BUILDING, RUNNING, EXPORTING)
_NOT_LOST = ("building", "moved", "paused", "restart")
"""Codes of reasons for which a run leaves its work without having lost anybody."""


class MetricTotals:
    """What Prometheus counts, over all runs, since this start of the broker."""

    def __init__(self) -> None:
        self.steps = 0
        self.tokens = 0
        self.sent_bytes: Counter[str] = Counter()  # By role.
        self.again_bytes = 0
        self.rounds = 0
        self.round_bytes = 0
        self.recoveries: Counter[str] = Counter()  # By the code of their cause.


class Digest:
    """One run. `tokens_per_step`: positions of text, else samples. What happened after `since_s`, a
    time of the broker's clock, is counted in `totals` as well."""

    def __init__(self, tokens_per_step: int, totals: MetricTotals, since_s: float) -> None:
        self._tokens_per_step = tokens_per_step
        self._totals, self._since_s = totals, since_s
        self.next_event = 0
        self.recoveries = 0
        self.plans: dict[int, tuple[Plan, PlanReport]] = {}
        """By replica: several train apart, count their own steps, and meet in rounds."""
        self._rounds = RoundRows(keep=False)
        self._round: dict[str, Any] | None = None
        self.loss = self.held_out = math.nan
        self._phase: Phase = WAITING
        self._replicas = 1
        self._loss_curve, self._held_out_curve = _Curve(), _Curve()
        self._recent: deque[tuple[float, float, int]] = deque(maxlen=_RECENT)
        self._links: dict[int, dict[tuple[str, str], int]] = {}
        """By replica, bytes of its newest step."""
        self._moments: deque[dict[str, Any]] = deque(maxlen=MOST_MOMENTS)

    def add(self, event: RunEvent) -> None:
        """The events of the run, in their order; each once."""
        self.next_event = event.number + 1
        counts, round = event.at_s > self._since_s, self._rounds.see(event)
        match event.WhichOneof("kind"):
            case "step":
                self._step(event.step, event.replica, counts)
            case "round_done" if round is not None:
                self._committed(event, round, counts)
            case "evaluated":
                self.held_out = event.evaluated.evaluation.loss
                self._held_out_curve.add(event.evaluated.step, self.held_out)
            case "plan":
                self.plans[event.replica] = event.plan, event.report
                self._links.pop(event.replica, None)
                self._recent.clear()
            case "state":
                self._state(event, counts)
            case "note":
                self._moment(event, "note", event.note)
            case "weights":
                self._moment(event, "state", f"the weights of step {event.weights.step} are stored")

    def _step(self, done: StepDone, replica: int, counts: bool) -> None:
        if self._replicas == 1:
            self.loss = done.outcome.loss
            self._loss_curve.add(done.step, done.outcome.loss)
        if done.HasField("evaluation"):
            self.held_out = done.evaluation.loss
            self._held_out_curve.add(done.step, done.evaluation.loss)
        self._recent.append((done.seconds, done.compute_s, done.sent_bytes))
        links = self._links[replica] = {}
        for use in done.links:
            if use.source:  # else of many links together
                way = use.source, use.destination
                links[way] = links.get(way, 0) + use.bytes
        if counts:
            totals = self._totals
            totals.steps += 1
            totals.tokens += self._tokens_per_step // self._replicas
            totals.again_bytes += done.again_bytes
            for use in done.links:
                totals.sent_bytes[use.role] += use.bytes

    def _committed(self, event: RunEvent, round: RoundRow, counts: bool) -> None:
        if round.loss is not None and round.step is not None:
            self.loss = round.loss
            self._loss_curve.add(round.step, round.loss)
        self._round = {"text": sentence(round)} | round.table()
        self._moment(event, "state", sentence(round))
        if counts:
            self._totals.rounds += 1
            self._totals.round_bytes += round.sent_bytes

    def _state(self, event: RunEvent, counts: bool) -> None:
        state, before = event.state, self._phase
        self._replicas = max(1, len(state.replicas))
        self._phase = state.phase
        code, text = state.reason.code, state.reason.text
        # Out of its work without having ended: somebody was lost, left, or failed in their part.
        lost = before in _ACTIVE and state.phase in (BUILDING, WAITING) and code not in _NOT_LOST
        if lost:
            self.recoveries += 1
            if counts:
                self._totals.recoveries[code] += 1
        kind = "loss" if lost else "bad" if state.phase in (FAILED, CANCELLED) else "state"
        shown = f"{Phase.Name(state.phase).lower()}{': ' if text else ''}{text}"
        self._moment(event, kind, shown)

    def _moment(self, event: RunEvent, kind: str, text: str) -> None:
        shown = printable(text, MOST_TEXT)
        self._moments.append({"at_s": event.at_s, "term": event.term, "kind": kind, "text": shown})

    @property
    def step_s(self) -> float:
        """Seconds of a step now; 0 before one was measured."""
        return sum(s for s, _, _ in self._recent) / len(self._recent) if self._recent else 0.0

    @property
    def tokens_per_s(self) -> float:
        """All replicas together: each has its part of a batch in one of its steps."""
        return self._tokens_per_step / self.step_s if self.step_s > 0 else 0.0

    def row(self) -> dict[str, Any]:
        """For JSON: numbers that are none are left out."""
        held = [s.holders for plan, _ in self.plans.values() for s in plan.stages]
        holders = len({p for each in held for p in each})
        spent = self.step_s * len(self._recent) * holders / self._replicas
        busy = sum(c for _, c, _ in self._recent) / spent if spent > 0 else 0.0
        sent = sum(b for _, _, b in self._recent) / len(self._recent) if self._recent else 0.0
        row: dict[str, Any] = {
            "loss": self.loss,
            "held_out": self.held_out,
            "step_s": self.step_s,
            "tokens_per_s": self.tokens_per_s,
            "busy": min(1.0, busy),
            "sent_bytes_per_step": sent,
            "recoveries": self.recoveries,
            "losses": self._loss_curve.points,
            "held_outs": self._held_out_curve.points,
            "moments": list(self._moments),
            "plans": [self._planned(number) for number in sorted(self.plans)],
            "round": self._round,
        }
        return {k: v for k, v in row.items() if not isinstance(v, float) or math.isfinite(v)}

    def _planned(self, replica: int) -> dict[str, Any]:
        plan, report = self.plans[replica]
        predicted = {p.peer: p for p in report.predicted.peers}
        links = self._links.get(replica, {})
        return {
            "replica": replica,
            "stages": [
                {"operators": [s.start, s.stop], "holders": list(s.holders)} for s in plan.stages
            ],
            "warm": list(dict.fromkeys(k.peer for k in plan.keepers)),
            "microbatches": microbatches_of(plan),
            "predicted_s": report.predicted.step_s,
            "bubble": {p: _sound(found.bubble) for p, found in predicted.items()},
            "bottlenecks": list(report.predicted.bottlenecks)[:5],
            "reasons": [r[:MOST_TEXT] for r in report.reasons[:8]],
            "spares": [[s.peer, s.reason[:MOST_TEXT]] for s in report.spares[:50]],
            "links": [[a, b, size] for (a, b), size in links.items()][:200],
        }


def _sound(value: float) -> float:
    return value if math.isfinite(value) else 0.0


class _Curve:
    """Points (step, value), thinned out as they grow; the newest is always the last."""

    def __init__(self) -> None:
        self._kept: list[list[float]] = []
        self._every = 1
        self._seen = 0
        self._newest: list[float] | None = None

    def add(self, step: int, value: float) -> None:
        if not math.isfinite(value):
            return
        self._newest = [step, float(f"{value:.6g}")]
        if self._seen % self._every == 0:
            self._kept.append(self._newest)
            if len(self._kept) >= MOST_POINTS:
                del self._kept[1::2]
                self._every *= 2
        self._seen += 1

    @property
    def points(self) -> list[list[float]]:
        if self._newest is None or self._kept[-1] is self._newest:
            return self._kept
        return [*self._kept, self._newest]
