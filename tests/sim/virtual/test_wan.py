"""The modelled network against closed formulas, and its sharing against brute force."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.dag.cost.network import Network
from shoal.dag.plan.plan import PeerId
from shoal.net.transports.carrier import InOrder
from shoal.sim.virtual.clock import VirtualClock
from shoal.sim.virtual.wan import MOST_EXACT, PACKET_BYTES, Wan, rounds_lost

INF = float("inf")
BIG = 100 * PACKET_BYTES


def network(count, latency_s=0.0, bandwidth=INF, up=INF, down=INF):
    """Peers "p0", "p1", …; `up` and `down` may be one number for all or one for each."""
    shape = count, count
    return Network(
        tuple(PeerId(f"p{i}") for i in range(count)),
        np.broadcast_to(np.asarray(latency_s, float), shape).copy(),
        np.broadcast_to(np.asarray(bandwidth, float), shape).copy(),
        np.broadcast_to(np.asarray(up, float), count).copy(),
        np.broadcast_to(np.asarray(down, float), count).copy(),
    )


class Sent:
    """Messages through a Wan on a clock of their own; when each left and arrived, by its number."""

    def __init__(self, net, **options):
        self.clock = VirtualClock()
        self.wan = Wan(net, **options)
        self.wan.attach(self.clock)
        self.left, self.arrived = {}, {}
        self._count = itertools.count()

    def send(self, i, j, size, then=None):
        number = next(self._count)

        def left():
            self.left[number] = self.clock.now
            if then is not None:
                then()

        def arrived():
            self.arrived[number] = self.clock.now

        busy_s = self.wan.send(f"p{i}", f"p{j}", size, left, arrived)
        if busy_s is not None:
            self.clock.after(busy_s, left)
        return number

    def at(self, time_s, what):
        self.clock.after(time_s - self.clock.now, what)

    def run(self, until_s=1e9):
        self.clock.after(until_s - self.clock.now, lambda: None)
        self.clock.until(lambda: self.clock.now >= until_s, math.inf)


# ------------------------------------------------------------ closed formulas


@given(
    st.floats(0, 2), st.floats(1e3, 1e9), st.floats(1e3, 1e9), st.floats(1e3, 1e9),
    st.integers(0, 10**9),
)  # fmt: skip
def test_one_message_takes_its_latency_and_its_bytes_at_the_slowest_part(
    latency_s, pair, up, down, size
):
    sent = Sent(network(2, latency_s, pair, up, down))
    n = sent.send(0, 1, size)
    sent.run()
    takes = size / min(pair, up, down)
    assert sent.left[n] == pytest.approx(takes, rel=1e-9)
    assert sent.arrived[n] == pytest.approx(takes + latency_s, rel=1e-9)


@pytest.mark.parametrize("count", [1, 2, 7, MOST_EXACT, MOST_EXACT + 1, 200])
@pytest.mark.parametrize("way", ["up", "down"])
def test_equal_flows_on_one_endpoint_each_get_their_part(count, way):
    sent = Sent(network(count + 1, 0.01, **{way: 1e6}))
    for k in range(1, count + 1):
        sent.send(*((0, k) if way == "up" else (k, 0)), BIG)
    sent.run()
    assert list(sent.left.values()) == [pytest.approx(count * BIG / 1e6)] * count
    assert list(sent.arrived.values()) == [pytest.approx(count * BIG / 1e6 + 0.01)] * count


def test_messages_of_one_pair_share_its_bandwidth():
    sent = Sent(network(2, bandwidth=1e6))
    numbers = [sent.send(0, 1, BIG), sent.send(0, 1, 3 * BIG)]
    sent.run()
    # Both at half the rate until the first has left; then the second alone.
    assert sent.left[numbers[0]] == pytest.approx(2 * BIG / 1e6)
    assert sent.left[numbers[1]] == pytest.approx(4 * BIG / 1e6)


def test_the_next_message_of_a_stream_takes_the_place_of_the_one_before():
    sent = Sent(network(3, up=1e6))
    numbers = []

    def chain(left):
        numbers.append(sent.send(0, 1, BIG, (lambda: chain(left - 1)) if left else None))

    chain(9)
    other = sent.send(0, 2, 10 * BIG)
    sent.run()
    assert sent.left[numbers[-1]] == sent.left[other] == pytest.approx(20 * BIG / 1e6)
    assert sent.wan.shared_out <= 4, "the other flow noticed nothing between"


def test_small_messages_pass_between_the_packets_of_large_ones():
    alone, beside = Sent(network(3, up=1e6)), Sent(network(3, up=1e6))
    first = alone.send(0, 1, BIG)
    assert first == beside.send(0, 1, BIG)
    small = beside.send(0, 2, PACKET_BYTES)
    alone.run()
    beside.run()
    assert beside.left[first] == alone.left[first]
    assert beside.left[small] == pytest.approx(2 * PACKET_BYTES / 1e6)


def test_both_directions_of_a_pair_are_apart():
    sent = Sent(network(2, bandwidth=1e6, up=1e6, down=1e6))
    sent.send(0, 1, BIG)
    sent.send(1, 0, BIG)
    sent.run()
    assert list(sent.left.values()) == [pytest.approx(BIG / 1e6)] * 2


# ------------------------------------------------------------ max-min by brute force


def filled(flows, room):
    """Max-min fair rates by progressive filling: all flows grow alike until a resource is full;
    those on it stop. `flows`: the resources of each; `room`: what each has."""
    rates, growing = [0.0] * len(flows), set(range(len(flows)))
    while growing:
        left = {
            r: room[r] - sum(rates[f] for f in range(len(flows)) if r in flows[f]) for r in room
        }
        users = {r: [f for f in growing if r in flows[f]] for r in room}
        step = min(left[r] / len(users[r]) for r in room if users[r])
        for f in growing:
            rates[f] += step
        growing -= {
            f for r in room if users[r] and left[r] / len(users[r]) <= step * (1 + 1e-12)
            for f in users[r]
        }  # fmt: skip
    return rates


def plain_fluid(net, messages):
    """When each message leaves: everything shared out anew by filling whenever one begins or ends.
    `messages`: (begin, source, destination, size)."""
    count = len(net)
    room = {("up", i): net.up[i] for i in range(count)}
    room |= {("down", j): net.down[j] for j in range(count)}
    room |= {(i, j): net.bandwidth[i, j] for i in range(count) for j in range(count) if i != j}
    now, waiting, under_way, left = (
        0.0,
        sorted(range(len(messages)), key=lambda m: messages[m]),
        {},
        {},
    )
    while waiting or under_way:
        on = list(under_way)
        needs = [{("up", messages[m][1]), ("down", messages[m][2]), messages[m][1:3]} for m in on]
        rates = dict(zip(on, filled(needs, room), strict=True))
        ends = [now + under_way[m] / rates[m] for m in on]
        begins = messages[waiting[0]][0] if waiting else INF
        then = min([*ends, begins])
        for m in on:
            under_way[m] -= rates[m] * (then - now)
        now = then
        for m, end in zip(on, ends, strict=True):
            if end <= now * (1 + 1e-12):
                left[m] = now
                del under_way[m]
        while waiting and messages[waiting[0]][0] <= now:
            m = waiting.pop(0)
            under_way[m] = float(messages[m][3])
    return left


def random_case(seed, peers, count):
    rng = random.Random(seed)
    rates = [1e5, 3e5, 1e6]
    net = network(
        peers,
        bandwidth=[[rng.choice(rates) for _ in range(peers)] for _ in range(peers)],
        up=[rng.choice(rates) for _ in range(peers)],
        down=[rng.choice(rates) for _ in range(peers)],
    )
    messages = []
    for _ in range(count):
        i, j = rng.sample(range(peers), 2)
        begin = rng.choice([0.0, rng.uniform(0, 5)])
        messages.append((begin, i, j, rng.randint(PACKET_BYTES + 1, 10**6)))
    return net, messages


def played(net, messages, **options):
    sent = Sent(net, **options)
    numbers = {}
    for m, (begin, i, j, size) in enumerate(messages):
        sent.at(begin, lambda m=m, i=i, j=j, n=size: numbers.update({sent.send(i, j, n): m}))
    sent.run()
    return {m: sent.left[n] for n, m in numbers.items()}


@given(st.integers(0, 10**6), st.integers(2, 6), st.integers(1, 25))
def test_shares_are_those_of_filling_everything_anew(seed, peers, count):
    net, messages = random_case(seed, peers, count)
    found, wanted = played(net, messages), plain_fluid(net, messages)
    for m in wanted:
        assert found[m] == pytest.approx(wanted[m], rel=1e-6)


@given(st.integers(0, 10**6), st.integers(0, 8))
def test_nothing_is_overbooked_at_any_time_whichever_way_it_is_shared(seed, most_exact):
    net, messages = random_case(seed, 5, 30)
    sent = Sent(net, most_exact=most_exact)
    for begin, i, j, size in messages:
        sent.at(begin, lambda i=i, j=j, n=size: sent.send(i, j, n))

    def check():
        if sent.clock.next_s > sent.clock.now:
            used = {}
            for (a, b), rate in sent.wan.rates():
                i, j = int(a[1:]), int(b[1:])
                assert rate > 0
                for key, room in (
                    (("up", i), net.up[i]),
                    (("down", j), net.down[j]),
                    ((i, j), net.bandwidth[i, j]),
                ):
                    used[key] = used.get(key, 0.0) + rate
                    assert used[key] <= room * (1 + 1e-9)
        return len(sent.left) == len(messages)

    sent.clock.until(check, math.inf)


@given(st.integers(0, 10**6))
def test_equal_shares_are_never_more_than_max_min_and_overbook_nothing(seed):
    """Rates of the same flows at one moment, shared exactly and equally."""
    net, messages = random_case(seed, 5, 20)
    exact, equal = Sent(net, most_exact=10**6), Sent(net, most_exact=0)
    for sent in (exact, equal):
        for _, i, j, size in messages:
            sent.send(i, j, size)
        sent.run(1e-6)
    there, here = exact.wan.rates(), equal.wan.rates()
    assert len(there) == len(here)
    used = {}
    for (pair, fair), (same, rate) in zip(there, here, strict=True):
        assert pair == same
        assert 0 < rate <= fair * (1 + 1e-9)
        i, j = (int(name[1:]) for name in pair)
        for key, room in (
            (("up", i), net.up[i]),
            (("down", j), net.down[j]),
            (pair, net.bandwidth[i, j]),
        ):
            used[key] = used.get(key, 0.0) + rate
            assert used[key] <= room * (1 + 1e-9)


@pytest.mark.parametrize(("rooms", "median", "worst"), [([1e6], 0.95, 0.2), ([1e6, 1e7], 0.8, 0.1)])
def test_the_error_of_equal_shares_between_random_peers_is_as_stated(rooms, median, worst):
    ratios = []
    for seed in range(3):
        rng = random.Random(seed)
        net = network(40, up=rng.choices(rooms, k=40), down=rng.choices(rooms, k=40))
        pairs = [rng.sample(range(40), 2) for _ in range(250)]
        exact, equal = Sent(net, most_exact=10**6), Sent(net)
        for sent in (exact, equal):
            for i, j in pairs:
                sent.send(i, j, 10**12)
            sent.run(1.0)
        both = zip(exact.wan.rates(), equal.wan.rates(), strict=True)
        ratios += [rate / fair for (_, fair), (_, rate) in both]
    assert median < np.median(ratios) <= 1
    assert min(ratios) > worst


# ------------------------------------------------------------ jitter and loss


def test_jitter_spreads_the_latency_evenly_and_draws_per_sender():
    net = network(3, 0.1)
    spread = np.full((3, 3), 0.02)
    sent, other = Sent(net, jitter_s=spread, seed=3), Sent(net, jitter_s=spread, seed=3)
    for _ in range(400):
        sent.send(0, 1, 100)
        other.send(0, 1, 100)
        other.send(2, 1, 100)  # draws of another sender change nothing
    sent.run()
    other.run()
    delays = sorted(sent.arrived.values())
    assert 0.08 <= delays[0] < 0.085
    assert 0.115 < delays[-1] <= 0.12
    assert sum(delays) / 400 == pytest.approx(0.1, abs=0.002)
    assert [sent.arrived[n] for n in range(400)] == [other.arrived[2 * n] for n in range(400)]


def test_a_stream_keeps_its_order_and_streams_are_free_of_each_other():
    sent = Sent(network(2, 0.1), jitter_s=np.full((2, 2), 0.09), seed=1)
    order, free = InOrder(), []
    came = []
    for k in range(200):
        sent.wan.send("p0", "p1", 10, lambda: None, order.next(lambda k=k: came.append(k)))
        sent.wan.send("p0", "p1", 10, lambda: None, lambda k=k: free.append(k))
    sent.run()
    assert came == list(range(200))
    assert sorted(free) == came != free


@pytest.mark.parametrize("loss", [0.001, 0.1, 0.5])
@pytest.mark.parametrize("packets", [1, 30, 2000])
def test_rounds_of_repeats_are_spread_as_the_slowest_of_many_packets(loss, packets):
    rng = random.Random(5)

    def by_hand():
        """Each packet by itself, until the last one has come."""
        missing, rounds = packets, 0
        while (missing := sum(rng.random() < loss for _ in range(missing))) > 0:
            rounds += 1
        return rounds

    tries = 300
    found = [rounds_lost(packets, loss, (k + 0.5) / tries) for k in range(tries)]
    wanted = [by_hand() for _ in range(tries)]
    spread = max(1.0, np.std(wanted)) / math.sqrt(tries)
    assert abs(np.mean(found) - np.mean(wanted)) < 5 * spread
    assert found == sorted(found)


def test_a_lossy_link_carries_less_and_repeats_take_round_trips():
    net = network(2, [[0, 0.1], [0.05, 0]], bandwidth=1e6)
    sent = Sent(net, loss=np.full((2, 2), 0.2), seed=2)
    numbers = [sent.send(0, 1, BIG) for _ in range(1)]
    sent.run()
    takes = BIG / 0.8 / 1e6
    assert sent.left[numbers[0]] == pytest.approx(takes)
    late = sent.arrived[numbers[0]] - takes - 0.1
    assert late > 0
    assert late / 0.15 == pytest.approx(round(late / 0.15))


# ------------------------------------------------------------ faults


def test_a_parted_direction_holds_up_what_has_not_left_and_the_way_back_works():
    sent = Sent(network(2, 0.05, bandwidth=1e6))
    before = sent.send(0, 1, PACKET_BYTES)  # has left when the way is parted
    under_way = sent.send(0, 1, 10**6)
    sent.at(0.5, lambda: sent.wan.part("p0", "p1"))
    later, back = [], []
    sent.at(0.6, lambda: later.append(sent.send(0, 1, 10)))
    sent.at(0.6, lambda: back.append(sent.send(1, 0, 10)))
    sent.at(2.0, lambda: sent.wan.mend("p0", "p1"))
    sent.run(1.9)
    assert sent.wan.parted("p0", "p1")
    assert not sent.wan.parted("p1", "p0")
    assert before in sent.arrived
    assert back[0] in sent.arrived
    assert under_way not in sent.left
    assert later[0] not in sent.left
    sent.run()
    assert sent.left[under_way] == pytest.approx(1.0 + 1.5)
    assert sent.arrived[later[0]] == pytest.approx(2.05, abs=1e-4)


def test_a_parted_flow_leaves_its_share_to_the_others():
    sent = Sent(network(3, up=1e6))
    sent.send(0, 1, 10**6)
    other = sent.send(0, 2, 10**6)
    sent.at(1.0, lambda: sent.wan.part("p0", "p1"))
    sent.run(100)
    assert sent.left == {other: pytest.approx(1.5)}


def test_a_slow_pair_takes_its_factor_longer_and_is_as_before_afterwards():
    sent = Sent(network(2, 0.1, bandwidth=INF, up=1e6))
    sent.wan.slow("p0", "p1", 10)
    first = sent.send(0, 1, 10**6)
    sent.at(5.0, lambda: sent.wan.slow("p0", "p1", 1))
    sent.run()
    assert sent.left[first] == pytest.approx(5.0 + 0.5)


def test_an_unknown_name_is_named():
    with pytest.raises(KeyError, match="p9"):
        Sent(network(2)).wan.send("p0", "p9", 1, print, print)
