"""Holders in rows and columns: who answers for what, how much crosses, what the checker proves."""

import math
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.broker.scheduler.candidate import Candidate, Share
from shoal.broker.scheduler.interface import CodecOptions, PeerOffer, PlanOptions, PlanRequest
from shoal.broker.scheduler.judge import Judge
from shoal.dag.check import check, slots
from shoal.dag.convert_plan import plan_from_proto, plan_to_proto
from shoal.dag.flow import Flow
from shoal.dag.grid import MOST_ALL_TO_ALL, Grid, rows_for
from shoal.dag.pace import Totals, action_work, is_coded, sizes_of
from shoal.dag.plan import PeerId, Plan, StageSlot, Visit
from shoal.dag.schedule import Action, Kind, ScheduleError, step_actions


@st.composite
def grids(draw):
    n = draw(st.integers(2, 40))
    rows = draw(st.one_of(st.just(round(math.sqrt(n))), st.integers(1, n)))
    return Grid([PeerId(f"p{i}") for i in range(n)], rows)


def wide(chain, holders, rows):
    """A chain of two stages with so many holders of the second, of which two run microbatches."""
    peers = tuple(PeerId(f"p{i}") for i in range(holders))
    first = PeerId("first")
    plan = Plan(
        (StageSlot(0, 1, (first,)), StageSlot(1, 2, peers, rows=rows)),
        tuple((Visit(0, first), Visit(1, peer)) for peer in peers[:2]),
        microbatch_size=2,
    )
    return plan.validate(2), chain(2, 2).stages


def crossing(flow, stage=1):
    ports = tuple(f"S{stage}{mark}" for mark in (">", "=", "+", "*"))
    return [t for t in flow.given_by if t.port.startswith(ports) and not t.is_local]


@given(grids())
def test_each_shard_has_one_who_answers_for_it_in_each_row(grid):
    assert tuple(p for row in grid.rows for p in row) == grid.holders
    lengths = [len(row) for row in grid.rows]
    assert max(lengths) - min(lengths) <= 1
    for owner, handlers in zip(grid.holders, grid.handlers, strict=True):
        assert all(h in row for h, row in zip(handlers, grid.rows, strict=True))
        assert owner in handlers, "an owner answers for its shard in its own row"
    for row in grid.rows:
        answered = [shard for peer in row for shard in grid.answers[peer]]
        assert sorted(answered) == list(range(len(grid.holders)))
        assert all(grid.row(peer) == row for peer in row)
        # Nobody has many more than others.
        assert max(len(grid.answers[p]) for p in row) <= len(grid.rows) * (1 + 1 / len(row)) + 1


@pytest.mark.parametrize("n", [*range(2, 41), 125, 1000])
def test_frames_and_partners_grow_with_the_root(chain, n):
    grid = Grid([PeerId(f"p{i}") for i in range(n)], round(math.sqrt(n)))
    pairs = [(a, b) for _, a, b, _, _ in grid.transfers() if a != b]
    assert len(pairs) <= 4 * n * (math.sqrt(n) - 1) + n / 2
    partners = Counter(a for a, _ in {*pairs} | {(b, a) for a, b in pairs})
    assert max(partners.values()) <= 2 * math.sqrt(n)
    if n > MOST_ALL_TO_ALL:
        assert rows_for(n) == len(grid.rows)
        assert len(pairs) <= n * (n - 1), "half of what each with each takes"
    else:
        assert rows_for(n) == 0


