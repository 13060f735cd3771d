"""Which collective a plan takes for the gradients of a stage's holders."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.dag.cost.network import Network
from shoal.dag.cost.speed import Speeds
from shoal.dag.exchange.collectives import SUMS
from shoal.dag.ir.graph import Graph, Input, Operator, Output, Parameter, Ref, TensorSpec
from shoal.dag.plan.plan import PeerId
from shoal.planner.base.interface import CodecOptions, PeerOffer, PlannerOptions, PlanRequest
from shoal.planner.cost.candidate import Candidate, GradientSum, StageShare
from shoal.planner.cost.cost_model import CostModel
from shoal.planner.schedulers.auto import auto
from shoal.planner.search.collectives import EVEN, FINE, shares, with_collectives

FAST = Speeds.of_flops(1e14)


def graph_of(elements: int) -> Graph:
    """One operator with so many trained numbers."""
    row, weight = TensorSpec((2,), "float32"), TensorSpec((elements,), "float32")
    add = Operator("v", "aten.add.Tensor", (Ref("in:x"), Ref("in:x")), (), (Output(row, True),))
    mean = Operator(
        "w", "aten.mean.default", (Ref("param:p"),), (), (Output(TensorSpec((), "float32"), True),)
    )
    last = Operator("l", "aten.add.Tensor", (Ref("v"), Ref("w")), (), (Output(row, True),))
    return Graph((Input("x", row),), (Parameter("p", weight),), (), (add, mean, last), "l").bind(2)


def network(up: list[float], latency_s: float = 1e-4, places: list[int] | None = None) -> Network:
    """Lines of so many bytes/s each; between two places one hundredth of that, and 50 ms."""
    n = len(up)
    apart = np.zeros((n, n), dtype=bool)
    if places:
        apart = np.array(places)[:, None] != np.array(places)
    line = np.array(up)
    return Network(
        tuple(PeerId(f"p{i}") for i in range(n)),
        np.where(apart, 0.05, latency_s),
        np.where(apart, line.min() / 100, np.inf),
        line,
        line,
    )


def replicas(
    links: Network, elements: int = 2_000_000, **options: object
) -> tuple[CostModel, Candidate]:
    """Every peer holds the whole graph."""
    n = len(links.peers)
    offers = tuple(PeerOffer(p, device_memory_bytes=1 << 34, speeds=FAST) for p in links.peers)
    asked = PlannerOptions(**options)  # type: ignore[arg-type]
    judge = CostModel(PlanRequest(graph_of(elements), offers, n, 2, options=asked, links=links))
    whole = tuple((StageShare(i, 0, judge.operators),) for i in range(n))
    return judge, Candidate(whole, (1,) * n)


@settings(deadline=None, max_examples=4)
@given(
    st.lists(st.sampled_from([1e6, 3e6, 1e7, 1e8]), min_size=2, max_size=9),
    st.sampled_from([1e-4, 0.05]),
    st.sampled_from([1_000, 2_000_000]),
    st.integers(1, 3),
)
def test_the_choice_is_never_worse_and_is_what_the_plan_says(up, latency_s, elements, places):
    where = [i % places for i in range(len(up))]
    judge, candidate = replicas(network(up, latency_s, where), elements)
    found = with_collectives(judge, candidate)
    assert judge.seconds(found) <= judge.seconds(candidate)
    made = judge.plan(found)
    made.plan.validate(judge.operators)
    assert made.report.predicted.step_s == judge.seconds(found)
    for name in SUMS:
        other, _ = replicas(network(up, latency_s, where), elements, collective=name)
        assert judge.seconds(found) <= 1.01 * other.seconds(candidate), name


def test_shares_follow_unequal_lines():
    judge, candidate = replicas(network([1e8, 1e7, 1e7, 1e6]))
    found = with_collectives(judge, candidate)
    weights = shares(judge, range(4))
    assert weights[3] == 0, "the slowest gets and gives one vector, and adds up nothing"
    assert max(weights) < 1.1 * min(weights[:3]), "of the others it makes no difference: even ones"
    # That is as fast as its line allows: its gradients once.
    bound = judge.memory.stage(0, judge.operators).trainable / 1e6
    assert bound < judge.seconds(found) < 1.1 * bound
    assert judge.seconds(candidate) > 1.4 * judge.seconds(found)


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.sampled_from([1e6, 2e6, 5e6, 1e7]), min_size=4, max_size=4),
    st.lists(st.sampled_from([2e5, 1e6, 3e6, np.inf]), min_size=6, max_size=6),
)
def test_no_other_shares_are_sooner_done(up, pairs):
    """What is on a line is also on its pairs, of which some are narrower."""
    n = len(up)
    links = network(up)
    i, k = np.triu_indices(n, 1)
    links.bandwidth[i, k] = links.bandwidth[k, i] = pairs
    judge, _ = replicas(links)
    rate = np.minimum(links.rates(), links.rates().T)
    line = np.minimum(up, np.where(np.eye(n, dtype=bool), 0, rate).sum(axis=1))

    def done(f: np.ndarray) -> float:
        f = f / f.sum()
        return float(max(((1 + (n - 2) * f) / line).max(), ((f[i] + f[k]) / rate[i, k]).max()))

    found = done(np.array(shares(judge, range(n)), dtype=float))
    grid = [
        np.array([*some, 20 - sum(some)])
        for some in itertools.product(range(21), repeat=n - 1)
        if sum(some) <= 20
    ]
    assert found <= min(map(done, grid)) * (1 + 2 / FINE) / EVEN


def test_places_make_shares_together_and_wide_pairs_carry_more():
    """Of two places both as much; a member as its pairs across are wide."""
    links = network([1e8] * 4, places=[0, 0, 1, 1])
    links.bandwidth[:2, 2] = links.bandwidth[2, :2] = 3e6
    judge, candidate = replicas(links)
    weights = shares(judge, range(4), ((0, 1), (2, 3)))
    assert weights == (250, 250, 375, 125)
    groups = ((0, 1), (2, 3))
    sums = [GradientSum((0, 1, 2, 3), "hierarchical", groups, w, chunks=16) for w in ((), weights)]
    even, fitting = (judge.seconds(replace(candidate, sums=(one,))) for one in sums)
    size = judge.memory.stage(0, judge.operators).trainable
    assert fitting < 1.15 * size / 8e6 + 0.1 < even


def test_rows_that_are_places_cross_less_than_mixed_ones():
    links = network([1e8] * 6, places=[0, 1, 0, 1, 0, 1])
    judge, candidate = replicas(links)
    places, mixed = ((0, 2, 4), (1, 3, 5)), ((0, 1, 2), (3, 4, 5))
    by_place, by_number = (
        judge.seconds(
            replace(candidate, sums=(GradientSum(tuple(range(6)), "hierarchical", groups),))
        )
        for groups in (places, mixed)
    )
    assert by_place < 0.8 * by_number


@pytest.mark.parametrize("name", SUMS)
def test_a_job_may_name_one(name):
    judge, candidate = replicas(network([1e8, 1e7, 1e7, 1e6]), collective=name)
    assert with_collectives(judge, candidate) == candidate
    made = judge.plan(candidate)
    assert [e.collective for e in made.plan.exchanges] == ([name] if name != "all-to-all" else [])
    assert not any(e.weights for e in made.plan.exchanges)


def test_what_is_compressed_stays_with_each_with_each():
    links = network([1e7] * 6, places=[0, 0, 0, 1, 1, 1])
    judge, candidate = replicas(links, codecs=CodecOptions(sync="int8"))
    assert with_collectives(judge, candidate) == candidate


def test_auto_takes_it():
    judge, _ = replicas(network([1e8, 1e7, 1e7, 1e6]), elements=2_000_000, pipelines=4)
    made = auto(replace(judge.request, microbatches=12))
    assert all(e.weights and e.chunks > 1 for e in made.plan.exchanges)
    assert made.plan.exchanges


def test_it_says_nothing_of_other_holders():
    """Reasons and spares look at plans with one peer more or less."""
    judge, candidate = replicas(network([1e8, 1e7, 1e7, 1e6]))
    found = with_collectives(judge, candidate)
    fewer = replace(found, pipelines=found.pipelines[:3], microbatches=(1, 1, 2))
    assert judge.seconds(fewer) == judge.seconds(replace(fewer, sums=()))
    turned = replace(found, pipelines=found.pipelines[::-1])
    assert judge.seconds(turned) == judge.seconds(replace(turned, sums=()))
