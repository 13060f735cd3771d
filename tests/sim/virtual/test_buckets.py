"""Token buckets of links: what goes at once after a rest, in every world, and what probes see."""

from __future__ import annotations

import numpy as np
import pytest

from shoal.dag.cost.network import Network
from shoal.dag.plan.plan import PeerId
from shoal.sim.scenario.scenario import Scenario
from shoal.sim.shaped.pacing import Pacer
from shoal.sim.shaped.shaping import Shaping
from shoal.sim.virtual.clock import Bucket, VirtualClock
from shoal.sim.virtual.wan import Wan
from shoal.sim.virtual.world import PeerSpec, World

RATE, BURST, LATENCY_S = 1e6, 100_000, 0.01
INF = float("inf")
TWO = """
version = 1
job = "job.toml"
[[peers]]
name = "a"
place = "here"
[[peers]]
name = "b"
place = "there"
[[links]]
from = "here"
to = "there"
latency = "10ms"
bandwidth = "8Mbit"
"""


def network(count=2, up=INF, bandwidth=RATE):
    shape = count, count
    return Network(
        tuple(PeerId(f"p{i}") for i in range(count)),
        np.full(shape, LATENCY_S),
        np.full(shape, bandwidth),
        np.full(count, up),
        np.full(count, INF),
    )


class Sent:
    """When each message arrived, by its number."""

    def __init__(self, net, **options):
        self.clock, self.arrived = VirtualClock(), {}
        shape = len(net), len(net)
        self.wan = Wan(net, **{"burst": np.full(shape, float(BURST))} | options)
        self.wan.attach(self.clock)

    def send(self, number, size, to=1, left=lambda: None):
        def arrived():
            self.arrived[number] = self.clock.now

        busy_s = self.wan.send("p0", f"p{to}", size, left, arrived)
        if busy_s is not None:
            self.clock.after(busy_s, left)

    def until_quiet(self):
        self.clock.after(100.0, lambda: None)
        self.clock.until(lambda: self.clock.now >= 100.0)


def test_a_bucket_is_refilled_at_its_rate_up_to_its_size():
    bucket = Bucket(100.0, 10.0)
    assert [bucket.take(80.0, 0.0), bucket.take(80.0, 0.0), bucket.take(80.0, 3.0)] == [80, 20, 30]
    assert bucket.take(1e9, 1000.0) == 100
    bucket.skip(1005.0)
    assert bucket.there(1006.0) == pytest.approx(10.0), "what came until then was used"


