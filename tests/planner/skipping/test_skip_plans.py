"""Plans whose microbatches leave stages out: what holds of any of them, and what is refused."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shoal.dag.analysis.skippable import bypass_of, skippable_blocks
from shoal.dag.capture.capture import capture
from shoal.dag.cost.network import Network
from shoal.dag.execute.stage_visits import StageVisits
from shoal.dag.ir.graph import Graph
from shoal.dag.plan.action import Kind
from shoal.dag.plan.cut import cut
from shoal.dag.plan.plan import PeerId, PlanError
from shoal.dag.plan.report import PlanWithReport
from shoal.dag.plan.routes import IN_ORDER, crossings, routes_digest, swaps
from shoal.examples.gpt import gpt
from shoal.examples.resnet_digits import resnet
from shoal.planner.answers.bad_plan import bad_plan
from shoal.planner.answers.planning import outlined
from shoal.planner.base.interface import (
    CodecOptions,
    NoPlan,
    PeerOffer,
    PlannerOptions,
    PlanRequest,
)
from shoal.planner.cost.cost_model import CostModel
from shoal.planner.cost.plan_cost import plan_seconds
from shoal.planner.schedulers.schedulers import plan
from shoal.planner.skipping.layouts import window


def captured(module: nn.Module, *, labels: bool = True) -> Graph:
    text = torch.zeros(2, 8, dtype=torch.int64)
    return capture(module, {"x": text, "y": text} if labels else {"x": text.float()}).graph


@cache
def whole() -> Graph:
    """Captured when the first test runs, not when tests are collected."""
    return captured(gpt(6, 16, 1, 8, 0.0))


def request_of(
    speeds: list[float],
    *,
    graph: Graph | None = None,
    microbatches: int = 6,
    memory: int = 1 << 30,
    latency_s: float = 0.02,
    **options: object,
) -> PlanRequest:
    peers = tuple(PeerId(f"p{i}") for i in range(len(speeds)))
    offers = tuple(
        PeerOffer(p, f"h{p}", device_memory_bytes=memory, flops_per_s=s)
        for p, s in zip(peers, speeds, strict=True)
    )
    n, rng = len(peers), np.random.default_rng(len(peers))
    links = Network(
        peers,
        latency_s * rng.uniform(0.1, 1.0, (n, n)),
        1e6 * rng.uniform(0.5, 2.0, (n, n)),
        np.full(n, np.inf),
        np.full(n, np.inf),
    )
    asked = PlannerOptions(**{"scheduler": "op-fence", **options})  # type: ignore[arg-type]
    return PlanRequest((graph or whole()).bind(2), offers, microbatches, 2, 1, asked, links)


@pytest.mark.parametrize(
    "seed", [*range(2), *(pytest.param(k, marks=pytest.mark.slow) for k in range(2, 20))]
)
def test_any_plan_has_equal_visits_whole_blocks_and_no_more_left_out_than_allowed(
    seed: int,
) -> None:
    rng = random.Random(seed)
    speeds = [rng.choice([1e8, 3e8, 1e9]) for _ in range(rng.randint(1, 5))]
    microbatches, skip = rng.choice([6, 7, 12]), rng.choice([0.2, 1 / 3, 0.5])
    reorder = seed % 2 == 1
    request = request_of(speeds, microbatches=microbatches, skip=skip, reorder=reorder)
    found, report = plan(request)
    graph, last = request.graph, len(found.stages) - 1
    found = outlined(graph, found.validate(len(graph.operators)))
    assert bad_plan(PlanWithReport(found, report), ()) == ""
    visits = Counter(v.stage for route in found.routes for v in route)
    assert visits[0] == visits[last] == microbatches
    inner = [visits[k] for k in range(1, last)]
    assert max(inner) - min(inner) <= 1
    blocks = [b for b in skippable_blocks(graph) if not b.why_not]
    gone = 0
    for route in found.routes:
        for k in {*range(1, last)} - {v.stage for v in route}:
            slot = found.stages[k]
            assert not bypass_of(graph, slot.start, slot.stop).why_not
            gone += sum(slot.start <= b.start < slot.stop for b in blocks)
    assert 0 < gone <= (skip + 0.01) * len(blocks) * microbatches + len(blocks) / (last - 1)
    assert reorder or not swaps(found)
    assert all(len(route) == last + 1 for route in found.evaluation_routes)
    assert plan_seconds(CostModel(request), found) == pytest.approx(report.predicted.step_s)


def test_a_block_that_is_used_many_times_says_what_its_copies_take() -> None:
    """On one peer, too: every stage updates a copy of its own."""

    class Repeated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.block = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.first(x)
            for _ in range(4):
                h = h + torch.relu(self.block(h))
            return h.square().mean()

    graph = captured(Repeated(), labels=False)
    found, report = plan(request_of([1e8], graph=graph, skip=0.5))
    (said,) = [r for r in report.reasons if "a copy of its own" in r]
    stages = cut(graph.bind(2), [(s.start, s.stop) for s in found.stages])
    copies = sum("block.weight" in s.trainable for s in stages)
    assert "2 weights of several stages" in said
    assert f"{(copies - 1) * 4 * (64 + 8)} B more" in said


def test_a_plan_is_found_again() -> None:
    request = request_of([1e8] * 4, skip=0.5, reorder=True)
    assert plan(request).plan == plan(request).plan


def test_a_plan_with_full_steps_says_what_they_take_with_codecs_and_without() -> None:
    codecs = CodecOptions(activation="bf16", activation_grad="bf16")
    for coded in (CodecOptions(), codecs):
        request = request_of([1e8] * 4, skip=1 / 3, full_steps=(2, 4), codecs=coded)
        found, report = plan(request)
        assert found.full is not None
        assert (found.full.before, found.full.since) == (2, 4)
        predicted = report.predicted
        assert predicted.step_s < predicted.full_step_s < 0.25
        outlined(request.graph, found.validate(len(request.graph.operators)))
    links = {(c.source, c.destination) for c in found.codecs if c.role == "activation"}
    pairs = {(a.peer, b.peer) for r in found.full.routes for a, b in pairwise(r)}
    assert {(a, b) for a, b in pairs if a != b} <= links


@pytest.mark.slow
def test_full_steps_fit_the_memory_that_the_others_fit() -> None:
    request = request_of([1e8] * 4, skip=0.5, full_steps=(2, 4), schedule="gpipe")
    found, judge = plan(request).plan, CostModel(request)
    needed = judge.plan_bytes(found)
    assert needed == judge.plan_bytes(found.in_full)
    assert any(needed[p] > size for p, size in judge.plan_bytes(replace(found, full=None)).items())


@pytest.mark.parametrize("schedule", ["gpipe", "listed", "zero-bubble"])
def test_a_job_may_say_how_its_visits_are_listed(schedule: str) -> None:
    request = request_of([1e8] * 3, skip=0.5, schedule=schedule)
    found = plan(request).plan
    assert found.schedule == schedule
    halves = any(a.kind is Kind.WEIGHT for visits in found.visits for a in visits)
    assert halves == (schedule == "zero-bubble")
    outlined(request.graph, found)


def test_nothing_is_left_out_unless_the_job_says_so() -> None:
    request = request_of([1e8] * 3, scheduler="auto")
    found = plan(request)
    assert routes_digest(found.plan) == IN_ORDER
    asked = replace(request, options=replace(request.options, skip=0.0, reorder=False))
    assert plan(asked) == found


def test_the_planner_leaves_out_a_quarter_at_most_and_only_where_it_pays() -> None:
    found = plan(request_of([1e8], microbatches=8, skip=None))
    out = 1 - sum(len(r) - 2 for r in found.plan.routes) / 8 / (len(found.plan.stages) - 2)
    assert 0.15 < out <= 0.26
    few = plan(request_of([1e8], skip=None, microbatches=2))
    assert routes_digest(few.plan) == IN_ORDER
    assert "all stages in order: plan.skip: 2 microbatches cannot" in few.report.reasons[-1]


def test_what_cannot_be_is_refused_with_a_reason() -> None:
    plain = captured(_Plain(), labels=False)
    for request, words in (
        (
            request_of([1e8] * 2, graph=plain, skip=0.3),
            "that follow each other, 0 can be left out: expected",
        ),
        (request_of([1e8] * 3, microbatches=1, skip=0.5), "1 microbatch cannot visit each of"),
        (
            request_of([1e8] * 2, skip=0.02),
            "plan.skip = 0.02 leaves out no whole stage: .* expected 0.17",
        ),
        (request_of([1e8] * 2, skip=0.3, stages=7), "plan.stages is 7: expected 2 to 6"),
        (request_of([1e8] * 2, skip=0.5, memory=20_000), "memory"),
        (
            request_of([1e8] * 2, graph=clamped(), skip=0.5, stochastic_depth=True),
            'skip_scaling is "stochastic-depth", and layers.0 has a ReLU behind its sum',
        ),
    ):
        with pytest.raises(NoPlan, match=words):
            plan(request)


def test_a_stage_with_a_relu_behind_its_sum_is_left_out_but_not_scaled() -> None:
    """A peer says so too, whatever the plan: each stage of a hand-written one is looked at."""
    request = request_of([1e8] * 2, graph=clamped(), skip=0.5)
    found, graph = plan(request).plan, request.graph
    assert any(len(route) < len(found.stages) for route in found.routes)
    stages = cut(graph, [(s.start, s.stop) for s in found.stages])
    visited = tuple(m for m, r in enumerate(found.routes) if any(v.stage == 1 for v in r))
    asked = graph, stages[1], visited, found.routes, found.peers[0]
    assert StageVisits.of(*asked, "renormalise").gradients == len(found.routes) / len(visited)
    assert StageVisits.of(*asked, "sum").gradients == 1
    with pytest.raises(PlanError, match=r"stage 1 is left out .* has a ReLU behind its sum"):
        StageVisits.of(*asked, "stochastic-depth")


class _Stack(nn.Module):
    """Six residual layers; the first `frozen` of them and what is before train nothing, `read`: the
    layer of which the loss takes what it makes, too, `apart`: whether each layer also takes a value
    of its own, made before all of them."""

    def __init__(self, *, frozen: int = -1, read: int | None = None, apart: bool = False) -> None:
        super().__init__()
        self.first, self.last, self.read = nn.Linear(8, 8), nn.Linear(8, 1), read
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.sides = nn.ModuleList(nn.Linear(8, 8) for _ in range(6 if apart else 0))
        for part in (self.first, *self.layers)[: frozen + 1]:
            part.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, made = self.first(x), []
        sides = [side(x) for side in self.sides]
        for i, layer in enumerate(self.layers):
            h = h + torch.tanh(layer(h) + (sides[i] if sides else 0.0))
            made.append(h)
        loss: torch.Tensor = self.last(h).square().mean()
        return loss if self.read is None else loss + made[self.read].square().mean()


@pytest.mark.parametrize(
    ("frozen", "read", "reorder"),
    [
        (0, None, False),
        (2, None, True),
        (-1, 3, True),
        *(
            pytest.param(frozen, read, reorder, marks=pytest.mark.slow)
            for frozen in (-1, 0, 1, 3)
            for read in (None, 0, 1, 4, 5)
            for reorder in (False, True)
        ),
    ],
)
def test_a_plan_leaves_out_only_what_those_that_check_it_allow(
    frozen: int, read: int | None, reorder: bool
) -> None:
    graph = captured(_Stack(frozen=frozen, read=read), labels=False)
    request = request_of([1e8] * 2, graph=graph, skip=0.5, reorder=reorder)
    try:
        found = plan(request).plan
    except NoPlan as error:
        assert "can be left out: expected 2 or more" in error.reason  # noqa: PT017
        assert (frozen, read) in {(1, 4), (3, 4)}
        return
    assert any(len(route) < len(found.stages) for route in found.routes)
    stages = cut(request.graph, [(s.start, s.stop) for s in found.stages])
    for route in found.routes:
        assert crossings(stages, route)


def test_more_in_flight_than_a_step_has_microbatches_is_all_of_them() -> None:
    graph = captured(_Stack(), labels=False)
    all_of_them, more = (
        plan(request_of([1e8] * 2, graph=graph, scheduler="auto", skip=0.5, in_flight=n)).plan
        for n in (6, 500)
    )
    assert more == all_of_them


def test_stages_that_none_may_leave_out_are_refused_by_name() -> None:
    request = request_of(
        [1e8] * 3, graph=captured(_Stack(apart=True), labels=False), skip=0.5, stages=6
    )
    with pytest.raises(NoPlan, match=r"stage 1 \(layers.0\) cannot be, as not one value alone"):
        plan(request)


@cache
def clamped() -> Graph:
    images, labels = torch.zeros(2, 1, 8, 8), torch.zeros(2, dtype=torch.int64)
    return capture(resnet(4, 4), {"x": images, "y": labels}).graph


class _Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.layers(x).mean()
        return loss


@given(st.integers(1, 12), st.integers(0, 11))
def test_a_window_is_the_fewest_microbatches_of_equal_visits(inner: int, out: int) -> None:
    out %= inner
    fits = [w for w in range(1, inner + 1) if w * (inner - out) % inner == 0]
    assert window(inner, out) == fits[0]
