"""Every collective keeps to what a step asks of it; one that is added is tested by being listed."""

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.dag.cost.pace import IntervalWork, Vectors, action_work
from shoal.dag.exchange import engine
from shoal.dag.exchange.collective import Members
from shoal.dag.exchange.collectives import COLLECTIVES, SUMS
from shoal.dag.exchange.hierarchical import MOST_SHARDS
from shoal.dag.exchange.rows import MOST_ALL_TO_ALL, even_rows
from shoal.dag.exchange.wiring import Exchange
from shoal.dag.plan.action import ExchangeContent
from shoal.dag.plan.plan import PeerId, Plan, PlanError, StageExchange, StageSlot, Visit
from shoal.dag.schedule.convert_plan import plan_from_proto, plan_to_proto
from shoal.dag.schedule.flow import Flow
from shoal.dag.schedule.replay import slots
from shoal.dag.schedule.schedule import Action, Kind, ScheduleError, listed
from shoal.planner.base.interface import CodecOptions, PeerOffer, PlannerOptions, PlanRequest
from shoal.planner.cost.candidate import Candidate, StageShare
from shoal.planner.cost.cost_model import CostModel
from shoal.tests.dag.schedule.checker import check

from ..conftest import random_exchange


class Arrays:
    """The arithmetic of whole numbers, cut at the exchange's bounds."""

    def __init__(self, exchange, elements):
        self.bounds = exchange.bounds(elements)

    def cut(self, vector):
        return np.split(vector, self.bounds[1:-1])

    def split(self, vector, shards):
        ends = np.cumsum([self.bounds[s + 1] - self.bounds[s] for s in shards])
        return np.split(vector, ends[:-1])

    def concat(self, shards):
        return np.concatenate(shards)

    join = concat

    def add(self, parts):
        return sum(parts[1:], parts[0])

    def relay(self, total):
        return total


@st.composite
def exchanges(draw):
    n = draw(st.integers(2, 40))
    peers = tuple(PeerId(f"p{i}") for i in range(n))
    chosen = random_exchange(draw(st.randoms(use_true_random=False)), 0, peers)
    members = Members(peers, peers, chosen.groups, chosen.weights, chosen.chunks)
    return Exchange(ExchangeContent.GRADIENT, 0, members, COLLECTIVES[chosen.collective])


@settings(deadline=None)
@given(exchanges(), st.integers(0, 90), st.integers(0, 2**32))
def test_everybody_ends_with_the_sum_of_all(exchange, elements, seed):
    """Each element of each participant counts once, whoever is faster: peers act in phases here."""
    rng = np.random.default_rng(seed)
    peers = exchange.members.participants
    own = {p: rng.integers(-(10**6), 10**6, elements) for p in peers}
    space, stores, ended = Arrays(exchange, elements), {p: {} for p in peers}, {}
    for phase in range(exchange.last + 1):
        for peer in rng.permutation(peers):
            if phase not in exchange.phases(peer):
                continue
            takes, gives = exchange.phases(peer)[phase]
            taken = [(hop, stores[peer].pop(hop)) for hop in takes]
            if phase == exchange.last:
                ended[peer] = engine.take(taken, space)
                continue
            if phase == 0:
                given_ = engine.give(exchange, lambda hop: own[hop.source], space)
            else:
                given_ = engine.pass_on(taken, space)
            for hop in gives:
                what = given_(hop)
                assert len(what) == exchange.elements(hop, elements), "as many as announced"
                stores[hop.destination][hop] = what
    assert not any(stores.values()), "all that was given was taken"
    total = sum(own.values())
    assert ended.keys() == set(peers)
    assert all((ended[p] == total).all() for p in peers)


@given(exchanges())
def test_hops_go_to_later_phases_and_have_names_of_their_own(exchange):
    assert all(hop.given < hop.taken <= exchange.last for hop in exchange.hops)
    assert all(hop.shards for hop in exchange.hops)
    names = Counter((exchange.port(h), h.source, h.destination) for h in exchange.hops)
    assert max(names.values()) == 1
    for peer in exchange.members.participants:
        kinds = [exchange.action(peer, phase).kind for phase in exchange.phases(peer)]
        assert kinds[0] is Kind.GIVE
        assert kinds[-1] is Kind.TAKE
        assert set(kinds[1:-1]) <= {Kind.REDUCE, Kind.RELAY}


@given(exchanges())
def test_what_a_codec_may_lose_is_encoded_once_and_alike_for_all(exchange):
    """Else holders would end with different bits."""
    if not exchange.collective.coded:
        return
    for hop in exchange.hops:
        assert len(hop.shards) == 1
        assert hop.given == 0 or hop.total
        assert hop.taken == exchange.last or not hop.total


