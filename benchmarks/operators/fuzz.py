"""Calls every operator on the allow-lists with arguments that validation lets pass, and looks for
what no such call may do: reach beyond a tensor, give what nobody wrote, end the process, or not
end.

    python benchmarks/operators/fuzz.py [--cases N] [--operators GLOB] [--seed N] …

Without arguments, 500 cases for each operator by two processes. Cases begin with a call that works
and change it (cases.py). Rules and torch's shape functions refuse many; the rest runs
forward and backward, twice, on memory between guard pages (guard.c, for which a C compiler is
needed), whose unwritten bytes differ between the runs (worker.py). Rows are kept in --rows
FILE, by operator and seed: started again, it goes on; a fault is printed with the call that shows
it. The exit code is 1 if there is one. `--case N` runs one case of one operator here, and prints
it.

On CUDA there are no guard pages: what counts there is what CUDA reports, and results of two runs.
"""

from __future__ import annotations

import fnmatch
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from shoal.benchmarks.operators.seeds import SEEDS
from shoal.benchmarks.table import Figure, arguments, report

__all__ = ["guard", "guarded"]

HERE = Path(__file__).parent
BATCH = 1000
"""Cases of one row: what is lost when a run is stopped."""


def guard(folder: Path) -> Path:
    """Compiles guard.c. Raises CalledProcessError or FileNotFoundError without a C compiler."""
    made = folder / "guard.so"
    command = ["cc", "-O2", "-shared", "-fPIC", "-o", str(made), str(HERE / "guard.c")]
    subprocess.run(command, check=True, capture_output=True)
    return made


def guarded(library: Path | None) -> dict[str, str]:
    """The environment of a worker. Without the library glibc fills its memory, and small blocks are
    not taken from its caches, which would not."""
    own = {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=0", "OMP_NUM_THREADS": "1"}
    return {**os.environ, **own, **({"LD_PRELOAD": str(library)} if library else {})}


class Worker:
    """One process that answers orders with rows."""

    def __init__(self, library: Path | None, device: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "worker.py"), device],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=guarded(library),
        )

    def row(self, target: str, seed: int, first: int, count: int) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{target} {seed} {first} {count}\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the worker ended at {target}, cases {first} to {first + count}")
        return dict(json.loads(line))

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def _orders(names: list[str], seed: int, cases: int) -> Iterator[tuple[str, int, int, int]]:
    for first in range(0, cases, BATCH):
        for name in names:
            yield name, seed, first, min(BATCH, cases - first)


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["operator"], row["seed"], row["first"], row["cases"]


def _told(rows: list[dict[str, Any]]) -> list[Figure]:
    """Prints each operator's outcomes and faults."""
    total: Counter[str] = Counter()
    by_name: dict[str, Counter[str]] = {}
    for row in rows:
        by_name.setdefault(row["operator"], Counter()).update(row["outcomes"])
    for name in sorted(by_name):
        found = by_name[name]
        total.update(found)
        print(f"{name:<55} " + " ".join(f"{k}={n}" for k, n in sorted(found.items())))
    faulty: set[str] = set()
    for row in rows:
        for fault in row["faults"]:
            faulty.add(row["operator"])
            print(f"FAULT {fault['kind']} (--case {fault['case']}): {fault['text']}")
            print(f"  {fault['call']}")
    cases = sum(total.values())
    taken = {n: 1 - f["refused"] / sum(f.values()) for n, f in by_name.items()}
    return [
        Figure("fuzz_operators_faulty", len(faulty), "operators", "lower"),
        Figure("fuzz_cases", cases, "cases", "higher"),
        Figure("fuzz_accepted", 1 - total["refused"] / max(1, cases), "ratio", "higher"),
        Figure("fuzz_accepted_least", min(taken.values(), default=0.0), "ratio", "higher"),
    ]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--cases", type=int, default=500, help="of each operator")
    parser.add_argument("--operators", default="*", metavar="GLOB", help="e.g. 'aten.*norm*'")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--rows", type=Path, metavar="FILE", help="keeps rows, and goes on from them"
    )
    parser.add_argument("--case", type=int, help="one case of one operator, in this process")
    given = parser.parse_args()
    names = fnmatch.filter(sorted(SEEDS), given.operators)
    if given.case is not None:
        _one(names[0], given.seed, given.case, given.device)
        return
    rows: list[dict[str, Any]] = []
    if given.rows and given.rows.exists():
        rows = [json.loads(line) for line in given.rows.read_text().splitlines()]
    done = {_key(row) for row in rows}
    waiting = iter([o for o in _orders(names, given.seed, given.cases) if o not in done])
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        library = guard(Path(folder)) if given.device == "cpu" else None

        def work(_: int) -> None:
            worker = Worker(library, given.device)
            try:
                while (order := next(waiting, None)) is not None:
                    row = worker.row(*order)
                    rows.append(row)
                    if given.rows:
                        with given.rows.open("a") as file:
                            file.write(json.dumps(row) + "\n")
            finally:
                worker.close()

        with ThreadPoolExecutor(given.workers) as pool:
            list(pool.map(work, range(given.workers)))
    figures = _told([row for row in rows if row["operator"] in set(names)])
    figures.append(Figure("fuzz_minutes", (time.monotonic() - begun) / 60, "min", "lower"))
    report("fuzz_operators", figures, given.json)
    sys.exit(1 if figures[0].value else 0)


def _one(target: str, seed: int, index: int, device: str) -> None:
    import torch

    from shoal.benchmarks.operators.cases import draw
    from shoal.benchmarks.operators.worker import attempt

    case = draw(target, seed, index)
    print(case, flush=True)
    print(attempt(case, torch.device(device)))


if __name__ == "__main__":
    main()
