"""A backward in halves changes no bit: of losses, weights and what goes over the wire under any
codec, whatever a holder keeps, recomputes, adds up with others or clips. And no holder keeps more
than was reckoned."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal.dag.cost.cost import cost
from shoal.dag.cost.memory import MemoryModel, live_moments
from shoal.dag.plan.action import Kind
from shoal.dag.plan.cut import cut, tied_groups
from shoal.dag.plan.plan import PeerId, Plan
from shoal.dag.schedule.flow import Flow
from shoal.dag.schedule.orders import zero_bubble
from shoal.dag.schedule.schedule import listed, with_visits
from shoal.job import Codec
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
    for peer, told in memory_of(lab, halves).items():
        assert world.peers[peer].device.peak_bytes <= told


def memory_of(lab, plan: Plan) -> dict[PeerId, int]:
    """By peer that has a visit, what planners reckon it keeps."""
    graph, found = lab.graph.bind(plan.microbatch_size), {}
    stages = cut(graph, [(s.start, s.stop) for s in plan.stages])
    flow = Flow(plan, stages, tied_groups(graph, stages))
    model, backward = MemoryModel(graph, cost(graph)), [s.has_backward for s in stages]
    for peer in plan.peers:
        held = plan.stages_of(peer)
        if moments := live_moments(flow.actions(peer), held, backward):
            state = lab.job.train.state_bytes
            found[peer] = model.peer_bytes(plan, held, moments, state)
    return found


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
