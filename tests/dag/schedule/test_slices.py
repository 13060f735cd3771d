"""What a peer finds in its slice, against what it would find in the whole plan."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.dag.plan.cut import bare_stages, cut, outline, tied_groups
from shoal.dag.plan.plan import CodecChoice, PeerId, Plan, PlanError, SnapshotKeeper
from shoal.dag.schedule.convert_slice import slice_from_proto, slice_to_proto
from shoal.dag.schedule.flow import Flow
from shoal.dag.schedule.replay import slots
from shoal.dag.schedule.schedule import listed
from shoal.dag.schedule.slices import PlanSlices


def outlined(graph, plan: Plan) -> Plan:
    return replace(plan, outline=outline(graph, [(s.start, s.stop) for s in plan.stages]))


def same_part(whole: Flow, part: Flow, peer: PeerId) -> None:
    """All that a peer asks of its flow has the same answer."""
    assert part.actions(peer) == whole.actions(peer)
    assert part.evaluation_actions(peer) == whole.evaluation_actions(peer)
    assert part.hub == whole.hub
    for action in (*whole.actions(peer), *whole.evaluation_actions(peer)):
        assert part.takes(peer, action) == whole.takes(peer, action)
        assert part.gives(peer, action) == whole.gives(peer, action)
        for transfer in (*whole.takes(peer, action), *whole.gives(peer, action)):
            assert part.taken_by[transfer] == whole.taken_by[transfer]
            assert part.given_by[transfer] == whole.given_by[transfer]
            assert part.made(transfer) == whole.made(transfer)
            assert part.is_coded(transfer) == whole.is_coded(transfer)
            assert part.alike(transfer) == whole.alike(transfer)
            if transfer in whole.hops:
                (a, hop), (b, same) = whole.hops[transfer], part.hops[transfer]
                assert hop == same
                assert a.bounds(1000) == b.bounds(1000)
        if action.content is not None:
            mine = part.exchange_of(action).phases(peer)
            assert mine == whole.exchange_of(action).phases(peer)
    named = {t for t in part.taken_by if peer in (t.source, t.destination)}
    assert named == {t for t in whole.taken_by if peer in (t.source, t.destination)}


@given(st.data())
def test_a_slice_gives_a_peer_what_the_whole_plan_would(worlds, data):
    world = data.draw(worlds)
    plan = outlined(world.bound, world.plan)
    rng = random.Random(data.draw(st.integers(0, 99)))
    peers = plan.peers
    if len(peers) > 1:
        plan = replace(plan, keepers=tuple(SnapshotKeeper(p, q) for p, q in pairwise(peers)))
    links = [(a, b) for a in peers for b in peers if a != b and rng.random() < 0.5]
    plan = replace(
        plan,
        codecs=tuple(
            CodecChoice(a, b, r, "bf16") for a, b in links for r in ("sync", "activation")
        ),
    )
    whole = Flow(plan, world.stages, world.tied)
    slices, wanted = PlanSlices(plan), slots(plan, world.stages, world.tied)
    for peer in peers:
        mine = slices.of(peer).validate(len(world.graph.operators))
        same_part(whole, Flow.of_slice(mine, world.stages, world.tied), peer)
        assert {(a, b): n for a, b, n in mine.slots} == {
            (source, role): n for (source, to, role), n in wanted.items() if peer == to != source
        }
        choices = {c for c in plan.codecs if peer in (c.source, c.destination)}
        assert choices <= set(mine.plan.codecs)
        talks = {e for t in whole.taken_by for e in t[4:] if peer in t[4:]}
        assert talks <= {peer, *mine.plan.peers}
        again = slice_from_proto(peer, slice_to_proto(mine))
        assert again == mine


def size(plan: Plan, peer: str) -> int:
    return slice_to_proto(PlanSlices(plan).of(PeerId(peer))).ByteSize()


def test_a_slice_does_not_grow_with_those_whom_its_peer_never_talks_to(chain) -> None:
    """More holders of a stage far away cost nothing, more stages far away two numbers each."""
    base = outlined(chain(5, 60).graph, chain(5, 60).plan())

    def widened(holders: int) -> Plan:
        others = tuple(PeerId(f"other-{i}") for i in range(holders))
        stages = list(base.stages)
        stages[2] = replace(stages[2], holders=others)
        routes = [
            tuple(replace(v, peer=others[m % holders]) if v.stage == 2 else v for v in route)
            for m, route in enumerate(base.routes)
        ]
        plan = replace(base, stages=tuple(stages), routes=tuple(routes))
        return listed(plan, bare_stages(plan)).validate(5)

    assert size(widened(2), "a") == size(widened(60), "a")
    assert size(widened(2), "b") < size(widened(60), "b"), "who talks to them names them"
    few, many = (outlined(chain(n, 6).graph, chain(n, 6).plan()) for n in (4, 8))
    assert size(many, "a") <= size(few, "a") + 4 * 8


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda s: s.visits.remove("F0@0"), "other visits"),
        (lambda s: s.visits.append("F0@1"), "other visits"),
        (lambda s: s.visits.append("B1@0"), "stands where it cannot"),
        (lambda s: s.visits.append("U"), "is no visit"),
        (lambda s: s.visits.append("x"), "is no action"),
        (lambda s: s.slots.add(source="b", role=99, count=1), "role 99"),
        (lambda s: s.ring.append(""), "a peer id"),
        (lambda s: s.plan.ClearField("stages"), "no row"),
        (lambda s: s.plan.routes[0].visits.add(stage=7, peer="b"), "stage 7"),
    ],
)
def test_a_slice_that_breaks_a_rule_is_refused(chain, change, why) -> None:
    plan = outlined(chain(2, 2).graph, chain(2, 2).plan())
    message = slice_to_proto(PlanSlices(plan).of(PeerId("a")))
    assert [*message.visits] == ["F0@0", "F1@0", "B0@0", "B1@0"]
    change(message)
    with pytest.raises(PlanError, match=why):
        slice_from_proto(PeerId("a"), message)


def test_a_slice_without_its_neighbour_is_found_out(chain) -> None:
    graph = chain(2, 2).graph
    mine = PlanSlices(outlined(graph, chain(2, 2).plan())).of(PeerId("a"))
    alone = tuple(tuple(v for v in r if v.peer == "a") for r in mine.plan.routes)
    part = replace(mine, plan=replace(mine.plan, routes=alone))
    stages = cut(graph, [(0, 1), (1, 2)])
    with pytest.raises(PlanError, match="does not name both"):
        Flow.of_slice(part, stages, tied_groups(graph, stages))


def test_a_slice_without_a_backward_is_found_out(chain) -> None:
    graph = chain(2, 2).graph
    mine = PlanSlices(outlined(graph, chain(2, 2).plan())).of(PeerId("a"))
    stages = cut(graph, [(0, 1), (1, 2)])
    with pytest.raises(PlanError, match="B1@0"):
        Flow.of_slice(replace(mine, visits=mine.visits[:-1]), stages, tied_groups(graph, stages))


def test_a_plan_without_an_outline_has_no_slices(chain) -> None:
    with pytest.raises(PlanError, match="outline"):
        PlanSlices(chain(2, 2).plan())