def wide(chain, holders, collective, groups=()):
    """A chain of two stages with so many holders of the second, of which two run microbatches."""
    peers = tuple(PeerId(f"p{i}") for i in range(holders))
    first = PeerId("first")
    plan = Plan(
        (StageSlot(0, 1, (first,)), StageSlot(1, 2, peers)),
        tuple((Visit(0, first), Visit(1, peer)) for peer in peers[:2]),
        microbatch_size=2,
        exchanges=(StageExchange(1, collective, groups),),
    )
    stages = chain(2, 2).stages
    return listed(plan.validate(2), stages), stages


def lists_of(plan, stages):
    flow = Flow(plan, stages, ())
    return {peer: flow.actions(peer) for peer in plan.peers}


def crossing(flow):
    return [
        t
        for t, (exchange, _) in flow.hops.items()
        if exchange.content is ExchangeContent.GRADIENT and not t.is_local
    ]


@settings(deadline=None)
@given(st.data())
def test_the_checker_proves_the_lists(chain, data):
    n, name = data.draw(st.integers(2, 25)), data.draw(st.sampled_from(SUMS))
    plan, stages = wide(chain, n, name)
    order = check(plan, stages, (), lists_of(plan, stages)).order
    phases = [a.phase for p, a in order if p == "p0" and a.content is ExchangeContent.GRADIENT]
    assert phases == sorted(phases)
    links = {link[:2] for link in slots(plan, stages, ())}
    assert {t[4:] for t in crossing(Flow(plan, stages, ()))} <= links


@pytest.mark.parametrize("phase", range(4))
def test_a_wrong_order_is_caught(chain, phase):
    peers = tuple(PeerId(f"p{i}") for i in range(10))
    plan, stages = wide(chain, 10, "two-level", even_rows(peers, 3))
    lists, p4 = lists_of(plan, stages), PeerId("p4")
    first, second = (
        a
        for a in lists[p4]
        if a.content is ExchangeContent.GRADIENT and a.phase in (phase, phase + 1)
    )
    turned = {first: second, second: first}
    with pytest.raises(ScheduleError) as error:
        check(plan, stages, (), {**lists, p4: tuple(turned.get(a, a) for a in lists[p4])})
    assert f"p4 has {second} before {first}: expected it behind it" in str(error.value)
    without = tuple(a for a in lists[p4] if a != second)
    with pytest.raises(ScheduleError) as error:
        check(plan, stages, (), {**lists, p4: without})
    assert f"p4 lacks {second}" in str(error.value)
    each, _ = wide(chain, 10, "all-to-all")
    with pytest.raises(ScheduleError, match="which the plan does not give it"):
        check(each, stages, (), lists)


def bytes_of(plan, stages, graph):
    flow = Flow(plan, stages, ())
    vectors = Vectors(plan, stages, (), graph)
    return sum(
        vectors.size(*flow.hops[t]) if t in flow.hops else graph.spec[t.value].size_bytes
        for t in crossing(flow)
    )


@given(st.data())
def test_all_that_cut_carry_as_many_bytes(chain, data):
    n, graph = data.draw(st.integers(2, 40)), chain(2, 2).graph
    whole = graph.parameter_bytes["p1"]
    for name in ("all-to-all", "ring", "tree", "two-level", "hierarchical"):
        plan, stages = wide(chain, n, name)
        assert bytes_of(plan, stages, graph) == 2 * (n - 1) * whole, name


@pytest.mark.parametrize("n", [*range(2, 41), 125, 1000])
def test_frames_and_partners_of_rows_grow_with_the_root(n):
    peers = tuple(PeerId(f"p{i}") for i in range(n))
    hops = list(COLLECTIVES["two-level"].hops(Members(peers, peers)))
    pairs = [(h.source, h.destination) for h in hops if h.source != h.destination]
    assert len(pairs) <= 4 * n * (math.sqrt(n) - 1) + n / 2
    partners = Counter(a for a, _ in {*pairs} | {(b, a) for a, b in pairs})
    assert max(partners.values()) <= 2 * math.sqrt(n)
    if n > MOST_ALL_TO_ALL:
        assert len(pairs) <= n * (n - 1), "half of what each with each takes"


@given(st.integers(2, 40), st.integers(1, 8), st.randoms(use_true_random=False))
def test_between_two_places_one_vector_goes_each_way(n, places, rng):
    """Where each with each carries one for every pair of peers."""
    peers = tuple(PeerId(f"p{i}") for i in range(n))
    groups = even_rows(rng.sample(peers, n), min(places, n))
    members = Members(peers, peers, groups)
    exchange = Exchange(ExchangeContent.GRADIENT, 0, members, COLLECTIVES["hierarchical"])
    elements = exchange.edges[-1]  # one for each shard
    place = {peer: g for g, group in enumerate(groups) for peer in group}
    carried, by_pair = Counter(), Counter()
    for hop in exchange.hops:
        a, b = place[hop.source], place[hop.destination]
        if a != b:
            carried[a, b] += exchange.elements(hop, elements)
            by_pair[hop.source, hop.destination] += exchange.elements(hop, elements)
    for (a, b), count in carried.items():
        assert count == carried[b, a], "both directions"
        assert count == 2 * elements // len(groups)
    if len(groups) == 2 and 2 * len(groups[0]) * len(groups[1]) <= MOST_SHARDS:
        assert len(set(by_pair.values())) == 1
        assert len(by_pair) == 2 * len(groups[0]) * len(groups[1]), "every pair"


