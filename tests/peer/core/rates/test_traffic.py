"""What the frames of a run tell of links: the oracle is a link that is played, first in first out.

A played link has a bucket, a rate and a latency; several can share the bucket and the rate, as
neighbours behind one uplink do.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.dag.schedule.flow import Role
from shoal.net.links.frame import FrameKey
from shoal.peer.core.rates.traffic import FAR, LEAST_S, WINDOW_S, Traffic
from shoal.proto.broker_pb2 import LinkReport

ME = "p-me"
LINE = 1e9
"""Bytes/s of what passes while a bucket has something."""


def frame(step: int, to: str = "b", role: Role = Role.ACTIVATION, port: str = "h") -> FrameKey:
    return FrameKey("r-1", 1, step, role, 0, 1, port, ME, to)


@dataclass
class Uplink:
    """A token bucket: `burst` bytes, filled at `rate`; then a latency. First in, first out."""

    rate: float
    latency_s: float = 0.005
    burst: float = 0.0
    free_s: float = 0.0
    tokens: float = field(init=False)
    at: float = 0.0

    def __post_init__(self) -> None:
        self.tokens = self.burst

    def carry(self, size: int, now: float) -> float:
        """When it is acknowledged."""
        begin = max(now, self.free_s)
        tokens = min(self.burst, self.tokens + (begin - self.at) * self.rate)
        fast = min(size, tokens)
        self.free_s = begin + fast / LINE + (size - fast) / self.rate
        self.tokens, self.at = tokens - fast, self.free_s
        return self.free_s + 2 * self.latency_s


def played(
    uplink: Uplink, sends: Sequence[tuple[float, FrameKey, int]], traffic: Traffic | None = None
) -> list[tuple[float, LinkReport]]:
    """What is told when frames are queued and handed out at these times, ascending."""
    traffic = traffic or Traffic()
    for to in {key.destination for _, key, _ in sends}:
        traffic.know(to, 2 * uplink.latency_s)
    told: list[tuple[float, LinkReport]] = []
    waiting: list[tuple[float, int, FrameKey, float]] = []

    def until(now: float) -> None:
        while waiting and waiting[0][0] <= now:
            at, _, key, began = heapq.heappop(waiting)
            told.extend((at, i.message.link) for i in traffic.acknowledged(key, began, at))

    for number, (now, key, size) in enumerate(sends):
        until(now)
        traffic.queued(key, size, now)
        heapq.heappush(waiting, (uplink.carry(size, now), number, key, now))
    until(float("inf"))
    return told


def rates(told: Sequence[tuple[float, LinkReport]]) -> list[float]:
    return [r.bytes_per_s for _, r in told if r.bytes_per_s]


@given(
    rate=st.floats(1e5, 5e7),
    latency_s=st.floats(1e-4, 0.1),
    share=st.floats(0.0, 0.1),
    frames=st.integers(1, 8),
    pause=st.floats(0.0, 3.0),
)
def test_flows_tell_the_rate_that_a_link_sustains(
    rate: float, latency_s: float, share: float, frames: int, pause: float
) -> None:
    """A bucket of up to a tenth of the bytes of a step changes the answer by no more than that."""
    size = int(rate * max(0.1, 4 * latency_s))
    uplink = Uplink(rate, latency_s, burst=share * size * frames)
    sends, now = [], 0.0
    for step in range(12):
        for part in range(frames):
            sends.append((now, frame(step, port=f"h{part}"), size))
        now = max(now, uplink.free_s) + size * frames / rate + 2 * latency_s + pause
    found = rates(played(uplink, sends))
    assert found
    assert found == pytest.approx([rate] * len(found), rel=0.15)


def test_the_first_rate_is_told_within_a_step_and_the_next_ones_once_in_a_window() -> None:
    sends = [(float(step), frame(step), 500_000) for step in range(60)]
    told = played(Uplink(1e6), sends)
    assert told[0][0] < 2.0
    gaps = [b - a for (a, _), (b, _) in itertools.pairwise(told)]
    assert all(gap >= WINDOW_S for gap in gaps)
    assert len(told) >= 60 / (WINDOW_S + 2)


def test_a_rate_by_far_another_one_is_told_before_its_window_is_over() -> None:
    uplink, traffic = Uplink(4e6), Traffic()
    played(uplink, [(float(step), frame(step), 500_000) for step in range(20)], traffic)
    slow = Uplink(4e6 / (2 * FAR))
    told = played(slow, [(20.0 + s, frame(100 + s), 500_000) for s in range(5)], traffic)
    first = next(at for at, r in told if r.bytes_per_s < 4e6 / FAR)
    assert first - 20.0 < 3.0
    assert rates(told)[-1] == pytest.approx(slow.rate, rel=0.01)
    assert all(b - a >= LEAST_S for (a, _), (b, _) in itertools.pairwise(told))


@pytest.mark.parametrize("at_once", [False, True], ids=["each its own", "queued together"])
def test_neighbours_behind_one_uplink_show_the_uplink_not_their_shares(at_once: bool) -> None:
    """An all-reduce: to each of three others a shard, in pieces that take turns."""
    sends, now = [], 0.0
    for step in range(30):
        for piece in range(10):
            for to in "bcd":
                key = frame(step, to, Role.SYNC, f"grad0/{piece}")
                sends.append((now, key, 100_000))
        now += 6.0 if at_once else 3.5
    told = played(Uplink(1e6), sends)
    assert {r.peer for _, r in told} == {"b", "c", "d"}
    assert rates(told) == pytest.approx([1e6] * len(rates(told)), rel=0.15)


def shared_fairly(
    rate: float, sends: Sequence[tuple[float, FrameKey, int]]
) -> list[tuple[float, float]]:
    """When each frame began to leave and had left, over an uplink that neighbours share evenly;
    those to one of them go one after the other."""
    left = [float(size) for _, _, size in sends]
    began, done = [-1.0] * len(sends), [0.0] * len(sends)
    now = 0.0
    while any(left):
        first: dict[str, int] = {}
        for i, (at, key, _) in enumerate(sends):
            if at <= now and left[i]:
                first.setdefault(key.destination, i)
        each = rate / max(1, len(first))
        until = min(
            [now + left[i] / each for i in first.values()] + [s[0] for s in sends if s[0] > now]
        )
        for i in first.values():
            began[i] = now if began[i] < 0 else began[i]
            left[i] -= each * (until - now)
            if left[i] < 1.0:
                left[i], done[i] = 0.0, until
        now = until
    return list(zip(began, done, strict=True))


@given(
    st.lists(st.tuples(st.sampled_from("bcd"), st.floats(0.2, 2.0)), min_size=4, max_size=12),
    st.booleans(),
)
def test_a_flow_that_ends_before_those_beside_it_does_not_pass_for_alone(
    sizes: list[tuple[str, float]], apart: bool
) -> None:
    """As in an exchange: one large frame to each at once, the smallest is there first."""
    rate, trip_s, traffic = 1e6, 0.01, Traffic()
    sends = [
        (step * 0.3 * apart, frame(step, to), int(size * 1e6))
        for step, (to, size) in enumerate(sizes)
    ]
    times = shared_fairly(rate, sends)
    events = [(at, 0, i) for i, (at, _, _) in enumerate(sends)]
    events += [(done + trip_s, 1, i) for i, (_, done) in enumerate(times)]
    for to in "bcd":
        traffic.know(to, trip_s)
    told = []
    for now, is_ack, i in sorted(events):
        _, key, size = sends[i]
        if is_ack:
            told += traffic.acknowledged(key, times[i][0], now)
        else:
            traffic.queued(key, size, now)
    for one in told:
        # With a quarter of its bytes beside it a flow still counts as alone, and that quarter is
        # known from a mean: what goes at 1/2 beside one flow and at 1/3 beside two has gone at up
        # to 3/2 of its mean. 1 / (1 + 3/8) is 27 % less.
        assert one.message.link.bytes_per_s in (0, pytest.approx(rate, rel=0.28))
    if len({to for to, _ in sizes}) == 1:
        assert not any(one.message.link.shared for one in told)


def test_who_sends_to_several_at_once_says_that_they_share_its_line() -> None:
    sends = [
        (8.0 * step, frame(step, to, port=to), 1_000_000)
        for step in range(10)
        for to in "bcd"[: 3 if step % 2 else 1]
    ]
    reports = [r for _, r in played(Uplink(1e6), sends) if r.bytes_per_s]
    assert {(r.peer, r.shared) for r in reports} == {("b", False), ("c", True), ("d", True)}


def test_a_flow_alone_counts_more_than_shared_ones() -> None:
    """Two paths that share nothing: only what each shows by itself is its own."""
    traffic, near, far = Traffic(), Uplink(8e6), Uplink(1e6)
    for to in "bc":
        traffic.know(to, 0.01)
    told, now = [], 0.0
    for step in range(40):
        events = []
        for uplink, to, begins in ((near, "b", 0.0), (far, "c", 0.0), (far, "c", 1.2)):
            key = frame(step, to, port=f"h{begins}")
            traffic.queued(key, 800_000, now + begins)
            events.append((uplink.carry(800_000, now + begins), key, now + begins))
        for at, key, began in sorted(events, key=lambda x: x[0]):
            told += [i.message.link for i in traffic.acknowledged(key, began, at)]
        now += 4.0
    found = {to: [r.bytes_per_s for r in told if r.peer == to] for to in "bc"}
    assert found["c"] == pytest.approx([1e6] * len(found["c"]), rel=0.3)


def test_a_few_bytes_that_a_busy_process_acknowledged_late_say_nothing_of_the_rate() -> None:
    traffic, now, told = Traffic(), 0.0, []
    traffic.know("b", 0.001)
    for step in range(200):
        key = frame(step)
        traffic.queued(key, 8, now)
        told += traffic.acknowledged(key, now, now + 0.2)
        now += 0.5
    assert not any(i.message.link.bytes_per_s for i in told)


def test_what_waits_for_a_credit_is_no_time_of_the_link() -> None:
    traffic, uplink, now, told = Traffic(), Uplink(1e7), 0.0, []
    traffic.know("b", 0.01)
    for step in range(40):
        key = frame(step)
        traffic.queued(key, 1_000_000, now)
        now += 0.5  # the other side computes
        at = uplink.carry(1_000_000, now)
        told += traffic.acknowledged(key, now, at)
        now = at
    found = [i.message.link.bytes_per_s for i in told]
    assert found
    assert found == pytest.approx([1e7] * len(found), rel=0.01)


def test_roles_that_take_turns_on_a_link_are_one_flow() -> None:
    """Both begin at once and end one after the other: each alone would show nonsense."""
    traffic, now, told = Traffic(), 0.0, []
    traffic.know("b", 0.01)
    for step in range(40):
        keys = [frame(step), frame(step, role=Role.SYNC)]
        for key in keys:
            traffic.queued(key, 500_000, now)
        for key, seconds in zip(keys, (0.99, 1.0), strict=True):
            told += traffic.acknowledged(key, now, now + seconds + 0.01)
        now += 1.5
    found = [i.message.link.bytes_per_s for i in told]
    assert found
    assert found == pytest.approx([1e6] * len(found), rel=0.02)


def test_small_frames_tell_the_latency() -> None:
    traffic, now, told = Traffic(), 0.0, []
    for step in range(400):
        key = frame(step)
        traffic.queued(key, 64, now)
        told += traffic.acknowledged(key, now, now + 0.04 * (1 + step % 2))
        now += 0.1
    assert len(told) == pytest.approx(now / WINDOW_S, abs=1.5)
    reports = [i.message.link for i in told]
    assert [r.latency_s for r in reports] == pytest.approx([0.02] * len(told))
    assert [r.bytes_per_s for r in reports] == [0.0] * len(told)


def test_without_a_round_trip_or_over_a_break_no_rate_is_told() -> None:
    traffic, now = Traffic(), 0.0
    for step in range(40):
        key = frame(step)
        traffic.queued(key, 1 << 20, now)
        assert not traffic.acknowledged(key, now, now + 1.0)
        now += 1.0
    traffic.know("b", 0.01)
    for step in range(40, 80):
        key = frame(step)
        traffic.queued(key, 1 << 20, now)
        traffic.broke("b")
        assert not traffic.acknowledged(key, None, now + 1.0)
        now += 1.0
    traffic.clear()
    assert not traffic.acknowledged(frame(79), now, now)


def test_short_frames_between_far_peers_say_nothing_of_the_rate() -> None:
    sends = [(float(step), frame(step), 65536) for step in range(40)]
    assert not played(Uplink(1e9, 0.25), sends)


@pytest.mark.parametrize(("trips", "says"), [(10, False), (100, True)])
def test_a_snapshot_tells_the_rate_when_it_takes_many_round_trips(trips: int, says: bool) -> None:
    """It begins slowly, so as not to be in the way; a short one never gets all of the link."""
    size = int(trips * 0.04 * 1e7)
    sends = [(10.0 * step, frame(step, role=Role.SNAPSHOT), size) for step in range(40)]
    found = rates(played(Uplink(1e7, 0.02), sends))
    assert bool(found) == says
    assert found == pytest.approx([1e7] * len(found), rel=0.01)
