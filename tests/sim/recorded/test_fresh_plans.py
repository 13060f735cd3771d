"""A plan that is searched for today takes, executed by ghosts, at most as long as the recorded
one."""

from __future__ import annotations

import pytest

from .fed import Answers
from .named_worlds import WORLDS
from .playing import Laboratories, played
from .records import FOLDER, read

FAST = ("1f1b", "interleaved", "diloco")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in FAST else pytest.mark.slow) for n in WORLDS]
)
def test_a_fresh_plan_takes_at_most_as_long(laboratories: Laboratories, name: str) -> None:
    named = WORLDS[name]
    lab = laboratories.of(named)
    answers = Answers(read(FOLDER, name)["answers"])
    before = played(lab, named, answers, ghosts=True, check=False)
    fresh = played(lab, named, ghosts=True, check=False)
    ratio = fresh.seconds / before.seconds
    assert ratio <= 1 + 1e-9, f"{ratio} times as long: {fresh.plans} instead of {before.plans}"
