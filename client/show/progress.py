"""What a person sees of a run: a progress bar on a terminal, plain lines elsewhere, tables."""

from __future__ import annotations

import json as json_module
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...broker import round_rows
from ...broker.round_rows import RoundRow, RoundRows
from ...job.words import count_of, counted_in, loss_text, some_of
from ...net.finite import finite
from ...net.interrupts import uninterrupted
from ...proto.broker_pb2 import CANCELLED, DONE, FAILED, RUNNING, Phase, RunEvent, RunState
from ..files.records import evaluation_numbers, read_run, step_numbers
from ..runs.bar import on_clock, progress_bar, time_left
from ..runs.run import Run
from ..runs.weights import CheckpointWriter
from .formation import formation_lines
from .plan_lines import formed_in_short, long_time_text, planned_in_short
from .text import number, safe
from .wire import CompressionSums, sentence

__all__ = ["follow", "note_of", "print_table", "row_of"]

MOST_HOLDERS = 8
"""Named of a stage; `shoal plan` has all."""
MOST_CODECS = 24
"""Lines of what codecs did; `--json` has all."""
LINE_EVERY_S = 5.0
"""Without a terminal, a step is printed at most this often (and after each evaluation)."""


def follow(run: Run, *, json: bool, since: int = 0, verbose: bool = False) -> RunState:
    """Shows the events of a run from number `since` on until it has ended, and records all of its
    steps; returns its last state.

    With `json` each event is one line on stdout. Otherwise people see it on stderr: a bar on a
    terminal, plain lines elsewhere. Of a plan they see three lines; with `verbose` all of it, and
    at the end what codecs did on each link, if any were used (with `json` always).
    """
    recorder, wire = run.recorder(), CompressionSums(run.client.names)
    state, played = RunState(run=run.id), RoundRows(keep=False)
    counted = counted_in(read_run(recorder.folder).get("job", {}))
    told = _Told(run, recorder.tokens_per_step, counted, verbose=verbose)
    view: _View = _Json(recorder.tokens_per_step) if json else _Lines(told)
    if not json and sys.stderr.isatty():
        view = _Bar(told)
    keeper = CheckpointWriter(run.checkpoint_keeper)
    try:
        with keeper, view:
            for event in run.watch():
                with uninterrupted():
                    if event.HasField("state"):
                        state = event.state
                    round = played.see(event)
                    recorder.see(event, round)
                    wire.see(event)
                    keeper.see(event)
                if event.number >= since:
                    view.show(event, state, round)  # may wait for a reader of what it prints
    finally:
        recorder.close()
        for problem in keeper.problems:
            print(safe(problem), file=sys.stderr)
    if json or verbose:
        _show_wire(wire, json=json)
    return state


def _show_wire(wire: CompressionSums, *, json: bool) -> None:
    """What compression did in the steps that were watched."""
    rows = wire.rows()
    if json and rows:
        print(json_module.dumps({"kind": "wire", "links": wire.table()}), flush=True)
    elif rows:
        steps = count_of(max(r.steps for r in rows), "step")
        print(f"codecs, in {steps}", file=sys.stderr)
        for row in rows[:MOST_CODECS]:
            print(f"  {safe(sentence(row))}", file=sys.stderr)
        if len(rows) > MOST_CODECS:
            print(f"  and {len(rows) - MOST_CODECS} more (--json has all)", file=sys.stderr)