@settings(deadline=None)
@given(st.data())
def test_the_checker_proves_the_lists(chain, data):
    n = data.draw(st.integers(2, 40))
    plan, stages = wide(chain, n, data.draw(st.integers(1, n)))
    lists = step_actions(plan, stages, ())
    order = [a.kind for p, a in check(plan, stages, (), lists).order if p == "p0"]
    kinds = [Kind.SYNC_GIVE, Kind.SYNC_ROW, Kind.SYNC_COMBINE, Kind.SYNC_RELAY, Kind.SYNC_TAKE]
    at = [order.index(kind) for kind in kinds]
    assert at == sorted(at)
    peak = slots(plan, stages, ())
    flow = Flow(plan, stages, ())
    assert {t[4:] for t in crossing(flow)} <= {link[:2] for link in peak}


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ("S>@1", "S=@1", "p4 has S=@1 before S>@1: expected it behind it"),
        ("S=@1", "S+@1", r"p4 has S\+@1 before S=@1"),
        ("S+@1", "S*@1", r"p4 has S\*@1 before S\+@1"),
        ("S*@1", "S<@1", r"p4 has S<@1 before S\*@1"),
    ],
)
def test_a_wrong_order_is_caught(chain, first, second, message):
    plan, stages = wide(chain, 10, 3)
    lists = step_actions(plan, stages, ())
    turned = {Action.parse(first): Action.parse(second), Action.parse(second): Action.parse(first)}
    p4 = PeerId("p4")
    with pytest.raises(ScheduleError, match=message):
        check(plan, stages, (), {**lists, p4: tuple(turned.get(a, a) for a in lists[p4])})
    without = tuple(a for a in lists[p4] if a != Action.parse(second))
    with pytest.raises(
        ScheduleError, match=f"p4 lacks {second}".replace("+", r"\+").replace("*", r"\*")
    ):
        check(plan, stages, (), {**lists, p4: without})
    each, _ = wide(chain, 10, 0)
    with pytest.raises(ScheduleError, match="which the plan does not give it"):
        check(each, stages, (), lists)


@given(st.data())
def test_rows_carry_as_many_bytes_as_each_with_each(chain, data):
    n = data.draw(st.integers(2, 40))
    rows = data.draw(st.integers(1, n))
    (plan, stages), graph = wide(chain, n, rows), chain(2, 2).graph
    each, _ = wide(chain, n, 0)
    sums = [
        sum(sizes_of(p, stages, (), graph)(t) for t in crossing(Flow(p, stages, ())))
        for p in (plan, each)
    ]
    assert sums[0] == sums[1]


def test_the_work_of_rows_is_less_than_of_all_shards(chain):
    """Each adds up its row's parts and the rows' sums: about as much in all as n parts."""
    graph = chain(2, 2).graph
    n, size = 16, graph.parameter_bytes["p1"]
    works = []
    for rows in (0, 4):
        plan, stages = wide(chain, n, rows)
        work = action_work(plan, stages, (), graph, Totals([]), optimizer_slots=0)
        listed = (a for a in step_actions(plan, stages, ())[PeerId("p5")] if str(a)[0] == "S")
        works.append({str(a): work(PeerId("p5"), a).memory / size for a in listed})
    assert works[0] == {"S>@1": 2, "S+@1": 17 / 16, "S<@1": 2}
    assert works[1] == {
        **{"S>@1": 4, "S=@1": 5 * 4 / 16, "S+@1": 5 / 16, "S*@1": 2 * 4 / 16, "S<@1": 2}
    }


def test_a_plan_with_rows_comes_back_from_the_wire(chain):
    plan, stages = wide(chain, 12, 3)
    assert plan_from_proto(plan_to_proto(plan)) == plan
    assert "in 3 rows" in repr(plan)
    assert not any(is_coded(t) for t in crossing(Flow(plan, stages, ())))


@pytest.mark.parametrize(("codec", "rows"), [("none", 3), ("int8", 0), ("auto", 0)])
def test_planners_choose_rows_for_many_where_gradients_go_raw(chain, codec, rows):
    graph = chain(2, 2).graph
    offers = tuple(PeerOffer(PeerId(f"p{i}"), device_memory_bytes=1 << 30) for i in range(10))
    options = PlanOptions(codecs=CodecOptions(sync=codec))
    candidate = Candidate(tuple((Share(i, 0, 2),) for i in range(10)), (1,) * 10)
    judge = Judge(replace(PlanRequest(graph, offers, 10, 2), options=options))
    plan = judge.plan(candidate)
    assert [slot.rows for slot in plan.stages] == [rows]
    assert plan.predicted.step_s == judge.seconds(candidate) > 0
