"""What a formation promises of an exchange, against the same exchange of ghosts over random links
that the broker knows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from shoal.benchmarks.sync.exposed import ghosts
from shoal.benchmarks.sync.worlds import MBIT
from shoal.broker.links.probing import Probing
from shoal.dag.cost.network import Network
from shoal.dag.plan.plan import PeerId
from shoal.sim.virtual.control import BROKER
from shoal.sim.virtual.wan import Wan
from shoal.sim.virtual.world import PeerSpec
from shoal.tests.sim.played_rounds import Rounds, done_of

WITHIN = 0.15
JOB: dict[str, Any] = {
    "version": 1,
    "name": "promised-exchange",
    "model": {
        "factory": "shoal.benchmarks.sync.places:wide",
        "args": {"width": 400, "hidden": 1600},
    },
    "data": {"kind": "text", "length": 8, "holdout": 0.0},
    "plan": {"replicas": 8, "stages": 1, "replan": False},
    "recovery": {"ladder": []},
    "sync": {"kind": "local", "every": 1, "method": "average"},
    "train": {"steps": 2, "batch": 8, "microbatch": 1, "eval_every": 0},
}


@pytest.fixture(scope="module")
def million(laboratory: Any) -> Rounds:
    """A model of 1.2 million numbers, nearly all in one matrix."""
    return Rounds(laboratory, JOB)


def drawn(names: Sequence[str], rng: np.random.Generator) -> Network:
    """Members in one to three places, with 1 to 50 Mbit/s on each pair between two of them, and
    perhaps lines of 5 to 100; the broker has fast ones."""
    n, places = len(names), int(rng.integers(1, 4))
    at = rng.integers(0, places, n)
    between = np.exp(rng.uniform(np.log(1), np.log(50), (places, places))) * MBIT
    near = at[:, None] == at
    rate, latency = np.full((n + 1, n + 1), 1e9), np.full((n + 1, n + 1), 0.02)
    rate[:n, :n] = np.where(near, 200 * MBIT, np.minimum(between, between.T)[np.ix_(at, at)])
    latency[:n, :n] = np.where(near, 0.002, 0.04)
    np.fill_diagonal(latency, 0.0)
    line = np.full(n + 1, np.inf)
    if places == 1 or rng.random() < 0.5:
        line[:n] = np.exp(rng.uniform(np.log(5), np.log(100), n)) * MBIT
    return Network(tuple(map(PeerId, (*names, BROKER))), latency, rate, line, line.copy())


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_an_exchange_takes_what_was_promised(
    million: Rounds, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    names = [f"p{i}" for i in range(int(rng.integers(2, 10)))]
    network = drawn(names, rng)

    def known(self: Probing, peers: Sequence[PeerId], now: float) -> Network:
        return network.part([network.peers.index(p) for p in peers])

    monkeypatch.setattr(Probing, "network", known)
    specs = [PeerSpec(name=n, place=n, flops_per_s=1e12) for n in names]
    plan, train = {"replicas": len(names)}, {"batch": len(names)}
    world, run = million.start(
        specs, None, device=ghosts(), wan=Wan(network, seed=0), plan=plan, train=train
    )
    million.monitor.finish(run, 1e6)
    [promised] = [e.formed.exchange_s for e in world.events(run) if e.HasField("formed")]

    second = done_of(world, run)[1]  # in the first one links learn what they carry
    assert promised == pytest.approx(second.exchange_s, rel=WITHIN)
