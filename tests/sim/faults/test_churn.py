"""Random churn and recorded traces, as streams of faults."""

from __future__ import annotations

from itertools import islice, takewhile
from pathlib import Path

import pytest

from shoal.job.settings import SettingsError
from shoal.job.units import Duration
from shoal.sim.faults.churn import absent_at_first, churn_of, random_churn, recorded_churn
from shoal.sim.scenario.mishaps import Churn

NAMES = ["home-1", "home-2", "cloud"]


def until(stream, end_s):
    return list(takewhile(lambda fault: fault.at < end_s, stream))


def test_churn_is_in_the_order_of_its_times_and_alternates_for_each_peer():
    faults = list(islice(random_churn(NAMES, 10.0, 60.0, seed=1), 500))
    assert [f.at for f in faults] == sorted(f.at for f in faults)
    for name in NAMES:
        own = [f for f in faults if f.who == (name,)]
        assert [f.do for f in own] == [("kill", "join")[i % 2] for i in range(len(own))]
        away = [b.at - a.at for a, b in zip(own[::2], own[1::2], strict=False)]
        assert away == pytest.approx([60.0] * len(away))


def test_peers_fail_as_often_as_the_rate_says():
    # Exponential with mean 360 s, then 40 s away: in 100 h each of 3 peers fails 900 times, with a
    # deviation of at most 30 (renewals vary less than a Poisson stream).
    kills = [f for f in until(random_churn(NAMES, 10.0, 40.0, seed=3), 3.6e5) if f.do == "kill"]
    assert abs(len(kills) - 3 * 900) < 5 * 30 * 3**0.5


def test_a_rate_of_nothing_gives_nothing():
    assert list(random_churn(NAMES, 0.0, 60.0, seed=1)) == []


def test_another_peer_changes_nothing_for_the_rest():
    few = until(random_churn(NAMES[:2], 5.0, 60.0, seed=9), 36000)
    more = until(random_churn(NAMES, 5.0, 60.0, seed=9), 36000)
    assert [f for f in more if f.who != ("cloud",)] == few
    assert few != until(random_churn(NAMES[:2], 5.0, 60.0, seed=10), 36000)


def trace(folder: Path, *lines: str) -> Path:
    path = folder / "trace.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_trace_is_read_row_by_row(tmp_path):
    path = trace(tmp_path, "time,peer,state", "0,cloud,up", "310.5,home-1,down", "400, home-1, up")
    faults = recorded_churn(path, NAMES)
    assert [(f.do, f.who[0], float(f.at)) for f in faults] == [
        ("join", "cloud", 0.0),
        ("kill", "home-1", 310.5),
        ("join", "home-1", 400.0),
    ]
    assert absent_at_first(faults) == ("cloud",)


@pytest.mark.parametrize(
    ("rows", "line", "words"),
    [
        (["5,cloud,down", "4,home-1,down"], 2, "backwards: 4 s after 5 s"),
        (["5,clout,down"], 1, 'did you mean "cloud"'),
        (["5,cloud,up", "6,cloud,up"], 2, "cloud is up twice: it has been since line 1"),
        (["5,cloud,down", "", "6,cloud,down"], 3, "cloud is down twice: it has been since line 1"),
        (["5,cloud,away"], 1, 'expected "up" or "down"'),
        (["soon,cloud,up"], 1, "expected seconds"),
        (["nan,cloud,up"], 1, "expected seconds"),
        (["-1,cloud,up"], 1, "expected seconds"),
        (["1,cloud"], 1, "has 2 columns: expected time, peer, state"),
    ],
)
def test_a_row_that_is_none_is_refused_with_its_file_and_line(tmp_path, rows, line, words):
    path = trace(tmp_path, *rows)
    with pytest.raises(SettingsError) as caught:
        recorded_churn(path, NAMES)
    assert str(caught.value).startswith(f"{path}:{line}: ")
    assert words in str(caught.value)


def test_the_scenario_says_which(tmp_path):
    trace(tmp_path, "7,cloud,down")
    recorded = churn_of(Churn(trace="trace.csv"), NAMES, 1, tmp_path)
    assert [float(f.at) for f in recorded] == [7.0]
    drawn = churn_of(Churn(fail_per_hour=10.0, return_after=Duration("60s")), NAMES, 1, tmp_path)
    assert list(islice(drawn, 9)) == list(islice(random_churn(NAMES, 10.0, 60.0, 1), 9))
    with pytest.raises(FileNotFoundError):
        churn_of(Churn(trace="missing.csv"), NAMES, 1, tmp_path)
