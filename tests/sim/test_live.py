"""The live view: one state as text, and the shell that degrades to lines."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pytest
from rich.console import Console

from shoal.proto import broker_pb2
from shoal.sim.live import LiveState, LiveView, mode, render
from shoal.sim.trace import Mark


def text(view: LiveState, rows: int = 16) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=80).print(render(view, rows=rows))
    return [line.strip() for line in out.getvalue().splitlines() if line.strip()]


def planned(*holders: str, spare: str = "") -> broker_pb2.RunEvent:
    plan, report = broker_pb2.Plan(), broker_pb2.PlanReport(reasons=["because of memory"])
    for i, holder in enumerate(holders):
        plan.stages.add(start=i, stop=i + 1, holders=[holder])
    if spare:
        report.spares.add(peer=spare, reason="slow")
    return broker_pb2.RunEvent(plan=plan, report=report)


def phase(number: int, why: str = "") -> broker_pb2.RunEvent:
    state = broker_pb2.RunState(phase=number, steps=20, reason={"text": why})
    return broker_pb2.RunEvent(state=state)


def step(number: int, loss: float, **more: object) -> broker_pb2.RunEvent:
    outcome = broker_pb2.Outcome(loss=loss)
    done = broker_pb2.StepDone(step=number, outcome=outcome, seconds=0.5, **more)
    return broker_pb2.RunEvent(step=done)


def use(source: str, destination: str, size: int) -> broker_pb2.LinkUse:
    return broker_pb2.LinkUse(source=source, destination=destination, bytes=size)


@pytest.fixture
def view() -> LiveState:
    """A run of two stages in which a peer was just lost."""
    view = LiveState("two homes · seed 7", names={"h-1": "home-1"}, tokens_per_step=1024)
    view.event(planned("h-1", "cloud-1", spare="home-2"))
    view.event(phase(broker_pb2.RUNNING))
    for i in range(4):
        uses = [use("h-1", "cloud-1", 10**6), use("h-1", "cloud-1", 10**6)]
        view.event(step(i, 4.0 - i, links=uses))
    view.mark(Mark(at_s=12.5, who="cloud-1", what="kill", text="in step 4"))
    view.clock_s = 12.5
    return view


def test_one_state_as_text(view: LiveState) -> None:
    assert text(view) == [
        "two homes · seed 7  running",
        "step 4/20 · loss 1.000 █▆▃▁ · 0.5 s/step · 2.05k tokens/s · 12.5 s virtual",
        "peer      stage   state      step",
        "─────────────────────────────────",
        "cloud-1   1       lost          4",
        "home-1    0       training      4",
        "home-2    -       pool          -",
        "busiest links       MB/s in the last step",
        "─────────────────────────────────────────",
        "home-1 -> cloud-1                       4",
        "· because of memory",
        "· 12.5 s: kill cloud-1 in step 4",
    ]


def test_of_many_peers_those_that_are_lost_stay_in_sight(view: LiveState) -> None:
    found = text(view, rows=1)
    assert any(line.startswith("cloud-1") for line in found)
    assert not any(line.startswith("home-1  ") for line in found)
    assert "and 2 more: 1 training, 1 pool" in found


def test_a_new_plan_moves_the_stages(view: LiveState) -> None:
    view.event(planned("h-1", "home-2"))
    assert {n: p.stages for n, p in view.peers.items()} == {
        "home-1": (0,),
        "home-2": (1,),
        "cloud-1": (),
    }
    view.event(phase(broker_pb2.RUNNING))
    view.event(step(4, 0.5))
    assert {n: p.state for n, p in view.peers.items()} == {
        "home-1": "training",
        "home-2": "training",
        "cloud-1": "lost",
    }


def test_names_cannot_write_on_the_terminal() -> None:
    view = LiveState("a\x1b[2Jb")
    view.event(planned("[red]p\x1b]0;x\x07"))
    view.mark(Mark(at_s=0, who="p\x1b[31m", what="kill"))
    shown = "\n".join(text(view))
    assert "\x1b" not in shown
    assert "\x07" not in shown
    assert "[red]p?]0;x?" in shown


@pytest.mark.parametrize(
    ("quiet", "json", "terminal", "wanted"),
    [
        (False, False, True, "screen"),
        (False, False, False, "lines"),
        (False, True, True, "lines"),
        (True, False, True, "nothing"),
    ],
)
def test_a_screen_only_where_people_look(
    quiet: bool, json: bool, terminal: bool, wanted: str
) -> None:
    assert mode(quiet=quiet, json=json, terminal=terminal) == wanted


def test_lines_tell_plans_reasons_marks_and_now_and_then_a_step() -> None:
    out = io.StringIO()
    times: Iterator[float] = iter([0.0, 1.0, 6.0, 7.0])
    with LiveView(LiveState("job"), "lines", stream=out, clock=lambda: next(times)) as shown:
        shown.say("starting")
        shown.event(phase(broker_pb2.WAITING, "no peers"))
        shown.event(planned("a"))
        shown.event(step(0, 4.0))
        shown.event(step(1, 3.0))  # 1 s later: not told
        shown.event(step(2, 2.0))
        shown.event(step(3, 1.0, evaluation=broker_pb2.Evaluation(loss=1.5)))
        shown.mark(Mark(at_s=3, who="a", what="kill"))
    assert out.getvalue().splitlines() == [
        "starting",
        "waiting: no peers",
        "plan: because of memory",
        "step 0: loss 4.000",
        "step 2: loss 2.000",
        "step 3: loss 1.000, held-out 1.500",
        "3.0 s: kill a",
    ]


def test_nothing_is_nothing() -> None:
    out = io.StringIO()
    with LiveView(LiveState("job"), "nothing", stream=out) as shown:
        shown.say("starting")
        shown.event(step(0, 4.0))
    assert out.getvalue() == ""


def test_a_screen_is_drawn_and_taken_away() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    out = Terminal()
    with LiveView(LiveState("job"), "screen", stream=out) as shown:
        shown.event(planned("home-1"))
        shown.event(step(0, 4.0))
    assert "home-1" in out.getvalue()
    assert out.getvalue().endswith("\x1b[2K")  # the last line is erased
