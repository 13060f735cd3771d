"""op-fence: cuts along a path against brute force, and plans that keep what was asked for."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.dag.cost.cost import OperatorCost, cost
from shoal.dag.cost.network import Network
from shoal.dag.ir.graph import Graph, Input, Operator, Output, Parameter, Ref, TensorSpec
from shoal.dag.plan.plan import PeerId
from shoal.planner.base.interface import NoPlan, PeerOffer, PlannerOptions, PlanRequest
from shoal.planner.baselines.op_fence import MOST_JUDGED, candidates, op_fence
from shoal.planner.cost.cost_model import CostModel
from shoal.planner.cost.rows import RowBuilder
from shoal.planner.network.pathcut import (
    Path,
    PathCut,
    best_cut,
    least_bottleneck,
    slowest_circle,
    soonest_fill,
)
from shoal.tests.planner.cases import chain

GIB = 2**30


@functools.cache
def layers_graph(layers: int, width: int = 32) -> Graph:
    """linear, relu, …, then a sum as the loss."""
    operators: list[Operator] = []
    value, spec = "in:x", TensorSpec((4, width), "float32")
    for i in range(layers):
        args = (Ref(value), Ref(f"param:w{i}"))
        out = (Output(spec, True),)
        operators.append(Operator(f"linear{i}", "aten.linear.default", args, (), out))
        relu = (Ref(f"linear{i}"),)
        operators.append(Operator(f"relu{i}", "aten.relu.default", relu, (), out))
        value = f"relu{i}"
    scalar = (Output(TensorSpec((), "float32"), True),)
    operators.append(Operator("loss", "aten.sum.default", (Ref(value),), (), scalar))
    return Graph(
        inputs=(Input("x", spec),),
        parameters=tuple(
            Parameter(f"w{i}", TensorSpec((width, width), "float32")) for i in range(layers)
        ),
        buffers=(),
        operators=tuple(operators),
        loss="loss",
        batch=4,
    )


@functools.cache
def costs_of(layers: int) -> tuple[OperatorCost, ...]:
    return cost(layers_graph(layers))


def ask(
    seed: int,
    peers: int,
    layers: int = 4,
    memory: int = GIB,
    microbatches: int = 6,
    **options: object,
) -> PlanRequest:
    """Speeds over 10×, bandwidths over 1,000×."""
    rng = np.random.default_rng(seed)
    names = tuple(PeerId(f"p{i}") for i in range(peers))
    bandwidth = 10 ** rng.uniform(5, 8, (peers, peers))
    latency = rng.uniform(1e-4, 1e-2, (peers, peers))
    free = np.full(peers, np.inf)
    return PlanRequest(
        layers_graph(layers),
        tuple(
            PeerOffer(p, p, device_memory_bytes=memory, flops_per_s=10 ** rng.uniform(7, 8))
            for p in names
        ),
        microbatches,
        4,
        options=PlannerOptions(**options),
        links=Network(names, latency, bandwidth, free, free.copy()),
        known_costs=costs_of(layers),
    )


# ---------------------------------------------------------------- the cut along a path


def random_path(seed: int, peers: int, n: int, reach: int) -> Path:
    rng = np.random.default_rng(seed)
    steps = rng.integers(0, 10, n) * (rng.random(n) < 0.8)
    seconds = np.concatenate(([0.0], np.cumsum(steps)))[None] / rng.uniform(1, 10, (peers, 1))
    crossing = rng.integers(1, 20, n + 1).astype(float)
    there = rng.uniform(0.01, 1.0, (peers, peers)) ** 2
    # What fits: no more than some number of positions.
    lows = [np.maximum(0, np.arange(n + 1) - rng.integers(1, n + 1)) for _ in range(peers)]
    latency = rng.uniform(0, 1, (peers, peers))
    return Path(
        seconds, lows, crossing, np.maximum(there, there.T), there + there.T, latency, reach
    )


def every_cut(path: Path) -> list[tuple[float, float]]:
    """(bottleneck, fill) of every way to cut the path that fits."""
    n, found = path.seconds.shape[1] - 1, []
    everyone = range(len(path))
    for size in range(1, len(path) + 1) if path.reach > 1 else (len(path),):
        for chosen in itertools.combinations(everyone, size):
            if any(b - a > path.reach for a, b in itertools.pairwise(chosen)):
                continue
            for inner in itertools.combinations(range(1, n), size - 1):
                cuts = (0, *inner, n)
                spans = list(zip(chosen, itertools.pairwise(cuts), strict=True))
                if any(a < path.lows[k][b] for k, (a, b) in spans):
                    continue
                stages = [path.seconds[k, b] - path.seconds[k, a] for k, (a, b) in spans]
                hops = list(zip(itertools.pairwise(chosen), inner, strict=True))
                slow = [path.crossing[i] * path.slower[hop] for hop, i in hops]
                both = [path.crossing[i] * path.both[hop] + path.latency[hop] for hop, i in hops]
                found.append((max(stages + slow), sum(stages) + sum(both)))
    return found


@given(st.integers(0, 10_000), st.integers(1, 4), st.integers(1, 7), st.sampled_from([1, 2, 4]))
@settings(max_examples=150)
def test_the_cut_has_the_least_bottleneck_and_then_fills_soonest(
    seed: int, peers: int, n: int, reach: int
) -> None:
    path = random_path(seed, peers, n, reach)
    every = every_cut(path)
    found = least_bottleneck(path)
    if not every:
        assert found is None
        return
    assert found is not None
    assert found.bottleneck_s == pytest.approx(min(b for b, _ in every), rel=1e-6)
    for bound in (found.bottleneck_s * 1.5, np.inf):
        fill = soonest_fill(path, bound)
        assert fill is not None
        assert fill.fill_s == pytest.approx(min(f for b, f in every if b <= bound * (1 + 1e-9)))
        assert fill.fill_s == pytest.approx(sum(fill.stages_s))
    assert found.cuts[0] == 0
    assert found.cuts[-1] == n


def test_windows_of_long_chains_are_those_of_short_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    from shoal.planner.network import pathcut

    path = random_path(3, 6, 90, 6)
    short = least_bottleneck(path)
    monkeypatch.setattr(pathcut, "_SMALL", 4)
    assert least_bottleneck(path) == short
    assert short is not None


def test_what_is_on_its_way_bounds_the_pace() -> None:
    # Two stages of 1 s and a link of 1 s there and back: a microbatch is back after 3 s, and two
    # may be on their way.
    assert slowest_circle((2.0, 1.0), 8) == 1.5
    assert slowest_circle((2.0, 1.0), 1) == 0.0


# ---------------------------------------------------------------- plans


@given(st.integers(0, 1000), st.integers(1, 5))
@settings(max_examples=12)
def test_candidates_are_different_and_valid(seed: int, peers: int) -> None:
    request = ask(seed, peers)
    judge = CostModel(request)
    found = list(itertools.islice(candidates(judge), 30))
    assert len(set(found)) == len(found) > 0
    for candidate in found:
        judge.plan(candidate).plan.validate(judge.operators)


@given(st.integers(0, 1000), st.permutations(range(4)))
@settings(max_examples=12)
def test_names_and_joining_do_not_matter(seed: int, order: list[int]) -> None:
    request = ask(seed, 4)
    assert request.links is not None
    turned = dataclasses.replace(
        request,
        offers=tuple(request.offers[i] for i in order),
        links=request.links.part(order),
    )
    a, b = op_fence(request), op_fence(turned)
    assert a.plan.stages == b.plan.stages
    assert sorted(a.plan.routes) == sorted(b.plan.routes)
    assert a.report.predicted.step_s == b.report.predicted.step_s


def test_one_peer_alone_has_the_whole_graph() -> None:
    made = op_fence(ask(0, 1))
    assert [(s.start, s.stop, s.holders) for s in made.plan.stages] == [(0, 9, ("p0",))]
    assert made.report.predicted.step_s > 0


def test_a_slow_peer_goes_to_the_pool() -> None:
    request = ask(0, 3)
    slow = dataclasses.replace(request.offers[1], flops_per_s=1e3)
    request = dataclasses.replace(request, offers=(request.offers[0], slow, request.offers[2]))
    made = op_fence(request)
    assert "p1" not in made.plan.peers
    assert "p1" in [s.peer for s in made.report.spares]


def test_the_slow_crossing_between_two_islands_is_passed_once() -> None:
    request = ask(0, 6, layers=8, stages=6)
    island = np.arange(6) % 2
    rate = np.where(island[:, None] == island, 1e8, 2e4)
    assert request.links is not None
    links = dataclasses.replace(request.links, bandwidth=rate)
    made = op_fence(dataclasses.replace(request, links=links))
    at = [int(visit.peer[1]) % 2 for visit in made.plan.routes[0]]
    assert sum(a != b for a, b in itertools.pairwise(at)) == 1


def test_memory_is_kept() -> None:
    whole = CostModel(ask(1, 4, layers=6)).stage_bytes(0, 13, 1)
    request = ask(1, 4, layers=6, memory=whole // 2)
    made = op_fence(request)
    assert len(made.plan.peers) > 1
    assert all(p.device_bytes <= whole // 2 for p in made.report.predicted.peers)


def test_what_is_short_is_named() -> None:
    with pytest.raises(NoPlan, match="short by") as caught:
        op_fence(ask(1, 2, memory=6000))
    assert caught.value.code == "memory"
    with pytest.raises(NoPlan, match="4 peers are needed") as caught:
        op_fence(ask(1, 2, stages=4))
    assert caught.value.code == "peers"


@pytest.mark.parametrize(
    "options",
    [
        {"stages": 2},
        {"pipelines": 2},
        {"stages": 2, "pipelines": 2},
        {"schedule": "gpipe"},
        {"schedule": "interleaved"},
        {"recompute": True},
    ],
)
def test_options_are_kept(options: dict[str, object]) -> None:
    request = ask(5, 4, **options)
    plan = op_fence(request).plan.validate(9)
    routes = set(plan.routes)
    if "pipelines" in options:
        assert len(routes) == 2
    if "stages" in options:
        per_row = {len({visit.peer for visit in route}) for route in routes}
        assert per_row == {2}
    if "schedule" in options:
        assert plan.schedule == options["schedule"]
    assert all(s.recompute for s in plan.stages) == bool(options.get("recompute"))


def test_other_microbatch_sizes_are_tried() -> None:
    request = ask(2, 3, microbatches=1)
    finer = dataclasses.replace(request, microbatches=8)
    made = op_fence(dataclasses.replace(finer, others=(request,)))
    assert len(made.plan.routes) == 1  # here a microbatch costs the same whatever its size is


def test_the_best_of_the_judged_is_taken() -> None:
    request = ask(4, 4)
    judge = CostModel(request)
    first = list(itertools.islice(candidates(judge), MOST_JUDGED))
    made = op_fence(request)
    assert made.report.predicted.step_s == pytest.approx(min(judge.seconds(c) for c in first))
    alone = min(judge.seconds(chain([p], [0, 9], 6)) for p in range(4))
    assert made.report.predicted.step_s <= alone * (1 + 1e-9)


# ---------------------------------------------------------------- rows


def test_a_row_keeps_its_cuts_where_fewer_peers_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut again for the peers that got something, positions may be coarser, and nothing fits
    between them (seen with 48 peers and the 1,800 operators of a model of 8B parameters)."""
    request, without = ask(3, 40, layers=150), 0
    sizes = [GIB if i in (7, 30) else 1 for i in range(40)]
    offers = tuple(
        dataclasses.replace(offer, device_memory_bytes=size)
        for offer, size in zip(request.offers, sizes, strict=True)
    )
    rows = RowBuilder(CostModel(dataclasses.replace(request, offers=offers)))

    def only_once(path: Path, microbatches: int, *, bound: bool) -> PathCut | None:
        nonlocal without
        without += path.reach == 1
        return None if path.reach == 1 else best_cut(path, microbatches, bound=bound)

    monkeypatch.setattr("shoal.planner.cost.rows.best_cut", only_once)
    guess = rows.single(range(40))
    assert without == 1
    assert guess is not None
    (shares,) = guess.candidate.pipelines
    assert {s.peer for s in shares} <= {7, 30}
    ends = [end for s in shares for end in (s.start, s.stop)]
    assert ends == sorted(ends)
    assert (ends[0], ends[-1]) == (0, len(request.graph.operators))
