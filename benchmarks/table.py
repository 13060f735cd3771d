"""What every benchmark shares: the figures as a table on stdout, and as JSON for machines.

    figures = [Figure("executor_over_eager", 1.01, "ratio", "lower")]
    report("executor", figures, arguments(__doc__).parse_args().json)

Scripts are run from the repository's root (`python benchmarks/steps/executor.py --json out.json`)
and import this file as `from shoal.benchmarks.table import Figure, arguments, report`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

__all__ = ["Figure", "arguments", "report"]


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured number. `better`: which direction is an improvement."""

    name: str
    value: float
    unit: str
    better: Literal["higher", "lower"]


def arguments(description: str | None) -> argparse.ArgumentParser:
    """A parser that knows `--json FILE`; add further options, then `parse_args()`."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures as JSON")
    return parser


def report(title: str, figures: Sequence[Figure], json_file: Path | None = None) -> None:
    """Prints the figures as a table; with a file, writes them as a list of
    {"name", "value", "unit", "better"}."""
    rows = [(f.name, f"{f.value:.4g}", f.unit, f.better) for f in figures]
    head = (title, "value", "unit", "better")
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(4)]
    for name, value, unit, better in [head, *rows]:
        print(f"{name:<{widths[0]}}  {value:>{widths[1]}}  {unit:<{widths[2]}}  {better}".rstrip())
    if json_file is not None:
        json_file.write_text(json.dumps([asdict(f) for f in figures], indent=2) + "\n")
