"""The exact planner against an unpruned enumeration, and what any optimum must obey."""

from __future__ import annotations

import dataclasses
import itertools
import random

import numpy as np
import pytest

from shoal.dag.cost.network import Network
from shoal.planner.base.interface import NoPlan, PlanRequest
from shoal.planner.cost.candidate import Candidate, chain
from shoal.planner.cost.cost_model import CostModel
from shoal.planner.schedulers.exact import MOST_OPERATORS, exact, prove
from shoal.tests.planner.cases import random_case


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


def test_its_plan_is_valid_fits_and_says_why() -> None:
    request = random_case(3, operators=8, peers=4)
    made = exact(request)
    made.plan.validate(len(request.costs))
    memory = {o.peer: o.device_memory_bytes for o in request.offers}
    assert all(p.device_bytes <= memory[p.peer] for p in made.report.predicted.peers)
    assert made.report.reasons[0].startswith("proven best of ")
    assert {s.peer for s in made.report.spares} | set(made.plan.peers) == set(memory)


def test_fixed_stages_and_recomputation_are_kept() -> None:
    request = random_case(4, operators=8, peers=4)
    options = dataclasses.replace(request.options, stages=2, recompute=True)
    made = exact(dataclasses.replace(request, options=options))
    assert len(made.plan.stages) == 2
    assert all(s.recompute for s in made.plan.stages)


def test_larger_requests_are_refused_with_the_limit() -> None:
    cases = (random_case(seed, operators=MOST_OPERATORS + 8, peers=3) for seed in range(9))
    request = next(case for case in cases if len(case.costs) > MOST_OPERATORS)
    with pytest.raises(NoPlan, match="up to 12 operators and 6 peers"):
        exact(request)
    several = dataclasses.replace(
        random_case(1), options=dataclasses.replace(request.options, pipelines=2)
    )
    with pytest.raises(NoPlan, match="knows one pipeline"):
        exact(several)
