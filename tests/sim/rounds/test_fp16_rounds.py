"""fp16 between replicas: each has a scale of losses of its own, as a plain loop per replica with
torch's autocast and scaler has, whoever is lost in the middle of a round."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shoal.broker.round_rows import RoundRows
from shoal.proto.broker_pb2 import DONE
from shoal.sim.plain.plain_rounds import beside
from shoal.sim.plain.round_log import committed_rounds
from shoal.sim.virtual.world import World
from shoal.tests.sim.clients.test_federated_world import MODEL
from shoal.tests.sim.played_rounds import JOB, Rounds, assert_same_versions, sites, sync_of

pytestmark = pytest.mark.usefixtures("plans_once", "masks_once")

LOSS_SCALE = {"init_scale": 2.0**20, "growth_interval": 1}
"""The scale is halved until nothing overflows, and then doubled at once."""
FOUR = sites(1e7, 1e7, 1e7, 1e7)
Scales = dict[tuple[int, int], tuple[float, bool]]


@pytest.fixture(scope="module")
def scaled(laboratory: Any, tmp_path_factory: pytest.TempPathFactory) -> Rounds:
    folder = tmp_path_factory.mktemp("scaled")
    (folder / "model.py").write_text(MODEL)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(120, 6)).astype(np.float32)
    np.savez(folder / "data.npz", x=x, y=(x[:, 0] > 0).astype(np.int64) + (x[:, 1] > 0))
    job = JOB | {
        "name": "scaled rounds",
        "model": {"factory": str(folder / "model.py") + ":small", "dtype": "fp16"},
        "data": {"kind": "arrays", "source": str(folder / "data.npz"), "holdout": 0.1},
        "train": JOB["train"] | {"loss_scale": LOSS_SCALE},
    }
    return Rounds(laboratory, job)


def scales(world: World, run: str) -> Scales:
    """By replica and local step, the scale and whether the step was skipped; of one that was made
    twice the newest."""
    steps = [(e.replica, e.step) for e in world.events(run) if e.HasField("step")]
    return {(n, s.step): (s.outcome.loss_scale, s.outcome.skipped) for n, s in steps}


def check(rounds: Rounds, world: World, run: str) -> Scales:
    """Losses, scales and weights are the plain loop's, and each skip is where it has one. Returns
    the scales."""
    assert world.broker.ended[run].phase == DONE, world.broker.ended[run].reason.text
    wanted, got = rounds.expected(world, run)
    rows, found = RoundRows(), scales(world, run)
    begun: dict[tuple[int, int], int] = {}
    for event in world.events(run):
        rows.see(event)
        for work in event.round_begun.work:
            begun[event.round_begun.round, work.replica] = work.first_step
    compared = 0
    for n, k, j, loss, other in beside(rows.rows, wanted):
        assert loss == pytest.approx(other, rel=5e-3), f"step {j} of {k} in round {n}"
        scale, skipped = found[k, begun[n, k] + j]
        assert scale == wanted.scales[n][k][j], f"step {j} of {k} in round {n}"
        behind = wanted.scales[n][k][j + 1 :][:1]
        assert not behind or skipped == (behind[0] < scale), f"step {j} of {k} in round {n}"
        compared += 1
    assert compared >= sum(m.steps for row in rows.rows for m in row.members)
    for name, tensor in wanted.shared.items():
        apart = (got[name] - tensor).double().norm() / tensor.double().norm().clamp(min=1e-3)
        assert float(apart) < 1e-2, f"{name} is {float(apart)} off"
    return found


@pytest.mark.parametrize(
    ("method", "tables"),
    [
        ("diloco", {}),
        *(
            pytest.param(method, tables, marks=pytest.mark.slow)
            for method, tables in (
                ("diloco", {"train": {"optimizer": "adamw", "lr": 0.01, "clip": 0.3}}),
                ("average", {}),
                ("streaming-diloco", {"train": {"steps": 24}, "sync": {"every": 6}}),
                ("noloco", {"train": {"steps": 12}}),
                ("sparse-loco", {}),
            )
        ),
    ],
)
def test_every_replica_has_the_scales_of_its_own_loop(
    scaled: Rounds, method: str, tables: dict[str, Any]
) -> None:
    sync = sync_of(method) | tables.get("sync", {})
    plan = {"replicas": 2, "stages": 2}
    world, run = scaled.play(FOUR, **{**tables, "sync": sync, "plan": plan})
    if method in ("noloco", "sparse-loco"):  # of which the versions have tests of their own
        scaled.assert_steps(world, run, scaled.expected(world, run)[0])
        found = scales(world, run)
    else:
        found = check(scaled, world, run)
    skipped = {k: [s for (n, _), (_, s) in sorted(found.items()) if n == k] for k in (0, 1)}
    assert {*skipped[0]} == {*skipped[1]} == {True, False}, "the test shows too little"


@pytest.mark.slow
def test_one_replica_overflows_and_another_does_not(scaled: Rounds) -> None:
    train = {"steps": 18, "loss_scale": {"init_scale": 2.0**20, "growth_interval": 2}}
    world, run = scaled.play(FOUR, plan={"replicas": 3, "stages": 1}, train=train)
    found = check(scaled, world, run)
    skips = [[found[n, j][1] for n in range(3)] for j in range(18)]
    assert any({*row} == {True, False} for row in skips), "the test shows too little"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("part", range(2))
def test_a_part_of_a_replica_is_lost_and_goes_on_with_its_scale(scaled: Rounds, part: int) -> None:
    """Its keeper takes it, from a snapshot in the middle of the round: nobody notices."""
    plan = {"replicas": 2, "stages": 2}
    tables = {"plan": plan, "train": {"steps": 30}, "sync": {"every": 15}}
    peers = sites(*[1e7] * 9)
    calm, run = scaled.play(peers, **tables)
    check(scaled, calm, run)
    plans = [e.plan for e in calm.events(run) if e.HasField("plan")]
    [who] = plans[0].stages[part].holders
    kept = 0
    for at in map(scaled.moment, (0.3, 0.4, 0.45)):
        world, again = scaled.play(peers, {at: who}, **tables)
        events = world.events(again)
        check(scaled, world, again)
        assert_same_versions(events, calm.events(run), at)
        kept += max(e.term for e in events) > 1 and not any(fresh(scaled, world, again))
    assert kept, "the test shows too little"


def fresh(rounds: Rounds, world: World, run: str) -> list[bool]:
    """Of each part in a round, whether its optimizer began anew."""
    train = rounds.job.train
    log = committed_rounds(
        world.events(run), microbatches=train.microbatches, microbatch_size=train.microbatch_size
    )
    return [m.fresh for r in log for m in r.members]


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.1, 0.35, 0.5])
def test_who_comes_back_by_the_version_of_others_begins_with_the_first_scale(
    scaled: Rounds, share: float
) -> None:
    """As its optimizer begins anew."""
    tables = {
        "plan": {"replicas": 3, "stages": 1},
        "train": {"steps": 42},
        "sync": {"every": 7},
        "recovery": {"warm_spares": 0},
    }
    peers = sites(*[1e5] * 4)  # so slow that there is time to come back
    quiet, run = scaled.play(peers, **tables)
    first = next(e.plan for e in quiet.events(run) if e.HasField("plan") and not e.replica)
    [who] = first.stages[0].holders
    world, run = scaled.play(peers, {scaled.moment(share): who}, **tables)
    found = check(scaled, world, run)
    assert any(fresh(scaled, world, run)), "the test shows too little"
    first_scale = [n for (n, _), (scale, _) in found.items() if scale == 2.0**20]
    assert first_scale.count(0) > 1, "at its first step, and at the first one of the other term"
