"""Liars among honest members of rounds: whatever one says or does not say, rounds end, and honest
members keep their place in them."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shoal.broker.events import Instruction
from shoal.tests.hostile.scripted_rounds import Lie, Member, ScriptedRounds, any_lie

ALL = frozenset({"p1", "p2", "p3"})
LIES = {
    "lacks all": Lie(lacks=("p1", "p2", "p3")),
    "lacks one": Lie(lacks=("p2",)),
    "overflows": Lie(problem="overflow", again=3),
    "withholds from all": Lie(withholds=ALL),
    "withholds from one": Lie(withholds=frozenset({"p1"})),
    "cheats all": Lie(cheats=ALL),
    "cheats one": Lie(cheats=frozenset({"p2"})),
    "is silent": Lie(silent=True),
    "is late": Lie(late=True),
    "is wrong": Lie(wrong=True),
}
ROUNDS = 24


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_one_liar_costs_honest_members_a_few_attempts_and_no_place(lie: Lie) -> None:
    game = ScriptedRounds(4, {"p0": lie})
    game.play(ROUNDS)
    assert len(game.done) >= ROUNDS, game.notes[-9:]
    inside = game.inside(ROUNDS)
    for honest in ("p1", "p2", "p3"):
        assert inside[honest] >= ROUNDS - 2, (inside, game.notes)
    assert sum(d.attempt - 1 for d in game.done) <= 12, game.notes
    spent = sum(d.seconds for d in game.done)
    assert spent < 1000, "each failed attempt takes a minute, and few may fail"


@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 2**32))
@example(108)
def test_whatever_one_does_rounds_end_with_the_honest_members(seed: int) -> None:
    rng = random.Random(seed)
    count = rng.randint(3, 6)
    names = [f"p{i}" for i in range(count)]
    [liar] = rng.sample(names, 1)
    lie = any_lie(rng, [n for n in names if n != liar])
    game = ScriptedRounds(count, {liar: lie})
    game.play(20, 6000.0)
    assert len(game.done) >= 20, (lie, game.notes[-9:])
    inside = game.inside(10)
    for honest in set(names) - {liar}:
        assert inside[honest] >= 8, (lie, inside, game.notes)


def test_exponents_come_down_again() -> None:
    game = ScriptedRounds(4, {"p0": Lie(problem="overflow")})
    game.play(3)
    game.members["p0"].lie = Lie()
    game.play(80)
    plans = [m.plan for m in game.members.values() if m.plan is not None]
    assert {p.exponent for p in plans} == {10}


def test_two_words_have_a_larger_exponent_and_one_has_not() -> None:
    game = ScriptedRounds(4, {})
    game.play(1)
    for name in ("p0", "p1"):
        game.members[name].lie = Lie(problem="overflow")
    highest = 0
    while len(game.done) < 2 and not game.over:
        game.play(len(game.done) + 1, 10.0)
        highest = max(m.plan.exponent for m in game.members.values() if m.plan)
        if highest > 22:
            game.members["p0"].lie = game.members["p1"].lie = Lie()
            for member in game.members.values():
                member.said = False
    assert highest > 22
    assert len(game.done[-1].members) == 4


def test_who_reports_its_steps_at_once_gets_a_bounded_share() -> None:
    game = ScriptedRounds(3, {})
    game.members["p0"].step_s = 1e-4
    game.play(30)
    shares = game.shares()
    assert shares["p0"] <= 4 * max(shares["p1"], shares["p2"]) + 4, shares


def test_two_replicas_go_on_though_one_says_that_it_lacks_the_other() -> None:
    game = ScriptedRounds(2, {"p0": Lie(lacks=("p1",))})
    game.play(30)
    assert len(game.done) >= 30, game.notes
    assert game.inside(20)["p1"] >= 18, (game.inside(20), game.notes)


class HeldBack(ScriptedRounds):
    """p1 makes its steps, and its contribution takes long, while `waits`."""

    waits = False

    def _report(self, member: Member, number: int, attempt: int, **keys: Any) -> list[Instruction]:
        if self.waits and member.name == "p1" and not attempt:
            return []
        return super()._report(member, number, attempt, **keys)


def test_a_liar_ends_no_run_of_two_replicas_while_the_other_is_late() -> None:
    """Who only came late contributes after all, where nothing of the other one counts."""
    game = HeldBack(2, {})
    game.play(2)
    liar, honest = game.members["p0"], game.members["p1"]
    game.waits, liar.lie = True, Lie(problem="overflow", again=4)
    while not any("in time" in note for note in game.notes) and not game.over:
        game.play(9, 10.0)
    assert not game.over, game.world.state(game.run).reason.text
    done, game.waits = len(game.done), False
    assert honest.start is not None
    game.settle(game._report(honest, honest.start.round, 0))
    game.play(done + 3, 3000.0)
    assert not game.over, game.world.state(game.run).reason.text
    assert len(game.done) >= done + 3, game.notes[-9:]
