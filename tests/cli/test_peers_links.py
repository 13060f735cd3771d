"""`shoal peers --links`: what links sustain, and what they let through before."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from shoal import client as clients
from shoal.cli.base import app
from shoal.proto import broker_pb2


@pytest.fixture
def described(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker that knows one link, both ways; only one has a burst."""
    there = broker_pb2.LinkState(
        source="ann-1\x1b[2J",
        destination="bob-2",
        latency_s=0.012,
        bytes_per_s=6.25e6,
        age_s=3.14,
        burst_bytes_per_s=2e8,
        burst_bytes=128 << 10,
    )
    back = broker_pb2.LinkState(source="bob-2", destination="ann-1", latency_s=0.012, age_s=3.0)
    found = broker_pb2.Description(links=[there, back])

    @contextmanager
    def connect(_: str | None) -> Iterator[SimpleNamespace]:
        yield SimpleNamespace(address="here:1", describe=lambda: found)

    monkeypatch.setattr(clients, "connect", connect)


@pytest.mark.usefixtures("described")
def test_links_are_shown_with_what_they_sustain_and_their_burst() -> None:
    text = CliRunner().invoke(app, ["peers", "--links"]).output
    assert "2 measured links" in text
    (line,) = (line for line in text.splitlines() if line.startswith("ann-1"))
    assert "12 ms    5.96 MiB/s  128 KiB at 190.7 MiB/s  3.1 s" in line
    assert "\x1b" not in text
    assert "measured link" not in CliRunner().invoke(app, ["peers"]).output


@pytest.mark.usefixtures("described")
def test_links_are_numbers_in_json() -> None:
    found = json.loads(CliRunner().invoke(app, ["peers", "--links", "--json"]).output)["links"]
    assert [link["bytes_per_s"] for link in found] == [6.25e6, 0.0]
    assert (found[0]["burst_bytes_per_s"], found[0]["burst_bytes"]) == (2e8, 128 << 10)
    assert "links" not in json.loads(CliRunner().invoke(app, ["peers", "--json"]).output)
