"""Whom the broker has measure links, and what that may cost them."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shoal.broker.events import Log, MakePlan, PlanReady
from shoal.broker.links.probed import LINKS, PROBE_BYTES, SMALLEST_BYTES, Allowance, Landmarks
from shoal.dag.plan.plan import PeerId
from shoal.proto.broker_pb2 import Goodbye

from .conftest import TRUE_RATE, failed, live, orders, pairs_of, probe, serve

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


# ------------------------------------------------------------ what it costs


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
        known.reserve(most - PROBE_BYTES, world.now)
        assert world.machine.probing._affords(PeerId("a"), PROBE_BYTES, world.now)
        assert not world.machine.probing._affords(PeerId("a"), PROBE_BYTES + 1, world.now)
