"""Faults as sentences, and when they happen, on a stage that writes down what is done to it."""

from __future__ import annotations

import operator
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.dag.schedule.schedule import Action
from shoal.job.settings import SettingsError
from shoal.peer.core import events as p
from shoal.proto.broker_pb2 import RoundBegun, RoundStart, RunEvent
from shoal.sim.faults import damage, faults
from shoal.sim.faults.churn import random_churn
from shoal.sim.faults.damage import FLAP_S
from shoal.sim.faults.faults import Faults
from shoal.sim.scenario import sentences as f
from shoal.sim.scenario.mishaps import FaultTable
from shoal.sim.scenario.sentences import sentence
from shoal.sim.shaped.surface import Surface
from shoal.sim.virtual.clock import Observed, VirtualClock
from shoal.sim.virtual.control import BROKER
from shoal.sim.virtual.world import PeerSpec

NAMES = ("a", "b", "spare")


class Stage(VirtualClock):
    """What faults need of a world."""

    def __init__(self) -> None:
        super().__init__()
        self.observe: Any = None
        self.done: list[tuple[Any, ...]] = []
        self.parted: set[tuple[str, str]] = set()
        self.factors: dict[tuple[str, str], float] = {}
        self.unmet: set[tuple[str, str]] = set()
        self.network = SimpleNamespace(break_link=lambda a, b: self.note("break", a, b))
        self.peers: dict[str, Any] = {}
        for i, name in enumerate(NAMES):
            self.join(PeerSpec(name=name, place="us" if i == 2 else "eu", memory_bytes=i << 30))
        self.done.clear()

    def note(self, *what: Any) -> None:
        self.done.append((round(self.now, 6), *what))

    def join(self, spec: PeerSpec) -> None:
        self.note("join", spec.name)
        self.peers[spec.name] = SimpleNamespace(spec=spec, alive=True, exit=None)

    def kill(self, name: str) -> None:
        self.note("kill", name)
        self.peers[name].alive = False

    def leave(self, name: str) -> None:
        self.note("leave", name)
        self.peers[name].exit = p.Exit(0, "")

    def stop(self, name: str) -> None:
        self.note("stop", name)

    def go_on(self, name: str) -> None:
        self.note("go_on", name)

    def cut(self, name: str) -> None:
        self.note("cut", name)

    def part(self, a: str, b: str) -> None:
        assert (a, b) not in self.parted
        self.parted.add((a, b))

    def mend(self, a: str, b: str) -> None:
        self.parted.remove((a, b))

    def slow(self, a: str, b: str, factor: float) -> None:
        self.factors[a, b] = factor

    def corrupt(self, a: str, b: str) -> None:
        self.note("corrupt", a, b)

    def corrupts(self, a: str, b: str) -> bool:
        return (a, b) in self.unmet

    def restart_broker(self) -> None:
        self.note("broker_restart")

    # ------------------------------------------------------------ what a test lets happen

    def see(self, who: str, record: Any) -> None:
        self.observe(Observed(self.now, who, record))
        self.run(0.0)

    def built(self, *names: str) -> None:
        for name in names:
            self.see(name, p.Built("r", 1, None, (), 0, 20))  # type: ignore[arg-type]

    def computes(self, who: str, step: int, action: str) -> None:
        self.see(who, p.Compute("r", 1, step, Action.parse(action)))

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        self.after(seconds, lambda: None)
        self.until(lambda: self.now >= end and self.next_s > end)


def playing(*faults: Any, **options: Any) -> tuple[Stage, Faults]:
    stage = Stage()
    made = Faults(stage, faults, **options)  # type: ignore[arg-type]
    made.start()
    return stage, made


# -------------------------------------------------------------------- sentences


def test_a_sentence_is_what_a_table_says():
    for said, table in (
        (
            f.kill("peer-3", at_step=20, phase="backward"),
            {"do": "kill", "who": ["peer-3"], "at_step": 20, "phase": "backward"},
        ),
        (
            f.cut_off(["eu"], ["us"], at_s=60, for_s=30),
            {"do": "cut-off", "who": ["eu"], "with": ["us"], "at": "60s", "for": "30s"},
        ),
        (
            f.slow("a", "b", factor=10),
            {"do": "slow", "who": ["a"], "with": ["b"], "at": "0s", "factor": 10.0},
        ),
    ):
        assert said == FaultTable.from_table(table)


def test_a_fault_reads_as_a_sentence():
    assert sentence(f.kill("p3", at_step=20, phase="clip")) == "kill p3 at step 20 (clip)"
    said = sentence(f.cut_off("eu", "us", at_s=60, for_s=30))
    assert said == "cut-off eu and us at 60 s for 30 s"
    assert sentence(f.slow("a", factor=10)) == "slow a 10 times at 0 s"


