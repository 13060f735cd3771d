"""What the events of one run say of it, taken into a summary; the same for every world."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Mapping, Sequence

from ..broker.course import Course
from ..broker.round_rows import RoundRows, client_numbers
from ..compression.codec import parse
from ..dag.ir.graph import TensorSpec
from ..dag.plan.strategies import parse_strategy
from ..dag.schedule.convert_plan import microbatches_of
from ..proto import broker_pb2
from .report import Summary

__all__ = ["Following", "lack_of"]


class Following:
    """`see` takes the events of one run, in their order; `finish` adds what needs all of them.
    `names`: the peers' by id. `limits`: bytes of device memory that they may use, by name."""

    def __init__(
        self, summary: Summary, names: Mapping[str, str], limits: Mapping[str, int] | None = None
    ) -> None:
        self.summary, self._names, self._limits = summary, names, limits or {}
        self._predicted: dict[str, int] = {}
        self._peaks: dict[str, int] = {}
        self.losses: list[float] = []
        """The loss of every step."""
        self.seconds: list[float] = []
        """The time of every step, since the one before."""
        self._steps: list[tuple[float, bool]] = []
        """The same, each with whether the step evaluated, too."""
        self._paces: dict[int, list[tuple[float, bool]]] = {}
        """The same, of each replica."""
        self.microbatch_size = 0
        """As the plan divides a batch; 0 without a plan."""
        self.microbatches = 0
        self.first_plan: broker_pb2.Plan | None = None
        """Under which the first step was done."""
        self.lacks = ""
        """What memory the run waits for; empty: it does not."""
        self.played = RoundRows()
        """The rounds, of several replicas."""
        self.course = Course()
        self._meets = False
        """Whether steps are those between two rounds."""
        self.events: list[broker_pb2.RunEvent] = []
        """Those of rounds, of versions that were evaluated, and of states."""
        self._plans: dict[int, tuple[broker_pb2.Plan, broker_pb2.PlanReport]] = {}
        """By replica."""
        self._formed = broker_pb2.Formation()
        self._compute_s = 0.0
        self._evaluations: list[tuple[int, float]] = []

    def see(self, event: broker_pb2.RunEvent) -> None:
        if (row := self.played.see(event)) is not None:
            self.course.met(row.table())
        match event.WhichOneof("kind"):
            case "plan":
                self._plans[event.replica] = event.plan, event.report
                self._planned(event.plan)
            case "round_begun" | "round_done":
                self._meets = True
                self.events.append(event)
                self.summary.bytes_on_wire += event.round_done.sent_bytes
            case "formed":
                self._formed = event.formed
            case "evaluated":
                self.events.append(event)
                told, summary = event.evaluated, self.summary
                summary.eval_loss = told.evaluation.loss
                self.course.evaluated(told.round, told.evaluation.loss)
                if numbers := client_numbers(told.evaluation):
                    summary.clients += ({"round": told.round, **numbers},)
            case "step":
                self._stepped(event.step, event.replica)
            case "state":
                self.events.append(event)
                state, summary = event.state, self.summary
                summary.steps = state.step
                summary.inexact_from = state.inexact_from
                summary.replicas = max(1, len(state.replicas))
                if state.phase in (broker_pb2.FAILED, broker_pb2.CANCELLED):
                    summary.exit, summary.error = 1, self.lacks or state.reason.text
                self.lacks = lack_of(event)
            case _:
                pass

    @property
    def left_out(self) -> bool:
        """Whether microbatches left stages out."""
        return any(visits < self.microbatches for visits in self.summary.visits)

    @property
    def report(self) -> broker_pb2.PlanReport | None:
        """Report of the newest plan; of several replicas the peers, links, spares and reasons of
        all of theirs in one. None before the first plan."""
        if not self._plans:
            return None
        first, *others = [report for _, (_, report) in sorted(self._plans.items())]
        found = copy.deepcopy(first)
        for other in others:
            found.predicted.peers.extend(other.predicted.peers)
            found.predicted.links.extend(other.predicted.links)
            found.spares.extend(s for s in other.spares if s not in found.spares)
            found.reasons.extend(r for r in other.reasons if r not in found.reasons)
        return found

    def _planned(self, plan: broker_pb2.Plan) -> None:
        summary, report = self.summary, self.report
        assert report is not None, "a plan was seen"
        predicted = report.predicted
        summary.codecs = tuple(dict.fromkeys(c.codec for c in plan.codecs))
        methods = dict.fromkeys(e.strategy for e in plan.exchanges if _encodes(e.strategy))
        summary.lossy = (*filter(_loses, summary.codecs), *methods)
        stages = [p.stages for p, _ in self._plans.values()]
        holders = {peer for each in stages for stage in each for peer in stage.holders}
        summary.stages, summary.holders = max(map(len, stages)), len(holders)
        summary.predicted_step_s = predicted.step_s  # of several replicas see `_own_paces`
        bubbles = [p.bubble for p in predicted.peers]
        summary.bubble = sum(bubbles) / max(1, len(bubbles))
        each = [(n, r.predicted.bottlenecks) for n, (_, r) in sorted(self._plans.items())]
        summary.bottlenecks = tuple(f"replica {n}: {b[0]}" for n, b in each if b)
        summary.against = {}
        if len(each) == 1:  # else they are of one replica, and what is compared are all together
            summary.bottlenecks = tuple(predicted.bottlenecks)
            summary.against = {a.name: a.step_s for a in predicted.alternatives}
        spares = {s.peer: s.reason for _, r in self._plans.values() for s in r.spares}
        summary.spares = tuple(
            f"{self._names.get(p, p)}: {why}" for p, why in spares.items() if p not in holders
        )
        self._predicted |= {
            self._names.get(p.peer, p.peer): p.device_bytes for p in predicted.peers
        }
        self.microbatch_size = plan.microbatch_size
        self.microbatches = microbatches_of(plan)
        if self.first_plan is None or not self.losses:
            self.first_plan = plan
            in_order = list(range(len(plan.stages)))
            orders = ([v.stage for v in route.visits] for route in plan.routes)
            summary.rerouted = any(order != in_order for order in orders)
            if summary.rerouted:
                known = [{v.stage for v in route.visits} for route in plan.routes]
                routes = [known[r] for r in plan.route_of or range(len(known))]
                summary.visits = tuple(sum(k in r for r in routes) for k in in_order)

    def _stepped(self, step: broker_pb2.StepDone, replica: int) -> None:
        self.losses.append(step.outcome.loss)
        self.summary.skipped_steps += step.outcome.skipped
        self.summary.loss_scale = step.outcome.loss_scale
        self.seconds.append(step.seconds)
        took = step.seconds, step.HasField("evaluation")
        self._steps.append(took)
        self._paces.setdefault(replica, []).append(took)
        self._compute_s += step.compute_s
        self.summary.bytes_on_wire += step.sent_bytes
        again = self.summary.retransmitted_bytes or 0
        self.summary.retransmitted_bytes = again + step.again_bytes
        self._peaks |= {self._names.get(p.peer, p.peer): p.device_bytes for p in step.peaks}
        row: dict[str, float] = {"step": step.step, "loss": step.outcome.loss}
        row |= {"seconds": step.seconds, "sent_bytes": step.sent_bytes}
        if step.HasField("evaluation"):
            row["eval_loss"] = step.evaluation.loss
        self.course.stepped(row, replica if self._meets else None)
        if step.HasField("evaluation"):
            self.summary.eval_loss = step.evaluation.loss
            self._evaluations.append((step.step, step.evaluation.loss))

    def finish(
        self, tokens_per_step: int, spent: Callable[[int], float] = lambda sums: 0.0
    ) -> None:
        """After the last event. `spent`: the epsilon that so many noisy sums come to."""
        summary = self.summary
        summary.losses, summary.step_seconds = tuple(self.losses), tuple(self.seconds)
        summary.evaluations = tuple(self._evaluations)
        summary.course = tuple(self.course.points)
        summary.tokens = tokens_per_step * len(self.losses)
        summary.memory = tuple(
            {
                "peer": name,
                "predicted_bytes": self._predicted.get(name, 0),
                "peak_bytes": self._peaks.get(name, 0),
                "limit_bytes": self._limits.get(name, 0),
            }
            for name in dict.fromkeys([*self._predicted, *self._peaks])
        )
        if self.losses:
            summary.loss_first, summary.loss_last = self.losses[0], self.losses[-1]
        if self.played.rows:
            self._apart(tokens_per_step, spent)
        if len(self.seconds) > 1:
            summary.step_s = statistics.median(_training_s(self._steps))
            if len(self._paces) > 1:
                self._own_paces()
            summary.tokens_per_s = tokens_per_step / summary.step_s if summary.step_s else 0.0
            if took := sum(r.seconds for r in self.played.rows):
                summary.tokens_per_s = summary.tokens / took
            if summary.cores:
                summary.compute_share = self._compute_s / (
                    (took or sum(self.seconds)) * summary.cores
                )

    def _own_paces(self) -> None:
        """Seconds of a local step, predicted and measured: of each replica by itself, then the mean
        over the steps that they made, so that unequal replicas are compared each with its plan."""
        paces = {n: _training_s(steps) for n, steps in self._paces.items()}
        total = sum(map(len, paces.values()))
        plans = {n: self._plans[n][1].predicted.step_s for n in paces if n in self._plans}
        weighed = [(len(s) / total, statistics.median(s), plans.get(n)) for n, s in paces.items()]
        self.summary.step_s = sum(share * measured for share, measured, _ in weighed)
        known = all(predicted for _, _, predicted in weighed)
        self.summary.predicted_step_s = (
            sum(share * (predicted or 0.0) for share, _, predicted in weighed) if known else 0.0
        )

    def _apart(self, tokens_per_step: int, spent: Callable[[int], float]) -> None:
        """Follow what is otherwise in several replicas, which each make steps of their own."""
        summary, rows = self.summary, self.played.rows
        summary.losses = ()
        if (formed := self._formed).every:
            summary.predicted_batch_s = (formed.local_s + formed.exposed_s) / formed.every
            summary.against = {a.name: a.step_s for a in formed.alternatives if a.step_s}
        summary.rounds = tuple(
            row.table() | ({"epsilon": spent(row.sums)} if row.sums else {}) for row in rows
        )
        summary.skipped_steps += sum(row.skipped for row in rows)
        losses: dict[str, list[tuple[float, float]]] = {}
        for row in rows:
            for m in row.members:
                for j, loss in enumerate(m.losses, 1):
                    at = row.samples_before + row.samples * j / len(m.losses)
                    losses.setdefault(str(m.replica), []).append((at, loss))
        summary.local_losses = {n: tuple(points) for n, points in sorted(losses.items())}
        summary.held_out = tuple((n, loss) for n, _, loss in self.played.evaluations)
        known = [row.loss for row in rows if row.loss is not None]
        if known:
            summary.loss_first, summary.loss_last = known[0], known[-1]
        summary.tokens = tokens_per_step * summary.steps


def lack_of(event: broker_pb2.RunEvent) -> str:
    """What memory a run waits for since this event; empty: it does not."""
    state = event.state
    waits = state.phase == broker_pb2.WAITING and state.reason.code == "memory"
    return state.reason.text if waits else ""


def _training_s(steps: Sequence[tuple[float, bool]]) -> list[float]:
    """Seconds of the steps that only train, of (seconds, whether it evaluated, too): without the
    first, in which everything is slower, where there are others. Of all where each evaluated."""
    trained = [(i, seconds) for i, (seconds, evaluated) in enumerate(steps) if not evaluated]
    later = [seconds for i, seconds in trained if i]
    return later or [s for _, s in trained] or [s for s, _ in steps[1:] or steps]


def _encodes(strategy: str) -> bool:
    """Whether holders of a stage take something else than the sum of their gradients."""
    return bool(strategy) and parse_strategy(strategy).traits.elements is not None


def _loses(codec: str) -> bool:
    """Whether what comes back may differ from what went in."""
    return parse(codec).error_bound(TensorSpec((1024, 1024), "float32")) > 0
