"""What people see of a simulation while it runs: peers, links, step and loss, in a terminal.

`LiveState` takes in what happens and holds the state, `render` draws one state, and `LiveView` is
the thin shell that shows it: on a terminal a screen that is drawn anew a few times a second,
elsewhere plain lines, and nothing where nothing is wanted.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TextIO

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ..broker import round_rows
from ..broker.round_rows import RoundRow, RoundRows
from ..net.printable import printable
from ..proto import broker_pb2
from .report.words import thousands
from .trace import Mark

__all__ = ["LiveState", "LiveView", "Mode", "PeerRow", "mode", "render"]

Mode = Literal["screen", "lines", "nothing"]
LINE_EVERY_S = 5.0
"""Plain lines: a step is told at most this often, and after each evaluation."""
MOST_PEERS, MOST_LINKS, MOST_NOTES = 16, 6, 4
"""Rows of the screen."""
_STATES = {
    "kill": "lost",
    "lost": "lost",
    "stop": "frozen",
    "leave": "left",
    "go_on": "training",
    "join": "pool",
    "joined": "pool",
}
"""What marks say of the peer that they are about."""
_STYLES = {"lost": "bold red", "frozen": "yellow", "left": "yellow", "pool": "dim"}
_BARS = "▁▂▃▄▅▆▇█"


@dataclass(slots=True)
class PeerRow:
    """One peer, as it is now."""

    name: str
    stages: tuple[int, ...] = ()
    state: str = "pool"
    step: int = -1
    replica: int = 0
    """That it belongs to; each of several counts its own steps."""


@dataclass
class LiveState:
    """The state that is shown. `names`: peers' names by id, for what the broker says."""

    title: str
    names: Mapping[str, str] = field(default_factory=dict)
    tokens_per_step: int = 0
    counted: str = "tokens"
    phase: str = "waiting"
    reason: str = ""
    step: int = 0
    """Steps that are done."""
    steps: int = 0
    loss: float | None = None
    held_out: float | None = None
    step_s: float = 0.0
    clock_s: float | None = None
    """The world's, where it is virtual."""
    peers: dict[str, PeerRow] = field(default_factory=dict)
    links: dict[tuple[str, str], float] = field(default_factory=dict)
    """Bytes per second of the last step, by sender and receiver."""
    learns: bool = True
    """Whether losses say something; those of hashes do not."""
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=24))
    notes: deque[str] = field(default_factory=lambda: deque(maxlen=MOST_NOTES))
    replicas: int = 1
    round: RoundRow | None = None
    """The newest that is committed, of several replicas."""
    played: RoundRows = field(default_factory=lambda: RoundRows(keep=False))

    def event(self, event: broker_pb2.RunEvent) -> None:
        """Takes in one event of the run."""
        round = self.played.see(event)
        kind = event.WhichOneof("kind")
        if kind == "state":
            state = event.state
            self.phase = broker_pb2.Phase.Name(state.phase).lower()
            self.reason, self.step = state.reason.text, state.step
            self.steps = state.steps or self.steps
            self.replicas = max(1, len(state.replicas))
            for row in self.peers.values():
                if row.stages and row.state in ("building", "training", "exporting", "done"):
                    row.state = {"running": "training"}.get(self.phase, self.phase)
        elif kind == "plan":
            held: dict[str, list[int]] = {}
            for i, slot in enumerate(event.plan.stages):
                for holder in slot.holders:
                    held.setdefault(self._name(holder), []).append(i)
            for spare in event.report.spares:
                held.setdefault(self._name(spare.peer), [])
            for row in self.peers.values():
                if row.replica == event.replica:
                    row.stages = ()
            for name, stages in held.items():
                row = self._row(name)
                if row.stages and not stages:
                    continue  # another replica's
                row.replica = event.replica
                row.stages, row.state = tuple(stages), "building" if stages else "pool"
            self.notes.extend(event.report.reasons)
        elif kind == "step":
            self._stepped(event.step, event.replica)
        elif kind == "note":
            self.notes.append(event.note)
        elif kind == "evaluated":
            self.held_out = event.evaluated.evaluation.loss
        elif round is not None:
            self.round = round
            self.step = self.step if round.step is None else round.step
            if round.loss is not None:
                self._learned(round.loss)

    def _learned(self, loss: float) -> None:
        self.loss = loss
        self.losses.append(loss)

    def _stepped(self, done: broker_pb2.StepDone, replica: int) -> None:
        self.step_s = done.seconds
        if self.replicas == 1:
            self.step = done.step + 1
            self._learned(done.outcome.loss)
        if done.HasField("evaluation"):
            self.held_out = done.evaluation.loss
        for row in self.peers.values():
            if row.stages and row.replica == replica and row.state != "lost":
                row.step, row.state = done.step + 1, "training"
        self.links.clear()
        for use in done.links:
            if use.source and use.bytes and done.seconds > 0:
                link = self._name(use.source), self._name(use.destination)
                self.links[link] = self.links.get(link, 0.0) + use.bytes / done.seconds

    def mark(self, mark: Mark) -> None:
        """Takes in a moment of the trace."""
        self.notes.append(f"{mark.at_s:.1f} s: {mark.what} {mark.who} {mark.text}".rstrip())
        if (state := _STATES.get(mark.what)) and mark.who in self.peers:
            self.peers[mark.who].state = state

    def _name(self, peer: str) -> str:
        return self.names.get(peer, peer)

    def _row(self, name: str) -> PeerRow:
        return self.peers.setdefault(name, PeerRow(name))

    @property
    def tokens_per_s(self) -> float:
        return self.tokens_per_step / self.step_s if self.step_s else 0.0


