"""What the broker believes of what peers report of their links: rates, bursts, and for how long."""

from __future__ import annotations

import math

import pytest

from shoal.broker.events import DescribeAsked, Log
from shoal.broker.links.links import MAX_AGE_S, LinkBurst
from shoal.dag.plan.plan import PeerId
from shoal.proto.broker_pb2 import LinkReport

from .conftest import TRUE_LATENCY_S, TRUE_RATE, live, orders, probe, serve

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