def test_what_is_not_built_is_refused_by_name():
    with pytest.raises(SettingsError, match="`phase`"):
        f.kill("a", at_step=1, phase="snapshot")
    with pytest.raises(SettingsError, match="cannot be corrupted"):
        playing(f.corrupt("a", "broker"))


def test_the_broker_is_started_again_by_a_fault_of_nobody():
    table = FaultTable.from_table({"do": "broker_restart", "at": "1s"})
    assert table == f.broker_restart(at_s=1)
    assert sentence(f.broker_restart(at_step=2)) == "broker_restart at step 2"
    stage, faults = playing(f.broker_restart(at_step=2), f.broker_restart(at_s=9))
    stage.built("a")
    stage.computes("a", 2, "F0@0")
    assert [what for _, what in stage.done] == ["broker_restart"]
    assert faults.fired[1].at_s is None
    stage.run(9.0)
    assert not faults.missed()


def test_an_unknown_peer_is_refused_with_the_nearest_name():
    with pytest.raises(SettingsError, match='did you mean "spare"'):
        playing(f.kill("spar"))


# -------------------------------------------------------------------- when


def test_a_fault_with_a_time_happens_then_and_is_undone():
    stage, faults = playing(f.stop("a", at_s=5, for_s=2))
    stage.run(4.9)
    assert stage.done == []
    assert faults.fired[0].at_s is None
    stage.run(5)
    assert stage.done == [(5.0, "stop", "a"), (7.0, "go_on", "a")]
    assert faults.fired[0].at_s == 5.0
    assert faults.missed() == ()


@pytest.mark.parametrize(
    ("phase", "actions"),
    [
        ("forward", ["F0@0"]),
        ("backward", ["B0@0"]),
        ("clip", [">@norm", "+1@norm", "<2@norm"]),
        ("update", ["U"]),
    ],
)
def test_a_fault_in_a_step_happens_when_its_peer_begins_the_phase(phase, actions):
    others = {"F0@0", "B0@0", ">@norm", "<2@norm", "U", ">@grad0"} - set(actions)
    for action in actions:
        stage, _ = playing(f.kill("a", at_step=3, phase=phase))
        stage.built("a", "b")
        stage.computes("a", 2, action)
        stage.computes("b", 3, action)
        for other in sorted(others):
            stage.computes("a", 3, other)
        assert stage.done == []
        stage.computes("a", 3, action)
        stage.computes("a", 3, action)
        assert stage.done == [(0.0, "kill", "a")]


def test_a_fault_in_a_round_happens_when_its_peer_begins_it():
    assert sentence(f.kill("a", at_round=2)) == "kill a at round 2"
    stage, faults = playing(f.kill("a", at_round=2), f.broker_restart(at_round=1))
    stage.built("a", "b")

    def begins(who: str, number: int) -> None:
        stage.see(who, p.BeginRound("r", 1, RoundStart(round=number)))

    begins("a", 0)
    stage.computes("a", 2, "F0@0")
    begins("b", 2)
    assert stage.done == []
    begins("b", 1)
    begins("a", 1)
    assert [what for _, what, *_ in stage.done] == ["broker_restart"]
    begins("a", 2)
    begins("a", 2)
    assert stage.done[1:] == [(0.0, "kill", "a")]
    assert not faults.missed()


def test_a_spare_and_the_broker_follow_the_first_who_begins():
    stage, _ = playing(
        f.leave("spare", at_step=1, phase="update"),
        f.flap("spare", BROKER, at_step=2, for_s=0.5),
    )
    stage.built("a", "b")
    stage.computes("b", 1, "U")
    stage.computes("a", 1, "U")
    assert stage.done == [(0.0, "leave", "spare")]
    stage.peers["spare"].exit = None
    stage.computes("a", 2, "F0@0")
    assert stage.done[1:] == [(0.0, "cut", "spare")]


def test_other_observers_still_see_everything():
    stage, seen = Stage(), []
    stage.observe = seen.append
    Faults(stage, [f.kill("a", at_step=1)]).start()  # type: ignore[arg-type]
    stage.computes("a", 1, "F0@0")
    assert len(seen) == 1
    assert stage.done == [(0.0, "kill", "a")]


# -------------------------------------------------------------------- whether


def test_a_fault_whose_step_never_came_is_missed():
    stage, faults = playing(f.kill("a", at_step=30), f.kill("b", at_s=1))
    stage.run(2)
    (missed,) = faults.missed()
    assert missed.startswith("kill a at step 30: it did not happen")


def test_a_fault_that_found_nothing_to_do_is_missed_and_says_why():
    stage, faults = playing(f.kill("a"), f.kill("a", at_s=1), f.join("b", at_s=1))
    stage.run(2)
    assert [m.split(", ", 1)[1] for m in faults.missed()] == [
        "since a is gone already",
        "since b is here already",
    ]


