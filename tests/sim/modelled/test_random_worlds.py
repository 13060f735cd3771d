"""Worlds drawn from seeds: no invariant breaks, every fault happens, in each phase, and each comes
to what it must.

Most are worlds of ghosts, whose losses prove that every sample counted once
(`sim/ghost/hashes.py`); one in twenty has real tensors. `benchmarks/worlds/chaos.py` draws
thousands, with up to five faults each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from shoal.benchmarks.worlds import chaos
from shoal.job import Job
from shoal.proto import broker_pb2
from shoal.sim.ghost.device import Ghosts
from shoal.sim.ghost.hashes import expected
from shoal.tests.mutants.planted import forgotten_queue
from shoal.tests.sim.random_worlds import (
    CELLS,
    LOSING,
    PHASES,
    SURVIVED,
    Drawn,
    Played,
    draw,
    explain,
    play,
    shorter,
)

STEPS, MICROBATCHES = 20, 4
WORLDS, AT_ONCE, REAL = 200, 10, 20
"""So many in all and in a test; one in REAL has real tensors."""
LEAST = 3
"""How often each fault must happen in each phase, over all of them."""
TOLERANCE = 1e-4
"""Relative, of real losses: sums have another order under another cut."""
JOB = Job.from_table(
    {
        "version": 1,
        "name": "random-worlds",
        "model": {
            "factory": "shoal.examples.gpt:gpt",
            "args": {"layers": 2, "width": 8, "heads": 1, "length": 8, "dropout": 0.0},
        },
        "data": {"kind": "text", "length": 8},
        "train": {
            **{"steps": STEPS, "batch": MICROBATCHES, "microbatch": 1, "lr": 0.01},
            **{"eval_every": 0, "schedule": "constant", "warmup": 0},
        },
    }
)


@pytest.fixture(scope="module")
def lab(laboratory: Any) -> Any:
    made = laboratory(JOB)
    made.ghosts = expected(made.graph.bind(1), made.job.seed, STEPS, MICROBATCHES).losses
    made.alone = made.plain().losses
    return made


def cells_of(seed: int) -> Sequence[tuple[str, str]]:
    """Two for each world: over all of them, each of CELLS about equally often as the second."""
    survived = [cell for cell in CELLS if cell[0] in SURVIVED]
    first = survived[(seed * 11) % len(survived)]
    second = CELLS[seed % len(CELLS)]
    if (first[0], second[0]) == ("broker restarted", "holder's stream cut"):
        first = survived[0]  # while the broker is away, there is no stream to cut
    return first, second


def world_of(lab: Any, seed: int) -> Drawn:
    cells = cells_of(seed)
    return draw(seed, lab.graph, microbatches=MICROBATCHES, microbatch_size=1, cells=cells)


def ghostly(lab: Any, drawn: Drawn, **options: Any) -> Played:
    folder = lab.prepared.weights.parent
    return play(drawn, lab.spec, lab.blobs, folder, device=Ghosts(), losses=lab.ghosts, **options)


def real(lab: Any, drawn: Drawn) -> Played:
    folder = lab.prepared.weights.parent
    return play(drawn, lab.spec, lab.blobs, folder, losses=lab.alone, tolerance=TOLERANCE)


def table(drawn: Iterable[Drawn]) -> str:
    """How often each fault happened in each phase."""
    count = Counter(cell for world in drawn for cell in world.cells)
    lines = [f"{'':26}" + "".join(f"{phase:>10}" for phase in PHASES)]
    for kind in (*SURVIVED, *LOSING):
        lines.append(f"{kind:26}" + "".join(f"{count[kind, phase]:10}" for phase in PHASES))
    return "\n".join(lines)


@pytest.mark.parametrize(
    "first",
    [
        pytest.param(k, marks=[pytest.mark.slow] if k % (8 * AT_ONCE) else [])
        for k in range(0, WORLDS, AT_ONCE)
    ],
)
def test_random_worlds_keep_every_invariant(lab: Any, first: int) -> None:
    for seed in range(first, first + AT_ONCE):
        drawn = world_of(lab, seed)
        # Raises Violation, also for a fault that did not happen.
        played = ghostly(lab, drawn) if seed % REAL else real(lab, drawn)
        assert sum(e.HasField("step") for e in played.events) == STEPS, seed
        assert played.checks > 500, seed


def test_the_random_worlds_have_every_fault_in_every_phase(lab: Any) -> None:
    worlds = [world_of(lab, seed) for seed in range(WORLDS)]
    print("\n" + table(worlds))
    assert all(len(world.peers) >= 3 and len(world.faults) == 2 for world in worlds)
    count = Counter(cell for world in worlds for cell in world.cells)
    assert not [cell for cell in CELLS if count[cell] < LEAST], table(worlds)


def test_the_same_seed_gives_the_same_world(lab: Any) -> None:
    drawn = draw(
        7,
        lab.graph,
        microbatches=MICROBATCHES,
        microbatch_size=1,
        cells=[("flapping link", "backward"), ("stopped for a moment", "clip")],
    )
    first, second = ghostly(lab, drawn, log=True), ghostly(lab, drawn, log=True)
    assert first.log == second.log
    assert len(first.log) > 1000


@pytest.mark.parametrize(
    "cells",
    [
        [("corrupt message", "backward"), ("flapping link", "update")],
        [("cut-off", "clip"), ("holder dies", "backward")],
    ],
    ids=["nobody lost", "a holder lost"],
)
def test_real_tensors_come_to_what_the_plain_loop_has(lab: Any, cells: Any) -> None:
    drawn = draw(3, lab.graph, microbatches=MICROBATCHES, microbatch_size=1, cells=cells)
    done = [e.step.outcome.loss for e in real(lab, drawn).events if e.HasField("step")]
    assert done == pytest.approx(lab.alone, rel=TOLERANCE)


def test_a_world_that_fails_is_shortened_to_what_it_takes(lab: Any) -> None:
    cells = [("peer joins", "forward"), ("flapping link", "backward")]
    drawn = draw(0, lab.graph, microbatches=MICROBATCHES, microbatch_size=1, cells=cells)
    folder = lab.prepared.weights.parent
    with forgotten_queue():
        found = explain(drawn, lab.spec, lab.blobs, folder, device=Ghosts(), losses=lab.ghosts)
    assert [fault.do for fault in found.faults] == ["flap"]
    assert found.faults[0].at_step < found.steps < STEPS
    assert f"still so with {found.steps} steps and flap " in str(found)


def test_a_shorter_run_is_the_same_run_with_fewer_steps(lab: Any) -> None:
    drawn = draw(5, lab.graph, microbatches=MICROBATCHES, microbatch_size=1, cells=[])
    folder = lab.prepared.weights.parent
    spec = shorter(lab.spec, 3)
    played = play(drawn, spec, lab.blobs, folder, device=Ghosts(), losses=lab.ghosts)
    assert played.events[-1].state.phase == broker_pb2.DONE
    assert played.events[-1].state.steps == 3


@pytest.mark.parametrize(
    "first", [0, *(pytest.param(k, marks=pytest.mark.slow) for k in range(3, 90, 3))]
)
def test_nothing_breaks_where_microbatches_leave_stages_out(first: int) -> None:
    for seed in range(first, first + 3):
        assert chaos.world(seed, routed=True).violation == ""


def test_every_kind_of_full_steps_is_drawn_and_made_differently() -> None:
    """None, at the begin, at the end and both; a loop that knows of none has other losses."""
    lab, kinds = chaos.lab(routed=True), set[tuple[bool, bool]]()
    for seed in range(40):
        size = {"microbatches": MICROBATCHES, "microbatch_size": 1}
        plan = draw(seed, lab.made.graph, **size, cells=[], routed=True).plan
        has = plan.full.has if plan.full else lambda step: False
        kind = has(0), has(chaos.STEPS - 1)
        if any(kind) and kind not in kinds:
            assert lab.over(plan) != lab.over(replace(plan, full=None))
        kinds.add(kind)
    assert len(kinds) == 4
