"""The proven optimum against an unpruned enumeration, and what any optimum must obey."""

from __future__ import annotations

import dataclasses
import itertools
import random

import numpy as np
import pytest

from shoal.benchmarks.planning.exact import prove
from shoal.dag.cost.network import Network
from shoal.planner.base.interface import PlanRequest
from shoal.planner.cost.candidate import Candidate
from shoal.planner.cost.cost_model import CostModel
from shoal.tests.planner.cases import chain, random_case


def brute_force(judge: CostModel, schedule: str) -> tuple[float, Candidate | None]:
    """Every order of every subset, every cut, played without any bound."""
    n, m = judge.operators, judge.request.microbatches
    best: tuple[float, Candidate | None] = (float("inf"), None)
    for k in range(1, min(n, len(judge.offers)) + 1):
        for inner in itertools.combinations(range(1, n), k - 1):
            for peers in itertools.permutations(range(len(judge.offers)), k):
                candidate = chain(peers, (0, *inner, n), m, schedule)  # type: ignore[arg-type]
                if judge.fits(candidate):
                    seconds = judge.play(candidate)[1].step_s
                    if seconds < best[0]:
                        best = seconds, candidate
    return best


def schedule_of(request: PlanRequest) -> str:
    return request.options.schedule


@pytest.mark.parametrize("seed", range(24))
def test_it_finds_what_the_unpruned_enumeration_finds(seed: int) -> None:
    request = random_case(seed, operators=5, peers=3)
    judge = CostModel(request)
    seconds, candidate = brute_force(judge, schedule_of(request))
    proof = prove(CostModel(request), schedule_of(request))  # type: ignore[arg-type]
    assert (proof.best is None) == (candidate is None)
    assert proof.seconds == pytest.approx(seconds, rel=1e-9)


def test_most_candidates_fall_to_the_bounds() -> None:
    request = random_case(0)
    proof = prove(CostModel(request), "1f1b")
    assert proof.candidates > 10_000
    assert proof.played < 300


@pytest.mark.parametrize("seed", range(6))
def test_other_numbers_of_the_peers_give_the_same_seconds(seed: int) -> None:
    request = random_case(seed, operators=7, peers=4)
    order = list(range(len(request.offers)))
    random.Random(seed).shuffle(order)
    assert request.links is not None
    other = dataclasses.replace(
        request,
        offers=tuple(request.offers[i] for i in order),
        links=request.links.part(order),
    )
    one = prove(CostModel(request), "1f1b")
    assert prove(CostModel(other), "1f1b").seconds == pytest.approx(one.seconds, rel=1e-9)


@pytest.mark.parametrize("seed", range(6))
def test_a_faster_pair_never_makes_the_optimum_slower(seed: int) -> None:
    """Where no uplink or downlink is shared: there a faster flow could take from a needed one."""
    request = random_case(seed, operators=7, peers=4)
    rng = random.Random(seed)
    n = len(request.offers)
    assert request.links is not None
    free = np.full(n, np.inf)
    net = Network(request.links.peers, request.links.latency_s, request.links.bandwidth, free, free)
    before = prove(CostModel(dataclasses.replace(request, links=net)), "1f1b").seconds
    for _ in range(3):
        i, j = rng.sample(range(n), 2)
        faster = net.bandwidth.copy()
        faster[i, j] *= rng.uniform(1, 50)
        net = dataclasses.replace(net, bandwidth=faster)
        after = prove(CostModel(dataclasses.replace(request, links=net)), "1f1b").seconds
        assert after <= before * (1 + 1e-9)
        before = after


def test_recomputation_takes_longer_and_needs_less() -> None:
    judge = CostModel(random_case(4, operators=8, peers=4))
    plain, again = (prove(judge, "1f1b", stages=2, recompute=r) for r in (False, True))
    assert again.seconds > plain.seconds
    assert again.best is not None
    assert all(s.recompute for s in again.best.pipelines[0])
    assert len(again.best.pipelines[0]) == 2
