"""Models that no machine of yours can hold: planned, submitted, started and exported without ever
having them whole.

    python benchmarks/large/large.py [--json FILE] [--only plan recipe …]

Each part is a module of its own (`benchmarks/large/PART.py`), whose `figures()` says what it
measures and how; together they take less than 40 minutes on two cores. Memory is the peak resident
set of a process.
"""

from __future__ import annotations

import time
from importlib import import_module

from shoal.benchmarks.table import Figure, arguments, report

PARTS = ("plan", "recipe", "submit", "small", "shards", "lora")
"""The modules, in the order in which they run."""


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    options = parser.parse_args()
    figures: list[Figure] = []
    for part in options.only:
        began = time.perf_counter()
        print(f"{part}", flush=True)
        # Only when it runs: a part may need more than the others, and loads it.
        figures += import_module(f"shoal.benchmarks.large.{part}").figures()
        print(f"{part} took {time.perf_counter() - began:.0f} s", flush=True)
    report("large", figures, options.json)


if __name__ == "__main__":
    main()
