"""Text for people: tables without lines, wrapped sentences, times and sizes in three digits."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from ...job.words import size_text
from ...net.printable import printable as safe

__all__ = ["labelled", "lines", "new_table", "number", "safe", "size_text", "time_text", "wrapped"]

LABEL = 12
"""Columns of the words at the left."""


def new_table(*columns: str) -> Table:
    """A table without lines; a column whose name starts with > is of figures."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        figures = column.startswith(">")
        table.add_column(
            column.removeprefix(">"),
            justify="right" if figures else "left",
            overflow="fold",
            no_wrap=figures,
        )
    return table


def lines(table: Table, columns: int) -> Iterator[str]:
    out = io.StringIO()
    Console(file=out, width=columns, color_system=None, highlight=False).print(table)
    for line in out.getvalue().splitlines():
        yield safe(line.rstrip())


def labelled(label: str, text: str, columns: int) -> Iterator[str]:
    return wrapped(f"{label:<{LABEL}}{text}", columns, " " * LABEL)


def wrapped(text: str, columns: int, indent: str = "  ") -> Iterator[str]:
    """Lines of at most so many columns, the later ones indented; no word is lost."""
    text = safe(text)
    if len(text) <= columns:
        yield text
    else:
        yield from textwrap.wrap(
            text, columns, subsequent_indent=indent, break_on_hyphens=False, drop_whitespace=True
        )


def time_text(seconds: float) -> str:
    if seconds >= 0.1 or seconds == 0:
        return f"{number(seconds)} s"
    return f"{number(seconds * 1e3)} ms" if seconds >= 1e-4 else f"{number(seconds * 1e6)} us"


def number(x: float) -> str:
    """Three digits, never in powers of ten where people read it."""
    return f"{x:.0f}" if abs(x) >= 999.5 else f"{x:.3g}"