def test_shares_follow_the_weights(chain):
    peers = tuple(PeerId(p) for p in "abcd")
    members = Members(peers, peers, weights=(3, 0, 1, 1))
    exchange = Exchange(ExchangeContent.GRADIENT, 0, members, COLLECTIVES["all-to-all"])
    assert exchange.bounds(10) == (0, 6, 8, 10)
    owners = {h.source for h in exchange.hops if h.total}
    assert owners == {"a", "c", "d"}
    sent = Counter()
    for hop in exchange.hops:
        if hop.source != hop.destination:
            sent[hop.source] += exchange.elements(hop, 10)
    assert sent == {"a": 4 + 3 * 6, "b": 10, "c": 8 + 3 * 2, "d": 8 + 3 * 2}


def test_work_is_what_is_read_and_written(chain):
    """In vectors: flattening and writing back are two each, a sum its parts and itself."""
    graph, p1 = chain(2, 2).graph, PeerId("p1")
    size, works = graph.parameter_bytes["p1"], []
    for name in ("all-to-all", "two-level"):
        plan, stages = wide(chain, 4, name)
        flow = Flow(plan, stages, ())
        vectors = Vectors(plan, stages, (), graph)
        work = action_work(
            plan, stages, flow.exchanges, vectors, IntervalWork([]), optimizer_slots=0
        )
        mine = (a for a in flow.actions(p1) if a.content is ExchangeContent.GRADIENT)
        works.append({str(a): work(p1, a).memory / size for a in mine})
    assert works[0] == {">@grad1": 2, "+1@grad1": 5 / 4, "<2@grad1": 2}
    assert works[1] == {
        **{">@grad1": 4, "+1@grad1": 3 * 2 / 4, "+2@grad1": 3 / 4},
        **{"*3@grad1": 2 * 2 / 4, "<4@grad1": 2},
    }


@pytest.mark.parametrize("name", SUMS)
def test_a_plan_comes_back_from_the_wire_with_its_collective(chain, name):
    peers = tuple(PeerId(f"p{i}") for i in range(12))
    groups = even_rows(peers, 3) if name in ("two-level", "hierarchical") else ()
    plan, stages = wide(chain, 12, name, groups)
    assert plan_from_proto(plan_to_proto(plan)) == plan
    assert (f"by {name}" in repr(plan)) is (name != "all-to-all")
    flow = Flow(plan, stages, ())
    assert {flow.is_coded(t) for t in crossing(flow)} == {name == "all-to-all"}


@pytest.mark.parametrize("name", ["", "star", "gather", "ring ", "RING"])
def test_a_collective_that_there_is_not_is_refused(chain, name):
    plan, stages = wide(chain, 3, name)
    with pytest.raises(PlanError, match=r"stage 1 exchanges .* expected one of all-to-all"):
        Flow(plan, stages, ())


@pytest.mark.parametrize(("codec", "name"), [("none", "two-level"), ("int8", ""), ("auto", "")])
def test_planners_choose_rows_for_many_where_gradients_go_raw(chain, codec, name):
    graph = chain(2, 2).graph
    offers = tuple(PeerOffer(PeerId(f"p{i}"), device_memory_bytes=1 << 30) for i in range(10))
    options = PlannerOptions(codecs=CodecOptions(sync=codec))
    candidate = Candidate(tuple((StageShare(i, 0, 2),) for i in range(10)), (1,) * 10)
    judge = CostModel(replace(PlanRequest(graph, offers, 10, 2), options=options))
    plan, report = judge.plan(candidate)
    assert [e.collective for e in plan.exchanges] == ([name] if name else [])
    assert report.predicted.step_s == judge.seconds(candidate) > 0


def test_an_action_is_of_its_exchange(chain):
    plan, stages = wide(chain, 3, "ring")
    flow = Flow(plan, stages, ())
    assert flow.exchange_of(Action.parse(">@grad1")).collective.name == "ring"
    assert [
        str(a) for a in flow.actions(PeerId("p0")) if a.content is ExchangeContent.GRADIENT
    ] == [*(">@grad1", "+1@grad1", "+2@grad1", "*3@grad1", "<4@grad1")]
