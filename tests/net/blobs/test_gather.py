"""A blob from several holders: whole and in order, whoever is slow, fails or lies."""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.net.blobs import gather as module
from shoal.net.blobs.client import BlobClient, BlobTransferError
from shoal.net.blobs.gather import gather
from shoal.proto.broker_pb2 import BlobPiece, BlobRange


class Holder:
    """Answers in an order that a seed decides: each answer takes some turns of the event loop.
    `fails_at`: the fetch that fails, and all after it; `stuck`: the first one that never ends."""

    def __init__(
        self, data: bytes, turns: random.Random, fails_at: int = 10**9, stuck: int = 10**9
    ) -> None:
        self.data, self.turns, self.fails_at, self.stuck = data, turns, fails_at, stuck
        self.asked: list[tuple[int, int]] = []
        self.cancelled = 0

    async def fetch(self, hash: str, offset: int = 0, length: int = 0) -> bytes:
        self.asked.append((offset, length))
        number = len(self.asked)
        try:
            if number >= self.stuck:
                await asyncio.Event().wait()
            for _ in range(self.turns.randrange(8)):
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if number >= self.fails_at:
            raise BlobTransferError("NOT_FOUND", f"holder fails at {offset}")
        return self.data[offset : offset + length]


async def gathered(holders: list[Holder], data: bytes, offset: int = 0) -> bytes:
    pieces = gather(holders, "ab" * 32, len(data), offset)  # type: ignore[arg-type]
    return b"".join([piece async for piece in pieces])


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    size=st.integers(0, 40),
    count=st.integers(1, 4),
    offset=st.integers(0, 40),
)
def test_it_comes_whole_and_in_order_as_long_as_one_holder_works(
    seed: int, size: int, count: int, offset: int
) -> None:
    rng, data = random.Random(seed), bytes(range(size))
    offset = min(offset, size)
    holders = [
        Holder(
            data,
            random.Random(rng.random()),
            fails_at=rng.choice((1, 2, 5, 10**9)),
            stuck=rng.choice((1, 3, 10**9, 10**9)),
        )
        for _ in range(count)
    ]
    holders[rng.randrange(count)].__init__(data, rng)  # type: ignore[misc]  # this one works
    before, module.RANGE_BYTES = module.RANGE_BYTES, 3
    try:
        assert asyncio.run(gathered(holders, data, offset)) == data[offset:]
    finally:
        module.RANGE_BYTES = before


@pytest.fixture(autouse=True)
def _small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RANGE_BYTES", 3)


async def test_each_holder_gives_a_part_and_nothing_is_fetched_twice_without_need() -> None:
    data = bytes(range(60))
    holders = [Holder(data, random.Random(i)) for i in range(3)]
    assert await gathered(holders, data) == data
    asked = Counter(at for h in holders for at, _ in h.asked)
    assert set(asked) == set(range(0, 60, 3))
    assert all(len(h.asked) > 3 for h in holders)


async def test_a_slow_holder_is_waited_for_by_nobody_and_let_go_at_the_end() -> None:
    data = bytes(range(60))
    slow, fast = Holder(data, random.Random(0), stuck=1), Holder(data, random.Random(1))
    assert await gathered([slow, fast], data) == data
    assert len(slow.asked) == slow.cancelled == 1


async def test_when_all_fail_the_first_holders_reason_counts() -> None:
    holders = [Holder(b"x" * 30, random.Random(i), fails_at=i + 1) for i in range(3)]
    with pytest.raises(BlobTransferError, match="holder fails at"):
        await gathered(holders, b"x" * 30)


async def test_who_stops_listening_leaves_nobody_working() -> None:
    data = bytes(range(60))
    holders = [Holder(data, random.Random(0), stuck=4) for _ in range(2)]
    pieces = gather(holders, "ab" * 32, 60)  # type: ignore[arg-type]
    assert await anext(pieces) == data[:3]
    await pieces.aclose()
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_ranges_ahead_of_the_reader_are_bounded() -> None:
    data = bytes(range(240))
    holder = Holder(data, random.Random(0))
    pieces = gather([holder], "ab" * 32, 240)  # type: ignore[arg-type]
    await anext(pieces)
    for _ in range(200):
        await asyncio.sleep(0)
    assert len(holder.asked) <= 1 + 1 + module._AHEAD
    await pieces.aclose()


class Answers:
    """In the place of a channel's stub: each read takes `pause_s` of the clock and gives `most`
    bytes."""

    def __init__(self, data: bytes, clock: list[float], pause_s: float, most: int) -> None:
        self.data, self.clock, self.pause_s, self.most, self.reads = data, clock, pause_s, most, 0

    def Fetch(self, wanted: BlobRange) -> Answers:  # noqa: N802 (the name of the call)
        made = Answers(self.data, self.clock, self.pause_s, self.most)
        made.at, made.stop = wanted.offset, wanted.offset + wanted.length
        made.whole = self
        return made

    async def read(self) -> BlobPiece | None:
        self.whole.reads += 1
        if self.at >= self.stop:
            return None
        for _ in range(20):  # others are faster
            await asyncio.sleep(0)
        self.clock[0] += self.pause_s
        data = self.data[self.at : min(self.at + self.most, self.stop)]
        self.at += len(data)
        return BlobPiece(offset=self.at - len(data), data=data)

    def cancel(self) -> None: ...


def answering(answers: Answers, floor: float) -> BlobClient:
    with mock.patch("shoal.net.blobs.client.BlobsStub", return_value=answers):
        clock = answers.clock
        channel: Any = None
        return BlobClient(channel, attempts=0, stall_s=5.0, floor=floor, clock=lambda: clock[0])


@settings(max_examples=60, deadline=None)
@given(pause_s=st.sampled_from([0.5, 1.0, 4.0]), most=st.integers(1, 40), size=st.integers(1, 300))
def test_who_gives_less_than_the_floor_is_given_up_and_no_one_else(
    pause_s: float, most: int, size: int
) -> None:
    data, clock = random.Random(0).randbytes(size), [0.0]
    client = answering(Answers(data, clock, pause_s, most), floor=8.0)
    # The window is judged at the first piece that ends it, unless that is the last one.
    window_s = math.ceil(5.0 / pause_s) * pause_s
    pieces = math.ceil(size / most)
    whole = min(pieces, round(window_s / pause_s)) == pieces or most / pause_s >= 8.0
    if whole:
        assert asyncio.run(client.fetch("ab" * 32, 0, size)) == data
    else:
        with pytest.raises(BlobTransferError, match="expected 8 a second"):
            asyncio.run(client.fetch("ab" * 32, 0, size))
        assert clock[0] == window_s


async def test_two_that_give_a_byte_now_and_then_hold_nothing_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "RANGE_BYTES", 1000)
    data, clock = random.Random(1).randbytes(8000), [0.0]
    slow = [Answers(data, clock, 1.0, 1) for _ in range(2)]
    fast = Answers(data, clock, 0.0, 1000)
    holders = [answering(a, floor=8.0) for a in (*slow, fast)]
    assert b"".join([p async for p in gather(holders, "ab" * 32, 8000)]) == data
    # Without a floor each byte of the first two ranges would be read from them.
    assert max(a.reads for a in slow) <= 10


async def test_when_all_give_a_byte_now_and_then_it_ends_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "RANGE_BYTES", 60)
    data, clock = bytes(60), [0.0]
    holders = [answering(Answers(data, clock, 1.0, 1), floor=8.0) for _ in range(2)]
    with pytest.raises(BlobTransferError, match="expected 8 a second"):
        async for _ in gather(holders, "ab" * 32, 60):
            pass
