"""Action lists: their text, the textbook ones, any plan's, and what the checker refuses."""

import contextlib
import itertools
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.dag.plan.action import ExchangeContent
from shoal.dag.plan.plan import PeerId, Plan, StageSlot, Visit
from shoal.dag.plan.visit_lists import halved
from shoal.dag.schedule.flow import Flow, Role
from shoal.dag.schedule.orders.interleaved import room_of
from shoal.dag.schedule.replay import Replay, slots
from shoal.dag.schedule.schedule import (
    EXCHANGES,
    VISITS,
    Action,
    Kind,
    ScheduleError,
    listed,
)
from shoal.tests.dag.schedule.checker import bubble, check, table, timeline

GPIPE = "F0 F1 F2 F3 F4 F5 F6 F7 B0 B1 B2 B3 B4 B5 B6 B7"
ONE_F_ONE_B = [
    "F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7",
    "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 B6 B7",
    "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 B7",
    "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7",
]


def circle(chain, count, each, microbatches):
    """A plan with `each` stages on each of `count` peers: stage i on peer i mod `count`."""
    world = chain(count * each, microbatches)
    peers = [PeerId(f"p{i}") for i in range(count)]
    route = tuple(Visit(i, peers[i % count]) for i in range(count * each))
    slots_ = tuple(StageSlot(v.stage, v.stage + 1, (v.peer,)) for v in route)
    return world.stages, Plan(slots_, (route,) * microbatches, 2, "interleaved")


def most_live(actions):
    """The most visits that a peer has forward and not yet backward, over all its stages."""
    change = {Kind.FORWARD: 1, Kind.BACKWARD: -1}
    return max(itertools.accumulate(change.get(a.kind, 0) for a in actions), default=0)


def visits(actions):
    return " ".join(str(a).partition("@")[0] for a in actions if a.kind in VISITS)


def texts(actions):
    return " ".join(map(str, actions))


def parse(text):
    return tuple(map(Action.parse, text.split()))


HUB = ">@norm +1@norm <2@norm U"
END = ">@norm <2@norm U"
"""How the list of the hub ends, and that of any other."""

numbers = st.integers(0, 10**9 - 1)
visits_ = st.tuples(st.sampled_from(sorted(VISITS)), numbers, numbers).map(lambda x: Action(*x))
exchanges = st.sampled_from(sorted(EXCHANGES)).flatmap(
    lambda kind: st.builds(
        Action,
        st.just(kind),
        st.just(0) if kind is Kind.GIVE else st.integers(1, 10**9 - 1),
        numbers,
        st.sampled_from(
            [c for c in ExchangeContent if c not in (ExchangeContent.NORM, ExchangeContent.SCORES)]
        ),
    )
)
single = st.builds(
    Action, st.just(Kind.GIVE), st.just(0), st.just(0), st.sampled_from(["norm", "eval"])
).map(lambda a: a._replace(content=ExchangeContent(a.content)))
actions = visits_ | exchanges | single | st.just(Action(Kind.UPDATE))


@given(actions)
def test_an_action_prints_and_parses_back(action):
    assert Action.parse(str(action)) == action


@pytest.mark.parametrize(
    "text",
    ["", "F", "F1", "F01@2", "X1@1", "U@1", ">@0", "+@grad", "<02@grad1", "F1@2 ", "F-1@0", "F١@0"],
)
def test_a_text_that_is_no_action_is_refused(text):
    with pytest.raises(ScheduleError, match="is no action"):
        Action.parse(text)


@given(st.text(max_size=8))
def test_only_canonical_texts_parse(text):
    with contextlib.suppress(ScheduleError):
        assert str(Action.parse(text)) == text


def step_actions(plan, stages, tied):
    flow = Flow(listed(plan, stages), stages, tied)
    return {peer: flow.actions(peer) for peer in plan.peers}


def evaluation_actions(plan, stages):
    flow = Flow(listed(plan, stages), stages, ())
    return {peer: flow.evaluation_actions(peer) for peer in plan.peers}


def test_gpipe_on_a_chain_is_the_textbook(chain):
    world = chain(4, 8)
    lists = step_actions(world.plan("gpipe"), world.stages, ())
    assert [visits(lists[peer]) for peer in "abcd"] == [GPIPE] * 4


