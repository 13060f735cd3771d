"""Peers on one machine share its cores, and nobody's by what a stranger says."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.broker.events import DescribeAsked
from shoal.dag.cost.network import uniform
from shoal.dag.plan.plan import PeerId
from shoal.planner.base.interface import PeerOffer, PlannerOptions, PlanRequest
from shoal.planner.cost.candidate import Candidate, StageShare
from shoal.planner.cost.cost_model import CostModel
from shoal.planner.schedulers.auto import auto
from shoal.tests.planner.cases import random_graph


def offer(
    name: str, host: str = "m", cores: float = 2.0, threads: int = 2, flops: float = 1e9
) -> PeerOffer:
    return PeerOffer(
        PeerId(name), device_memory_bytes=2**40, flops_per_s=flops, host=host, cores=cores,
        threads=threads,
    )  # fmt: skip


def judge(*offers: PeerOffer) -> CostModel:
    graph, costs = random_graph(random.Random(1), 6)
    options = PlannerOptions(scheduler="auto")
    links = uniform([o.peer for o in offers], 1e-6, 1e12)
    return CostModel(
        PlanRequest(graph, offers, 4, 1, options=options, links=links, known_costs=costs)
    )


def replicas(count: int, operators: int) -> Candidate:
    """Whole replicas on the first peers, with two microbatches each."""
    whole = [(StageShare(p, 0, operators),) for p in range(count)]
    return Candidate(tuple(whole), (4 // count,) * count)


def test_two_peers_of_one_machine_are_no_faster_than_one_of_them() -> None:
    apart, one = judge(offer("a"), offer("b", host="n")), judge(offer("a"), offer("b"))
    both = replicas(2, one.operators)
    alone = one.seconds(replicas(1, one.operators))
    assert one.seconds(both) > 0.9 * alone
    assert apart.seconds(both) < 0.7 * alone


def test_with_a_core_for_each_thread_they_do_not_meet() -> None:
    wide = judge(offer("a", cores=4.0), offer("b", cores=4.0))
    apart = judge(offer("a"), offer("b", host="n"))
    both = replicas(2, wide.operators)
    assert wide.seconds(both) == pytest.approx(apart.seconds(both))


def test_a_peer_with_a_card_keeps_a_core_of_its_machine_and_no_more() -> None:
    card = offer("gpu", threads=0, flops=1e12)
    found = judge(offer("cpu", cores=4.0, threads=4), card).hosts([0, 1])
    assert found is not None
    cores = dict(zip(found.host, (found.cores[h] for h in found.host), strict=True))
    assert [cores[h] for h in found.host] == [3.0, 0.0]
    assert judge(card, offer("other", host="n", threads=0)).hosts([0, 1]) is None


def test_a_planner_that_knows_leaves_the_neighbour_in_the_pool() -> None:
    """The same four peers, in pairs on two machines: a pair has one machine's speed."""
    spread = [offer(n, host=n) for n in "abcd"]
    pairs = [offer(n, host=h) for n, h in zip("abcd", "mmnn", strict=True)]
    times = []
    for offers in (spread, pairs):
        found = judge(*offers)
        made = auto(found.request)
        times.append(made.report.predicted.step_s)
    assert times[1] > 1.5 * times[0]


@given(
    cores=st.floats(0, 1e12),
    threads=st.integers(0, 2**32 - 1),
    first=st.booleans(),
    count=st.integers(1, 3),
)
def test_who_lies_about_a_machine_takes_no_more_than_who_computes_there(
    cores: float, threads: int, first: bool, count: int
) -> None:
    """An honest peer with two threads on two cores beside liars: it has about its equal
    part at least."""
    honest, liars = offer("a"), [offer(f"x{i}", "m", cores, threads) for i in range(count)]
    offers = [*liars, honest] if first else [honest, *liars]
    found = judge(*offers).hosts(range(len(offers)))
    assert found is not None
    machine = found.host[offers.index(honest)]
    wanted = sum(t for h, t in zip(found.host, found.threads, strict=True) if h == machine)
    assert found.threads[offers.index(honest)] == 2
    assert found.cores[machine] / wanted >= 0.9 / (1 + count)


def test_nobody_is_told_on_which_machine_another_one_is(world):
    """Who does not know the id of a machine cannot claim to be there."""
    world.join("a", host="0123456789abcdef", cores=2, threads=2)
    member = world.machine.members.members["a"]
    assert member.offer.host == "0123456789abcdef"
    (answer,) = world.handle(DescribeAsked(world.request()))
    assert [p.profile.cores for p in answer.message.peers] == [2]
    assert "0123456789abcdef" not in str(answer.message)
