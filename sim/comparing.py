"""Runs held against each other, from Python and by `shoal compare`: what they tell of themselves,
from output folders, or from a broker."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..broker.course import Course
from ..broker.round_rows import RoundRows
from ..client.errors import RecordError
from ..client.files.records import read_run, step_numbers
from ..client.files.row_file import read_rows
from ..client.runs.run import Run
from ..client.runs.session import connect
from ..job.settings import json_object
from ..net.surroundings import user_path
from ..proto.broker_pb2 import FAILED
from .report.side_by_side import RunComparison, Told, reported

if TYPE_CHECKING:
    from ..client.runs.session import Client

__all__ = ["compare", "folder_told", "labels", "run_told"]

_OF_SEED = re.compile(r"-seed-\d+$")


def compare(
    *runs: Run | str | Path, broker: str | None = None, to: Path | str = "runs/"
) -> RunComparison:
    """Hold runs against each other: `print` shows the table, `draw(path)` the losses over steps,
    samples, bytes and time, and `table()` has the same for programs. A run is a `Run`, an id at
    `broker`, the folder of one (in `to`, or anywhere), or of a report of `shoal sim`. Names that
    differ in "-seed-N" at their end alone are one row.

    Raises ClientError, SettingsError for a folder of another kind, OSError.
    """
    names = [run.id if isinstance(run, Run) else str(user_path(run)) for run in runs]
    told = []
    with ExitStack() as open_until_then:
        client: Client | None = None
        for run, name, label in zip(runs, names, labels(names), strict=True):
            if isinstance(run, Run):
                told.append(run_told(run, label))
            elif (summary := Path(name) / "summary.json").is_file():
                told.append(reported(summary, label))
            elif Path(name).is_dir():
                told.append(folder_told(Path(name), label))
            else:
                client = client or open_until_then.enter_context(connect(broker))
                told.append(run_told(client.run(name, to), label))
    return RunComparison(told)


def labels(names: Sequence[str]) -> list[str]:
    """What runs are called, given by folders or ids: without what all folders have in front, and
    without "-seed-N" at the end, so that runs of one setting stand together."""
    folders = [name for name in names if Path(name).is_dir()]
    before = os.path.commonpath([Path(f).absolute().parent for f in folders]) if folders else ""
    made = [
        os.path.relpath(Path(name).absolute(), before) if name in folders else name
        for name in names
    ]
    short = [_OF_SEED.sub("", name) for name in made]
    return [s if short.count(s) > 1 else whole for s, whole in zip(short, made, strict=True)]


def folder_told(folder: Path, label: str) -> Told:
    """Read the output folder of a run. Raises RecordError for another folder, OSError."""
    record = read_run(folder)
    if "job" not in record:
        raise RecordError(
            f"{folder} has no run.json with a job, and no summary.json: expected the folder of a "
            "run that was submitted from here (runs/RUN), or a report of shoal sim --report"
        )
    course = Course()
    rows = list(read_rows(folder / "rounds.jsonl"))
    apart = any(row["kind"] == "round_done" for row in rows)
    for row in read_rows(folder / "metrics.jsonl"):
        numbers = {key: math.nan if value is None else value for key, value in row.items()}
        course.stepped(numbers, row.get("replica", 0) if apart else None)
    for row in rows:
        if row["kind"] == "round_done":
            course.met(row)
        elif row["kind"] == "evaluated":
            held_out = row["eval_loss"]
            course.evaluated(row["round"], math.nan if held_out is None else held_out)
    job = record["job"]
    return Told(label=label, seed=job.get("seed", 0), job=job, course=course.points)


def run_told(run: Run, label: str) -> Told:
    """Ask a broker for a run, as far as it has come; its folder may know its job better. Raises
    ClientError."""
    course, rounds, meets, error = Course(), RoundRows(keep=False), False, ""
    for event in run.so_far():
        if (row := rounds.see(event)) is not None:
            course.met(row.table())
        match event.WhichOneof("kind"):
            case "round_begun":
                meets = True
            case "step":
                course.stepped(step_numbers(event.step), event.replica if meets else None)
            case "evaluated":
                course.evaluated(event.evaluated.round, event.evaluated.evaluation.loss)
            case "state":
                error = event.state.reason.text if event.state.phase == FAILED else ""
    job: Mapping[str, Any] = read_run(run.folder).get("job", {})
    job = job or json_object(run.client.recall(run.id).spec.job)
    seed = job.get("seed", 0)
    return Told(label=label, seed=seed, job=job, course=course.points, error=error)