def test_1f1b_on_a_chain_is_the_textbook(chain):
    world = chain(4, 8)
    lists = step_actions(world.plan("1f1b"), world.stages, ())
    assert [visits(lists[peer]) for peer in "abcd"] == ONE_F_ONE_B
    assert texts(lists["a"]).endswith(f"B7@0 {END}")
    assert texts(lists["d"]).endswith(f"B7@3 {HUB}")


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("stages", "microbatches"), [(1, 3), (2, 1), (4, 8), (5, 3), (7, 16)])
def test_the_bubble_is_k_minus_1_over_m_plus_k_minus_1(chain, schedule, stages, microbatches):
    world = chain(stages, microbatches)
    plan = world.plan(schedule)
    lists = step_actions(plan, world.stages, ())
    expected = (stages - 1) / (microbatches + stages - 1)
    assert bubble(plan, world.stages, (), lists) == pytest.approx(expected)


@pytest.mark.parametrize(("schedule", "live"), [("gpipe", [8] * 4), ("1f1b", [4, 3, 2, 1])])
def test_peak_live_microbatches_of_a_chain(chain, schedule, live):
    world = chain(4, 8)
    plan = world.plan(schedule)
    checked = check(plan, world.stages, (), step_actions(plan, world.stages, ()))
    assert [checked.peak_live[peer, i] for i, peer in enumerate("abcd")] == live


@given(st.data())
def test_what_is_live_under_any_interleaved_plan_is_bound(worlds, data):
    world = data.draw(worlds)
    plan, stages = replace(world.plan, schedule="interleaved"), world.stages
    if all(len(plan.stages_of(peer)) == 1 for peer in plan.peers):
        return
    lists = step_actions(plan, stages, world.tied)
    for peer, room in room_of(plan, stages).items():
        kept = [a for a in lists[peer] if a.kind in VISITS and stages[a.stage].has_backward]
        assert most_live(kept) <= room + len(plan.stages_of(peer))


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("each", [1, 2, 3, 4])
@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_interleaving_divides_the_bubble_by_the_stages_of_a_peer(chain, count, each, rounds):
    stages, plan = circle(chain, count, each, rounds * count)
    lists = step_actions(plan, stages, ())
    total = each * rounds * count
    assert bubble(plan, stages, (), lists) == pytest.approx((count - 1) / (total + count - 1))
    for rank, peer in enumerate(plan.peers):
        bound = 2 * (count - rank - 1) + (each - 1) * count + 1
        assert most_live(lists[peer]) <= min(total, bound if each > 1 else count - rank)


def test_interleaved_lists_are_those_of_megatron(chain):
    stages, plan = circle(chain, 2, 2, 4)
    lists = step_actions(plan, stages, ())
    assert texts(lists["p0"]) == (
        f"F0@0 F1@0 F0@2 F1@2 F2@0 B0@2 F3@0 B1@2 F2@2 B0@0 F3@2 B1@0 B2@2 B3@2 B2@0 B3@0 {END}"
    )
    assert texts(lists["p1"]) == (
        f"F0@1 F1@1 F0@3 B0@3 F1@3 B1@3 F2@1 B0@1 F3@1 B1@1 F2@3 B2@3 F3@3 B3@3 B2@1 B3@1 {HUB}"
    )


def test_interleaving_one_stage_per_peer_is_1f1b(chain):
    world = chain(4, 8)
    assert step_actions(world.plan("interleaved"), world.stages, ()) == step_actions(
        world.plan("1f1b"), world.stages, ()
    )


def test_interleaving_works_where_microbatches_fill_no_round(chain):
    for microbatches in (1, 3, 5, 6, 9):
        stages, plan = circle(chain, 4, 2, microbatches)
        lists = step_actions(plan, stages, ())
        usual = replace(plan, schedule="1f1b")
        other = bubble(usual, stages, (), step_actions(usual, stages, ()))
        assert bubble(plan, stages, (), lists) <= other


