"""Hours, pause and the month's traffic: what the owner of a host has set outlives every process."""

from __future__ import annotations

import os
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.net.cap import Meter
from shoal.peer.host.host import SILENT_S, Host, HostError
from shoal.peer.hours import Hours
from shoal.peer.shell.owner import Owner

times = st.integers(0, 24 * 60 - 1)


@given(begin=times, end=times, minute=times)
def test_hours_are_the_minutes_that_one_walks_through(begin: int, end: int, minute: int) -> None:
    if begin == end:
        return
    hours = Hours.parse(f"{begin // 60}:{begin % 60:02} - {end // 60:02}:{end % 60:02}")
    walked, at = set(), begin
    while at != end:
        walked.add(at)
        at = (at + 1) % (24 * 60)
    assert (datetime(2026, 1, 1, minute // 60, minute % 60) in hours) == (minute in walked)


def test_hours_are_read_as_people_write_them() -> None:
    assert str(Hours.parse("22-08")) == "22:00-08:00"
    assert datetime(2026, 1, 1, 23, 59) in Hours.parse("00-24")
    for text in ("", "22", "22-", "-8", "22-08-09", "ten-two", "24:01-3", "3-4:60"):
        with pytest.raises(ValueError, match="expected"):
            Hours.parse(text)


def test_a_pause_is_the_owners_alone_and_outlives_processes(tmp_path: Path) -> None:
    host = Host(tmp_path / "peers")
    assert not host.paused
    assert host.paused_since is None
    host.pause()
    host.pause()
    assert Host(tmp_path / "peers").paused
    assert abs(Host(tmp_path / "peers").paused_since - datetime.now()) < timedelta(minutes=1)
    assert (tmp_path / "peers").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "peers" / "paused").stat().st_mode & 0o777 == 0o600
    host.unpause()
    host.unpause()
    assert not Host(tmp_path / "peers").paused


class Clock:
    def __init__(self) -> None:
        self.now = datetime(2026, 11, 23, 12)

    def __call__(self) -> datetime:
        return self.now


def owner(
    folder: Path, peer: str, clock: Clock, monthly: int | None = 10**9
) -> tuple[Owner, Meter]:
    meter, host = Meter(), Host(folder)
    names = {"peer": peer, "name": peer, "broker": "b:1"}
    return Owner(host, meter, monthly_bytes=monthly, clock=clock, **names), meter


def test_a_months_traffic_is_counted_over_peers_and_starts(tmp_path: Path) -> None:
    clock = Clock()
    one, meter = owner(tmp_path, "one", clock)
    meter.add(100)
    assert one.look("").moved_bytes == 100
    meter.add(50)
    assert one.look("").moved_bytes == 150
    one.host.keep(one.standing)
    other, meter_of_other = owner(tmp_path, "other", clock)
    meter_of_other.add(7)
    assert other.look("").moved_bytes == 157
    other.host.keep(other.standing)
    again, meter = owner(tmp_path, "one", clock)  # the process was started anew
    meter.add(1000)
    assert again.look("").moved_bytes == 1157
    clock.now = datetime(2026, 12, 1)
    assert again.look("").moved_bytes == 0, "another month"
    meter.add(3)
    assert again.look("").moved_bytes == 3


def test_without_a_limit_nobody_elses_traffic_is_looked_for(tmp_path: Path) -> None:
    clock = Clock()
    one, meter = owner(tmp_path, "one", clock, monthly=None)
    (tmp_path / "standing").mkdir()
    (tmp_path / "standing" / "x.json").write_text("nonsense")
    meter.add(5)
    assert one.look("").moved_bytes == 5


@pytest.mark.parametrize("text", ["", "[]", '{"peer": "one"}', "{", '{"a": 1}'])
def test_a_damaged_count_is_refused_with_its_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "standing").mkdir()
    (tmp_path / "standing" / "one.json").write_text(text)
    with pytest.raises(HostError, match=r"one\.json is not what a peer wrote .* remove it"):
        owner(tmp_path, "one", Clock())


def test_a_peer_that_was_killed_counts_as_ended_after_a_while(tmp_path: Path) -> None:
    one, _ = owner(tmp_path, "one", Clock())
    one.host.keep(one.standing)
    assert [s.ended for s in one.host.standings()] == [False]
    path = tmp_path / "standing" / "one.json"
    old = path.stat().st_mtime - SILENT_S - 1
    os.utime(path, (old, old))
    assert [s.ended for s in one.host.standings()] == [True]


def test_no_name_of_a_peer_leads_out_of_the_folder(tmp_path: Path) -> None:
    one, _ = owner(tmp_path / "host", "../../evil", Clock())
    one.host.keep(one.standing)
    assert [p.parent.name for p in tmp_path.rglob("*.json")] == ["standing"]
