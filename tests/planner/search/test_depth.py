"""Depth: plans are as deep as links want and memory allows, and never longer for it."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.dag.plan.action import TRAITS, Kind
from shoal.dag.plan.plan import Plan
from shoal.dag.schedule.orders.schedules import TIMED
from shoal.dag.schedule.schedule import check_listed
from shoal.planner.base.interface import NoPlan, PlannerOptions
from shoal.planner.cost.candidate import Candidate
from shoal.planner.cost.cost_model import CostModel
from shoal.planner.schedulers.auto import auto
from shoal.planner.schedulers.form_result import FormResult, deepest
from shoal.planner.search.depth import deepened
from shoal.planner.search.search import SearchResult
from shoal.tests.planner.cases import chain, random_case
from shoal.tests.planner.replicas.chains import request_in_places

PEERS = 4


def far(room: float, *, microbatches: int = 24, **options: object) -> tuple[CostModel, Candidate]:
    """Four equal peers, each in a place of its own: a message holds its link nearly as long as a
    forward takes. `room`: memory, in microbatches that the first one can keep."""
    asked = PlannerOptions(pipelines=1, recompute=False, **options)  # type: ignore[arg-type]
    request = request_in_places(
        range(PEERS),
        [1.0] * PEERS,
        [1.0] * PEERS,
        slow=4e4,
        microbatches=microbatches,
        operators=3 * PEERS,
        options=asked,
    )
    heavy = tuple(replace(c, saves=((i, 1 << 20),)) for i, c in enumerate(request.costs))
    request = replace(request, known_costs=heavy)
    judge = CostModel(request)
    least = judge.stage_bytes(0, 3, 1)
    each = judge.stage_bytes(0, 3, 2) - least
    memory = int(least + (room - 1) * each)
    offers = tuple(replace(o, device_memory_bytes=memory) for o in request.offers)
    return CostModel(replace(request, offers=offers)), chain(
        range(PEERS), range(0, 3 * PEERS + 1, 3), microbatches
    )


def kept(plan: Plan) -> int:
    """The most microbatches that a peer keeps between forward and backward."""
    most = 0
    for visits in plan.visits:
        live = 0
        for visit in visits:
            live += TRAITS[visit.kind].keeps
            most = max(most, live)
    return most


def test_it_is_deeper_where_messages_take_long_and_memory_allows() -> None:
    seconds = []
    for room in (4, 6, 9, 30):
        judge, candidate = far(room)
        found = deepened(judge, candidate)
        assert found.seconds == judge.seconds(found.candidate) <= judge.seconds(candidate)
        assert judge.fits(found.candidate)
        assert kept(judge.plan(found.candidate).plan) <= room
        seconds.append(found.seconds)
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] < 0.75 * judge.seconds(candidate)
    flush = replace(candidate, schedule="gpipe")
    assert seconds[-1] <= judge.seconds(flush) * (1 + 1e-9)
    assert seconds[2] < 1.05 * seconds[-1]
    assert not far(9)[0].fits(flush)
    assert found.tried[0][0] <= PEERS < found.tried[-1][0]


def test_where_links_are_free_no_depth_is_worth_more_than_the_textbooks() -> None:
    judge, candidate = far(30)
    links = judge.network
    free = replace(links, latency_s=0 * links.latency_s, bandwidth=np.full((PEERS, PEERS), np.inf))
    judge = CostModel(replace(judge.request, links=free))
    found = deepened(judge, candidate)
    assert found.candidate.schedule == "zero-bubble"
    assert found.undivided_s == judge.seconds(candidate)


@given(st.integers(0, 2**32 - 1))
def test_no_step_is_longer_and_lists_are_proved(seed: int) -> None:
    request, rng = random_case(seed, held=False), random.Random(seed)
    judge = CostModel(request)
    peers = rng.sample(range(len(request.offers)), rng.randint(1, len(request.offers)))
    stages = min(len(peers), judge.operators)
    candidate = chain(peers[:stages], judge.even_cuts(stages), request.microbatches)
    if not judge.cuttable(candidate):
        return
    found = deepened(judge, candidate)
    assert found.seconds == judge.seconds(found.candidate) <= judge.seconds(candidate)
    if found.seconds < float("inf"):
        plan = judge.plan(found.candidate).plan
        check_listed(plan, judge.structure(found.candidate).stages)
        assert (plan.schedule in TIMED) == bool(found.candidate.visits)


def test_a_job_says_how_deep() -> None:
    seconds = {}
    for asked in (1, 2, 5, 8):
        judge, _ = far(9, schedule="listed", in_flight=asked)
        plan, report = auto(judge.request)
        assert plan.schedule == "listed"
        assert kept(plan) <= asked
        seconds[asked] = report.predicted.step_s
    assert seconds[1] > seconds[2] > seconds[5] > seconds[8]
    with pytest.raises(NoPlan, match=r"in_flight is 20, and .* more than (\d+) at once") as caught:
        auto(far(9, in_flight=20)[0].request)
    most = int(str(caught.value).split(" at once")[0].split()[-1])
    assert kept(auto(far(9, in_flight=most)[0].request).plan) <= most < 20


def test_smaller_microbatches_may_have_room_for_as_many() -> None:
    judge, _ = far(9, in_flight=20)
    request = judge.request
    roomy = tuple(replace(c, saves=tuple((k, 1 << 10) for k, _ in c.saves)) for c in request.costs)
    other = replace(request, known_costs=roomy, microbatches=48)
    plan = auto(replace(request, others=(other,))).plan
    assert (len(plan.routes), plan.schedule) == (48, "zero-bubble")


def test_a_job_may_ask_for_a_list_or_the_textbook() -> None:
    judge, _ = far(30, schedule="1f1b")
    textbook = auto(judge.request)
    assert (textbook.plan.schedule, kept(textbook.plan)) == ("1f1b", PEERS)
    listed = auto(far(30, schedule="listed")[0].request)
    assert listed.plan.schedule == "listed"
    assert listed.report.predicted.step_s < textbook.report.predicted.step_s
    assert any(
        "by the most microbatches that a peer keeps: 4 at once" in x for x in listed.report.reasons
    )


def test_gradients_of_weights_fill_waits_where_memory_has_room_for_them() -> None:
    """Under auto never a longer step than with whole backwards; and no more memory than is there,
    of what is live and of what waits."""
    shorter = []
    for room in (3, 4, 6, 9, 30):
        whole = auto(far(room, schedule="listed")[0].request)
        judge, candidate = far(room)
        plan, report = auto(judge.request)
        assert report.predicted.step_s <= whole.report.predicted.step_s
        halves = deepened(far(room, schedule="zero-bubble")[0], candidate).candidate
        assert halves.schedule == "zero-bubble"
        if judge.fits(halves):
            assert kept(judge.plan(halves).plan) <= room
            assert plan.schedule == "zero-bubble"
            assert any("gradients of weights are computed where" in x for x in report.reasons)
            shorter.append(report.predicted.step_s / whole.report.predicted.step_s)
    assert len(shorter) >= 4
    assert shorter[-1] < 0.92


def test_a_job_may_ask_for_gradients_of_weights_apart() -> None:
    """Also where they gain nothing: of one peer, and where memory has no room it is said."""
    request = request_in_places([0], [2.0], [1.0], microbatches=4)
    plan = auto(replace(request, options=PlannerOptions(schedule="zero-bubble"))).plan
    assert plan.schedule == "zero-bubble"
    assert sum(a.kind is Kind.WEIGHT for visits in plan.visits for a in visits) == 4
    judge, candidate = far(9, microbatches=1, schedule="zero-bubble")
    room = max(judge.stage_bytes(a, b, 1) for a, b, *_ in candidate.slots())
    offers = tuple(replace(o, device_memory_bytes=room) for o in judge.offers)
    judge = CostModel(replace(judge.request, offers=offers))
    only = FormResult(judge, SearchResult(candidate, (0.0, judge.seconds(candidate))), {})
    assert judge.fits(candidate)
    with pytest.raises(NoPlan, match=r"none has memory for one whose gradients of weights wait"):
        deepest(only)
    plan = auto(far(9, schedule="zero-bubble", in_flight=3)[0].request).plan
    assert (plan.schedule, kept(plan)) == ("zero-bubble", 3)


def test_one_peer_takes_one_microbatch_after_the_other() -> None:
    request = request_in_places([0], [2.0], [1.0], microbatches=4)
    options = PlannerOptions(schedule="listed", in_flight=3)
    plan = auto(replace(request, options=options)).plan
    assert (plan.schedule, kept(plan)) == ("listed", 1)
