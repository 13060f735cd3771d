"""Runs in rounds that somebody asks to finish, in the simulated world: they end early, with what a
plain loop over the rounds that they made comes to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from shoal.broker.events import Publish, Reject, RunAsked, RunId
from shoal.job import Job
from shoal.peer.core.events import BeginRound
from shoal.proto.broker_pb2 import DONE, RunEvent
from shoal.sim.virtual.clock import Observed
from shoal.sim.virtual.world import World
from shoal.tests.sim.clients.test_federated_world import assert_expected, job_of, world_of
from shoal.tests.sim.played_rounds import Rounds, sites, sync_of


def finish(world: World, run: str) -> Any:
    return world.broker.ask(lambda request: RunAsked(request, RunId(run), "finish"))


def before_and_all(events: Sequence[RunEvent]) -> tuple[int, int]:
    """Rounds that were done when somebody asked, and at the end."""
    kinds = [e.WhichOneof("kind") for e in events]
    asked = kinds.index("finishing")
    assert kinds.count("finishing") == 1
    return kinds[:asked].count("round_done"), kinds.count("round_done")


def played(lab: Any, at: int, away: bool = False) -> tuple[Any, str, int]:
    """The world in which somebody asks behind so many records since the first round began, twice,
    and the broker is started again after that if it is to be `away`. Returns records, too."""
    world, count = world_of(lab), 0
    world.until(lambda: len(world.broker.machine.members.pool) == 3)
    run, checks = world.submit(lab.spec), world.observe

    def ask() -> None:
        assert not isinstance(finish(world, run), Reject)
        assert not isinstance(finish(world, run), Reject), "once more changes nothing"
        if away:
            world.restart_broker(1.0)

    def observe(seen: Observed) -> None:
        nonlocal count
        checks(seen)
        count += bool(count) or isinstance(seen.record, BeginRound)
        if count == at > 0:
            world.after(0.0, ask)
            count += 1  # once

    world.observe = observe
    world.finish(run)
    return world, run, count


@pytest.mark.parametrize(
    ("away", "moments", "sync"),
    [
        *((False, 2, {}), (True, 1, {})),
        *(pytest.param(away, 12, {}, marks=pytest.mark.slow) for away in (False, True)),
        pytest.param(True, 12, {"secure": True}, marks=pytest.mark.slow),
    ],
)
def test_whenever_somebody_asks_the_round_under_way_is_the_last(
    laboratory: Callable[[Job], Any],
    tmp_path: Path,
    away: bool,
    moments: int,
    sync: dict[str, Any],
) -> None:
    job = job_of(tmp_path, "fedavgm")
    lab = laboratory(replace(job, sync=replace(job.sync, **sync)))
    _, _, records = played(lab, 0)
    seen = set()
    for part in range(moments):
        world, run, _ = played(lab, 1 + records * (2 * part + 1) // (3 * moments), away)
        done = assert_expected(lab, world, run)
        before, whole = before_and_all(world.events(run))
        assert len(done) == whole == before + 1 <= 4
        assert world.events(run)[-1].state.step == whole
        seen.add(whole)
    assert len(seen) == min(3, moments)


def test_before_the_first_round_it_is_the_first(
    laboratory: Callable[[Job], Any], tmp_path: Path
) -> None:
    lab = laboratory(job_of(tmp_path, "fedavg"))
    world = world_of(lab)
    run = world.submit(lab.spec)
    finish(world, run)
    world.finish(run)
    assert len(assert_expected(lab, world, run)) == 1
    assert before_and_all(world.events(run)) == (0, 1)
    assert finish(world, run).message.phase == DONE, "as it was asked to"
    assert before_and_all(world.events(run)) == (0, 1)


def test_a_run_that_was_cancelled_is_not_finished(
    laboratory: Callable[[Job], Any], tmp_path: Path
) -> None:
    lab = laboratory(job_of(tmp_path, "fedavg"))
    world = world_of(lab)
    run = world.submit(lab.spec)
    world.broker.ask(lambda request: RunAsked(request, RunId(run), "cancel"))
    refused = finish(world, run)
    assert isinstance(refused, Reject)
    assert (refused.code, refused.reason) == (
        "FAILED_PRECONDITION",
        f"run {run} is cancelled: nothing to finish",
    )


KINDS: dict[str, dict[str, Any]] = {
    "diloco": {},
    "diloco ahead": {"sync": {"method": "diloco", "options": {"overlap": 2}}},
    "streaming-diloco": {
        "sync": {
            **{"method": "streaming-diloco", "every": 6},
            "options": {"bits": 32, "overlap": 2, "mix": 0.5},
        }
    },
    "saps": {"sync": sync_of("saps"), "plan": {"replicas": 4}},
    "noloco": {"sync": sync_of("noloco"), "plan": {"replicas": 4}},
}


BY_DAY = [("streaming-diloco", "round_begun", False), ("saps", "round_planned", True)]


@pytest.mark.parametrize(
    ("kind", "behind", "away"),
    [
        *BY_DAY,
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in product(KINDS, ("round_begun", "round_planned"), (False, True))
            if each not in BY_DAY
        ),
    ],
)
def test_replicas_that_train_apart_make_one_more_round_which_is_the_last(
    rounds: Rounds, kind: str, behind: str, away: bool
) -> None:
    """Asked in the second round, when it has begun, or when its exchange is planned."""
    tables = {"train": {"steps": 15, "batch": 24, "eval_every": 6}} | KINDS[kind]
    peers, asked = sites(*[1e9] * tables.get("plan", {"replicas": 2})["replicas"]), list[str]()

    def also(world: World, seen: Observed) -> None:
        event = seen.record.event if isinstance(seen.record, Publish) else RunEvent()
        if event.WhichOneof("kind") == behind and getattr(event, behind).round == 1 and not asked:
            asked.append(seen.record.run)
            world.after(0.0, lambda: finish(world, asked[0]))
            if away:
                world.after(0.0, lambda: world.restart_broker(1.0))

    world, run = rounds.play(peers, None, also, **tables)
    events = world.events(run)
    rounds.assert_expected(world, run)
    assert before_and_all(events) == (1, 3)
    begun = [e.round_begun.work for e in events if e.HasField("round_begun")]
    last = [e.round_begun.round == 2 for e in events if e.HasField("round_begun")]
    assert [all(w.final for w in work) for work in begun] == last
