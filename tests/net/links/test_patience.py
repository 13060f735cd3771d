"""The window of what can wait, against a path that is a queue: a rate, a delay, and a buffer
without end, as a slow uplink behind a large socket buffer is."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.dag.schedule.flow import Role
from shoal.net.links.patience import LEAST_BYTES, SendWindow
from shoal.net.transports.carrier import Timed

WAIT_S = 0.025
MOST = 512 * 1024


@dataclass
class Path:
    """`rate` bytes/s, `latency_s` each way. `waits`: (when, how long what comes next would wait),
    each time that a piece left; `held`: how long the others' bursts waited."""

    rate: float
    latency_s: float
    now: float = 0.0
    carried: int = 0
    free: float = 0.0
    waits: list[tuple[float, float]] = field(default_factory=list)
    held: list[tuple[float, float]] = field(default_factory=list)
    acks: list[tuple[float, int, int]] = field(default_factory=list)
    number: int = 1
    end: int = 0
    next: float = 0.0
    """When the next of them comes."""
    bursts: list[float] = field(default_factory=list)
    """When they are acknowledged."""

    def put(self, size_bytes: int) -> None:
        self.free = max(self.now, self.free) + size_bytes / self.rate
        self.waits.append((self.now, self.free - self.now))

    def ahead(self) -> int:
        return 65536 * sum(at > self.now for at in self.bursts[-50:])

    def run(self, window: SendWindow, until: float, others: float = 0.0) -> None:
        """All the time there is something that can wait; `others` of the rate goes to what cannot,
        a burst of 64 KiB at a time."""
        while True:
            while not window.full:
                size = window.piece_bytes(0.0)
                self.end += size
                window.left(self.number, self.end, size, self.now, self.ahead())
                self.put(size)
                heapq.heappush(self.acks, (self.free + 2 * self.latency_s, self.end, size))
            then = min(self.acks[0][0], self.next) if others else self.acks[0][0]
            if then > until:
                self.now = until
                return
            self.now = then
            if others and then == self.next:
                self.held.append((self.now, max(0.0, self.free - self.now)))
                self.put(65536)
                self.bursts.append(self.free + 2 * self.latency_s)
                self.next += 65536 / (others * self.rate)
                continue
            _, end, size = heapq.heappop(self.acks)
            self.carried += size
            window.arrived(self.number, end, self.now)

    def worst_wait(self, since: float) -> float:
        return max(wait for at, wait in self.waits if at >= since)


rates = st.floats(0.25e6, 125e6)
latencies = st.floats(0.0005, 0.15)


def warm_up_s(path: Path) -> float:
    """The window of an empty path grows by wait / round trip in each."""
    return 3.0 + 80 * path.latency_s


@settings(max_examples=60)
@given(rates, latencies)
def test_a_path_is_filled_and_its_buffer_is_not(rate, latency_s):
    path, window = Path(rate, latency_s), SendWindow(WAIT_S, MOST)
    begin = warm_up_s(path)
    path.run(window, begin)
    before = path.carried
    path.run(window, begin + 15.0)
    assert path.carried - before > 0.9 * rate * 15.0
    # The last piece may go over the window, and one is always under way. Half a round trip more
    # stands there for a moment when the window has grown once too often.
    piece_s = max(WAIT_S / 2, LEAST_BYTES / rate)
    assert path.worst_wait(begin) < WAIT_S + 2 * piece_s + path.latency_s


@settings(max_examples=40)
@given(rates, latencies, st.floats(0.05, 20.0))
def test_a_path_that_changes_its_rate_is_learned_anew(rate, latency_s, factor):
    path, window = Path(rate, latency_s), SendWindow(WAIT_S, MOST)
    path.run(window, warm_up_s(path))
    path.rate = min(max(rate * factor, 0.25e6), 125e6)
    begin = path.now + warm_up_s(path) + 3.0 * max(1.0, 1.0 / factor)
    path.run(window, begin)
    before = path.carried
    path.run(window, begin + 15.0)
    assert path.carried - before > 0.8 * path.rate * 15.0
    piece_s = max(WAIT_S / 2, LEAST_BYTES / path.rate)
    assert path.worst_wait(begin) < WAIT_S + 2 * piece_s + path.latency_s


@settings(max_examples=20)
@given(rates, st.floats(0.005, 0.1), st.floats(0.2, 5.0))
def test_a_path_that_becomes_longer_or_shorter_is_learned_anew(rate, latency_s, factor):
    path, window = Path(rate, latency_s), SendWindow(WAIT_S, MOST)
    path.run(window, warm_up_s(path))
    path.latency_s = latency_s * factor
    begin = path.now + 60.0 + warm_up_s(path)  # by then it has looked
    path.run(window, begin)
    before = path.carried
    path.run(window, begin + 15.0)
    assert path.carried - before > 0.8 * rate * 15.0


@settings(max_examples=60, derandomize=True)  # bounds of what was found, not of what is known
@given(rates, latencies, st.floats(0.1, 0.8))
def test_what_cannot_wait_has_its_share_and_the_rest_is_used(rate, latency_s, others):
    path, window = Path(rate, latency_s), SendWindow(WAIT_S, MOST)
    begin = warm_up_s(path)
    path.run(window, begin, others)
    before = path.carried
    path.run(window, begin + 15.0, others)
    assert path.carried - before > 0.25 * (1 - others) * rate * 15.0
    piece_s = max(WAIT_S / 2, LEAST_BYTES / rate)
    # Some windows at worst, where the others hardly leave a moment free.
    held = max(wait for at, wait in path.held if at >= begin)
    assert held < 2 * (WAIT_S + 3 * piece_s + 2.5 * latency_s)