def print_table(title: str, columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    """A table on stdout; cells are cut to the width of the terminal only on a terminal."""
    console = Console(width=None if sys.stdout.isatty() else 200)
    table = Table(title=Text(safe(title)), title_justify="left", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column.removesuffix("_bytes"), overflow="fold")
    for row in rows:
        table.add_row(*(Text(_cell(column, row[column])) for column in columns))
    console.print(table, markup=False)


def _cell(column: str, value: Any) -> str:
    if column.endswith("_bytes"):
        return f"{value / 2**30:.1f} GiB"
    return safe(str(value))


def _stands(event: RunEvent) -> str:
    """How a run stands; while it goes on, how the replica stands that the event is of, if that was
    lost or has ended."""
    state, at, who = event.state, event.replica, ""
    phase, reason = state.phase, state.reason.text
    if phase == RUNNING and 1 < len(state.replicas) > at:
        own = state.replicas[at]
        if own.phase == DONE:
            return ""
        if own.phase != RUNNING or own.term > 1:
            who, phase, reason = f"replica {at} ", own.phase, own.reason.text
    return f"{who}{Phase.Name(phase).lower()}" + (f": {safe(reason)}" if reason else "")


def note_of(event: RunEvent, round: RoundRow | None = None) -> str:
    """What a person should read of an event that is no step, safe to print: a plan has several
    lines, all else one; empty: nothing. round: that it commits."""
    match event.WhichOneof("kind"):
        case "state":
            return _stands(event)
        case "plan":
            cuts = [
                f"[{s.start}, {s.stop}) on {safe(some_of(s.holders, MOST_HOLDERS, ' + '))}"
                for s in event.plan.stages
            ]
            lines = [f"plan of term {event.term}: {count_of(len(cuts), 'stage')}"]
            lines += [f"  stage {i}: operators {cut}" for i, cut in enumerate(cuts)]
            return "\n".join([*lines, *(f"  {safe(reason)}" for reason in event.report.reasons)])
        case "formed":
            return "\n".join(safe(line) for line in formation_lines(event.formed, {}))
        case "note":
            return safe(event.note)
        case "checkpoint":
            return f"checkpoint after step {event.checkpoint.step}"
        case "round_planned" if event.round_planned.attempt > 1:
            return round_rows.planned(event)
        case "evaluated":
            return round_rows.evaluated(event)
    return "" if round is None else round_rows.sentence(round)


def row_of(
    event: RunEvent, tokens_per_step: int = 0, round: RoundRow | None = None
) -> dict[str, Any]:
    """An event for programs. tokens_per_step 0: not known. round: that it commits, of a run whose
    events were seen. What is no finite number is None, as JSON has none."""
    row: dict[str, Any] = {"event": event.number, "term": event.term, "at_s": event.at_s}
    row |= {"replica": event.replica, "kind": event.WhichOneof("kind")}
    match event.WhichOneof("kind"):
        case "step":
            row |= finite(step_numbers(event.step, tokens_per_step))
            return row
        case "state":
            phase = Phase.Name(event.state.phase).lower()
            row |= {"phase": phase, "step": event.state.step, "steps": event.state.steps}
            row |= {"round": event.state.round, "stop_at_s": event.state.stop_at_s or None}
        case "round_begun":
            work = [
                {"replica": w.replica, "first_step": w.first_step, "steps": w.steps}
                for w in event.round_begun.work
            ]
            text = round_rows.begun(event)
            return row | {"round": event.round_begun.round, "work": work, "text": text}
        case "chosen":
            return row | {"round": event.chosen.round, "clients": list(event.chosen.clients)}
        case "round_planned":
            found, text = event.round_planned, round_rows.planned(event)
            row |= {"round": found.round, "attempt": found.attempt, "text": text}
            members = [
                {"replica": m.replica, "samples": round_rows.samples_of(m)} for m in found.members
            ]
            return row | {"members": members, "joiners": list(found.joiners)}
        case "round_done" if round is not None:
            row |= finite(round.table())
        case "evaluated":
            row |= finite(evaluation_numbers(event.evaluated))
    return row | {"text": note_of(event, round)}


def _apart(state: RunState) -> bool:
    """Whether steps are those of replicas that train apart, which each count their own."""
    return len(state.replicas) > 1


class _Told:
    """What people read of a run while it goes on."""

    def __init__(
        self, run: Run, tokens_per_step: int, counted: str = "tokens", *, verbose: bool
    ) -> None:
        self.run, self.tokens_per_step, self.verbose = run, tokens_per_step, verbose
        self.counted = counted
        self.planned = False
        """Whether a plan was told in full: of the ones behind it a line is enough."""
        self.formed = False
        """Whether replicas were told of: what each of them plans is not."""
        self.held_out = self.last = ""

    def note(self, event: RunEvent, state: RunState, round: RoundRow | None) -> str:
        """Lines on an event that is no step; empty: none. A bad end is said once, as the error."""
        if event.HasField("state") and event.state.phase in (FAILED, CANCELLED):
            return ""
        if self.verbose or event.WhichOneof("kind") not in ("plan", "formed"):
            before, self.last = self.last, note_of(event, round)
            return "" if self.last == before else self.last  # as of each replica
        if event.HasField("formed"):
            self.formed = True
            return "\n".join([*formed_in_short(event.formed), self._rest()])
        if self.formed or _apart(state):
            return ""
        names = self.run.client.names()
        lines = list(planned_in_short(event, max(0, state.steps - state.step), names))
        if self.planned:
            return f"another plan: {lines[0].removeprefix('who trains').strip()}"
        self.planned = True
        return "\n".join([*lines, self._rest()])

    def _rest(self) -> str:
        return f"             why, and all else: shoal logs {self.run.id}"

    def step(self, event: RunEvent, state: RunState) -> str:
        """The figures of a step; the newest held-out loss stays."""
        done = event.step
        if done.HasField("evaluation"):
            self.held_out = f"held-out {loss_text(done.evaluation.loss, done.evaluation.weight)}"
        parts = [f"loss {loss_text(done.outcome.loss, done.outcome.weight)}", self.held_out]
        if done.outcome.skipped:
            parts.append(f"skipped: overflow at loss scale {done.outcome.loss_scale:g}")
        if self.verbose:
            parts += [f"lr {done.outcome.lr:.2e}", f"norm {done.outcome.grad_norm:.3g}"]
        if self.tokens_per_step and done.seconds > 0:
            own = self.tokens_per_step / max(1, len(state.replicas))
            parts.append(f"{number(own / done.seconds)} {self.counted}/s")
        parts.append(f"{done.seconds:.2f} s/step")
        return " · ".join(filter(None, parts))


class _View:
    """Shows events; nothing is to be begun or ended."""

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...

    def show(self, event: RunEvent, state: RunState, round: RoundRow | None) -> None:
        raise NotImplementedError


class _Lines(_View):
    """Plain lines on stderr."""

    def __init__(self, told: _Told) -> None:
        self.told = told
        self.next_at = 0.0
        self.pace_s = 0.0
        """Seconds of a step: the mean, in which the newer ones count for more."""

    def show(self, event: RunEvent, state: RunState, round: RoundRow | None) -> None:
        if not event.HasField("step"):
            if note := self.told.note(event, state, round):
                print(note, file=sys.stderr, flush=True)
            return
        took = event.step.seconds
        self.pace_s = 0.9 * self.pace_s + 0.1 * took if self.pace_s else took
        line = self.told.step(event, state)
        notable = event.step.HasField("evaluation") or event.step.outcome.skipped
        if notable or time.monotonic() >= self.next_at:
            self.next_at = time.monotonic() + LINE_EVERY_S
            done = f"step {event.step.step + 1}/{state.steps}"
            by_steps_s: float | None = (state.steps - event.step.step - 1) * self.pace_s
            if _apart(state):
                done = f"replica {event.replica}, its step {event.step.step + 1}"
                by_steps_s = None
            if left := time_left(by_steps_s, state.stop_at_s, event.at_s):
                line += f" · {long_time_text(left)} left"
            print(f"{done} · {line}", file=sys.stderr, flush=True)


class _Bar(_View):
    """A progress bar on a terminal's stderr, notes above it."""

    def __init__(self, told: _Told) -> None:
        self.told = told
        self.console = Console(stderr=True)
        self.bar = progress_bar(self.console)
        self.task = self.bar.add_task("waiting", total=None, figures="", stop_at_s=0.0)

    def __enter__(self) -> None:
        self.bar.start()

    def __exit__(self, *error: object) -> None:
        self.bar.stop()

    def show(self, event: RunEvent, state: RunState, round: RoundRow | None) -> None:
        stop_at_s = on_clock(self.bar, state.stop_at_s, event.at_s)
        self.bar.update(self.task, stop_at_s=stop_at_s)
        if event.HasField("step"):
            line = self.told.step(event, state)
            if _apart(state):
                line = f"replica {event.replica}: {line}"
            else:
                self.bar.update(self.task, completed=event.step.step + 1)
            self.bar.update(self.task, figures=line)
            if event.step.outcome.skipped:
                note = f"step {event.step.step + 1}: {line}"
                self.console.print(note, markup=False, highlight=False)
            return
        if event.HasField("state"):
            phase = Phase.Name(event.state.phase).lower()
            self.bar.update(self.task, description=phase, total=event.state.steps or None)
        if round is not None and round.step is not None:
            self.bar.update(self.task, completed=round.step)
        if note := self.told.note(event, state, round):
            self.console.print(note, markup=False, highlight=False)


class _Json(_View):
    """One JSON object per event on stdout."""

    def __init__(self, tokens_per_step: int) -> None:
        self.tokens_per_step = tokens_per_step

    def show(self, event: RunEvent, state: RunState, round: RoundRow | None) -> None:
        print(json_module.dumps(row_of(event, self.tokens_per_step, round)), flush=True)