@given(st.data(), st.sampled_from(["gpipe", "1f1b", "interleaved"]))
def test_the_lists_of_any_plan_check(worlds, data, schedule):
    world = data.draw(worlds)
    plan, stages, tied = world.plan, world.stages, world.tied
    plan = replace(plan, schedule=schedule)
    training, evaluation = step_actions(plan, stages, tied), evaluation_actions(plan, stages)
    assert training == step_actions(plan, stages, tied)
    checked = check(plan, stages, tied, training)
    assert len(checked.order) == sum(map(len, training.values()))
    both = {peer: training[peer] + evaluation[peer] for peer in plan.peers}
    check(plan, stages, tied, both)
    if plan.evaluation_routes:
        check(plan, stages, tied, evaluation)
    for peer in plan.peers:
        for stage in plan.stages_of(peer):
            for kind in VISITS:
                done = [a.microbatch for a in both[peer] if (a.kind, a.stage) == (kind, stage)]
                assert done == sorted(done)
            behind = {a: b for a, b in itertools.pairwise(training[peer])}
            last = [a for a in training[peer] if (a.kind, a.stage) == (Kind.BACKWARD, stage)][-1:]
            given = Action(Kind.GIVE, 0, stage, ExchangeContent.GRADIENT)
            if last and given in training[peer]:
                assert behind[last[0]] == given
        if plan.schedule == "gpipe":
            assert "F" not in visits(training[peer]).partition("B")[2]
    if plan.schedule == "1f1b":
        width = [len({route[i].peer for route in plan.routes}) for i in range(len(stages))]
        for (_, i), live in checked.peak_live.items():
            assert live <= max(len(stages) - i, -(-sum(width[i:]) // width[i]))


@given(st.data(), st.randoms(use_true_random=False))
def test_no_execution_needs_more_slots_than_the_checker_says(worlds, data, rng):
    """Against random executions, over three steps with evaluations: frames outstanding are counted
    as they come, with everyone as fast or slow as chance wants."""
    world = data.draw(worlds)
    plan, flow = world.plan, Flow(world.plan, world.stages, world.tied)
    allowed = slots(plan, world.stages, world.tied)
    lists = {}
    for peer in plan.peers:
        lists[peer] = [
            (n, a) for n in range(3) for a in (*flow.actions(peer), *flow.evaluation_actions(peer))
        ]
    at, given_, count = dict.fromkeys(lists, 0), set(), {}
    eager = rng.choice([None, *plan.peers])  # one peer runs as far ahead as it can
    while any(at[p] < len(lists[p]) for p in lists):
        ready = []
        for peer in lists:
            if at[peer] < len(lists[peer]):
                n, action = lists[peer][at[peer]]
                if all((n, t) in given_ for t in flow.takes(peer, action)):
                    ready.append(peer)
        peer = eager if eager in ready else rng.choice(ready)
        n, action = lists[peer][at[peer]]
        at[peer] += 1
        for t in flow.takes(peer, action):
            given_.remove((n, t))
            count[t.source, t.destination, t.role] = (
                count.get((t.source, t.destination, t.role), 0) - 1
            )
        for t in flow.gives(peer, action):
            given_.add((n, t))
            link = (t.source, t.destination, t.role)
            count[link] = count.get(link, 0) + 1
            assert t.is_local or count[link] <= allowed[link]


@given(st.data())
def test_slots_are_what_some_execution_needs(worlds, data):
    """The definition: when all has happened that must have before a frame is given, and nothing
    else, the frames of its link that are given and not taken."""
    world = data.draw(worlds)
    plan, flow = world.plan, Flow(world.plan, world.stages, world.tied)
    lists = {p: [(n, a) for n in range(2) for a in flow.actions(p)] for p in plan.peers}
    most = {}
    for peer, entries in lists.items():
        for i, (_, last) in enumerate(entries):
            past, open_ = set(), [(peer, i)]
            while open_:
                p, at = open_.pop()
                if at < 0 or (p, at) in past:
                    continue
                past.add((p, at))
                n, action = lists[p][at]
                open_.append((p, at - 1))
                for t in flow.takes(p, action):
                    open_.append((t.source, lists[t.source].index((n, flow.given_by[t]))))
            happened = [(p, *lists[p][at]) for p, at in past]
            left = {(n, t) for p, n, action in happened for t in flow.gives(p, action)}
            left -= {(n, t) for p, n, action in happened for t in flow.takes(p, action)}
            count = Counter((t.source, t.destination, t.role) for _, t in left)
            for t in flow.gives(peer, last):
                link = (t.source, t.destination, t.role)
                if not t.is_local:
                    most[link] = max(count[link], most.get(link, 0))
    replay = Replay(flow, lists)
    list(replay.run())
    assert replay.peak_slots == most


@given(st.data())
def test_two_steps_show_the_peak_of_many(worlds, data):
    world = data.draw(worlds)
    flow = Flow(world.plan, world.stages, world.tied)
    lists = {
        p: [(n, a) for n in range(4) for a in (*flow.actions(p), *flow.evaluation_actions(p))]
        for p in world.plan.peers
    }
    replay = Replay(flow, lists)
    list(replay.run())
    allowed = slots(world.plan, world.stages, world.tied)
    assert set(allowed) == set(replay.peak_slots)
    assert all(peak <= allowed[link] for link, peak in replay.peak_slots.items())


@given(st.data())
def test_nobody_ends_a_step_before_all_its_neighbours_began_it(worlds, data):
    """So at most two steps overlap, with the norm or without: slots, early frames and snapshots
    count on it."""
    world = data.draw(worlds)
    flow = Flow(world.plan, world.stages, world.tied)
    replay = Replay(flow, {p: [(0, a) for a in flow.actions(p)] for p in world.plan.peers})
    list(replay.run())
    for t in flow.taken_by:
        a, b = replay.peers.index(t.source), replay.peers.index(t.destination)
        evaluates = t.port.startswith("eval")
        assert evaluates or min(replay.clock[a, b], replay.clock[b, a]) > 0, t


def test_slots_of_a_chain_follow_the_schedule(chain):
    world = chain(4, 8)
    found = slots(world.plan("1f1b"), world.stages, ())
    assert found["a", "b", Role.ACTIVATION] == 4
    assert found["c", "d", Role.ACTIVATION] == 2
    assert found["b", "a", Role.ACTIVATION_GRAD] == 4
    assert slots(world.plan("gpipe"), world.stages, ())["a", "b", Role.ACTIVATION] == 8


def test_holders_of_a_wide_stage_are_kept_busy(chain):
    """One peer before three: the textbook's bound of two live microbatches would starve one."""
    world = chain(2, 9)
    peers = [PeerId(p) for p in ("b", "c", "d")]
    plan = replace(
        world.plan(),
        stages=(StageSlot(0, 1, (PeerId("a"),)), StageSlot(1, 2, tuple(peers))),
        routes=tuple((Visit(0, PeerId("a")), Visit(1, peers[m % 3])) for m in range(9)),
        visits=(),
        evaluations=(),
    ).validate(2)
    lists = step_actions(plan, world.stages, ())
    assert texts(lists["b"]) == f"F0@1 B0@1 F3@1 B3@1 F6@1 B6@1 >@grad1 +1@grad1 <2@grad1 {HUB}"
    assert check(plan, world.stages, (), lists).peak_live["a", 0] == 3


def test_two_stages_on_one_peer_drain_before_they_fill(chain):
    world = chain(3, 2)
    a, b = PeerId("a"), PeerId("b")
    plan = replace(
        world.plan(),
        stages=(StageSlot(0, 1, (a,)), StageSlot(1, 2, (b,)), StageSlot(2, 3, (a,))),
        routes=((Visit(0, a), Visit(1, b), Visit(2, a)),) * 2,
        visits=(),
        evaluations=(),
    ).validate(3)
    lists = step_actions(plan, world.stages, ())
    assert texts(lists[a]) == f"F0@0 F1@0 F0@2 B0@2 F1@2 B0@0 B1@2 B1@0 {HUB}"


def test_stages_below_which_nothing_trains_have_no_backward(chain):
    world = chain(3, 4, trainable=(False, True, True))
    lists = step_actions(world.plan(), world.stages, ())
    assert visits(lists["a"]) == "F0 F1 F2 F3"
    assert visits(lists["b"]) == "F0 F1 B0 F2 B1 F3 B2 B3"


def test_an_evaluation_is_forwards_and_one_sum(chain):
    world = chain(2, 1)
    lists = evaluation_actions(world.plan(evaluations=2), world.stages)
    assert (texts(lists["a"]), texts(lists["b"])) == (
        "E0@0 E1@0",
        "E0@1 E1@1 >@eval +1@eval <2@eval",
    )
    assert evaluation_actions(world.plan(), world.stages) == {"a": (), "b": ()}


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        (
            f"F0@0 F1@0 B0@0 B1@0 {END}",
            f"F0@1 B0@1 B1@1 F1@1 {HUB}",
            "b has B1@1 before F1@1",
        ),
        (
            "F0@0 F1@0 B0@0 B1@0 >@norm U <2@norm",
            f"F0@1 B0@1 F1@1 B1@1 {HUB}",
            "a has U before <2@norm",
        ),
        (
            "F0@0 F1@0 B0@0 >@norm B1@0 <2@norm U",
            f"F0@1 B0@1 F1@1 B1@1 {HUB}",
            "a has >@norm before B1@0",
        ),
        (
            f"F0@0 B0@0 F1@0 B1@0 {END}",
            f"F0@1 F1@1 B0@1 B1@1 {HUB}",
            r"deadlock: a waits in B0@0 for activation_grad v0<1 m0 hop 0 b->a of B0@1 of b, "
            r"which is at F1@1; b waits in F1@1 for activation v0 m1 hop 1 a->b of F1@0 of a, "
            r"which is at B0@0",
        ),
        (
            f"F0@0 F1@0 B0@0 B1@0 {END}",
            f"F0@1 F1@1 B1@1 {HUB}",
            r"b lacks B0@1: a takes activation_grad v0<1 m0 hop 0 b->a in B0@0 and nobody gives it",
        ),
        (
            f"F0@0 F1@0 B0@0 B1@0 {END}",
            f"F1@1 B1@1 B0@1 {HUB}",
            r"b lacks F0@1: a gives activation v0 m0 hop 1 a->b in F0@0 and nobody takes it",
        ),
        (
            f"F0@0 F0@0 F1@0 B0@0 B1@0 {END}",
            f"F0@1 F1@1 B0@1 B1@1 {HUB}",
            r"a has F0@0 2 times: activation v0 m0 hop 1 a->b would be given twice",
        ),
        (
            f"F0@0 F1@0 F2@0 B0@0 B1@0 {END}",
            f"F0@1 F1@1 B0@1 B1@1 {HUB}",
            "a has F2@0, which the plan does not give it",
        ),
        (
            f"F0@0 F1@0 F0@1 B0@0 B1@0 {END}",
            f"F0@1 F1@1 B0@1 B1@1 {HUB}",
            "a has F0@1, which the plan does not give it",
        ),
    ],
)
def test_lists_that_cannot_run_are_refused_with_the_reason(chain, a, b, message):
    world = chain(2, 2)
    lists = {PeerId("a"): parse(a), PeerId("b"): parse(b)}
    with pytest.raises(ScheduleError, match=message.replace("+", r"\+")):
        check(world.plan(), world.stages, (), lists)


