"""Members near each other in the simulated world: of each place one gives the sum of what all of it
give, and passes on the result. Versions are those of plain loops, whoever is lost or lies."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.dag.cost.network import Network
from shoal.dag.plan.plan import PeerId
from shoal.dag.rounds.wiring import GATHER, GIVE, RESULT
from shoal.dag.schedule.flow import Role
from shoal.net.identity.receipts import ATTEMPT, proves, read_receipt
from shoal.net.identity.statements import signer
from shoal.peer.core.events import SendFrame
from shoal.proto.broker_pb2 import DONE, RunSpec
from shoal.sim.virtual.clock import Observed
from shoal.sim.virtual.identities import check_named
from shoal.sim.virtual.wan import Wan
from shoal.sim.virtual.world import PeerSpec, World
from shoal.tests.sim.clients.test_federated_world import job_of
from shoal.tests.sim.lying_devices import Lie, devices
from shoal.tests.sim.played_rounds import Rounds, done_of, inside_of, lies_of, outcome
from shoal.tests.sim.rounds.test_secure_world import PRIVACY

pytestmark = pytest.mark.usefixtures("plans_once")

PEERS, PLACES = 6, 2
TABLES: dict[str, Any] = {
    "plan": {"replicas": PEERS, "stages": 1},
    "train": {"steps": 12, "eval_every": 0},
    "sync": {"kind": "local", "every": 3, "method": "diloco", "audit": 0.0},
}
FAST, SLOW = 1e7, 1e5
SPECS = [PeerSpec(name=f"p{i}", place=f"s{i % PLACES}", flops_per_s=1e9) for i in range(PEERS)]


def wan() -> Wan:
    """Two places, with links inside that carry a hundred times what those between do."""
    names = tuple(PeerId(n) for n in (*(s.name for s in SPECS), "broker"))
    place = np.array([*(i % PLACES for i in range(PEERS)), -1])
    near = place[:, None] == place[None, :]
    free = np.full(len(names), np.inf)
    rate = np.where(near, FAST, SLOW)
    rate[-1, :] = rate[:, -1] = 1e6
    latency = np.where(near, 0.001, 0.01)
    np.fill_diagonal(latency, 0.0)
    return Wan(Network(names, latency, rate, free, free), seed=0)


@pytest.fixture(autouse=True)
def _all_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """And there are parts enough for all to do so."""
    monkeypatch.setattr("shoal.broker.policies.segments.UNDIVIDED", 64)
    monkeypatch.setattr("shoal.dag.rounds.vector.PIECE", 128)


class Frames:
    """Frames of rounds by their hop, and whether they stay in a place."""

    def __init__(self) -> None:
        self.sent = Counter[tuple[int, bool]]()
        self.gatherers = set[str]()

    def __call__(self, world: World, seen: Observed) -> None:
        match seen.record:
            case SendFrame(key=key) if key.role is Role.ROUND:
                near = int(key.source[1:]) % PLACES == int(key.destination[1:]) % PLACES
                self.sent[key.hop, near] += 1
                if key.hop == GATHER:
                    self.gatherers.add(key.source)


def test_of_a_place_one_gives_the_sum_and_versions_are_those_of_a_plain_loop(
    rounds: Rounds, monkeypatch: pytest.MonkeyPatch
) -> None:
    near, far = Frames(), Frames()
    world, run = rounds.play(SPECS, wan=wan(), also=near, **TABLES)
    rounds.assert_expected(world, run)
    assert not near.sent[GIVE, False]
    assert not near.sent[GATHER, True]
    assert near.sent[GATHER, False]
    assert len(near.gatherers) > 1
    # Of each part one sum and one result cross to the other place, or from there.
    assert near.sent[RESULT, False] == near.sent[GATHER, False]
    hashes, took = [d.hash for d in done_of(world, run)], done_of(world, run)[-1].exchange_s
    with monkeypatch.context() as patch:
        patch.setattr("shoal.broker.policies.policy.places_of", lambda network, elements: {})
        world, run = rounds.play(SPECS, wan=wan(), also=far, **TABLES)
    assert [d.hash for d in done_of(world, run)] == hashes, outcome(world, run)
    assert not far.sent[GATHER, False]
    assert far.sent[GIVE, False] == PEERS // PLACES * near.sent[GATHER, False]
    assert took < done_of(world, run)[-1].exchange_s


SIGNED = TABLES | {"train": {"steps": 6, "eval_every": 0}}
ALL = SIGNED | {"sync": TABLES["sync"] | {"audit": 1.0}}
"""All sums are added up again."""


def test_where_all_are_honest_sums_of_places_are_found_right(rounds: Rounds) -> None:
    frames = Frames()
    world, run = rounds.play(SPECS, wan=wan(), signs=True, device=devices(), also=frames, **ALL)
    assert frames.sent[GATHER, False]
    assert {d.attempt for d in done_of(world, run)} == {1}
    assert not [e.note for e in world.events(run) if e.note]
    assert not lies_of(world, run)
    rounds.assert_expected(world, run)


@pytest.mark.parametrize("kind", ["place", "two places"])
def test_who_gives_a_wrong_sum_of_its_place_is_found_and_nobody_else(
    rounds: Rounds, kind: str
) -> None:
    """A wrong one is signed as what it gave, and others come to another; of two different ones the
    receipts contradict each other."""
    lie = Lie("p2", kind, first=1)
    world, run = rounds.play(SPECS, wan=wan(), signs=True, device=devices(lie), **ALL)
    assert lie.told
    [found] = lies_of(world, run)
    assert found.peer == "p2"
    if kind == "place":
        assert signer(check_named, ATTEMPT, found.first) == "p2"
        told = [read_receipt(s, check_named) for s in found.sums]
        assert len(told) >= 3
        assert len({(r.hash, r.heard) for _, r in told}) == 1
    else:
        assert proves(found.first, found.second, check_named) == "p2"
    assert inside_of(world, run)[1] == [0, 1, 3, 4, 5]
    assert not any(f"replica {n} " in e.note for e in world.events(run) for n in (0, 1, 3, 4, 5))
    rounds.assert_expected(world, run)


@pytest.mark.parametrize("who", ["p0", "p3"])
def test_an_adder_who_lies_is_told_from_those_who_give_it_sums_of_places(
    rounds: Rounds, who: str
) -> None:
    lie = Lie(who, "wrong", first=1)
    world, run = rounds.play(SPECS, wan=wan(), signs=True, device=devices(lie), **ALL)
    assert lie.told
    assert [found.peer for found in lies_of(world, run)] == [who]
    rounds.assert_expected(world, run)


@pytest.mark.parametrize("accuser", ["p1", "p2", "p4"])
def test_no_gatherer_is_blamed_for_a_wrong_sum_by_what_one_alone_claims(
    rounds: Rounds, accuser: str
) -> None:
    adder, claims = Lie("p3", "wrong", first=1), Lie(accuser, "blames", first=1)
    world, run = rounds.play(SPECS, wan=wan(), signs=True, device=devices(adder, claims), **ALL)
    assert adder.told
    assert claims.told
    assert {found.peer for found in lies_of(world, run)} == {"p3"}
    honest = {0, 1, 2, 4, 5} - {int(accuser[1:])}
    assert not any(f"replica {n} " in e.note for e in world.events(run) for n in honest)
    rounds.assert_expected(world, run)


def at_hop(hop: int, moment: int) -> Any:
    """Kill who sends, or is to get, the frame of this hop that comes after so many."""
    seen_ = Counter[int]()

    def look(world: World, seen: Observed) -> None:
        match seen.record:
            case SendFrame(key=key) if key.role is Role.ROUND and key.hop == hop:
                seen_[hop] += 1
                if seen_[hop] == moment:
                    who = key.source if moment % 2 else key.destination
                    world.after(0.0, lambda: world.kill(who))

    return look


DEATHS = [(hop, moment) for hop in (GIVE, GATHER, RESULT) for moment in range(1, 7)]
BY_DAY = {(GATHER, 1), (RESULT, 4)}


@pytest.mark.parametrize(
    ("hop", "moment"),
    [pytest.param(*d, marks=() if d in BY_DAY else pytest.mark.slow) for d in DEATHS],
)
def test_whoever_is_lost_in_an_exchange_the_version_is_that_of_those_who_are_left(
    rounds: Rounds, hop: int, moment: int
) -> None:
    world, run = rounds.play(SPECS, wan=wan(), also=at_hop(hop, moment), **SIGNED)
    assert world.broker.ended[run].phase == DONE, outcome(world, run)
    assert sum(not p.alive for p in world.peers.values()) == 1
    rounds.assert_expected(world, run)


@pytest.mark.slow
@pytest.mark.parametrize("privacy", [None, PRIVACY], ids=["masks", "masks and noise"])
def test_masks_stay_on_sums_of_places(
    laboratory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, privacy: Any
) -> None:
    """Who gives the sum of a place sees masks as who adds up all does; versions are those without
    masks, to the bit."""
    monkeypatch.setattr("shoal.dag.rounds.vector.PIECE", 4)
    monkeypatch.setattr("shoal.broker.policies.segments.UNDIVIDED", 4)
    job = job_of(tmp_path, "fedavg", 2)
    job = replace(job, plan=replace(job.plan, replicas=PEERS))
    lab = laboratory(replace(job, sync=replace(job.sync, per_round=10)))
    found = []
    for secure in (True, False):
        sync = replace(lab.job.sync, secure=secure, weight="equal", privacy=privacy)
        spec = RunSpec()
        spec.CopyFrom(lab.spec)
        spec.job = replace(lab.job, sync=sync).to_json()
        world, frames = lab.world(SPECS, wan=wan(), log=False), Frames()
        world.observe = partial(frames, world)
        world.after(120.0, lambda: None)
        world.until(lambda world=world: world.now >= 120.0)
        run = world.submit(spec)
        world.finish(run)
        assert world.broker.ended[run].phase == DONE, world.broker.ended[run].reason.text
        assert frames.sent[GATHER, False]
        found.append([d.hash for d in done_of(world, run)])
    assert found[0] == found[1]
