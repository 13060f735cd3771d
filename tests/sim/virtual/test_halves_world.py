"""A backward in halves changes no bit: of losses, weights and what goes over the wire under any
codec, whatever a holder keeps, recomputes, adds up with others or clips. And no microbatch
keeps more between the halves than was reckoned."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal.dag.cost.cost import cost
from shoal.dag.cost.weight_costs import WaitingMemory
from shoal.dag.plan.action import Kind
from shoal.dag.plan.cut import cut
from shoal.dag.plan.plan import Plan
from shoal.dag.schedule.orders import zero_bubble
from shoal.dag.schedule.schedule import listed, with_visits
from shoal.job import Codec
from shoal.sim.virtual.world import World
from shoal.tests.sim.virtual.test_exactness import PEERS, random_plan, small_job


def in_halves(lab, plan: Plan, rng: random.Random) -> tuple[Plan, Plan]:
    """A plan under 1F1B, and with backwards in halves as deep as it comes."""
    graph = lab.graph.bind(plan.microbatch_size)
    stages = cut(graph, [(s.start, s.stop) for s in plan.stages])
    bounds, waiting = ({k: rng.randint(1, 4) for k in range(len(stages))} for _ in range(2))
    lists = zero_bubble.order(plan, stages, None, bounds, waiting)
    visits = tuple(tuple(lists[p]) for p in plan.peers)
    halves = with_visits(replace(plan, schedule="zero-bubble"), stages, visits)
    return listed(replace(plan, schedule="1f1b"), stages), halves


def compare(lab, seed: int) -> None:
    rng = random.Random(seed)
    stages = rng.randint(1, 4)
    plan = random_plan(rng, len(lab.graph.operators), stages, lab.job.train)
    again = tuple(replace(s, recompute=rng.random() < 0.4) for s in plan.stages)
    whole, halves = in_halves(lab, replace(plan, stages=again), rng)
    assert any(a.kind is Kind.WEIGHT for visits in halves.visits for a in visits)
    wanted, world = lab.train(lab.world(PEERS), whole), lab.world(PEERS)
    got = lab.train(world, halves)
    assert got.losses == wanted.losses
    assert got.norms == wanted.norms
    assert got.weights.keys() == wanted.weights.keys()
    for name, weight in wanted.weights.items():
        assert torch.equal(got.weights[name], weight), name
    assert_kept(lab, halves, world)


def assert_kept(lab, plan: Plan, world: World) -> None:
    """What a microbatch kept between its halves is no more than was reckoned, and nothing is left.
    Of peers that run the full graph: what the core form keeps is reckoned from that one, too."""
    graph = lab.graph.bind(plan.microbatch_size)
    reckoned = WaitingMemory(graph, cost(graph))
    for peer in plan.peers:
        for k, held in world.peers[peer].device._now.held.items():
            executor, slot = held.executor, plan.stages[k]
            assert not executor.waiting
            if not world.peers[peer].spec.core:
                assert executor.apart_bytes <= reckoned.of(slot.start, slot.stop)[0]


OTHERWISE = {"plain": {}, "clipped": {"clip": 0.05, "codec": Codec(default="int8:block=64")}}


def lab_of(laboratory, folder, name: str, otherwise: str):
    more = dict(OTHERWISE[otherwise])
    job = small_job(name, folder)
    clip = more.pop("clip", job.train.clip)
    train = replace(job.train, steps=3, eval_every=3, clip=clip)
    return laboratory(replace(job, name=f"halves-{name}-{otherwise}", train=train, **more))


def test_halves_give_the_bits_of_whole_backwards(laboratory, tmp_path) -> None:
    compare(lab_of(laboratory, tmp_path, "gpt_bytes", "clipped"), seed=1)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("otherwise", OTHERWISE)
@pytest.mark.parametrize("name", ["encoder_decoder", "gpt_bytes", "moe", "resnet_digits", "unet"])
@settings(max_examples=12, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32))
def test_any_plan_in_halves_gives_the_bits_of_the_plan(
    laboratory, tmp_path_factory, name, otherwise, seed
) -> None:
    folder = tmp_path_factory.mktemp("data")
    compare(lab_of(laboratory, folder, name, otherwise), seed)
