"""What runs tell of themselves, to be compared: from output folders, or from a broker."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ...broker.course import Course
from ...broker.round_rows import RoundRows
from ...job.settings import json_object
from ...proto.broker_pb2 import FAILED
from ..errors import RecordError
from ..files.records import read_run, step_numbers
from ..files.row_file import rows_of

if TYPE_CHECKING:
    from .run import Run

__all__ = ["RunTold", "folder_told", "labels", "run_told"]

_OF_SEED = re.compile(r"-seed-\d+$")


class RunTold(NamedTuple):
    """What one run tells."""

    seed: int
    job: Mapping[str, Any]
    """Its settings, table by table."""
    course: Sequence[Mapping[str, Any]]
    """Points as `Course` has them."""
    error: str = ""
    """Why it failed; empty: it did not."""


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


def folder_told(folder: Path) -> RunTold:
    """Read the output folder of a run. Raises RecordError for another folder, OSError."""
    record = read_run(folder)
    if "job" not in record:
        raise RecordError(
            f"{folder} has no run.json with a job, and no summary.json: expected the folder of a "
            "run that was submitted from here (runs/RUN), or a report of shoal sim --report"
        )
    course = Course()
    rows = list(_rows(folder / "rounds.jsonl"))
    apart = any(row["kind"] == "round_done" for row in rows)
    for row in _rows(folder / "metrics.jsonl"):
        numbers = {key: math.nan if value is None else value for key, value in row.items()}
        course.stepped(numbers, row.get("replica", 0) if apart else None)
    for row in rows:
        if row["kind"] == "round_done":
            course.met(row)
        elif row["kind"] == "evaluated":
            held_out = row["eval_loss"]
            course.evaluated(row["round"], math.nan if held_out is None else held_out)
    job = record["job"]
    return RunTold(job.get("seed", 0), job, course.points)


def _rows(file: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of a file of rows, which somebody may be writing; none where there is none.
    Numbers that were not finite are None."""
    if file.is_file():
        yield from rows_of(file.read_bytes(), file)


def run_told(run: Run) -> RunTold:
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
    return RunTold(job.get("seed", 0), job, course.points, error)
