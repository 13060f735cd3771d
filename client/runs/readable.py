"""What happens in a run, for programs of people: frozen records with plain fields, in place of the
protocol's messages."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...broker import round_rows
from ...broker.round_rows import RoundRow
from ...job.words import loss_text
from ...proto import broker_pb2
from ...proto.broker_pb2 import RunEvent, RunState
from ..files.records import step_numbers

__all__ = [
    "Evaluated",
    "Event",
    "Note",
    "Planned",
    "Reached",
    "Round",
    "Stage",
    "Step",
    "phase",
    "readable",
]


@dataclass(frozen=True, kw_only=True, repr=False)
class Event:
    """What happened. number: from 0, without gaps. at_s: seconds of the broker's clock. term: of
    the plan that it happened under. replica: the one that it happened in."""

    number: int
    at_s: float
    term: int
    replica: int

    def __str__(self) -> str:
        return ""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self}>"


@dataclass(frozen=True, kw_only=True, repr=False)
class Step(Event):
    """A step that is committed. step: from 0, of the run or of a replica that trains apart. loss:
    the mean over the batch. metrics: what else the model returns, by name. seconds: it took.
    sent_bytes: by all peers. eval_loss, eval_metrics: held out; None and empty: not evaluated.
    loss_scale: of fp16; None: losses are not scaled. skipped: whether gradients overflowed at it,
    so that nothing was updated.
    """

    step: int
    loss: float
    lr: float
    grad_norm: float
    seconds: float
    sent_bytes: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    eval_loss: float | None = None
    eval_metrics: Mapping[str, float] = field(default_factory=dict)
    loss_scale: float | None = None
    skipped: bool = False
    row: Mapping[str, float | int] = field(default_factory=dict, compare=False)
    """All of it flat, as in metrics.jsonl."""

    @property
    def loss_text(self) -> str:
        """Return the loss for people."""
        return loss_text(self.loss, self.row.get("weight", 1.0))

    def __str__(self) -> str:
        held_out = "" if self.eval_loss is None else f", held-out {self.eval_loss:.4f}"
        skipped = f", skipped at loss scale {self.loss_scale:g}" if self.skipped else ""
        return f"{self.step}: loss {self.loss_text}{held_out}{skipped}, {self.seconds:.2f} s"


@dataclass(frozen=True, kw_only=True, repr=False)
class Evaluated(Event):
    """A version between two rounds that was evaluated on held-out samples. round: it begins from
    it. step: of the run. clients: of federated training, by name of a number "least", "median" and
    "most" that a client's own held-out samples come to."""

    round: int
    step: int
    loss: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    clients: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"before round {self.round}: held-out {self.loss:.4f}"


@dataclass(frozen=True, kw_only=True, repr=False)
class Round(Event):
    """A round between replicas that is committed. table: as in rounds.jsonl."""

    round: int
    loss: float | None
    sent_bytes: int
    seconds: float
    table: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        loss = "" if self.loss is None else f"loss {self.loss:.4f}, "
        return f"{self.round}: {loss}{self.seconds:.2f} s"


@dataclass(frozen=True, kw_only=True, repr=False)
class Reached(Event):
    """The run has come into a phase: "queued", "running", "paused", "done", "failed",
    "cancelled", …. reason: in words, or empty. step, steps: committed, and wanted. round: committed
    ones. stop_at_s: of the broker's clock, when train.stop.time ends it; None: nothing does, or no
    step could begin yet."""

    phase: str
    reason: str
    step: int
    steps: int
    round: int
    stop_at_s: float | None = None

    def __str__(self) -> str:
        why = f": {self.reason}" if self.reason else ""
        return f"{self.phase} after {self.step} of {self.steps} steps{why}"


@dataclass(frozen=True)
class Stage:
    """A stage of a plan: operators from `start` to before `stop`, and the peers that have it."""

    start: int
    stop: int
    peers: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, repr=False)
class Planned(Event):
    """A plan was made. microbatch: its size in samples. reasons: sentences."""

    stages: tuple[Stage, ...]
    microbatch: int
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        peers = {peer for stage in self.stages for peer in stage.peers}
        return f"of {len(self.stages)} stages on {len(peers)} peers"


@dataclass(frozen=True, kw_only=True, repr=False)
class Note(Event):
    """Whatever else happens. kind: what it is, as the lines of `shoal watch --json` say. text: a
    sentence, if there is one."""

    kind: str
    text: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}" if self.text else self.kind


def phase(state: RunState, **of: Any) -> Reached:
    """Return how a run stands. of: fields of Event; default: none is known."""
    of = {"number": -1, "at_s": math.nan, "term": state.term, "replica": 0} | of
    name = broker_pb2.Phase.Name(state.phase).lower()
    return Reached(
        phase=name,
        reason=state.reason.text,
        step=state.step,
        steps=state.steps,
        round=state.round,
        stop_at_s=state.stop_at_s or None,
        **of,
    )


def readable(event: RunEvent, round: RoundRow | None = None) -> Event:
    """Return an event of the protocol as a record. round: that it commits."""
    of: dict[str, Any] = {"number": event.number, "at_s": event.at_s}
    of |= {"term": event.term, "replica": event.replica}
    match kind := event.WhichOneof("kind"):
        case "step":
            return _step(event.step, of)
        case "state":
            return phase(event.state, **of)
        case "plan":
            stages = tuple(Stage(s.start, s.stop, tuple(s.holders)) for s in event.plan.stages)
            size, why = event.plan.microbatch_size, tuple(event.report.reasons)
            return Planned(stages=stages, microbatch=size, reasons=why, **of)
        case "evaluated":
            found = event.evaluated
            numbers = {m.name: m.value for m in found.evaluation.metrics}
            of |= {"round": found.round, "step": found.step, "loss": found.evaluation.loss}
            spread = {
                n.name: {"least": n.least, "median": n.median, "most": n.most}
                for n in found.evaluation.clients
            }
            return Evaluated(metrics=numbers, clients=spread, **of)
        case "round_done" if round is not None:
            of |= {"round": round.round, "loss": round.loss, "table": round.table()}
            return Round(sent_bytes=round.sent_bytes, seconds=round.seconds, **of)
        case "note":
            return Note(kind="note", text=event.note, **of)
        case "round_planned":
            return Note(kind="round_planned", text=round_rows.planned(event), **of)
        case "checkpoint":
            text = f"after step {event.checkpoint.step}"
            return Note(kind="checkpoint", text=text, **of)
    return Note(kind=kind or "unknown", **of)


def _step(done: broker_pb2.StepDone, of: Mapping[str, Any]) -> Step:
    evaluated = done.HasField("evaluation")
    return Step(
        step=done.step,
        loss=done.outcome.loss,
        lr=done.outcome.lr,
        grad_norm=done.outcome.grad_norm,
        seconds=done.seconds,
        sent_bytes=done.sent_bytes,
        metrics={m.name: m.value for m in done.outcome.metrics},
        eval_loss=done.evaluation.loss if evaluated else None,
        eval_metrics={m.name: m.value for m in done.evaluation.metrics} if evaluated else {},
        loss_scale=done.outcome.loss_scale or None,
        skipped=done.outcome.skipped,
        row=step_numbers(done),
        **of,
    )