def test_lists_for_other_peers_are_refused(chain):
    world = chain(2, 1)
    lists = step_actions(world.plan(), world.stages, ())
    with pytest.raises(ScheduleError, match="there is no list for b"):
        check(world.plan(), world.stages, (), {PeerId("a"): lists["a"]})
    with pytest.raises(ScheduleError, match="a list for x, which holds no stage"):
        check(world.plan(), world.stages, (), {**lists, PeerId("x"): ()})


@given(st.data())
def test_a_list_with_an_action_left_out_or_doubled_never_checks(worlds, data):
    world = data.draw(worlds)
    lists = dict(step_actions(world.plan, world.stages, world.tied))
    peer = data.draw(st.sampled_from(world.plan.peers))
    i = data.draw(st.integers(0, len(lists[peer]) - 1))
    own = lists[peer]
    less = own[:i] + own[i + 1 :]
    whole = halved(less) != halved(own)  # no gradients of weights are apart any more
    for changed in (*(() if whole else (less,)), own[:i] + own[i : i + 1] + own[i:]):
        with pytest.raises(ScheduleError):
            check(world.plan, world.stages, world.tied, {**lists, peer: changed})


def test_the_table_shows_time_and_peers(chain):
    world = chain(2, 2)
    plan = world.plan()
    lists = step_actions(plan, world.stages, ())
    assert table(plan, world.stages, (), lists).splitlines() == [
        "      0  1  2  3  4  5      6      7       8       9",
        "a [0] F0 F1 ·  B0 ·  B1     >@norm ·       <2@norm U",
        "b [1] ·  F0 B0 F1 B1 >@norm ·      +1@norm <2@norm U",
        "bubble 33.3 % of 2 peers × time in visits",
    ]
    assert [start for start, _ in timeline(plan, world.stages, (), lists)["a"]][:3] == [0, 1, 3]
