"""What an upload takes, said before it begins."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shoal.client.files.uplink import Uplink, UplinkRate, duration_text, starting_bytes, takes
from shoal.dag.ir.graph import Buffer, Graph, Parameter, TensorSpec
from shoal.net.blobs.client import BlobClient
from shoal.tests.broker.service.loopback import running


def graph_of(*parameters: Parameter) -> Graph:
    buffer = Buffer("statistics", TensorSpec((4,), "float32"))
    return Graph((), parameters, (buffer,), (), "loss")


LARGE = graph_of(
    Parameter("base", TensorSpec((4096, 262_144), "bfloat16"), trainable=False),
    Parameter("own", TensorSpec((1024,), "float32")),
)


def test_weights_are_counted_in_their_own_dtype_without_what_peers_make() -> None:
    assert starting_bytes(LARGE) == 2 * 2**30 + 4096 + 16
    assert starting_bytes(LARGE, lambda name: name != "own") == 4096


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (41.7, "42 s"),
        (99.6, "2 min"),
        (3570, "1 h"),
        (11_100, "3 h 5 min"),
        (86_400 * 2 + 3600 * 4, "2 days 4 h"),
        (86_400 * 30, "30 days"),
    ],
)
def test_durations_are_said_in_two_units(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


def test_a_long_upload_is_said_with_its_time_and_what_a_break_costs() -> None:
    size = 15 * 2**30
    assert takes(size, UplinkRate(2.5e6, known=True)).startswith(
        "15 GiB take about 1 h 47 min at the 20 Mbit/s of this uplink; "
    )
    unknown = takes(size, None)
    assert "about 3 h 35 min at 10 Mbit/s or 21 min at 100 Mbit/s or 2 min at 1 Gbit/s" in unknown
    assert "goes on from there" in unknown
    assert takes(10 << 20, UplinkRate(2.5e6, known=True)) == ""
    slow = takes(starting_bytes(LARGE), UplinkRate(1e6, known=True))
    assert slow.startswith("2 GiB take about 36 min at the 8 Mbit/s")


def test_of_a_line_that_was_too_fast_to_be_seen_no_slower_one_is_claimed() -> None:
    size = 15 * 2**30
    at_least_20 = takes(size, UplinkRate(2.5e6, known=False))
    assert at_least_20.startswith("15 GiB take about 21 min at 100 Mbit/s or 2 min at 1 Gbit/s; ")
    assert takes(size, UplinkRate(2e8, known=False)).startswith(
        "15 GiB take about 2 min at 1 Gbit/s; "
    )
    assert takes(size, UplinkRate(4e8, known=False)) == ""  # it is seen already: within a minute


def test_the_rate_is_known_once_enough_bytes_took_enough_time() -> None:
    uplink = Uplink()
    assert uplink.rate is None
    uplink.sent(1000, 30.0)  # the way there and back, and no more
    assert uplink.rate is None
    uplink.sent(1_000_000, 0.5)
    assert uplink.rate == UplinkRate(2e6, known=False)
    uplink.sent(3_000_000, 1.5)
    assert uplink.rate == UplinkRate(2e6, known=True)


async def test_what_is_not_on_the_wire_does_not_count() -> None:
    """An uplink of 2 MB/s, by a clock that stands still but for what is said here: ten seconds
    before each upload, and each piece's time on the wire."""
    now = 100.0

    class Slow:
        """Read twice: for its hash, and on its way."""

        def __init__(self, content: bytes) -> None:
            self.content, self.times = content, 0

        def pieces(self, offset: int, most: int) -> Iterator[memoryview]:
            nonlocal now
            self.times += 1
            if self.times == 1:
                now += 10.0
            for at in range(offset, len(self.content), most):
                piece = memoryview(self.content)[at : at + most]
                if self.times > 1:
                    now += len(piece) / 2e6
                yield piece

    uplink = Uplink()
    async with running() as (_, channel):
        client = BlobClient(channel, sent=uplink.sent, clock=lambda: now)
        for byte in (b"a", b"b"):
            source = Slow(byte * 3_000_000)
            await client.store(source)
            assert source.times == 2
        again = Uplink()
        await BlobClient(channel, sent=again.sent).store(b"a" * 3_000_000)
    assert uplink.rate is not None
    assert uplink.rate.known
    assert uplink.rate.bytes_per_s == pytest.approx(2e6)
    assert again.rate is None, "it was there already"
