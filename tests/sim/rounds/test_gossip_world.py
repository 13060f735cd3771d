"""Replicas that meet in pairs, in the simulated world: through broker and peers, against plain
loops in torch that are fed with who met whom."""

from __future__ import annotations

import numpy as np
import pytest

from shoal.broker import events as b
from shoal.broker.records.version_ledger import pairs_of
from shoal.dag.cost.network import Network
from shoal.dag.plan.plan import PeerId
from shoal.job.rounds import GOSSIP
from shoal.sim.virtual.control import BROKER
from shoal.sim.virtual.wan import Wan
from shoal.sim.virtual.world import PeerSpec
from shoal.tests.sim.played_rounds import Rounds, done_of, sites, sync_of

pytestmark = pytest.mark.usefixtures("plans_once", "masks_once")

TRAIN = {"steps": 15, "batch": 40, "eval_every": 6}
"""Five rounds, of which the last one gathers; evaluations are due behind steps 6, 12 and 15."""


@pytest.mark.parametrize(
    ("method", "count"),
    [
        pytest.param(method, count, marks=pytest.mark.slow if count - 4 != k % 2 else ())
        for k, method in enumerate(GOSSIP)
        for count in (4, 5)
    ],
)
def test_the_weights_are_those_of_a_plain_loop(rounds: Rounds, method: str, count: int) -> None:
    peers, train = sites(*[1e9] * count), TRAIN | {"batch": 4 * count}
    world, run = rounds.play(peers, sync=sync_of(method), plan={"replicas": count}, train=train)
    rounds.assert_expected(world, run)
    pairs = [pairs_of(d.members) for d in done_of(world, run)]
    assert [len(p) for p in pairs] == [2, 2, 2, 2, 0]


@pytest.mark.parametrize("method", [pytest.param("noloco", marks=pytest.mark.slow), "saps"])
def test_evaluations_change_nothing_of_what_is_trained(rounds: Rounds, method: str) -> None:
    """Who meets whom, every version, and every byte between replicas."""
    found, told = [], []
    for every in (0, 3):
        train = TRAIN | {"eval_every": every, "steps": 9, "batch": 16}
        peers, plan = sites(*[1e9] * 4), {"replicas": 4}
        world, run = rounds.play(peers, sync=sync_of(method), plan=plan, train=train)
        found.append(
            [(pairs_of(d.members), d.hash, d.sent_bytes, d.drift) for d in done_of(world, run)]
        )
        told.append([e.evaluated for e in world.events(run) if e.HasField("evaluated")])
    assert found[0] == found[1]
    assert [[(e.step, e.replicas) for e in each] for each in told] == [
        [],
        [(3, 4), (6, 4), (9, 0)],
    ]


def test_a_pipeline_of_weak_peers_meets_strong_ones(rounds: Rounds) -> None:
    """One replica is cut into two stages: each of its holders has its part of the pair's mean."""
    weak = [PeerSpec(name=f"p{i}", place="home", memory_bytes=110_000) for i in range(2)]
    strong = [PeerSpec(name=f"q{i}", place=f"rack{i}", memory_bytes=1 << 30) for i in range(3)]
    for method in ("saps", "noloco"):
        world, run = rounds.play(
            [*weak, *strong],
            sync=sync_of(method),
            plan={"replicas": 4},
            train=TRAIN | {"batch": 16},
        )
        replicas = world.broker.machine.runs[b.RunId(run)].record.replicas
        assert sorted(len(r.plan.stages) for r in replicas if r.plan) == [1, 1, 1, 2]
        rounds.assert_expected(world, run)


def test_pairs_are_those_with_fast_links(rounds: Rounds) -> None:
    """Two sites of two replicas, links as they are measured: they stay inside until they have been
    apart for `recent` rounds."""
    peers = [PeerSpec(name=f"p{i}", place=f"s{i % 2}", flops_per_s=1e9) for i in range(4)]
    names = [*(p.name for p in peers), BROKER]
    rate = np.array([[4e6 if (i - j) % 2 == 0 else 1e5 for i in range(5)] for j in range(5)])
    rate[4, :] = rate[:, 4] = 1e7
    network = Network(
        peers=tuple(PeerId(name) for name in names),
        latency_s=np.full((5, 5), 0.01) - np.diag([0.01] * 5),
        bandwidth=rate + np.diag([np.inf] * 5),
        up=np.full(5, 1e8),
        down=np.full(5, 1e8),
    )
    sync = sync_of("saps") | {"options": {"keep": 0.25, "recent": 4, "threshold": "1MB/s"}}
    train = TRAIN | {"steps": 24, "eval_every": 0, "batch": 16}
    world, run = rounds.play(
        peers, sync=sync, plan={"replicas": 4}, train=train, wan=Wan(network, seed=0)
    )
    met = [pairs_of(d.members) for d in done_of(world, run)][:-1]
    replicas = world.broker.machine.runs[b.RunId(run)].record.replicas
    site = {r.number: int(r.peers[0][1]) % 2 for r in replicas}
    within = [all(site[x] == site[y] for x, y in pairs) for pairs in met]
    assert within == [True] * 4 + [False] + [True] * 2
    rounds.assert_expected(world, run)