def test_a_corruption_that_met_no_message_is_missed():
    stage, faults = playing(f.corrupt("a", "b"))
    stage.unmet.add(("a", "b"))
    stage.run(1)
    assert "no message came from a to b" in faults.missed()[0]
    assert stage.done == [(0.0, "corrupt", "a", "b")]


@given(unmet=st.sets(st.sampled_from(["b", "spare"])))
def test_a_corruption_towards_several_has_happened_once_one_of_them_got_a_message(
    unmet: set[str],
):
    stage, faults = playing(f.corrupt("a", ["b", "spare"]))
    stage.unmet |= {("a", name) for name in unmet}
    stage.run(1)
    assert bool(faults.missed()) == (unmet == {"b", "spare"})


# -------------------------------------------------------------------- whom, and how long


def test_a_cut_goes_both_ways_between_all_of_both_sides():
    stage, _ = playing(f.cut_off("place:eu", "us", for_s=3))
    stage.run(1)
    assert stage.parted == {("a", "spare"), ("b", "spare"), ("spare", "a"), ("spare", "b")}
    stage.run(3)
    assert stage.parted == set()


def test_one_way_only_what_the_first_send_is_concerned():
    stage, _ = playing(
        f.cut_off("place:eu", "us", for_s=3, both=False), f.slow("b", "a", factor=4, both=False)
    )
    stage.run(1)
    assert stage.parted == {("a", "spare"), ("b", "spare")}
    assert stage.factors == {("b", "a"): 4}
    stage.run(3)
    assert stage.parted == set()


def test_without_the_other_side_it_is_everyone_else_and_the_broker():
    stage, _ = playing(f.cut_off("memory>=2GiB"))
    stage.run(1)
    assert stage.parted == {
        pair for x in ("a", "b", BROKER) for pair in (("spare", x), (x, "spare"))
    }


def test_a_link_parted_by_two_faults_is_mended_by_the_last():
    stage, _ = playing(f.cut_off("a", "b", for_s=5), f.cut_off("b", "a", at_s=1, for_s=1))
    stage.run(3)
    assert stage.parted == {("a", "b"), ("b", "a")}
    stage.run(3)
    assert stage.parted == set()


def test_a_link_slowed_twice_is_as_slow_as_both_say():
    stage, _ = playing(
        f.slow("a", "b", factor=4, for_s=9), f.slow("a", "b", factor=8, at_s=1, for_s=1)
    )
    stage.run(1.5)
    assert stage.factors["a", "b"] == stage.factors["b", "a"] == 32
    stage.run(2)
    assert stage.factors["a", "b"] == 4
    stage.run(9)
    assert stage.factors["b", "a"] == 1


def test_a_flapping_link_breaks_again_and_again_and_is_up_at_the_end():
    stage, _ = playing(f.flap("a", "b", for_s=4.5 * FLAP_S))
    stage.run(0.5 * FLAP_S)
    assert stage.parted == {("a", "b"), ("b", "a")}
    stage.run(1.0 * FLAP_S)
    assert stage.parted == set()
    stage.run(10 * FLAP_S)
    assert stage.parted == set()
    assert [t for t, what, *_ in stage.done if what == "break"] == [
        t * FLAP_S for t in (0, 0, 2, 2, 4, 4)
    ]


def test_one_who_died_may_join_again_and_a_new_one_may_come():
    late = PeerSpec(name="late")
    stage, faults = playing(f.kill("a"), f.join(["a", "late"], at_s=2), specs=[late])
    stage.run(3)
    assert stage.done == [(0.0, "kill", "a"), (2.0, "join", "a"), (2.0, "join", "late")]
    assert faults.missed() == ()


def test_churn_without_an_end_is_let_happen_one_at_a_time():
    stage, faults = playing(churn=random_churn(NAMES, 60.0, 5.0, seed=4))
    stage.run(600)
    kills = [what for _, what, _ in stage.done if what == "kill"]
    assert faults.churned == len(stage.done)
    assert 15 < len(kills) < 45  # 30 on average, and 5 s of 65 away
    assert len(stage._heap) == 1


def test_real_processes_answer_what_faults_ask_of_a_world() -> None:
    surface = Surface(cast(Any, None), cast(Any, None), {}, {}, lambda mark: None)
    asked: set[str] = set()
    for source in (faults, damage):
        text = Path(source.__file__).read_text(encoding="utf-8")
        asked |= set(re.findall(r"self\._world\.([a-z_.]+)", text))
    assert {"corrupts", "network.break_link"} <= asked
    for name in sorted(asked):
        operator.attrgetter(name)(surface)


def test_real_processes_begin_a_round_when_their_broker_says_so() -> None:
    surface = Surface(cast(Any, None), cast(Any, None), {}, {}, lambda mark: None)
    played = Faults(cast(Any, surface), [f.broker_restart(at_round=1)])
    played.start()
    for number in (0, 1):
        assert not surface.pending
        surface.see(RunEvent(round_begun=RoundBegun(round=number)))
    assert surface.pending, "it is to happen"
