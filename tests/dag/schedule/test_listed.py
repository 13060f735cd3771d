"""Lists of visits in a plan: whoever made them, they are proved before anybody follows them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from shoal.dag.plan.action import TRAITS, VISITS
from shoal.dag.plan.cut import bare_stages, outline
from shoal.dag.plan.outline import Crossed, Outline, StageOutline
from shoal.dag.plan.plan import PeerId, Plan, PlanError, StageSlot, Visit
from shoal.dag.schedule.convert_plan import plan_from_proto, plan_to_proto
from shoal.dag.schedule.convert_slice import slice_to_proto
from shoal.dag.schedule.flow import Flow
from shoal.dag.schedule.orders.schedules import SCHEDULES
from shoal.dag.schedule.schedule import Action, Kind, ScheduleError, check_listed, listed
from shoal.dag.schedule.slices import PlanSlices
from shoal.tests.dag.schedule.checker import check


@given(st.data())
def test_lists_of_any_schedule_are_proved_and_come_back_from_the_wire(worlds, data) -> None:
    world = data.draw(worlds)
    plan = replace(world.plan, schedule=data.draw(st.sampled_from(sorted(SCHEDULES))))
    plan = listed(plan, world.stages)
    check_listed(plan, world.stages)
    assert plan_from_proto(plan_to_proto(plan)) == plan


def test_the_table_has_a_number_for_every_visit_and_for_nothing_else() -> None:
    numbers = {kind: traits.number for kind, traits in TRAITS.items() if traits.number >= 0}
    assert numbers.keys() == VISITS
    assert sorted(numbers.values()) == list(range(len(VISITS)))
    # Journals have them: none may ever stand for another kind.
    assert [numbers[Kind(text)] for text in "FBEW"] == [0, 1, 2, 3]


@given(st.data())
def test_what_waits_for_its_own_list_alone_takes_and_gives_nothing(worlds, data) -> None:
    world = data.draw(worlds)
    plan = listed(replace(world.plan, schedule="zero-bubble"), world.stages)
    flow = Flow(plan, world.stages, world.tied)
    for peer, visits in zip(plan.peers, plan.visits, strict=True):
        for at, visit in enumerate(visits):
            traits = TRAITS[visit.kind]
            if traits.behind is not None:
                assert visits.index(visit._replace(kind=traits.behind)) < at
            if traits.by_itself:
                assert traits.behind is not None
                assert not flow.takes(peer, visit)
                assert not flow.gives(peer, visit)


@given(st.data())
def test_a_listed_backward_of_a_stage_that_has_none_is_refused(worlds, data) -> None:
    world = data.draw(worlds)
    plan = listed(world.plan, world.stages)
    k = next((k for k, s in enumerate(world.stages) if s.has_backward), None)
    assume(k is not None)
    stages = [
        replace(s, has_backward=s.has_backward and i != k) for i, s in enumerate(world.stages)
    ]
    with pytest.raises(PlanError):
        check_listed(plan, stages)


@given(st.data())
def test_a_changed_list_is_refused_or_comes_to_its_end(worlds, data) -> None:
    """By the replay of whole steps, exchanges with them; only the order within a stage is a rule
    of its own."""
    world = data.draw(worlds)
    place = data.draw(st.integers(0, len(world.plan.peers) - 1))
    mine = list(world.plan.visits[place])
    if not mine:
        return
    at, to = (data.draw(st.integers(0, len(mine) - 1)) for _ in range(2))
    change = data.draw(st.sampled_from(["move", "swap", "drop", "repeat", "other"]))
    if change == "move":
        mine.insert(to, mine.pop(at))
    elif change == "swap":
        mine[at], mine[to] = mine[to], mine[at]
    elif change == "drop":
        del mine[at]
    elif change == "repeat":
        mine.insert(to, mine[at])
    else:
        mine[at] = mine[at]._replace(microbatch=mine[at].microbatch + 1)
    visits = tuple(tuple(mine) if i == place else v for i, v in enumerate(world.plan.visits))
    plan = replace(world.plan, visits=visits)

    def runs() -> bool:
        flow = Flow(plan, world.stages, world.tied)
        try:
            check(plan, world.stages, world.tied, {p: flow.actions(p) for p in plan.peers})
        except ScheduleError:
            return False
        return _ascends(visits[place])

    try:
        check_listed(plan, world.stages)
    except PlanError:
        assert not runs()
    else:
        assert runs()


@given(st.data())
def test_lists_with_any_times_and_bounds_are_proved(worlds, data) -> None:
    world = data.draw(worlds)
    seconds = st.floats(0, 10, allow_subnormal=False)
    times = _Times(data.draw(st.lists(seconds, min_size=7, max_size=7)))
    bounds = {k: data.draw(st.integers(1, 6)) for k in range(len(world.stages))}
    for name in sorted(SCHEDULES):
        plan = listed(replace(world.plan, schedule=name), world.stages, times, None)
        check_listed(plan, world.stages)
    plan = replace(world.plan, schedule="1f1b")
    check_listed(listed(plan, world.stages, times, bounds), world.stages)


class _Times:
    """Some seconds for each visit and message, by what they are."""

    def __init__(self, seconds: list[float]) -> None:
        self._seconds = seconds

    def visit(self, peer: PeerId, action: Action) -> float:
        return self._seconds[(action.stage + (action.kind is Kind.BACKWARD)) % 7]

    def message(
        self, source: tuple[PeerId, Kind, int], target: tuple[PeerId, Kind, int]
    ) -> tuple[float, float]:
        return self._seconds[source[2] % 7], self._seconds[target[2] % 7]


def _ascends(visits: tuple[Action, ...]) -> bool:
    by_stage: dict[tuple[Kind, int], list[int]] = {}
    for action in visits:
        by_stage.setdefault((action.kind, action.stage), []).append(action.microbatch)
    return all(found == sorted(set(found)) for found in by_stage.values())


def test_a_plan_that_would_wait_for_ever_names_where(chain) -> None:
    world = chain(2, 2)
    plan = world.plan()
    first = tuple(map(Action.parse, ("F0@0", "B0@0", "F1@0", "B1@0")))
    last = tuple(map(Action.parse, ("F0@1", "F1@1", "B0@1", "B1@1")))
    with pytest.raises(PlanError, match=r"peers wait for each other: a at B0@0, b at F1@1"):
        check_listed(replace(plan, visits=(first, last)), world.stages)
    last = tuple(map(Action.parse, ("F0@1", "B0@1", "B1@1", "F1@1")))
    with pytest.raises(PlanError, match=r"B1@1 stands where it cannot in the list of b"):
        check_listed(replace(plan, visits=(first, last)), world.stages)
    with pytest.raises(PlanError, match="lists the visits of 0 of 2 peers"):
        check_listed(replace(plan, visits=()), world.stages)
    ordered = outline(world.graph, [(s.start, s.stop) for s in plan.stages])
    with pytest.raises(PlanError, match="does not list its visits"):
        PlanSlices(replace(plan, outline=ordered, visits=()))


def test_the_plan_of_a_thousand_peers_and_a_slice_of_it_are_small() -> None:
    """The journal has a plan once for each term, a peer its slice."""
    for stages, pipelines in ((1000, 1), (25, 40)):
        plan = _pipelines(stages, pipelines, microbatches=64)
        assert plan_to_proto(plan).ByteSize() < 200_000
    plan = _pipelines(16, 1, microbatches=64)
    slices = PlanSlices(plan)
    assert max(slice_to_proto(slices.of(p)).ByteSize() for p in plan.peers) < 5_000


def _pipelines(stages: int, pipelines: int, microbatches: int) -> Plan:
    names = [
        [PeerId(f"peer-{p:04d}-{k:04d}-0123456789") for k in range(stages)]
        for p in range(pipelines)
    ]
    routes = [tuple(Visit(k, name) for k, name in enumerate(row)) for row in names]
    outlines = tuple(
        StageOutline(
            k,
            (Crossed(f"v{k}", (k + 1,), (k + 1,)),) if k + 1 < stages else (),
            trainable=True,
            statistics=False,
            makes_loss=k + 1 == stages,
            has_backward=True,
        )
        for k in range(stages)
    )
    plan = Plan(
        tuple(StageSlot(k, k + 1, tuple(row[k] for row in names)) for k in range(stages)),
        tuple(routes[m % pipelines] for m in range(microbatches * pipelines)),
        1,
        outline=Outline(outlines),
    )
    return listed(plan, bare_stages(plan))
