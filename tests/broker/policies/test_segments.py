"""Who exchanges what in a round, against a table of every element."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.broker.policies.segments import Replicated, provable, segments, sliced
from shoal.broker.rounds.exchange_planner import MOST_CLAIMS
from shoal.dag.ir.graph import TensorSpec
from shoal.dag.plan.outline import Outline, StageOutline, TiedGroup
from shoal.dag.plan.plan import PeerId, Plan, StageSlot, Visit
from shoal.dag.rounds.vector import Entry, RunVector, part_elements
from shoal.dag.rounds.wiring import ALL, claims_due, segment_of, wiring
from shoal.net.identity.receipts import MOST_RECEIPTS
from shoal.proto.broker_pb2 import RoundPlan

ELEMENTS = 400_000


@st.composite
def replicas(draw: st.DrawFn, number: int, weight: int) -> Replicated:
    """Cut anywhere, with one to three holders of each stage, and perhaps a tied parameter."""
    cuts = sorted(draw(st.sets(st.integers(1, ELEMENTS - 1), max_size=4)))
    bounds = [0, *cuts, ELEMENTS]
    slots, outlines, route = [], [], []
    for k, (a, b) in enumerate(pairwise(bounds)):
        count = draw(st.integers(1, 3))
        holders = tuple(PeerId(f"r{number}-{k}-{i}") for i in range(count))
        slots.append(StageSlot(k, k + 1, holders))
        outlines.append(StageOutline(k, makes_loss=b == ELEMENTS, elements=b - a))
        route.append(Visit(k, holders[0]))
    tied = ()
    if len(slots) > 1 and draw(st.booleans()):
        tied = (TiedGroup(0, "w", (0, len(slots) - 1), 0, min(1000, bounds[1])),)
    plan = Plan(tuple(slots), (tuple(route),), 1, outline=Outline(tuple(outlines), tied))
    return Replicated(plan, weight, line=draw(st.sampled_from([1.0, 3.0, 1e6])))


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[Replicated], list[Replicated]]:
    members = [draw(replicas(i, i + 1)) for i in range(draw(st.integers(1, 5)))]
    joiners = [draw(replicas(100 + i, 0)) for i in range(draw(st.integers(0, 2)))]
    return members, joiners


def holders_at(replica: Replicated, element: int) -> set[PeerId]:
    """By looking at all stages."""
    at, found = 0, set[PeerId]()
    for slot, stage in zip(replica.plan.stages, replica.plan.outline.stages, strict=True):
        if at <= element < at + stage.elements:
            found |= {*slot.holders}
        at += stage.elements
    for group in replica.plan.outline.tied:
        if group.start <= element < group.start + group.elements:
            found |= {h for k in group.stages for h in replica.plan.stages[k].holders}
    return found


@given(worlds(), st.data())
def test_each_element_is_added_up_once_and_reaches_all_that_have_it(
    world: tuple[list[Replicated], list[Replicated]], data: st.DataObject
) -> None:
    members, joiners = world
    found = segments(members, joiners)
    assert [s.span[0] for s in found] == [0, *(s.span[1] for s in found[:-1])]
    assert found[-1].span[1] == ELEMENTS
    for element in (0, ELEMENTS - 1, data.draw(st.integers(0, ELEMENTS - 1))):
        [s] = [s for s in found if s.span[0] <= element < s.span[1]]
        own = [holders_at(r, element) for r in members]
        assert [g.weight for g in s.givers] == [r.weight for r in members]
        assert all(g.peer in there for g, there in zip(s.givers, own, strict=True))
        assert set().union(*own) <= set(s.takers)
        assert s.aggregator in {g.peer for g in s.givers}
        want = set().union(*(holders_at(r, element) for r in joiners)) if joiners else set()
        assert want <= {to for _, to in s.versions}
        assert {source for source, _ in s.versions} <= {g.peer for g in s.givers}


@given(worlds(), st.data())
def test_who_is_behind_gives_and_takes_the_version_of_those_that_make_it(
    world: tuple[list[Replicated], list[Replicated]], data: st.DataObject
) -> None:
    members, joiners = world
    count = data.draw(st.integers(0, len(members) - 1))
    behind, makers = members[:count], members[count:]
    for s in segments(members, [*behind, *joiners]):
        element = data.draw(st.integers(s.span[0], s.span[1] - 1))
        assert [g.weight for g in s.givers] == [r.weight for r in members]
        own = set().union(*(holders_at(r, element) for r in makers))
        assert own <= set(s.takers)
        first = {g.peer for g, r in zip(s.givers, members, strict=True) if r in makers}
        assert s.aggregator in first
        assert {source for source, _ in s.versions} <= first
        want = [holders_at(r, element) for r in (*behind, *joiners)]
        assert set().union(*want) <= {to for _, to in s.versions}
        assert not set().union(*want) & set(s.takers)
    with pytest.raises(ValueError, match="a member"):
        segments(members, members)


@given(worlds())
def test_a_peer_is_told_of_what_names_it_and_an_aggregator_of_all(
    world: tuple[list[Replicated], list[Replicated]],
) -> None:
    found = segments(*world)
    mine = sliced(found)
    gives = Counter(
        (g.peer, s.start) for p, told in mine.items() for s in told for g in s.givers if g.peer == p
    )
    assert gives == Counter((g.peer, s.span[0]) for s in found for g in s.givers)
    for s in found:
        [told] = [t for t in mine[s.aggregator] if t.start == s.span[0]]
        assert [(g.peer, g.weight) for g in told.givers] == [(g.peer, g.weight) for g in s.givers]
        assert list(told.takers) == list(s.takers)


def whole(number: int, line: float = 1.0, elements: int = 10_000_000) -> Replicated:
    """A replica that is one peer."""
    peer = PeerId(f"p{number}")
    outline = Outline((StageOutline(0, makes_loss=True, elements=elements),))
    plan = Plan((StageSlot(0, 1, (peer,)),), ((Visit(0, peer),),), 1, outline=outline)
    return Replicated(plan, 1, number, line)


def test_equal_replicas_add_up_about_as_much() -> None:
    shares = Counter[str]()
    for s in segments([whole(i) for i in range(4)]):
        shares[s.aggregator] += s.span[1] - s.span[0]
    assert max(shares.values()) - min(shares.values()) <= 4


@given(st.lists(st.floats(1.0, 50.0), min_size=2, max_size=6))
def test_who_carries_more_adds_up_more(lines: list[float]) -> None:
    elements = 1 << 20
    found = segments([whole(i, line, elements) for i, line in enumerate(lines)])
    assert [s.span[0] for s in found] == [0, *(s.span[1] for s in found[:-1])]
    assert found[-1].span[1] == elements
    fast = {f"p{i}": line for i, line in enumerate(lines) if 2 * line >= max(lines)}
    assert [s.aggregator for s in found] == [*fast], "others would have all wait"
    for segment, line in zip(found, fast.values(), strict=True):
        share = elements * line / sum(fast.values())
        assert abs(segment.span[1] - segment.span[0] - share) <= len(lines)


def test_replicas_of_other_models_have_no_round() -> None:
    peer = PeerId("p")
    plans = [
        Plan(
            (StageSlot(0, 1, (peer,)),),
            ((Visit(0, peer),),),
            1,
            outline=Outline((StageOutline(0, makes_loss=True, elements=n),)),
        )
        for n in (10, 11)
    ]
    with pytest.raises(ValueError, match=r"vectors of \[10, 11\] elements"):
        segments([Replicated(p, 1) for p in plans])


@given(worlds())
def test_one_member_adds_up_all_if_that_is_wanted(
    world: tuple[list[Replicated], list[Replicated]],
) -> None:
    members, joiners = world
    found = segments(members, joiners, whole=True)
    assert {s.aggregator for s in found} <= set(members[0].plan.peers)
    if len(members[0].plan.stages) == 1:
        assert len({s.aggregator for s in found}) == 1


@given(worlds(), st.data())
def test_of_a_place_one_is_between_the_others_and_who_adds_up(
    world: tuple[list[Replicated], list[Replicated]], data: st.DataObject
) -> None:
    """And what each is told of that is what it does by all of it."""
    members, joiners = world
    peers = [p for r in (*members, *joiners) for p in r.plan.peers]
    places = {p: at for p in peers if (at := data.draw(st.integers(-1, 2))) >= 0}
    found = segments(members, joiners, places=places)
    for s in found:
        given, taken = {g.peer for g in s.givers}, {*s.takers}
        near = [p for place in s.places for p in place.givers]
        assert len(near) == len({*near})
        assert {*near} <= given & taken
        for place in s.places:
            assert place.gatherer in place.givers
            assert len(place.givers) > 1
            assert {*place.takers} <= taken
            [at] = {places[p] for p in (*place.givers, *place.takers)}
            assert at != places.get(s.aggregator)
        assert sum(h.weight for h in s.hops if h.taken == ALL) == sum(g.weight for g in s.givers)
    vector = RunVector([Entry("param:w", TensorSpec((ELEMENTS,), "float32"), 0, 0)])
    told = sliced(found)
    for peer in peers:
        mine = wiring(vector, map(segment_of, told.get(peer, [])), peer)
        whole = wiring(vector, found, peer)
        assert (mine.comes, mine.goes) == (whole.comes, whole.goes)
        assert mine.adders == whole.adders


@pytest.mark.parametrize(("members", "places"), [(24, 2), (64, 2), (64, 4), (300, 3)])
def test_with_places_no_member_has_more_to_claim_than_a_message_has_room_for(
    members: int, places: int
) -> None:
    elements = 124_000_000
    found = segments(
        [whole(i, 1.0, elements) for i in range(members)],
        places={PeerId(f"p{i}"): i % places for i in range(members)},
    )
    assert any(s.places for s in found)
    told = sliced(found)
    for peer, mine in told.items():
        assert sum(claims_due(RoundPlan(segments=mine), peer)) <= MOST_CLAIMS


@pytest.mark.parametrize("elements", [20_000_000, 90_000_000])
def test_members_have_receipts_of_all_parts_to_show_where_one_adds_up(elements: int) -> None:
    members, part = [whole(i, 1.0, elements) for i in range(40)], part_elements(elements, 40)
    assert elements > MOST_RECEIPTS * part, "the test shows too little"
    for alone in (False, True):
        found = segments(members, whole=alone, part=part)
        told = provable(found, part)
        assert all(s.span[1] - s.span[0] <= told * MOST_RECEIPTS for s in found)
        assert alone or told == part
    assert provable(found, 0) == 0
