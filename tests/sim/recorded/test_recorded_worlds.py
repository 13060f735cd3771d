"""Named worlds under recorded plans: losses, norms, weights and event logs are the recorded ones to
the bit.

A net for changes that must change nothing. No plan is searched for, so another search changes
nothing here; that what is searched for is as fast stands in `test_fresh_plans.py`.

Bits are of x86-64, one thread, and the version of torch that constraints.txt pins. Kernels differ
between processors in their last digits, so bits are recorded by kind of machine, beside those of a
plain loop in one process: on such a machine both must have them again. Elsewhere losses are
compared with the loop as it is there (I1). Times, orders and bytes of the event log follow from no
tensor and are compared everywhere.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from shoal.tests.sim.played_rounds import Rounds

from .fed import Answers, written_plan
from .named_worlds import WORLDS, NamedWorld
from .playing import Laboratories, PlayedWorld, played
from .records import (
    FOLDER,
    assert_orders,
    bits_of,
    lines_of,
    log_of_world,
    machine,
    read,
    write,
)


@pytest.fixture(scope="module")
def plain() -> dict[Any, Any]:
    """Plain loops by job."""
    return {}


def plain_of(lab: Any, known: dict[Any, Any]) -> Any:
    """The plain loop of a laboratory's job, once for worlds that differ in plans only."""
    key = (lab.job.model, lab.job.train)
    if repr(key) not in known:
        known[repr(key)] = lab.plain()
    return known[repr(key)]


def recorded(lab: Any, named: NamedWorld, loop: Any) -> dict[str, Any]:
    """A search in a world of ghosts, unless the plan is by hand; then a run with what was found."""
    answers = Answers()
    if named.by_hand is not None:
        plan = named.by_hand(lab.graph, lab.job.train.microbatches)
        answers.tables.append({"plans": [written_plan(plan, lab.graph)]})
    else:
        answers = played(lab, named, ghosts=True).answers
    found = played(lab, named, answers)
    assert named.contains((lab.graph, found.plans, found.events))
    return {
        "answers": answers.tables,
        "log": log_of_world(lines_of(found)),
        "bits": {machine(): bits_of(found, loop)},
    }


def assert_plain(lab: Any, named: NamedWorld, found: PlayedWorld, loop: Any) -> None:
    """I1: it is the loop, unless something is lossy or rebuilt; of rounds, the loop of replicas."""
    if named.rounds:
        rounds = Rounds(lambda job: copy.copy(lab))
        rounds.job = lab.job
        rounds.assert_expected(found.world, found.run)
    losses = [e.step.outcome.loss for e in found.events if e.HasField("step")]
    if named.exact and not named.rounds:
        assert losses == pytest.approx(loop.losses, rel=1e-5)
    elif not named.rounds:
        assert losses != pytest.approx(loop.losses, rel=1e-7), f"{named} changes nothing"
        assert losses == pytest.approx(loop.losses, rel=0.1)


@pytest.mark.parametrize("name", WORLDS)
def test_a_world_has_its_recorded_bits(
    laboratories: Laboratories, plain: dict[Any, Any], records: str, tmp_path: Path, name: str
) -> None:
    named = WORLDS[name]
    lab = laboratories.of(named)
    loop = plain_of(lab, plain)
    if records == "anew":
        write(FOLDER, name, recorded(lab, named, loop))
    wanted = read(FOLDER, name)
    answers = Answers(wanted["answers"])
    assert_orders(answers, lab.graph)
    found = played(lab, named, answers, check=False)
    assert named.contains((lab.graph, found.plans, found.events)), f"it is not about {name}"
    assert_plain(lab, named, found, loop)
    lines = lines_of(found)
    (tmp_path / "events.txt").write_text("\n".join(lines))
    got = log_of_world(lines)
    assert got == wanted["log"], (
        f"peers do something else, or at another time: compare {tmp_path / 'events.txt'} with that "
        "of the tree before"
    )
    bits = bits_of(found, loop)
    if records == "here":
        wanted["bits"][machine()] = bits
        write(FOLDER, name, wanted)
    for key, value in wanted["bits"].get(machine(), {}).items():
        assert bits[key] == value, key


def test_every_record_is_of_a_world() -> None:
    assert len({*FOLDER.glob("*.json")}) == len(WORLDS)
