"""Runs side by side: what people read of them, by numbers that were worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from shoal.broker.course import Course
from shoal.job import Job, SettingsError
from shoal.job.settings import plain
from shoal.sim.report.side_by_side import RunComparison, Told, reported


def job(**train: Any) -> dict[str, Any]:
    given = {"steps": 4, "batch": 8, **train}
    return plain(Job(model={"factory": "net.py:net"}, train=given))  # type: ignore[arg-type, no-any-return]


def told(label: str, losses: list[float], *, seed: int = 0, sent: int = 1000, **train: Any) -> Told:
    """A run with a loss for each step, of which each sent so many bytes and took half a second."""
    course = Course()
    for step, loss in enumerate(losses):
        course.stepped({"step": step, "loss": loss, "sent_bytes": sent, "seconds": 0.5})
    return Told(label=label, seed=seed, job=job(**train), course=course.points, more={})


def test_what_people_read() -> None:
    found = RunComparison(
        [
            told("fast", [5.0, 4.0, 3.0, 2.0], lr=0.01),
            told("slow", [5.0, 4.5, 3.75, 3.0], sent=10, lr=0.001),
        ]
    )
    assert found.text().splitlines() == [
        "the last columns: up to a loss of training of 3.0000, which all reach",
        "",
        "      steps  samples    loss  held-out  sent  time  steps  samples  sent   time",
        "fast      4       32  2.0000         -  4 kB   2 s      3       24  3 kB  1.5 s",
        "slow      4       32  3.0000         -  40 B   2 s      4       32  40 B    2 s",
        "",
        "different",
        "  key       fast   slow",
        "  train.lr  0.01  0.001",
        'equal: model.factory = "net.py:net" · train.steps = 4 · train.batch = 8; all else is '
        "as in any job",
    ]


def test_seeds_of_one_setting_stand_together() -> None:
    found = RunComparison(
        [told("a", [4.0, 2.0], seed=1), told("a", [4.0, 3.0], seed=2), told("b", [4.0, 2.5])]
    )
    line = next(line for line in found.text().splitlines() if line.startswith("a "))
    assert line.split()[:3] == ["a", "(2", "seeds)"]
    assert "2.5000 ± 0.5000" in line  # mean of 2 and 3, half of what is between them


def test_rounds_count_what_their_steps_sent() -> None:
    course = Course()
    course.evaluated(0, 6.0)
    for replica, sent in (
        (0, 10),
        (1, 20),
        (0, 30),
        (1, 40),
        (0, 50),
    ):  # the last: of a round to come
        course.stepped({"step": 0, "loss": 9.9, "sent_bytes": sent, "seconds": 1.0}, replica)
    work = [{"replica": n, "steps": 2, "samples": 8, "loss": 1.0} for n in (0, 1)]
    more = {"members": work[:1], "left_out": work[1:], "step": 2, "samples_committed": 16}
    course.met({"round": 0, **more, "sent_bytes": 1000, "seconds": 2.5, "loss": 5.0})
    course.evaluated(1, 4.5)
    assert course.points == [
        dict(step=0, samples=0, sent_bytes=0, seconds=0.0, loss=None, held_out=6.0),
        dict(step=2, samples=16, sent_bytes=1100, seconds=2.5, loss=5.0, held_out=4.5),
    ]


def test_the_target_is_the_worst_end_and_of_what_was_held_out_where_all_were_evaluated() -> None:
    runs = []
    for label, held in (("a", [4.0, 2.0]), ("b", [3.0, 2.5])):
        course = Course()
        for step, loss in enumerate(held):
            row = {"step": step, "loss": 9.0, "sent_bytes": 1, "seconds": 1.0, "eval_loss": loss}
            course.stepped(row)
        runs.append(Told(label=label, seed=0, job=job(), course=course.points, more={}))
    table = RunComparison(runs).table()
    assert (table["by"], table["target"]) == ("held_out", 2.5)
    assert [run["reached"]["step"] for run in table["runs"]] == [2, 2]


def test_settings_are_stated_once_or_by_run() -> None:
    found = RunComparison([told("a", [1.0], lr=0.1, clip=2.0), told("b", [1.0], lr=0.2, clip=2.0)])
    assert found.different == {"train.lr": [0.1, 0.2]}
    assert found.equal == {
        "model.factory": "net.py:net",
        "train.steps": 4,
        "train.batch": 8,
        "train.clip": 2.0,
    }


def test_the_picture_has_four_panels_and_every_run(tmp_path: Path) -> None:
    found = RunComparison([told("a", [3.0, 2.0]), told("b", [3.0, 2.5])])
    drawn = found.picture()
    labels = {shape.text for shape in drawn.shapes if hasattr(shape, "text")}
    assert {"steps", "samples", "sent between peers", "time", "a", "b"} <= labels
    found.draw(tmp_path / "both.png")
    with Image.open(tmp_path / "both.png") as image:
        assert image.size == (round(drawn.width * 2), round(drawn.height * 2))


def test_losses_that_are_no_numbers_are_left_out() -> None:
    found = RunComparison([told("a", [3.0, float("nan"), 2.0]), told("b", [3.0, float("inf")])])
    assert found.target == 3.0
    json.dumps(found.table()["equal"])
    found.picture().svg()


def test_what_is_not_the_same_setting_with_another_seed_has_no_mean() -> None:
    with pytest.raises(SettingsError, match="a stands there twice with one seed"):
        RunComparison([told("a", [1.0]), told("a", [2.0]), told("b", [2.0])])
    with pytest.raises(SettingsError, match=r"runs called a differ in train\.lr"):
        RunComparison([told("a", [1.0], lr=0.1), told("a", [2.0], seed=1, lr=0.2)])


def test_a_seed_is_a_setting_where_each_row_is_one_run() -> None:
    found = RunComparison([told("a", [1.0]), told("b", [1.0], seed=5)])
    assert found.different == {"seed": [0, 5]}
    several = [told("a", [1.0]), told("a", [1.0], seed=1), told("b", [1.0], seed=5)]
    assert RunComparison(several).different == {}


def test_one_run_is_no_comparison() -> None:
    with pytest.raises(SettingsError, match="1 run to compare: expected two or more"):
        RunComparison([told("a", [1.0])])


def test_a_report_of_an_older_shoal_says_how_to_make_it_again(tmp_path: Path) -> None:
    file = tmp_path / "summary.json"
    file.write_text('{"again": "shoal sim x --virtual"}')
    with pytest.raises(SettingsError, match="shoal sim x --virtual --report"):
        reported(file, "x")
