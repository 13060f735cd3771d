"""Lies in rounds of peers that sign what they give: proved, or found to be claimed without receipts,
and whoever is honest keeps its place. What is committed is what honest ones make of it."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.net.identity.receipts import NoProofError, proves
from shoal.proto.broker_pb2 import DONE, RunEvent
from shoal.sim.virtual.identities import check_named
from shoal.sim.virtual.world import World
from shoal.tests.sim.lying_devices import KINDS, Lie, devices
from shoal.tests.sim.played_rounds import Rounds, outcome, sites, sync_of

pytestmark = pytest.mark.usefixtures("plans_once")

THREE = sites(1e7, 1e7, 1e7)
TABLES: dict[str, Any] = {"plan": {"replicas": 3, "stages": 1}, "train": {"steps": 24}}


def rounds_of(world: World, run: str) -> list[Any]:
    return [e.round_done for e in world.events(run) if e.HasField("round_done")]


def lies_of(world: World, run: str) -> list[Any]:
    return [e.lie for e in world.events(run) if e.HasField("lie")]


@pytest.mark.parametrize("method", ["diloco", "sparse-loco"])
def test_where_all_are_honest_nobody_is_asked(rounds: Rounds, method: str) -> None:
    sync = sync_of(method)
    world, run = rounds.play(THREE, signs=True, device=devices(), sync=sync, **TABLES)
    rounds.assert_expected(world, run)
    done = rounds_of(world, run)
    assert [(d.attempt, len(d.members)) for d in done] == [(1, 3)] * len(done)
    assert not lies_of(world, run)


@pytest.mark.parametrize("kind", KINDS)
def test_lie(rounds: Rounds, kind: str) -> None:
    lie = Lie("p1", kind, ["p2"], first=2)
    world, run = rounds.play(THREE, signs=True, device=devices(lie), **TABLES)
    print([e.note for e in world.events(run) if e.note], outcome(world, run), lie.told)
    print([l.peer for l in lies_of(world, run)])
    rounds.assert_expected(world, run)
