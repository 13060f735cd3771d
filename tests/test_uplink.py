"""What an upload takes, said before it begins."""

from __future__ import annotations

import asyncio

import pytest

from shoal.client.uplink import Uplink, duration_text, starting_bytes, takes
from shoal.dag.graph import Buffer, Graph, Parameter, TensorSpec


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
    assert takes(size, 2.5e6).startswith(
        "15 GiB take about 1 h 47 min at the 20 Mbit/s of this uplink; "
    )
    unknown = takes(size, None)
    assert "3 h 35 min at 10 Mbit/s or 21 min at 100 Mbit/s" in unknown
    assert "goes on from there" in unknown
    assert takes(10 << 20, 2.5e6) == ""
    assert takes(starting_bytes(LARGE), 1e6).startswith("2 GiB take about 36 min at the 8 Mbit/s")


def test_the_rate_is_that_of_what_has_gone_since_the_first_byte() -> None:
    now = 100.0
    uplink = Uplink(lambda: now)
    assert uplink.bytes_per_s is None
    now = 160.0  # connecting
    asyncio.run(uplink.cap.take(100_000))
    now = 161.0
    assert uplink.bytes_per_s is None  # too little to tell
    asyncio.run(uplink.cap.take(900_000))
    now = 162.0
    assert uplink.bytes_per_s == pytest.approx(500_000)
