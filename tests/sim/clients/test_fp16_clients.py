"""fp16 of clients: each begins with the job's scale of losses, and comes to what torch's autocast
and scaler make of it, whoever is beside it and whoever is lost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shoal.job import Job
from shoal.job.training import LossScale
from shoal.proto.broker_pb2 import DONE
from shoal.sim.plain import plain_cohorts
from shoal.sim.plain.oracle import scaler_of
from shoal.sim.plain.plain_cohorts import committed_cohorts, expected_versions, last_version
from shoal.tests.sim.clients.moments import losing
from shoal.tests.sim.clients.test_federated_world import exported, job_of, world_of

EAGER = LossScale(init_scale=2.0**19, growth_interval=2)
"""It overflows at once, and again and again."""


def scaled(folder: Path, method: str = "fedavg", *, scale: LossScale = EAGER, **train: Any) -> Job:
    job = job_of(folder, method, 3)
    return replace(
        job,
        name=f"scaled {method}",
        model=replace(job.model, dtype="fp16"),
        train=replace(job.train, loss_scale=scale, **train),
    )


def check(lab: Any, world: Any, run: str, monkeypatch: pytest.MonkeyPatch) -> list[list[bool]]:
    """Evaluations and weights are those of a plain loop over what was committed. Returns, of each
    client in it, which steps it skipped."""
    skips = list[list[bool]]()

    def noted(train: Any) -> Any:
        scaler, mine = scaler_of(train), list[bool]()
        update = scaler.update
        skips.append(mine)

        def updated() -> None:
            before = scaler.get_scale()
            update()
            mine.append(scaler.get_scale() < before)

        monkeypatch.setattr(scaler, "update", updated)
        return scaler

    monkeypatch.setattr(plain_cohorts, "scaler_of", noted)
    events = world.events(run)
    assert events[-1].state.phase == DONE, events[-1].state.reason.text
    got, reader = exported(world, run), lab.reader()
    for name, tensor in last_version(lab.module, lab.job, events, reader).items():
        apart = (got[name] - tensor).double().norm() / tensor.double().norm()
        assert float(apart) < 1e-2, f"{name} is {float(apart)} off"
    said = {
        e.evaluated.step: e.evaluated.evaluation.loss for e in events if e.HasField("evaluated")
    }
    wanted = expected_versions(lab.module, lab.job, events, reader, size=4)
    assert said
    assert wanted == pytest.approx(said, rel=1e-2)
    each, cohorts = iter(skips), committed_cohorts(events, lab.job, reader)
    told = [e.round_done.skipped for e in events if e.HasField("round_done")]
    assert told == [sum(sum(next(each)) for _ in cohort) for cohort in cohorts]
    return skips


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "train", "sync"),
    [
        ("fedprox", {}, {}),
        ("fedavg", {}, {}),
        ("fedadam", {"optimizer": "adamw", "lr": 0.01, "clip": 0.3, "momentum": 0.0}, {}),
        ("fedavg", {"optimizer": "muon", "lr": 0.02, "no_muon": ("layers.2.*",)}, {}),
        ("fedavgm", {"clip": 0.3}, {"aggregate": "median", "weight": "equal"}),
    ],
)
def test_clients_come_to_what_torch_s_scaler_makes_of_each(
    laboratory: Callable[[Job], Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    train: dict[str, Any],
    sync: dict[str, Any],
) -> None:
    job = scaled(tmp_path, method, **train)
    lab = laboratory(replace(job, sync=replace(job.sync, **sync)))
    world = world_of(lab)
    run = world.submit(lab.spec)
    world.finish(run)
    skips = check(lab, world, run, monkeypatch)
    assert all(mine[0] for mine in skips), "each client begins with the first scale"
    assert len({tuple(mine[:4]) for mine in skips}) > 1, "all skip alike: the test shows too little"


@pytest.mark.slow
def test_of_a_scale_that_fits_no_client_skips_a_step(
    laboratory: Callable[[Job], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = laboratory(scaled(tmp_path, scale=LossScale(init_scale=256.0)))
    world = world_of(lab)
    run = world.submit(lab.spec)
    world.finish(run)
    assert not any(any(mine) for mine in check(lab, world, run, monkeypatch))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(1, 5))
def test_whoever_is_lost_clients_come_to_the_same(
    laboratory: Callable[[Job], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: int
) -> None:
    lab = laboratory(scaled(tmp_path))

    def play(deadly: int) -> tuple[Any, str, int]:
        world = world_of(lab)
        run, count = losing(world, lab.spec, deadly)
        return world, run, count

    _, _, records = play(0)
    world, run, _ = play(records * part // 5)
    assert not world.peers["p1"].alive
    check(lab, world, run, monkeypatch)
