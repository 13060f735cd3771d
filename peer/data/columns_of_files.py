"""Rows and columns of tables: Parquet, by pyarrow, and CSV."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .manifest import DataError

__all__ = ["columns_of", "csv_rows", "parquet_rows"]


def parquet_rows(path: Path, names: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """The rows of a file, some thousands of them in memory at a time; no names: all columns. Raises
    DataError."""
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise DataError(
            f"{path}: Parquet is read by the library pyarrow, which is not installed: pip install "
            "'shoal[data]', or give .jsonl or .csv"
        ) from None
    try:
        with ParquetFile(path) as file:
            for name in names:
                if name not in file.schema_arrow.names:
                    there = sorted(file.schema_arrow.names)
                    raise DataError(f"{path} has no column {name!r}, it has {there}")
            for batch in file.iter_batches(4096, columns=list(names) or None):
                yield from batch.to_pylist()
    except (ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def columns_of(path: Path, names: Sequence[str]) -> dict[str, npt.NDArray[Any]]:
    """Columns of a .csv or .parquet as arrays: int64 where all values are whole, else float32; of
    lists of one length, one row for each. Raises DataError, by the row, counted from 1."""
    is_csv = path.suffix != ".parquet"
    rows = list(_numbers(path, names) if is_csv else parquet_rows(path, names))
    if not rows:
        raise DataError(f"{path} has no rows")
    return {name: _array(path, name, [row[name] for row in rows]) for name in names}


def csv_rows(
    path: Path, names: Sequence[str] = ()
) -> Iterator[tuple[int, dict[str, str | None] | ValueError]]:
    """Line and row of a file with a header, where None stands for what a row has not; a ValueError
    in place of a row that has more than the header, as one with a comma outside of quotes. `names`:
    columns that it must have, each once; none: it has whichever, each once. Raises DataError."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            there = reader.fieldnames or ()
            for name in names or dict.fromkeys(filter(None, there)):
                if (count := there.count(name)) != 1:
                    what = f"{count} columns" if count else "no column"
                    raise DataError(f"{path} has {what} {name!r}, it has {sorted(there)}")
            more = f"the row has more than the {len(there)} values of the header: write a value "
            more += "with a comma in quotes"
            for row in reader:
                yield reader.line_num, ValueError(more) if None in row else row
    except (OSError, csv.Error, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def _numbers(path: Path, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    for line, row in csv_rows(path, names):
        if isinstance(row, ValueError):
            raise DataError(f"{path}:{line}: {row}")
        yield {name: _number(row[name]) for name in names}


def _number(text: str | None) -> int | float | None:
    for kind in (int, float) if "_" not in (text or "") else ():  # Python reads 2021_05 as 202105
        try:
            return kind(text or "")
        except ValueError:
            continue
    return None


def _array(path: Path, name: str, values: list[Any]) -> npt.NDArray[Any]:
    first: tuple[int, ...] = ()
    for row, value in enumerate(values, 1):
        try:
            one = np.asarray(value)
        except ValueError:  # lists of lists that are not alike
            one = np.asarray(None)
        if one.dtype.kind not in "biuf" or (row > 1 and one.shape != first):
            raise DataError(
                f"{path}: row {row} has no number in {name!r}, or not as many as the first: "
                "expected numbers, or lists of one length"
            )
        if _is_wide(value, one):  # no value: the data may be private
            raise DataError(
                f"{path}: row {row} has a whole number of 2^63 or more in {name!r}: expected "
                "smaller ones"
            )
        first = one.shape
    array = np.asarray(values)
    if array.dtype.kind != "f":
        return array.astype(np.int64)
    with np.errstate(over="ignore"):
        single = array.astype(np.float32)
    lost = (np.isinf(single) & np.isfinite(array)).reshape(len(array), -1).any(1)
    if lost.any():
        raise DataError(
            f"{path}: row {1 + int(lost.argmax())} has a number in {name!r} that is none of "
            "float32, which columns with fractions become: expected less than 3.4e38"
        )
    return single


def _is_wide(value: Any, one: npt.NDArray[Any]) -> bool:
    """Whether a row has a whole number that int64 has not; beside others numpy makes a float of
    it. one: the row as an array."""
    if one.dtype.kind != "f" or not (np.abs(one) >= 2.0**63).any():
        return one.dtype.kind == "u"
    return any(isinstance(number, int) for number in np.asarray(value, object).ravel())
