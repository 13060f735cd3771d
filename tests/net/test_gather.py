"""A blob from several holders: whole and in order, whoever is slow, fails or lies."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.net import gather as module
from shoal.net.blobs_client import BlobTransferError
from shoal.net.gather import gather


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
