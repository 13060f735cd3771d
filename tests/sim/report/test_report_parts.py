"""Small parts of the page: ticks, words, which marks count, tables, and pictures as files."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from shoal.proto import broker_pb2
from shoal.sim.report import Summary, to_json
from shoal.sim.report.measures.measure import measure
from shoal.sim.report.measures.moments import disturbing, notable
from shoal.sim.report.pictures.charts import BarRow, alike, bars, ticks
from shoal.sim.report.pictures.palette import PALETTE, rgb, shade
from shoal.sim.report.pictures.picture import Dot, Label, Line, Picture, Rect
from shoal.sim.report.tables import MOST_MARKS, comparison, happened
from shoal.sim.report.words import bit_rate, cut, figure, percent, plain, seconds, size, start
from shoal.sim.trace import Mark, Span, Trace


@given(low=st.floats(-1e6, 1e6), width=st.floats(1e-3, 1e6), most=st.integers(2, 12))
def test_ticks_are_few_even_and_inside(low: float, width: float, most: int) -> None:
    found = ticks(low, low + width, most)
    slack = 1e-6 * width + 1e-9 * abs(low)
    assert len(found) <= most
    assert all(low - slack <= t <= low + width + slack for t in found)
    steps = [b - a for a, b in pairwise(found)]
    assert all(step == pytest.approx(steps[0], rel=1e-3) for step in steps)


def test_times_of_an_axis_differ() -> None:
    assert alike([100.01, 100.02, 100.03]) == ["100.01 s", "100.02 s", "100.03 s"]
    assert alike([0.0, 0.5, 1.0]) == ["0 s", "500 ms", "1 s"]


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        (figure(12_345), "12.3k"),
        (figure(0), "0"),
        (seconds(0.0123), "12.3 ms"),
        (seconds(4e-6), "4 µs"),
        (seconds(90), "90 s"),
        (seconds(1800), "30 min"),
        (seconds(7200 * 3), "6 h"),
        (size(1500), "1.5 kB"),
        (size(999), "999 B"),
        (bit_rate(2.5e6), "20 Mbit/s"),
        (bit_rate(1.25e8), "1 Gbit/s"),
        (percent(0.5), "50%"),
        (percent(0.012), "1.2%"),
        (percent(0.0), "0%"),
        (cut("a-long-name-7", 7), "a-l…e-7"),
        (cut("short", 7), "short"),
        (start("abcdef", 4), "abc…"),
        (plain("a\x1b[2J\u202eb"), "a?[2J?b"),
    ],
)
def test_words(found: str, wanted: str) -> None:
    assert found == wanted


def test_what_every_run_has_is_not_told() -> None:
    marks = [
        Mark(at_s=5, who="a", what="kill"),
        Mark(at_s=0, who="a", what="join"),
        Mark(at_s=3, who="b", what="join"),
        Mark(at_s=2, who="r", what="loss", text="4.2"),
        Mark(at_s=1, who="r", what="running"),
    ]
    assert [(m.what, m.who) for m in notable(marks)] == [("join", "b"), ("kill", "a")]
    assert disturbing(marks) == [3, 5]
    assert happened(marks) == [("3 s", "join", "b", ""), ("5 s", "kill", "a", "")]
    many = happened([Mark(at_s=i, who="a", what="kill") for i in range(MOST_MARKS + 5)])
    assert len(many) == MOST_MARKS + 1
    assert many[-1][1] == "and 5 more"


def test_predictions_stand_beside_what_was_measured_and_nothing_else() -> None:
    trace = Trace()
    for step in range(3):
        for peer, begin, took in (("home", 0.0, 0.5), ("cloud", 0.5, 0.25)):
            trace.add(
                Span(
                    start_s=step + begin,
                    end_s=step + begin + took,
                    peer=peer,
                    kind="forward",
                    step=step,
                    microbatch=0,
                    stage=0,
                )
            )
    report = broker_pb2.PlanReport()
    for peer, compute_s in (("home-1f", 0.4), ("cloud", 0.25), ("never-seen", 1.0)):
        report.predicted.peers.add(peer=peer, compute_s=compute_s)
    memory = (
        {"peer": "home", "predicted_bytes": 2e9, "peak_bytes": 1e9, "limit_bytes": 0},
        {"peer": "cloud", "predicted_bytes": 2e9, "peak_bytes": 0, "limit_bytes": 0},
    )
    summary = Summary(
        name="job", world="virtual", seed=1, step_s=1.0, predicted_step_s=0.9, memory=memory
    )
    rows = comparison(summary, measure(trace), report, {"home-1f": "home"})
    assert {r.what: (r.predicted, r.measured) for r in rows} == {
        "time of a step": ("900 ms", "1 s"),
        # Steps 1 and 2, from 1 s to 2.75 s: 1 - (1 + 0.5) / 2 / 1.75.
        "bubble, mean over peers": ("0%", "57%"),
        "home computes, a step": ("400 ms", "500 ms"),
        "cloud computes, a step": ("250 ms", "250 ms"),
        "home, peak memory": ("2 GB", "1 GB"),
    }
    errors = {r.what: r.error for r in rows}
    assert errors["home computes, a step"] == pytest.approx(-0.2)
    assert errors["home, peak memory"] == pytest.approx(1.0)


def test_a_picture_is_the_same_as_a_file(tmp_path: Path) -> None:
    picture = Picture(40, 20, "a test")
    picture.add(
        Rect(0, 0, 10, 20, "forward"),
        Rect(10, 0, 10, 20, "recover", 0.5),
        Line(((25, 0), (25, 20)), "ink", 4),
        Line(((30, 0), (30, 20)), "ink", 1, dashed=True),
        Dot(36, 10, 3, "update"),
        Label(1, 15, "x → ä", 8),
    )
    picture.png(tmp_path / "p.png")
    image = Image.open(tmp_path / "p.png").convert("RGB")
    assert image.size == (80, 40)

    def at(x: float, y: float) -> tuple[int, ...]:
        pixel = image.getpixel((int(2 * x), int(2 * y)))
        assert isinstance(pixel, tuple)
        return pixel

    assert at(5, 2) == rgb("forward")
    half = tuple((a + b) / 2 for a, b in zip(rgb("recover"), rgb("paper"), strict=True))
    assert at(15, 2) == pytest.approx(half, abs=2)
    assert at(25, 10) == rgb("ink")
    assert at(36, 10) == rgb("update")
    assert at(22, 2) == rgb("paper")


def test_bars_beyond_the_most_are_counted() -> None:
    rows = [BarRow(name=f"p{i}", parts=[("sent", float(i))]) for i in range(30)]
    text = bars("bytes", rows, most=24).svg()
    assert "and 6 more" in text
    assert ">p23<" in text
    assert ">p24<" not in text


def test_shades_are_of_the_palette_and_rise() -> None:
    shades = [shade(i / 100) for i in range(101)]
    assert set(shades) <= PALETTE.keys()
    assert shades == sorted(shades)
    assert (shades[0], shades[100]) == ("heat0", "heat5")


@given(st.lists(st.floats(), max_size=4), st.floats())
def test_a_loss_that_diverged_is_null_in_the_summary(losses: list[float], last: float) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    summary = Summary(name="x", world="virtual", seed=0, losses=tuple(losses), loss_last=last)
    summary.against["alone"] = last
    found = json.loads(to_json(summary), parse_constant=refuse)
    wanted = [loss if math.isfinite(loss) else None for loss in losses]
    assert found["losses"] == wanted
