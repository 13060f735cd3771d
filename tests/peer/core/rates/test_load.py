"""What the load of a probe tells of links of every shape: arithmetic in place of a network."""

from __future__ import annotations

import heapq
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.peer.core.rates.load import LARGEST_BURST, PING_BYTES, ProbeLoad
from shoal.sim.virtual.clock import Bucket

MOST = 32 << 20


class Path:
    """A path with a bucket, and a queue before it; acknowledgements come a way back later.
    `pauses`: (begin, seconds) in which the receiver's process stands still. `opens(sent)`: bytes
    that TCP lets be on their way."""

    def __init__(self, rate, rtt_s, burst=0.0, line=1e9, pauses=(), opens=None, noise=0.0):
        self.rate, self.rtt_s, self.line = rate, rtt_s, line
        self.bucket = Bucket(burst, rate)
        self.pauses, self.opens = pauses, opens
        self.random, self.noise = random.Random(1), noise
        self.free = 0.0

    def arrives(self, size, now):
        begin = max(self.free, now)
        taken = self.bucket.take(size, begin)
        self.free = begin + taken / self.line + (size - taken) / self.rate
        if size > taken:
            self.bucket.skip(self.free)
        at = self.free + self.rtt_s
        for begin, seconds in self.pauses:
            if begin <= at < begin + seconds:
                at = begin + seconds
        return at + self.random.uniform(0.0, self.noise)


def run(path, most=MOST):
    """(what was found, the load, when it ended)."""
    load, now, order, under_way = ProbeLoad(most), 0.0, 0, []
    last = on_way = total = 0
    waiting = []
    while True:
        while size := load.next_bytes(now):
            waiting.append((size, now))
        while waiting and (path.opens is None or on_way < path.opens(total)):
            size, queued = waiting.pop(0)
            order += 1
            on_way += size
            last = max(last, path.arrives(size, now))
            heapq.heappush(under_way, (last, order, size, queued))
        if load.over or not under_way:
            return load.found(), load, now
        now, _, size, queued = heapq.heappop(under_way)
        on_way -= size
        total += size
        load.acknowledged(size, queued, now)


@given(rate=st.floats(2e4, 3e8), rtt_s=st.floats(1e-4, 0.3))
def test_a_steady_path_is_measured_exactly(rate, rtt_s):
    found, load, now = run(Path(rate, rtt_s))
    if rate * rtt_s < 4 << 20:
        assert found.bytes_per_s == pytest.approx(rate, rel=0.03)
        assert found.latency_s == pytest.approx(rtt_s / 2, rel=0.05, abs=2e-3)
        assert found.burst is None
    else:  # it holds so much that most of the bytes are used up before it is filled
        assert min(0.3 * rate, 4e7) < found.bytes_per_s < 1.03 * rate
    assert load.sent_bytes <= MOST
    assert now < 8.0 + 12 * rtt_s


@given(
    rate=st.sampled_from([1e6, 6.25e6, 25e6, 62.5e6]),
    burst=st.integers(32 << 10, LARGEST_BURST),
    rtt_s=st.floats(2e-4, 0.1),
)
def test_the_rate_behind_a_burst_is_found_and_not_the_burst(rate, burst, rtt_s):
    found, _, _ = run(Path(rate, rtt_s, burst))
    assert found.bytes_per_s == pytest.approx(rate, rel=0.1)
    assert found.latency_s == pytest.approx(rtt_s / 2, rel=0.1, abs=2e-3)


@pytest.mark.parametrize("burst", [64 << 10, 512 << 10, 4 << 20])
def test_the_burst_is_told_apart(burst):
    found, load, now = run(Path(1e6, 1e-3, burst, line=1e8))
    assert found.burst.size_bytes == pytest.approx(burst, rel=0.2)
    assert 1.5e6 < found.burst.bytes_per_s <= 1.1e8
    assert load.sent_bytes < burst + 2e6, "no more than the burst and two seconds"
    assert now < 2.5


def test_a_fast_link_takes_a_fraction_of_a_second():
    found, load, now = run(Path(1.25e9, 5e-4))
    assert found.bytes_per_s == pytest.approx(1.25e9, rel=0.05)
    assert load.sent_bytes == MOST
    assert now < 0.1


def test_slow_start_is_no_rate():
    """A TCP that doubles in each round trip, from ten packets on."""
    rtt_s, rate = 0.1, 1e7
    found, _, _ = run(Path(rate, rtt_s, opens=lambda total: 14_480 + total))
    assert found.bytes_per_s == pytest.approx(rate, rel=0.1)


def test_a_pause_of_the_receiver_is_waited_out():
    steady, _, _ = run(Path(6.25e6, 1e-3))
    for at in (0.05, 0.2, 0.4):
        found, _, now = run(Path(6.25e6, 1e-3, pauses=[(at, 0.6)]))
        assert found.bytes_per_s == pytest.approx(steady.bytes_per_s, rel=0.1)
        assert now > at + 0.6 + 0.4, "not even with a pause in it"


def test_a_rate_that_never_becomes_even_ends_in_its_mean():
    """As behind a policer: a seventh of a second of much, one of little."""

    class Policed(Path):
        def arrives(self, size, now):
            self.rate = 2e6 if int(max(self.free, now) * 7) % 2 else 4e6
            return super().arrives(size, now)

    found, _, now = run(Policed(4e6, 0.02))
    assert 2.4e6 < found.bytes_per_s < 3.6e6
    assert now < 6.0


def test_few_bytes_tell_a_burst_and_no_rate_and_of_a_slow_link_the_rate():
    found, load, _ = run(Path(6.25e6, 1e-3, 128 << 10), most=48 << 10)
    assert found.bytes_per_s == 0
    assert found.burst.size_bytes == 48 * 1024 - PING_BYTES * len(load._pings)
    assert found.latency_s == pytest.approx(5e-4, abs=2e-4)
    slow, _, _ = run(Path(2e4, 0.05), most=48 << 10)
    assert slow.bytes_per_s == pytest.approx(2e4, rel=0.05)


def test_a_break_begins_the_count_anew():
    load, now = ProbeLoad(MOST), 0.0
    for ends in (False, True):
        while not load.over and not (not ends and now > 0.1):
            sizes = []
            while size := load.next_bytes(now):
                sizes.append(size)
            for size in sizes:
                began, now = now, now + 1e-3 + size / 1e6
                load.acknowledged(size, began, now)
        if not ends:
            load.broke()
            now += 5.0
    assert load.found().bytes_per_s == pytest.approx(1e6, rel=0.3)


@given(seed=st.integers(0, 2**32))
def test_any_times_give_positive_numbers_or_nothing(seed):
    rng, now, flight = random.Random(seed), 0.0, []
    load = ProbeLoad(rng.choice([0, 5000, 1 << 20]))
    for _ in range(200):
        while size := load.next_bytes(now):
            flight.append((size, now if rng.random() < 0.9 else None))
        if not flight or load.over:
            break
        now += rng.choice([0.0, 1e-9, 1e-3, 0.5])
        load.acknowledged(*flight.pop(0), now)
        if rng.random() < 0.02:
            load.broke()
    found = load.found()
    assert load.sent_bytes <= load.most_bytes
    if found is not None:
        assert found.latency_s >= 0
        assert 0 <= found.bytes_per_s < 1e12
