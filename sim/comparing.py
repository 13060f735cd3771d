"""Runs held against each other, from Python and by `shoal compare`."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from ..client.runs.run import Run
from ..client.runs.session import connect
from ..client.runs.telling import folder_told, labels, run_told
from ..net.surroundings import user_path
from .report.side_by_side import RunComparison, Told, reported

if TYPE_CHECKING:
    from ..client.runs.session import Client

__all__ = ["compare"]


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
                one = run_told(run)
            elif (summary := Path(name) / "summary.json").is_file():
                told.append(reported(summary, label))
                continue
            elif Path(name).is_dir():
                one = folder_told(Path(name))
            else:
                client = client or open_until_then.enter_context(connect(broker))
                one = run_told(client.run(name, to))
            told.append(Told(label=label, more={}, **one._asdict()))
    return RunComparison(told)