def render(view: LiveState, *, rows: int = MOST_PEERS) -> RenderableType:
    """One state, as rich draws it; at most `rows` peers, those that are not well first."""
    parts: list[RenderableType] = [_head(view)]
    if view.peers:
        parts.append(_peers(view, rows))
    if view.links:
        parts.append(_links(view))
    for note in view.notes:
        parts.append(Text(f"· {printable(note)}", style="dim", overflow="ellipsis", no_wrap=True))
    return Group(*parts)


def _head(view: LiveState) -> Text:
    text = Text(printable(view.title), style="bold")
    text.append(f"  {view.phase}", style="red" if view.phase == "failed" else "green")
    if view.reason:
        text.append(f": {printable(view.reason)}", style="not bold")
    text.append("\n")
    figures = [f"step {view.step}/{view.steps}" if view.steps else f"step {view.step}"]
    if view.replicas > 1:
        done = view.round.round + 1 if view.round is not None else 0
        figures.append(f"{done} rounds of {view.replicas} replicas")
    if view.loss is not None and view.learns:
        figures.append(f"loss {view.loss:.3f} {_sparks(view.losses)}")
    if view.held_out is not None and view.learns:
        figures.append(f"held-out {view.held_out:.3f}")
    if view.step_s:
        figures.append(f"{view.step_s:.3g} s/step")
    if view.tokens_per_s:
        figures.append(f"{thousands(view.tokens_per_s)} {view.counted}/s")
    if view.clock_s is not None:
        figures.append(f"{view.clock_s:.1f} s virtual")
    return text.append(" · ".join(figures), style="not bold")


def _peers(view: LiveState, rows: int) -> RenderableType:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("peer", "stage", "state", "step"):
        table.add_column(
            name, justify="right" if name == "step" else "left", no_wrap=True, overflow="ellipsis"
        )
    order = {"lost": 0, "frozen": 1, "left": 2, "pool": 4}
    ranked = sorted(view.peers.values(), key=lambda p: (order.get(p.state, 3), p.stages, p.name))
    for peer in ranked[:rows]:
        table.add_row(
            Text(printable(peer.name)),
            " ".join(map(str, peer.stages)) or "-",
            Text(peer.state, style=_STYLES.get(peer.state, "")),
            str(peer.step) if peer.step >= 0 else "-",
        )
    if len(ranked) <= rows:
        return table
    states: dict[str, int] = {}
    for peer in ranked[rows:]:
        states[peer.state] = states.get(peer.state, 0) + 1
    more = ", ".join(f"{n} {state}" for state, n in states.items())
    return Group(table, Text(f"and {len(ranked) - rows} more: {more}", style="dim"))


