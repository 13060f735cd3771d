"""Rounds of gossip that were told ahead, and members are lost in them, or the broker is: what is
committed is what a plain loop makes of it, and samples count once."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from shoal.dag.cost.network import Network
from shoal.dag.plan.action import Kind
from shoal.dag.plan.plan import PeerId
from shoal.peer.core.events import BeginRound, Computed
from shoal.proto.broker_pb2 import RunEvent
from shoal.sim.virtual.clock import Observed
from shoal.sim.virtual.control import BROKER
from shoal.sim.virtual.spec import PeerSpec
from shoal.sim.virtual.wan import Wan
from shoal.sim.virtual.world import World
from shoal.tests.sim.played import ask
from shoal.tests.sim.played_rounds import Rounds, outcome, sites, sync_of

pytestmark = pytest.mark.usefixtures("plans_once", "masks_once")

THREE, FOUR = sites(1e7, 1e7, 1e7), sites(1e7, 1e7, 1e7, 1e7)
SIX, SEVEN = sites(*[1e7] * 6), sites(*[1e7] * 7)


def tables(method: str, replicas: int = 3, steps: int = 8, stages: int = 1) -> dict[str, Any]:
    """Rounds of two steps: but for the last one all are of pairs, and told at once."""
    return {
        "plan": {"replicas": replicas, "stages": stages},
        "train": {"steps": steps, "batch": 4 * replicas, "eval_every": 0},
        "sync": sync_of(method) | {"every": 2},
    }


def told(events: list[RunEvent]) -> list[int]:
    """Rounds that were told with others before them."""
    begun = (e.round_begun for e in events if e.HasField("round_begun"))
    return [ahead.round for b in begun for ahead in b.ahead]


@pytest.mark.parametrize("method", ["saps", "noloco"])
@pytest.mark.parametrize("part", [0, *(pytest.param(k, marks=pytest.mark.slow) for k in (1, 2, 3))])
def test_a_member_dies_at_any_moment(rounds: Rounds, part: int, method: str) -> None:
    world, run = rounds.play(FOUR, **tables(method))
    assert told(world.events(run)) == [1, 2]
    for at in rounds.moments(3, part, 4):
        name = f"p{at % 3}"
        world, run = rounds.play(FOUR, {at: name}, **tables(method))
        rounds.assert_expected(world, run, what=f"{name} at record {at}")


@pytest.mark.parametrize("method", ["saps", "noloco"])
@pytest.mark.parametrize("part", [0, *(pytest.param(k, marks=pytest.mark.slow) for k in (1, 2, 3))])
def test_a_holder_of_a_pipeline_dies_at_any_moment(rounds: Rounds, part: int, method: str) -> None:
    asked = tables(method, stages=2)
    world, run = rounds.play(SEVEN, **asked)
    assert told(world.events(run)) == [1, 2]
    rounds.assert_expected(world, run)
    for at in rounds.moments(3, part, 4):
        name = f"p{at % 6}"
        world, run = rounds.play(SEVEN, {at: name}, **asked)
        rounds.assert_expected(world, run, what=f"{name} at record {at}")


def test_no_holder_is_past_a_round_before_all_have_its_version(rounds: Rounds) -> None:
    """Where one line is slow, so that versions are made one long after the other."""
    made = dict[str, int]()
    replica = dict[str, str]()
    early, begun = set[tuple[str, int]](), Counter[int]()

    def watch(world: World, seen: Observed) -> None:
        match seen.record:
            case Computed(run=run, step=number, action=action) if action.kind is Kind.APPLY:
                made[seen.who], replica[seen.who] = number, run
            case BeginRound(run=run, start=start) if start.round:
                begun[start.round] += 1
                mates = [p for p, of in replica.items() if of == run and p != seen.who]
                early.update((p, start.round) for p in mates if made[p] < start.round - 1)

    names = tuple(PeerId(name) for name in (*(p.name for p in SIX), BROKER))
    rate, apart = np.array([5e4, *[1e7] * 6]), np.full((7, 7), np.inf)
    lines = Network(names, np.full((7, 7), 0.01), apart, rate, rate)
    asked = tables("random-pairs", stages=2)
    world, run = rounds.play(SIX, also=watch, wan=Wan(lines, seed=0), **asked)
    rounds.assert_expected(world, run)
    assert told(world.events(run)) == [1, 2]
    assert [begun[n] for n in (1, 2, 3)] == [len(SIX)] * 3
    assert not early


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("method", ["saps", "ring", "saps-outer"])
def test_holders_of_pipelines_die_at_any_two_moments(rounds: Rounds, method: str) -> None:
    asked, peers = tables(method, steps=10, stages=2), sites(*[1e7] * 9)
    rounds.play(peers, **asked)
    for deaths in rounds.two_deaths(13, 6):
        world, run = rounds.play(peers, deaths, **asked)
        rounds.assert_expected(world, run, what=deaths)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("method", ["saps", "ring", "saps-outer"])
def test_members_die_at_any_two_moments(rounds: Rounds, method: str) -> None:
    asked, peers = tables(method, replicas=4, steps=10), sites(*[1e7] * 6)
    rounds.play(peers, **asked)
    for deaths in rounds.two_deaths(13, 4):
        world, run = rounds.play(peers, deaths, **asked)
        rounds.assert_expected(world, run, what=deaths)


@pytest.mark.parametrize(
    ("stages", "peers"), [pytest.param(1, THREE, marks=pytest.mark.slow), (2, SIX)]
)
def test_the_broker_dies_behind_any_record_of_its_journal(
    rounds: Rounds, stages: int, peers: list[PeerSpec]
) -> None:
    asked = tables("saps", stages=stages)
    rounds.play(peers, **asked)
    for number in range(1, rounds.written + 1, 4 * stages):
        world, run = rounds.play(peers, also=rounds.broker_dies(number), **asked)
        rounds.assert_expected(world, run, what=f"record {number}")


@pytest.mark.parametrize(("stages", "peers"), [(1, FOUR), (2, sites(*[1e7] * 8))])
def test_rounds_go_on_while_the_broker_is_away(
    rounds: Rounds, stages: int, peers: list[PeerSpec]
) -> None:
    """It dies in the first round of five that were told, and is away for longer than these take."""
    begun = dict[int, int]()
    back = list[bool]()

    def away(world: World, seen: Observed) -> None:
        match seen.record:
            case BeginRound(start=start) if not back:
                begun[start.round] = begun.get(start.round, 0) + 1
                if begun == {0: len(peers)}:
                    world.restart_broker(8.0)
                    world.after(8.0, lambda: back.append(True))

    asked = tables("noloco", replicas=4, steps=12, stages=stages)
    world, run = rounds.play(peers, also=away, **asked)
    rounds.assert_expected(world, run)
    assert begun == dict.fromkeys(range(5), len(peers)), (
        "they did not go through all that they were told"
    )
    assert outcome(world, run).count("[0, 1, 2, 3] + 0") == 6


@pytest.mark.parametrize("share", [0.2, 0.45])
def test_a_run_is_paused_and_goes_on(rounds: Rounds, share: float) -> None:
    asked = tables("saps", steps=16)
    rounds.play(FOUR, **asked)
    at = rounds.moment(share)
    world, run = rounds.start(FOUR, **asked)
    world.until(lambda: rounds.records >= at, 600)
    ask(world, run, "pause")
    record = world.broker.machine.runs[run].record
    world.until(lambda: all(r.paused for r in record.replicas), 600)
    ask(world, run, "resume")
    rounds.monitor.finish(run, 3600.0)
    rounds.assert_expected(world, run)


def test_a_round_is_as_long_as_its_work_and_its_exchange(rounds: Rounds) -> None:
    """No message from the broker or to it stands between two rounds."""
    took = {}
    for window in (1, "auto"):
        asked = tables("random-pairs", replicas=4, steps=12)
        asked["sync"]["options"] = {"window": window}
        world, run = rounds.play(FOUR, **asked)
        rounds.assert_expected(world, run, what=f"window {window}")
        done = [e.round_done for e in world.events(run) if e.HasField("round_done")]
        took[window] = sum(d.seconds for d in done[1:5])
    assert took["auto"] < took[1]
