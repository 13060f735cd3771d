"""What rounds count on, of both algebras: neither how the vector is divided, nor who adds up which
part, nor the order in which frames come changes a version."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as settings_of
from hypothesis import strategies as st

from shoal.dag.plan.action import Kind
from shoal.dag.plan.cut import Stage, cut
from shoal.dag.plan.plan import PeerId
from shoal.dag.rounds import vector
from shoal.dag.rounds.vector import RunVector
from shoal.dag.rounds.wiring import (
    GATHER,
    GIVE,
    RESULT,
    Giver,
    Place,
    VectorSegment,
    port_of,
    wiring,
)
from shoal.dag.schedule.flow import Role
from shoal.job.rounds import RoundSettings
from shoal.net.links.frame import Arrived, FrameKey
from shoal.peer.rounds.local import LocalSteps
from shoal.peer.rounds.tensors import TensorAlgebra
from shoal.peer.rounds.work import RoundWork
from shoal.proto.broker_pb2 import RoundPlan, RoundStart
from shoal.sim.ghost.hashes import Hashes
from shoal.sim.ghost.rounds import GhostVector
from shoal.sim.ghost.stage_hash import HeldHash, Linear
from shoal.tests.sim.ghost.test_ghost_rounds import job

Work = RoundWork[Any]
Make = Callable[[Any, Stage, RoundSettings, str], Work]


def of_tensors(graph: Any, stage: Stage, settings: RoundSettings, peer: str) -> Work:
    run, draws = RunVector.of(graph), torch.Generator().manual_seed(1)
    begun = {e.value: torch.randn(e.spec.elements, generator=draws) for e in run.entries}
    copies = {value: [tensor.clone()] for value, tensor in begun.items()}
    algebra, local = TensorAlgebra(run, settings, peer), LocalSteps(1, 1)
    work = RoundWork(algebra, settings, local, peer=PeerId(peer), stages=[stage], copies=copies)
    own = torch.Generator().manual_seed(ord(peer))
    for tensor in (t for there in copies.values() for t in there):
        tensor += torch.randn(tensor.shape, generator=own)
    return work


def of_hashes(graph: Any, stage: Stage, settings: RoundSettings, peer: str) -> Work:
    held = HeldHash(Linear(Hashes(graph, 0), stage))
    work = GhostVector(graph, settings).rounds(LocalSteps(1, 1), PeerId(peer), {0: held})
    for at in range(len(held.linear.standing)):
        held.put(at, int(held.state[at]) * ord(peer) % 2**64)
    return work


def placed(segment: VectorSegment, rng: random.Random) -> VectorSegment:
    """Divide who does not add it up among two places, or give by itself, at random."""
    others = [g.peer for g in segment.givers if g.peer != segment.aggregator]
    at = {peer: rng.randrange(3) for peer in others}
    groups = [tuple(p for p in others if at[p] == n) for n in range(2)]
    places = tuple(Place(rng.choice(group), group, group) for group in groups if group)
    return replace(segment, places=places)


def met(
    works: dict[str, Work], rng: random.Random, near: bool = False, part: int = 0
) -> set[tuple[int, ...]]:
    """Hashes that all come to in an exchange that is divided at random. `near`: in places, too;
    `part`: as in RoundPlan."""
    run, peers = next(iter(works.values())).vector, [*works]
    cuts = {0, run.elements, *(rng.randrange(run.elements) for _ in range(rng.randrange(6)))}
    weights = {peer: 1 + i for i, peer in enumerate(peers)}
    givers = tuple(Giver(PeerId(p), w) for p, w in weights.items())
    takers = tuple(map(PeerId, peers))
    divided = [
        VectorSegment(span, PeerId(rng.choice(peers)), givers, takers)
        for span in pairwise(sorted(cuts))
    ]
    divided = [placed(segment, rng) for segment in divided] if near else divided
    plan = RoundPlan(attempt=1, weight=sum(weights.values()), exponent=10, members=len(peers))
    plan.part = part
    wired = {p: wiring(run, divided, PeerId(p), most=part) for p in peers}
    for peer, work in works.items():
        work.begin(RoundStart(steps=1))
        assert not work.carry_out(Kind.CONTRIBUTE).code
        work.join(plan, wired[peer])
        assert not work.carry_out(Kind.EXCHANGE).code
    for hop in (GIVE, GATHER, RESULT):
        frames = [(p, *f) for p in peers for f in sorted(wired[p].goes) if f[0] == hop]
        rng.shuffle(frames)
        frames.sort(key=lambda f: wired[f[0]].goes[f[1:]].given)  # passed on behind what is made
        for source, _, part, to, block in frames:
            assert (hop, part, source, block) in wired[to].comes
            key = FrameKey("r", 1, 0, Role.ROUND, block, hop, port_of(part), source, to)
            if source != to:
                works[to].frames.accept(copied(key, works[source].frames.payload(key)))
    return {work.carry_out(Kind.APPLY).hashes for work in works.values()}


def copied(key: FrameKey, payload: Any) -> Arrived:
    [*buffers] = payload.buffers
    whole = isinstance(buffers[0], memoryview)
    data = memoryview(bytearray(b"".join(buffers))) if whole else buffers[0]
    return Arrived(key, payload.codec, payload.codec_header, payload.spec, data)


@pytest.mark.parametrize("make", [of_tensors, of_hashes])
@pytest.mark.parametrize(
    "settings",
    [
        RoundSettings(method="average", replicas=3),
        RoundSettings(method="diloco", replicas=3, codec="int8"),
        RoundSettings(method="sparse-loco", replicas=3),
    ],
    ids=lambda settings: settings.method,
)
def test_a_version_hangs_on_what_was_given_alone(
    laboratory: Any, monkeypatch: pytest.MonkeyPatch, make: Make, settings: RoundSettings
) -> None:
    monkeypatch.setattr(vector, "PIECE", 1000)
    monkeypatch.setattr("shoal.peer.rounds.coding.LEAST_ELEMENTS", 64)
    graph = laboratory(job(3)).graph.bind(2)
    [stage] = cut(graph, [(0, len(graph.operators))])
    found = set()
    for seed in range(5):
        order = random.Random(seed)
        peers = order.sample("abc", 3)
        works = {p: make(graph, stage, settings, p) for p in sorted(peers)}
        found |= met(works, order)
    assert len(found) == 1
    two = {p: make(graph, stage, settings, p) for p in "ab"}
    assert not found & met(two, random.Random(0)), "who is in it counts"


@pytest.mark.parametrize("make", [of_tensors, of_hashes])
def test_sums_of_places_make_the_same_version(
    laboratory: Any, monkeypatch: pytest.MonkeyPatch, make: Make
) -> None:
    monkeypatch.setattr(vector, "PIECE", 1000)
    graph, settings = laboratory(job(6)).graph.bind(2), RoundSettings(method="diloco", replicas=6)
    [stage] = cut(graph, [(0, len(graph.operators))])
    found = set()
    for seed in range(6):
        works = {p: make(graph, stage, settings, p) for p in "abcdef"}
        found |= met(works, random.Random(seed), near=seed > 0)
    assert len(found) == 1


@pytest.mark.parametrize("make", [of_tensors, of_hashes])
def test_any_cut_makes_the_same_version(
    laboratory: Any, monkeypatch: pytest.MonkeyPatch, make: Make
) -> None:
    """Where numbers go as they are; also of a second attempt, which is cut in another way."""
    monkeypatch.setattr(vector, "PIECE", 300)
    graph = laboratory(job(4)).graph.bind(2)
    [stage] = cut(graph, [(0, len(graph.operators))])

    def version(seed: int, *parts: int) -> set[tuple[int, ...]]:
        settings = RoundSettings(method="average", replicas=4)
        works, rng = {p: make(graph, stage, settings, p) for p in "abcd"}, random.Random(seed)
        return set().union(*(met(works, rng, seed % 2 > 0, part) for part in parts))

    whole = version(0, 0)
    assert len(whole) == 1

    @settings_of(max_examples=6, deadline=None)
    @given(st.integers(0, 1 << 20), st.lists(st.integers(150, 2000), min_size=1, max_size=2))
    def cuts(seed: int, parts: list[int]) -> None:
        assert version(seed, *parts) == whole

    cuts()