def test_a_little_now_and_then_says_nothing_of_the_path():
    path, window = Path(12.5e6, 0.04), SendWindow(WAIT_S, MOST)
    path.run(window, 5.0)
    while path.acks:
        path.now, end, _ = heapq.heappop(path.acks)
        window.arrived(1, end, path.now)
    room = window.piece_bytes(0.0)
    for number in range(2, 12):
        window.left(number, 1000, 1000, path.now, 0)
        path.now += 0.081
        window.arrived(number, 1000, path.now)
    assert window.piece_bytes(0.0) == room


def test_one_piece_is_on_its_way_however_slow_the_path_is():
    window = SendWindow(WAIT_S, MOST)
    now = 0.0
    for number in range(1, 200):
        assert not window.full
        window.left(number, LEAST_BYTES, LEAST_BYTES, now, 0)
        now += 30.0
        window.arrived(number, LEAST_BYTES, now)


def test_what_a_broken_connection_lost_is_not_waited_for():
    window = SendWindow(WAIT_S, MOST)
    end = 0
    while not window.full:
        end += window.piece_bytes(0.0)
        window.left(1, end, window.piece_bytes(0.0), 0.0, 0)
    window.broke()
    assert not window.full
    window.arrived(1, end, 1.0)
    assert not window.full


@pytest.mark.parametrize("late", [0.3, 1.0])
def test_one_late_answer_does_not_make_the_window_small(late):
    """A core was not free for so long: what had arrived meanwhile is told at once."""
    path, window = Path(12.5e6, 0.04), SendWindow(WAIT_S, MOST)
    path.run(window, 10.0)
    path.acks = sorted((max(at, path.now + late), end, size) for at, end, size in path.acks)
    path.run(window, 12.0)
    before = path.carried
    path.run(window, 14.0)
    assert path.carried - before > 0.9 * path.rate * 2.0


@pytest.mark.parametrize("rate", [0.5e6, 2.5e6, 12.5e6])
@pytest.mark.parametrize("latency_s", [0.002, 0.04, 0.1])
async def test_a_frame_overtakes_a_snapshot_in_spite_of_the_kernels_buffers(
    memory_world, rate, latency_s
):
    """Links as they are, over a path whose sender's end takes 4 MiB before it holds anybody up."""
    world = memory_world
    free: dict[str, float] = {}

    def carry(source: str, destination: str, size_bytes: int) -> tuple[float, float]:
        free[source] = max(free.get(source, 0.0), world.now) + size_bytes / rate
        waits_s = free[source] - world.now
        return max(0.0, waits_s - (4 << 20) / rate), waits_s + latency_s

    world.network.medium.carrier = Timed(world.after, carry)
    a, b = await world.pair()
    began, size = world.now, int(10 * rate)
    snapshot = a.send("b", size, Role.SNAPSHOT)
    # The first windows are small, whatever comes between them.
    await world.until(lambda: world.now > began + 1 + 20 * latency_s)
    held = []
    for microbatch in range(10):
        sent = world.now
        key = a.send("b", int(0.1 * rate), microbatch=microbatch)
        await world.until(lambda key=key: key in b.arrived_keys)
        held.append(world.now - sent - 0.1 - latency_s)
        rest = world.now + 0.3
        await world.until(lambda rest=rest: world.now > rest)
    assert max(held) < 0.1 + latency_s
    await world.until(lambda: snapshot in a.acknowledged)
    # It had what the frames left, but for beginning small.
    assert size > 0.8 * (world.now - began - 1.0 - 20 * latency_s) * rate


@settings(max_examples=20)
@given(rates, latencies, st.sampled_from([100_000, 1_000_000, 1 << 60]))
def test_pieces_grow_with_the_rest_of_the_link_and_not_beyond(rate, latency_s, frame):
    """Where each piece leaves behind the one before, as in a modelled network, and the last piece
    of a frame is a small one."""
    window, share, pieces, carried = SendWindow(WAIT_S, 1 << 40, 0.05), 0.05, 0, 0
    acks: list[tuple[float, int, int]] = []
    now = free = 0.0
    number, end, half = 1, 0, 30.0 + warm_up_s(Path(rate, latency_s))
    while now < 2 * half:
        if now >= free and not window.full:
            wanted = window.piece_bytes(now)
            # What a full window learns counts pieces whole that arrived in part before.
            usual = max(4 * rate * WAIT_S / 2, LEAST_BYTES)
            assert wanted <= max(usual, 1.001 * rate * share * now)
            if end == frame:
                number, end = number + 1, 0
            size = min(wanted, frame - end)
            end, free = end + size, now + size / rate
            window.left(number, end, size, now, 0)
            acks.append((free + 2 * latency_s, number, end))
            pieces += 1
            carried += size if now > half else 0
        now = min([acks[0][0], *([free] if free > now else [])])
        if acks[0][0] <= now:
            window.arrived(*acks.pop(0)[1:], now)
    assert carried > 0.8 * rate * half
    if frame == 1 << 60:
        # A twentieth more each time makes e in twenty; half of the wait would be 80 a second.
        assert pieces < 700 + 20 * 80 * latency_s * 10
