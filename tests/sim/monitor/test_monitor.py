"""The monitor's words, and the shortest world that still fails."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.job import Codec, Job
from shoal.peer.core import events as p
from shoal.proto import broker_pb2
from shoal.sim.modelled.modelled import shortened
from shoal.sim.modelled.virtual_run import run_virtual
from shoal.sim.monitor.monitor import Monitor
from shoal.sim.monitor.violation import Violation, shortest
from shoal.sim.scenario.scenario import Scenario
from shoal.sim.scenario.sentences import cut_off, kill, slow
from shoal.sim.virtual.clock import Observed
from shoal.tests.mutants.planted import loss_ignored

JOB = Job.from_table(
    {
        "version": 1,
        "name": "monitor",
        "model": {
            "factory": "shoal.examples.gpt:gpt",
            "args": {"layers": 1, "width": 8, "heads": 1, "length": 8, "dropout": 0.0},
        },
        "data": {"kind": "text", "length": 8},
        "train": {
            **{"steps": 4, "batch": 4, "microbatch": 1, "lr": 0.02},
            **{"eval_every": 2, "eval_batches": 1},
        },
    }
)
FAULTS = [
    *(kill(f"p{i}", at_step=i) for i in range(4)),
    cut_off("p0", "p1", at_s=3, for_s=1),
    slow("p0", factor=2),
]


@pytest.fixture
def lab(laboratory: Any) -> Any:
    return laboratory(JOB)


def test_a_run_with_evaluations_and_lossy_codecs_breaks_nothing(lab: Any) -> None:
    world, lossy = lab.world(3), broker_pb2.RunSpec()
    lossy.CopyFrom(lab.spec)
    job = Job.from_json(lossy.job)
    lossy.job = replace(job, codec=Codec(default="int8:block=16", feedback="ef")).to_json()
    monitor = Monitor(world, losses=lab.plain().losses, tolerance=0.2)
    events = monitor.finish(world.submit(lossy))
    assert sum(e.HasField("step") for e in events) == 4
    assert monitor.checks > 500


def test_a_wrong_loss_is_named_with_its_step_the_seed_and_the_time(lab: Any) -> None:
    world = lab.world(2)
    losses = lab.plain().losses
    losses[2] *= 1.01
    monitor = Monitor(world, seed=42, losses=losses)
    with pytest.raises(Violation) as caught:
        monitor.finish(world.submit(lab.spec))
    said = str(caught.value)
    assert caught.value.invariant == "I1"
    assert f"I1 does not hold, seed 42, at {world.now:.6f} s: step 2: loss is" in said
    assert "broker: Publish" in said
    assert "--seed 42" in said


def test_a_world_in_which_nothing_happens_any_more_is_a_violation(lab: Any) -> None:
    world = lab.world(2)
    monitor = Monitor(world, seed=1)
    run = world.submit(lab.spec)
    world._heap.clear()
    world._soon.clear()
    with pytest.raises(Violation) as caught:
        monitor.finish(run)
    assert caught.value.invariant == "I9"


# -------------------------------------------------------------------- the shortest


def violation() -> Violation:
    return Violation(7, 1.5, Observed(1.5, "p0", p.TimerFired("stall")), "I9", "it hangs")


@given(st.sets(st.integers(0, 5)), st.integers(0, 20))
def test_what_is_left_fails_and_nothing_of_it_can_be_left_out(needed: set[int], step: int) -> None:
    """The oracle: it fails exactly with these faults, and more than so many steps."""
    culprits, tries = {FAULTS[i] for i in needed}, list[int]()

    def fails(faults: Any, steps: int) -> Violation | None:
        tries.append(steps)
        return violation() if culprits <= set(faults) and steps > step else None

    found = shortest(FAULTS, 21, fails)
    assert set(found.faults) == culprits
    assert found.steps == step + 1
    assert len(tries) <= 60


def test_of_several_reasons_one_is_left() -> None:
    def fails(faults: Any, steps: int) -> Violation | None:
        return violation() if any({a, b} <= set(faults) for a, b in PAIRS) else None

    PAIRS = [tuple(FAULTS[i : i + 2]) for i in (0, 2, 4)]  # noqa: N806 (three reasons)
    found = shortest(FAULTS, 20, fails)
    assert len(found.faults) == 2
    assert fails(found.faults, found.steps)
    smaller = [c for n in range(2) for c in combinations(found.faults, n)]
    assert not any(fails(c, found.steps) for c in smaller)


def test_the_violation_says_with_what_it_still_fails() -> None:
    def fails(faults: Any, steps: int) -> Violation | None:
        return violation() if FAULTS[4] in faults and steps > 4 else None

    said = str(shortest(FAULTS, 20, fails))
    assert "still so with 5 steps and cut-off p0 and p1 at 3 s for 1 s" in said


SCENARIO = """
version = 1
job = "job.toml"
seed = 7
peers = [{name = "p{0..1}", place = "eu"}, {name = "p2", place = "us"}]
links = [{from = "eu", to = "us", latency = "20ms", bandwidth = "20Mbit"}]

[[faults]]
do = "slow"
who = ["p0"]
at = "0s"
factor = 2.0

[[faults]]
do = "kill"
who = ["place:us"]
at_step = 1
phase = "backward"
"""


def test_a_scenario_that_fails_is_played_again_with_less(lab: Any, tmp_path: Path) -> None:
    path = tmp_path / "scenario.toml"
    path.write_text(SCENARIO)
    parts = Scenario.from_toml(path), JOB, lab.spec, lab.blobs, tmp_path
    with loss_ignored():
        with pytest.raises(Violation) as caught:
            run_virtual(*parts)
        found = shortened(caught.value, *parts)
    assert [fault.do for fault in found.faults] == ["kill"]
    assert found.steps == 2
    assert shortened(found, *parts) is found, "without the bug there is nothing to shorten"


def test_what_does_not_fail_cannot_be_shortened() -> None:
    with pytest.raises(ValueError, match="nothing to shorten"):
        shortest(FAULTS, 20, lambda faults, steps: None)