def _links(view: LiveState) -> RenderableType:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("busiest links", no_wrap=True, overflow="ellipsis")
    table.add_column("MB/s in the last step", justify="right", no_wrap=True)
    ranked = sorted(view.links.items(), key=lambda item: (-item[1], item[0]))
    for (source, destination), rate in ranked[:MOST_LINKS]:
        table.add_row(Text(f"{printable(source)} -> {printable(destination)}"), f"{rate / 1e6:.3g}")
    return table


def mode(*, quiet: bool, json: bool, terminal: bool) -> Mode:
    """How to show it: on a screen only where people look at one."""
    if quiet:
        return "nothing"
    return "screen" if terminal and not json else "lines"


class LiveView:
    """`with LiveView(view, mode) as shown:` and then `shown.event(…)`, `shown.mark(…)`,
    `shown.say(…)` as things happen; all in one thread. `stream`: standard error unless given.
    `clock`: seconds, for how often plain lines come."""

    def __init__(
        self,
        view: LiveState,
        mode: Mode,
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.view, self.mode, self._clock = view, mode, clock
        self._console = Console(file=stream or sys.stderr)
        self._lock = threading.Lock()  # the screen is drawn in a thread of its own
        self._next_at = 0.0
        self._live: Live | None = None

    def __enter__(self) -> LiveView:
        if self.mode == "screen":
            self._live = Live(
                console=self._console,
                get_renderable=self._renderable,
                refresh_per_second=5,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def say(self, line: str) -> None:
        """A sentence that is no event of the run: what the simulation itself is about to do."""
        with self._lock:
            self.view.notes.append(line)
        if self.mode == "lines":
            self._print(line)

    def event(self, event: broker_pb2.RunEvent) -> None:
        with self._lock:
            self.view.event(event)
        if self.mode == "lines":
            for line in self._lines(event):
                self._print(line)

    def mark(self, mark: Mark) -> None:
        with self._lock:
            self.view.mark(mark)
        if self.mode == "lines":
            self._print(self.view.notes[-1])

    def _lines(self, event: broker_pb2.RunEvent) -> list[str]:
        kind = event.WhichOneof("kind")
        if kind == "plan":
            return [f"plan: {reason}" for reason in event.report.reasons]
        if kind == "state" and event.state.reason.text:
            return [f"{self.view.phase}: {event.state.reason.text}"]
        if kind == "note":
            return [event.note]
        if kind == "round_done" and self.view.round is not None:
            return [round_rows.sentence(self.view.round)]
        if kind == "evaluated" and self.view.learns:
            return [round_rows.evaluated(event)]
        now = self._clock()
        if kind != "step" or not (event.step.HasField("evaluation") or now >= self._next_at):
            return []
        self._next_at = now + LINE_EVERY_S
        text = f"step {event.step.step}"
        if self.view.replicas > 1:
            text = f"replica {event.replica}, its {text}"
        if not self.view.learns:
            return [text]
        text += f": loss {event.step.outcome.loss:.3f}"
        if event.step.outcome.skipped:
            text += f", skipped: overflow at loss scale {event.step.outcome.loss_scale:g}"
        if event.step.HasField("evaluation"):
            text += f", held-out {event.step.evaluation.loss:.3f}"
        return [text]

    def _print(self, line: str) -> None:
        print(printable(line), file=self._console.file, flush=True)

    def _renderable(self) -> RenderableType:
        spare = MOST_LINKS + MOST_NOTES + 9
        with self._lock:
            return render(self.view, rows=max(3, min(MOST_PEERS, self._console.height - spare)))


def _sparks(values: deque[float]) -> str:
    finite = [v for v in values if v - v == 0]
    if len(finite) < 2 or max(finite) == min(finite):
        return ""
    low, span = min(finite), max(finite) - min(finite)
    return "".join(_BARS[round(7 * (v - low) / span)] for v in finite)