def test_what_finds_tokens_takes_no_time_and_the_rest_goes_at_the_rate():
    sent = Sent(network())
    sent.send("all", BURST // 2)
    sent.send("half", BURST)
    sent.until_quiet()
    assert sent.arrived["all"] == pytest.approx(LATENCY_S)
    assert sent.arrived["half"] == pytest.approx(LATENCY_S + BURST / 2 / RATE)


def test_an_uplink_bounds_a_burst_and_is_shared_by_those_that_burst_at_once():
    sent = Sent(network(3, up=10 * RATE))
    sent.send("one", BURST, to=1)
    sent.send("two", BURST, to=2)
    sent.until_quiet()
    shared = 2 * BURST / (10 * RATE)
    assert sent.arrived == {
        "one": pytest.approx(LATENCY_S + shared),
        "two": pytest.approx(LATENCY_S + shared),
    }


def test_after_a_burst_through_an_uplink_the_rest_goes_at_the_rate():
    sent = Sent(network(up=10 * RATE))
    sent.send("long", 3 * BURST)
    sent.until_quiet()
    took = BURST / (10 * RATE) + 2 * BURST / RATE
    assert sent.arrived["long"] == pytest.approx(LATENCY_S + took)


def test_a_stream_of_messages_sustains_the_rate_and_no_more():
    sent, count = Sent(network(up=10 * RATE)), 50

    def more(number=0):
        if number < count:
            sent.send(number, BURST, left=lambda: more(number + 1))

    more()
    sent.until_quiet()
    took = max(sent.arrived.values()) - LATENCY_S
    assert took == pytest.approx((count - 1) * BURST / RATE, rel=0.01)


def test_a_parted_burst_goes_on_when_it_is_mended():
    sent = Sent(network(up=2 * RATE))
    sent.send("long", 2 * BURST)
    sent.clock.after(0.01, lambda: sent.wan.part("p0", "p1"))
    sent.clock.after(1.0, lambda: sent.wan.mend("p0", "p1"))
    sent.until_quiet()
    assert sent.arrived["long"] == pytest.approx(1.0 + (2 * BURST - 0.02 * RATE) / RATE + LATENCY_S)


def test_buckets_of_nothing_are_no_buckets():
    plain, empty = Sent(network(up=2e6), burst=None), Sent(network(up=2e6), burst=np.zeros((2, 2)))
    for sent in (plain, empty):
        for number in range(20):
            sent.send(number, 7_000 * (number + 1))
        sent.until_quiet()
    assert plain.arrived == empty.arrived


def test_shaped_paths_let_a_burst_through_and_then_pace():
    square = ((BURST, BURST),) * 2
    shaping = Shaping(
        names=("p0", "p1"),
        latency_s=((0.0,) * 2,) * 2,
        bandwidth=((RATE,) * 2,) * 2,
        up=(10 * RATE,) * 2,
        down=(INF,) * 2,
        burst=square,
    )
    assert Shaping.from_json(shaping.to_json()) == shaping
    pacer, flow, now, gone = Pacer(shaping), (0, 1), 5.0, 0
    pacer.wait(flow, now)
    left = {}
    while gone < 4 * BURST:
        size = pacer.piece_bytes(flow, now)
        now = pacer.leave(flow, size, now)
        gone += size
        left[gone] = now - 5.0
    first = next(t for n, t in left.items() if n >= BURST)
    assert first == pytest.approx(BURST / (10 * RATE), rel=0.2)
    assert left[gone] == pytest.approx((gone - BURST) / RATE, rel=0.05)


def test_a_scenario_says_how_much_goes_at_once(tmp_path):
    def read(more):
        (tmp_path / "two.toml").write_text(TWO + more)
        return Scenario.from_toml(tmp_path / "two.toml")

    assert not read("").wide().burst.any()
    wide = read('burst = "128KiB"\n').wide()
    a, b = (wide.network.peers.index(name) for name in ("a", "b"))
    assert wide.burst[a, b] == wide.burst[b, a] == 128 * 1024
    assert Shaping.of(wide).burst[a][b] == 128 * 1024
    with pytest.raises(ValueError, match="burst"):
        read('burst = "much"\n')


@pytest.mark.parametrize(
    ("rate", "burst", "latency_s", "up", "seen"),
    [
        (1e6, 32 << 10, 0.02, INF, False),
        (6.25e6, 128 << 10, 1e-4, 1.25e8, True),
        (1e6, 4 << 20, 0.005, 1.25e8, True),
        (6.25e6, 4 << 20, 0.01, INF, True),
        (62.5e6, 4 << 20, 0.05, 1.25e9, False),
    ],
)
def test_probes_find_the_rate_behind_a_burst(tmp_path, rate, burst, latency_s, up, seen):
    """Whatever the burst. It is seen itself unless the load grows more slowly than it goes."""
    net = Network(
        (PeerId("a"), PeerId("b"), PeerId("broker")),
        np.full((3, 3), latency_s),
        np.full((3, 3), rate),
        np.full(3, up),
        np.full(3, INF),
    )
    wan = Wan(net, burst=np.full((3, 3), float(burst)))
    peers = [PeerSpec(name="a"), PeerSpec(name="b")]
    world = World(peers, blobs={}, folder=tmp_path, wan=wan)
    world.until(lambda: len(world.broker.machine.members.members) == 2)
    probing = world.broker.machine.probing
    world.until(lambda: probing.settled(world.peers))
    for a, b in (("a", "b"), ("b", "a")):
        found = probing.links.get(PeerId(a), PeerId(b), world.now)
        assert found.bytes_per_s == pytest.approx(rate, rel=0.05)
        assert found.latency_s == pytest.approx(latency_s, rel=0.1, abs=1e-3)
        assert (found.burst.bytes_per_s > 1.5 * rate) == seen
        if seen:
            assert found.burst.size_bytes == pytest.approx(burst, rel=0.5)
    shown = probing.links.states(world.broker.machine.members.members, world.now)
    assert [link.burst_bytes > 0 for link in shown] == [seen, seen], "people see it"
