"""The committed steps of a run as a table."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...proto.broker_pb2 import RunEvent
from ..files.records import step_numbers
from ..files.row_file import read_rows

__all__ = ["History"]


class History:
    """Rows of steps, by name of column, in order; of replicas that train apart one for each step
    of each. `len`, indexing and iteration are those of a list of rows."""

    def __init__(self, folder: Path) -> None:
        """folder: of the run; what its metrics.jsonl has is taken in."""
        self._rows: dict[tuple[int, int], dict[str, Any]] = {}
        self._replicas = 1
        for found in read_rows(folder / "metrics.jsonl"):
            row: dict[str, Any] = {
                key: math.nan if value is None else value for key, value in found.items()
            }
            self._rows[row["step"], row.get("replica", 0)] = row

    def see(self, event: RunEvent) -> None:
        """Take in an event of the protocol: what the folder does not have."""
        if event.HasField("state"):
            self._replicas = max(1, len(event.state.replicas))
        elif event.HasField("step"):
            of = {"replica": event.replica} if self._replicas > 1 else {}
            row = {**of, **step_numbers(event.step)}
            self._rows.setdefault((event.step.step, event.replica), row)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Return the rows by step, then by replica."""
        return [row for _, row in sorted(self._rows.items())]

    @property
    def columns(self) -> dict[str, list[Any]]:
        """Return the values by name of column; None where a row has none."""
        rows = self.rows
        names = dict.fromkeys(name for row in rows for name in row)
        return {name: [row.get(name) for row in rows] for name in names}

    def pandas(self) -> Any:
        """Return a pandas.DataFrame of the rows. Raises ImportError without pandas."""
        import pandas

        return pandas.DataFrame(self.columns)

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows)

    def __getitem__(self, at: int) -> dict[str, Any]:
        return self.rows[at]

    def __repr__(self) -> str:
        if not (rows := self.rows):
            return "<History of no steps>"
        names = ", ".join(self.columns)
        ends = f"loss {rows[0]['loss']:.4g} -> {rows[-1]['loss']:.4g}"
        return f"<History of {len(rows)} rows, {ends}; columns {names}>"
