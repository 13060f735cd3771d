"""Whom the broker has measure links, what it believes of the answers, and what plans get of it."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.broker.events import (
    DescribeAsked,
    FormReplicas,
    Log,
    MakePlan,
    PlanReady,
    ReplicasFormed,
    Tell,
)
from shoal.broker.links.links import MAX_AGE_S, LinkBurst
from shoal.broker.links.probed import LINKS, PROBE_BYTES, SMALLEST_BYTES, Allowance, Landmarks
from shoal.dag.plan.outline import Outline, StageOutline
from shoal.dag.plan.plan import PeerId
from shoal.proto.broker_pb2 import Availability, Formation, FormedReplica, Goodbye, LinkReport
from shoal.proto.common_pb2 import Reason
from shoal.tests.broker.conftest import make_plan, make_spec

TRUE_LATENCY_S, TRUE_RATE = 0.02, 5e6


@pytest.fixture
def world(make_world):
    return make_world(probe_s=5.0)


def orders(out):
    """(stream, Probe) of every probe that someone was told of."""
    return [
        (i.stream, i.message.probe)
        for i in out
        if isinstance(i, Tell) and i.message.WhichOneof("kind") == "probe"
    ]


def probe(number, peer, latency_s=TRUE_LATENCY_S, rate=TRUE_RATE, size_bytes=80_000):
    return LinkReport(
        peer=peer, probe=number, latency_s=latency_s, bytes_per_s=rate, size_bytes=size_bytes
    )


def failed(number, peer, code="patience"):
    return LinkReport(peer=peer, probe=number, problem=Reason(code=code, text="no route"))


def serve(world, out, answer=probe):
    """Peers answer their probes, and those that come of it; everything that was done."""
    names = {stream: peer for peer, stream in world.streams.items()}
    done, queue = list(out), orders(out)
    while queue:
        stream, order = queue.pop(0)
        if stream not in names:
            continue
        more = world.say(names[stream], link=answer(order.number, order.peer))
        done += more
        queue += orders(more)
    return done


def live(world, seconds):
    """Time passes, and every peer speaks."""
    out = []
    for _ in range(int(seconds / 5)):
        for peer in world.streams:
            world.say(peer, heartbeat={})
        out += world.wait(5.0)
    return out


def pairs_of(out, world):
    names = {stream: peer for peer, stream in world.streams.items()}
    return [frozenset((names[stream], order.peer)) for stream, order in orders(out)]


def formation(ask, *peers):
    """Each of them is a replica."""
    told = Formation(kind="local", replicas=[FormedReplica(peers=[p]) for p in peers])
    whole = Outline(
        (StageOutline(0, trainable=True, makes_loss=True, has_backward=True, elements=1),)
    )
    plans = (replace(make_plan(p, microbatches=1), outline=whole) for p in peers)
    made = tuple(PlanReady(ask.replica, ask.version, plan) for plan in plans)
    return ReplicasFormed(ask.replica, ask.version, told, made)


# ------------------------------------------------------------ whom


def test_two_peers_measure_their_link_and_a_lone_one_nothing(world):
    assert not orders(world.join("a"))
    (to_a, first), (to_b, second) = sorted(
        orders(world.join("b")), key=lambda o: o[0] == world.streams["b"]
    )
    assert (to_a, to_b) == (world.streams["a"], world.streams["b"])
    assert (first.peer, second.peer) == ("b", "a")
    assert first.number == second.number
    assert sorted([first.address, second.address]) == ["", "a:1"] or first.address == "b:1"
    assert first.most_bytes == second.most_bytes == PROBE_BYTES
    assert first.generation == second.generation > 0


def test_the_side_without_an_address_dials_and_two_of_them_are_left_alone(world):
    world.join("a", address="")
    out = world.join("b")
    told = dict(orders(out))
    assert told[world.streams["a"]].address == "b:1"
    assert told[world.streams["b"]].address == ""
    serve(world, out)
    world.say("b", goodbye=Goodbye())
    assert not orders(world.join("c", address=""))


def test_small_pools_are_measured_whole_and_large_ones_in_linearly_many_probes(world):
    count = Counter()
    for i in range(5):
        count.update(pairs_of(serve(world, world.join(f"p{i}")), world))
    assert len(count) == 10
    assert set(count.values()) == {2}, "each pair once, told to both"
    for i in range(5, 60):
        count.update(pairs_of(serve(world, world.join(f"p{i}")), world))
    assert len(count) <= LINKS * 60
    assert world.machine.probing.settled(world.machine.members.members)
    degree = Counter(p for pair in count for p in pair)
    assert min(degree.values()) >= 3
    assert len(world.machine.probing.landmarks.chosen) == LINKS


def test_landmarks_are_far_from_each_other(world):
    place = {"a": 0.0, "b": 0.01, "c": 0.011, "far": 0.2, "d": 0.012, "e": 0.013}

    for name in place:
        out = world.join(name)
        queue = orders(out)
        names = {stream: peer for peer, stream in world.streams.items()}
        while queue:
            stream, order = queue.pop(0)
            me = names[stream]
            apart = abs(place[me] - place[order.peer]) + 1e-3
            queue += orders(world.say(me, link=probe(order.number, order.peer, apart)))
    assert "far" in world.machine.probing.landmarks.chosen


def test_a_peer_takes_part_in_one_probe_at_a_time(world):
    told = [o for i in range(9) for o in orders(world.join(f"p{i}"))]
    busy = Counter(stream for stream, _ in told)
    assert max(busy.values()) == 1
    for stream, order in told[:2]:
        peer = next(p for p, s in world.streams.items() if s == stream)
        out = world.say(peer, link=probe(order.number, order.peer))
    assert orders(out), "the next one when one has ended"


def test_what_probes_cost_a_peer_in_an_hour_is_bounded(make_world):
    most = 2 * PROBE_BYTES
    world = make_world(probe_s=5.0, probe_bytes=most)

    def dear(number, peer):
        return probe(number, peer, size_bytes=PROBE_BYTES)

    sent = Counter()
    for i in range(12):
        out = serve(world, world.join(f"p{i}"), dear)
        for pair in set(pairs_of(out, world)):
            sent.update(pair)
    assert max(sent.values()) == 2
    assert orders(live(world, 4200)), "an hour later there is room again"


def test_a_pair_without_a_route_is_left_for_ten_minutes_and_tried_again(world):
    world.join("a")
    out = serve(world, world.join("b"), failed)
    assert len(orders(out)) == 2
    assert [i for i in out if isinstance(i, Log) and i.name == "link_unmeasured"]
    assert world.machine.probing.unmeasured([("a", "b")], world.now) == ()


def test_an_order_that_nobody_answers_ends_by_itself(world):
    world.join("a")
    world.join("b")
    assert not world.machine.probing.settled(["a", "b"])
    out = live(world, 40.0)
    assert [i for i in out if isinstance(i, Log) and i.name == "link_unmeasured"]
    assert world.machine.probing.settled(["a", "b"])


def test_a_peer_lost_in_mid_probe_frees_the_other_in_the_end(world):
    world.join("a")
    ((_, order), _) = orders(world.join("b"))
    world.close("b")
    world.join("c")
    out = world.say("a", link=failed(order.number, "b"))
    assert set(pairs_of(out, world)) == {frozenset("ac")}


def test_who_lacks_links_is_who_a_count_of_the_whole_pool_finds(world, monkeypatch):
    count, seen = Landmarks.count, []

    def counted(self, pool, reach):
        count(self, pool, reach)
        known = self._peers
        short = [
            p
            for p in pool
            if len(known[p].tried) < min(LINKS, len(pool) - 1)
            and any(q != p and q not in known[p].tried and reach(p, q) for q in pool)
        ]
        assert list(self.short) == short, "in this order, which is that of their probes"
        seen.append(short)

    monkeypatch.setattr(Landmarks, "count", counted)
    rng, pending = random.Random(5), []
    for i in range(400):
        names = {stream: peer for peer, stream in world.streams.items()}
        what = rng.random()
        if what < 0.15 and len(names) < 24:
            out = world.join(f"p{i}", address="" if rng.random() < 0.3 else f"10.0.0.{i}:1")
        elif what < 0.2 and names:
            out = world.close(rng.choice(list(names.values())))
        elif what < 0.25:
            out = live(world, rng.choice([5.0, 30.0, 700.0]))
        elif pending:
            stream, order = pending.pop(rng.randrange(len(pending)))
            answer = probe if rng.random() < 0.8 else failed
            peer = names.get(stream)
            out = world.say(peer, link=answer(order.number, order.peer)) if peer else []
        else:
            out = []
        pending += orders(out)
    assert len(seen) > 80
    assert any(seen)
    assert not all(seen)


# ------------------------------------------------------------ what is believed


@pytest.mark.parametrize(
    ("report", "word"),
    [
        (probe(1, "b", latency_s=math.nan), "latency_s is nan"),
        (probe(1, "b", rate=1e-306), "bytes_per_s is 1e-306: expected 0, or 1 or more"),
        (probe(1, "b", latency_s=-1.0), "latency_s is -1"),
        (probe(1, "b", latency_s=61.0), "latency_s is 61"),
        (probe(1, "b", rate=math.inf), "bytes_per_s is inf"),
        (probe(1, "b", rate=2e12), "bytes_per_s is 2e+12"),
        (probe(1, "b", rate=-5.0), "bytes_per_s is -5"),
        (probe(1, "b", latency_s=0.0, rate=0.0), "neither"),
        (probe(1, "a"), "no other member"),
        (probe(7, "b"), "nobody waits for probe 7"),
        (probe(0, "zz"), "no other member"),
        (probe(0, "a"), "no other member"),
    ],
)
def test_numbers_that_cannot_be_are_ignored_with_the_reason(world, report, word):
    world.join("a")
    world.join("b")
    out = world.say("a", link=report)
    (log,) = [i for i in out if isinstance(i, Log)]
    assert log.name == "message_ignored"
    assert word in dict(log.fields)["why"]
    assert not world.machine.probing.links.states(world.machine.members.members, world.now)


def test_a_report_is_taken_once(world):
    world.join("a")
    ((_, order), _) = orders(world.join("b"))
    world.say("a", link=probe(order.number, "b"))
    out = world.say("a", link=probe(order.number, "b", rate=1.0))
    assert [i.name for i in out if isinstance(i, Log)] == ["message_ignored"]
    assert world.machine.probing.links.get("a", "b", 0.0).bytes_per_s == TRUE_RATE


def test_training_traffic_moves_an_estimate_and_a_probe_replaces_it(world):
    world.join("a")
    serve(world, world.join("b"))
    links = world.machine.probing.links
    world.say("a", link=probe(0, "b", latency_s=0.0, rate=0.8 * TRUE_RATE))
    first = links.get("a", "b", world.now)
    assert first.bytes_per_s == pytest.approx((0.7 + 0.3 * 0.8) * TRUE_RATE)
    assert first.latency_s == TRUE_LATENCY_S, "what was not measured stays"
    for _ in range(40):
        world.say("a", link=probe(0, "b", latency_s=0.0, rate=1e6))
    assert links.get("a", "b", world.now).bytes_per_s == pytest.approx(1e6, rel=1e-3)
    links.report("a", "b", 0.01, 9e6, world.now, "probe")
    assert links.get("a", "b", world.now).bytes_per_s == 9e6


def test_the_description_lists_what_was_measured_with_its_age(world):
    world.join("a")
    serve(world, world.join("b"))
    world.wait(3.0)
    (answer,) = world.handle(DescribeAsked(world.request()))
    (ab, ba) = answer.message.links
    assert {(ab.source, ab.destination), (ba.source, ba.destination)} == {("a", "b"), ("b", "a")}
    assert ab.bytes_per_s == TRUE_RATE
    assert ab.age_s == pytest.approx(3.0)


def test_estimates_age_out_and_are_measured_again(world):
    world.join("a")
    serve(world, world.join("b"))
    probing = world.machine.probing
    live(world, MAX_AGE_S - 100)
    assert probing.links.is_measured("a", "b", world.now)
    assert orders(live(world, 700))
    assert not probing.links.is_measured("a", "b", world.now)


def test_another_start_of_a_peer_is_measured_anew_and_a_reconnection_is_not(world):
    world.join("a")
    serve(world, world.join("b"))
    world.close("b")
    assert not orders(world.join("b"))
    assert len(orders(world.join("b", counter=2))) == 2


# ------------------------------------------------------------ what plans get


def test_a_plan_waits_for_the_links_and_gets_them_as_they_were_measured(world):
    out = [*world.join("a", place="x"), *world.join("b", place="y", up_bytes_per_s=1e6)]
    run, asked = world.submit(world.spec(plan={"stages": 2}))
    assert not [i for i in asked if isinstance(i, MakePlan)]
    assert "measured" in world.state(run).reason.text
    ask = world.only(serve(world, out), MakePlan)
    network = ask.network
    assert network.peers == ("a", "b")
    assert network.latency_s[0, 1] == TRUE_LATENCY_S
    assert network.bandwidth[1, 0] == TRUE_RATE
    assert network.up.tolist() == [np.inf, 1e6]
    assert network.measured.all()


def test_a_plan_waits_no_longer_than_it_must(world):
    world.join("a")
    world.join("b")
    world.wait(2.0)
    run, _ = world.submit(world.spec(plan={"stages": 2}))
    out = world.wait(2.9)
    assert not [i for i in out if isinstance(i, MakePlan)]
    ask = world.only(world.wait(0.2), MakePlan)
    assert ask.replica == run
    assert not ask.network.measured[0, 1]
    assert np.isfinite(ask.network.bandwidth[0, 1])


def test_peers_that_keep_joining_do_not_hold_a_plan_up_for_ever(world):
    world.join("a")
    run, _ = world.submit(world.spec(plan={"stages": 1}))
    asked = []
    for i in range(10):
        out = world.join(f"p{i}")
        out += world.wait(1.0)
        for peer in list(world.streams):
            world.say(peer, heartbeat={})
        asked += [i for i in out if isinstance(i, MakePlan)]
    assert asked or world.state(run).reason.code == "planning"


def test_a_plan_over_pairs_that_nobody_measured_has_them_measured_first_and_once(world):
    for i in range(12):
        serve(world, world.join(f"p{i}"))
    probing = world.machine.probing
    names = list(world.machine.members.members)
    missing = [
        (a, b)
        for a in names
        for b in names
        if a < b and not probing.links.is_measured(a, b, world.now)
    ]
    assert missing
    a, b = missing[0]
    run, out = world.submit(world.spec(plan={"stages": 2}))
    ask = world.only(out, MakePlan)
    at = ask.network.peers.index(a), ask.network.peers.index(b)
    assert not ask.network.measured[at]
    out = world.handle(PlanReady(run, ask.version, world.plan(a, b)))
    assert set(pairs_of(out, world)) == {frozenset((a, b))}
    again = world.only(serve(world, out), MakePlan)
    assert again.network.measured[at]
    out = world.handle(PlanReady(run, again.version, world.plan(a, b)))
    assert world.machine.replica(run).record.active


def test_a_plan_is_not_refused_when_its_pairs_cannot_be_measured(world):
    for i in range(12):
        serve(world, world.join(f"p{i}"))
    probing = world.machine.probing
    names = list(world.machine.members.members)
    a, b = next(
        (a, b)
        for a in names
        for b in names
        if a < b and not probing.links.is_measured(a, b, world.now)
    )
    run, out = world.submit(world.spec(plan={"stages": 2}))
    ask = world.only(out, MakePlan)
    out = world.handle(PlanReady(run, ask.version, world.plan(a, b)))
    again = world.only(serve(world, out, failed), MakePlan)
    world.handle(PlanReady(run, again.version, world.plan(a, b)))
    assert world.machine.replica(run).record.active


def test_one_peer_waits_for_no_links(make_world):
    """Though one of its own is being measured: with a peer that then rests."""
    world = make_world(probe_s=5.0)
    world.join("a")
    world.join("b")
    resting = Reason(code="paused", text="its owner has paused it")
    world.say("b", availability=Availability(closed=resting))
    assert not world.machine.probing.settled(["a"])
    run, out = world.submit(world.spec())
    world.only(out, MakePlan)
    assert "links" not in world.state(run).reason.text


def test_replicas_of_saps_measure_the_links_that_it_chooses_among_and_those_of_noloco_do_not(
    make_world,
):
    for method, measured in (("saps-outer", True), ("noloco", False)):
        world = make_world(probe_s=5.0)
        names = [f"p{i:02}" for i in range(12)]
        for name in names:
            serve(world, world.join(name))
        job = {"sync": {"kind": "gossip", "method": method}, "plan": {"replicas": 12}}
        run, out = world.submit(make_spec(microbatches=12, **job))
        ask = world.only(out, FormReplicas)
        assert not ask.network.measured.all()
        out = world.handle(formation(ask, *names))
        told = pairs_of(out, world)
        assert len(told) == len(set(told)) * 2, "nobody is in two at once"
        if measured:
            again = world.only(serve(world, out), FormReplicas)
            assert again.network.measured.all()
            assert again.network.peers == ask.network.peers
            out = world.handle(formation(again, *names))
        assert not told or measured
        assert all(r.record.active for r in world.machine.runs[run].replicas)


def test_a_pair_whose_peers_may_send_no_more_probes_is_not_waited_for(make_world):
    world = make_world(probe_s=5.0, probe_bytes=5 * PROBE_BYTES)
    for i in range(12):
        serve(world, world.join(f"p{i}"), lambda n, p: probe(n, p, size_bytes=PROBE_BYTES))
    probing, members = world.machine.probing, world.machine.members.members
    unmeasured = probing.unmeasured(list(itertools.combinations(members, 2)), world.now)
    assert unmeasured
    probing.wanted(unmeasured, world.now, turns=12)
    assert not probing.settled(members)
    serve(
        world,
        probing.advance(world.machine.members, world.now),
        lambda n, p: probe(n, p, size_bytes=PROBE_BYTES),
    )
    assert probing.settled(members)
    assert probing.unmeasured(unmeasured, world.now)


def test_an_assigned_peer_is_not_probed_and_its_report_of_that_is_no_failure(world):
    world.join("a")
    out = world.join("b")
    ((_, order), _) = orders(out)
    world.machine.members.assign(world.machine.members.members[PeerId("a")], "r-x")
    for peer, other in (("a", "b"), ("b", "a")):
        world.machine.probing.reported(
            PeerId(peer), failed(order.number, other, "assigned"), world.now
        )
    probing = world.machine.probing
    probing.advance(world.machine.members, world.now)
    assert not probing._busy
    members = world.machine.members
    members.drain(members.members[PeerId("a")], world.now)
    members.drained(members.members[PeerId("a")], "r-x")
    assert not orders(probing.advance(members, world.now)), "not at once"
    assert orders(probing.advance(members, world.now + 31)) or orders(
        probing.advance(members, world.now + 31)
    )


# ------------------------------------------------------------ within a hundredth


@given(
    rate=st.floats(1e3, 1e10),
    requests=st.lists(
        st.tuples(st.floats(0, 100), st.integers(1, 2 * SMALLEST_BYTES)), max_size=60
    ),
)
def test_probes_of_a_training_peer_stay_within_a_hundredth_of_its_uplink(rate, requests):
    allowance, now, granted = Allowance(rate), 0.0, []
    for pause, size in requests:
        now += pause
        if allowance.take(size, now):
            granted.append((now, size))
    for i, (begin, _) in enumerate(granted):
        total = 0
        for end, size in granted[i:]:
            total += size
            most = 0.01 * rate * (end - begin) + SMALLEST_BYTES
            assert total <= most * (1 + 1e-9)


def test_wanted_pairs_of_a_training_peer_take_the_smallest_probe_and_wait_their_time(world):
    for name in ("a", "b", "c"):
        serve(world, world.join(name))
    run, out = world.submit(world.spec(plan={"stages": 2}, recovery={"warm_spares": 0}))
    world.handle(PlanReady(run, world.only(out, MakePlan).version, world.plan("a", "b")))
    world.machine.probing.links.forget(PeerId("c"))
    probing, members = world.machine.probing, world.machine.members
    uplink = probing.links.uplink(PeerId("a"), world.now)
    assert uplink == TRUE_RATE
    pair = (PeerId("a"), PeerId("c"))
    started = []
    for tenth in range(200):
        now = world.now + tenth / 10
        for known in probing._peers.values():
            known.tried.clear()
        probing.wanted([pair], now)
        out = probing.advance(members, now)
        told = orders(out)
        started += [(now, o.most_bytes) for s, o in told if s == world.streams["a"]]
        for stream, order in told:
            if order.most_bytes == SMALLEST_BYTES:
                me = next(p for p, s in world.streams.items() if s == stream)
                probing.reported(PeerId(me), failed(order.number, order.peer), now)
    assert {size for _, size in started} == {SMALLEST_BYTES}
    pauses = np.diff([now for now, _ in started])
    assert len(started) > 3
    assert (pauses >= SMALLEST_BYTES / (0.01 * TRUE_RATE) - 0.11).all()


# ------------------------------------------------------------ bursts and rates


def test_what_a_link_sustains_is_planned_with_and_its_burst_is_shown(world):
    def shaped(number, peer):
        link = probe(number, peer)
        link.burst_bytes_per_s, link.burst_bytes = 2e8, 1 << 17
        return link

    world.join("a")
    serve(world, world.join("b"), shaped)
    probing = world.machine.probing
    (one, two) = probing.links.states(world.machine.members.members, world.now)
    assert {one.bytes_per_s, two.bytes_per_s} == {TRUE_RATE}
    assert (one.burst_bytes_per_s, one.burst_bytes) == (2e8, 1 << 17)
    network = probing.network([PeerId("a"), PeerId("b")], world.now)
    assert network.bandwidth[0, 1] == TRUE_RATE
    world.say("a", link=LinkReport(peer="b", bytes_per_s=TRUE_RATE, size_bytes=1))
    assert probing.links.get("a", "b", world.now).burst == (2e8, 1 << 17), "traffic tells none"
    why = probing.links.report("a", "b", 0.1, 1e6, world.now, "probe", LinkBurst(math.nan, 1))
    assert why.startswith("burst_bytes_per_s is nan")


def test_a_burst_alone_leaves_the_rate_unknown_and_the_pair_for_ten_minutes(world):
    def burst_alone(number, peer):
        link = probe(number, peer, rate=0.0)
        link.burst_bytes_per_s, link.burst_bytes = 2e8, 48 << 10
        return link

    world.join("a")
    serve(world, world.join("b"), burst_alone)
    probing = world.machine.probing
    assert not probing.links.is_measured("a", "b", world.now)
    assert probing.links.get("a", "b", world.now).latency_s == TRUE_LATENCY_S
    assert not probing.unmeasured([("a", "b")], world.now), "another try now tells as little"
    assert not orders(live(world, 300.0))


def test_an_hour_of_probes_is_twenty_seconds_of_a_fast_uplink(make_world):
    """A slow one's is 128 MiB, which most of its probes take little of."""
    for rate, most in ((1e6, 128 << 20), (1e7, 200_000_000), (1e9, 512 << 20)):
        world = make_world(probe_s=5.0)
        world.join("a")
        serve(
            world, world.join("b"), lambda number, peer, rate=rate: probe(number, peer, rate=rate)
        )
        known = world.machine.probing._peers[PeerId("a")]
        known.sent.clear()
        known.sent_bytes = 0
        known.reserve(most - PROBE_BYTES, world.now)
        assert world.machine.probing._affords(PeerId("a"), PROBE_BYTES, world.now)
        assert not world.machine.probing._affords(PeerId("a"), PROBE_BYTES + 1, world.now)
