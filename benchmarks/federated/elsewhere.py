"""Other frameworks, each in an environment of its own that is made when it is first asked for.

    FLOWER.play(problem, [{"key": "fedavg", …}], cache)     # by key, what came of each task

What was played is kept in the cache: under one folder for each problem, by key.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.benchmarks.federated.problem import Problem

__all__ = ["CACHE", "FLOWER", "PFL", "Framework", "Theirs"]

CACHE = Path(".cache/federated-rivals")
TORCH = ("torch==2.13.0+cpu", "psutil")


@dataclass(frozen=True)
class Theirs:
    """What a framework came to. accuracies: after each round; round_cpu, round_s: of each round, of
    all its processes; mib: resident, of all, at most. weights: in the order of the parameters."""

    accuracies: list[float]
    round_cpu: list[float]
    round_s: list[float]
    mib: float
    weights: list[npt.NDArray[np.float32]]


@dataclass(frozen=True)
class Framework:
    """`script`: beside this file, called with a problem, tasks and a folder for what came."""

    name: str
    packages: tuple[str, ...]
    script: str

    def python(self, cache: Path) -> Path:
        """Return the Python that has it. Raises CalledProcessError where it cannot be installed."""
        folder = (cache / self.name).absolute()
        python, ready = folder / "bin/python", folder / "ready"
        wanted = "\n".join((*TORCH, *self.packages))
        if not ready.exists() or ready.read_text() != wanted:
            print(f"installing {self.name} into {folder}", file=sys.stderr, flush=True)
            subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
            subprocess.run(
                [str(python), "-m", "pip", "install", "-q", *TORCH, *self.packages], check=True
            )
            ready.write_text(wanted)
        return python

    def play(
        self, problem: Problem, tasks: Sequence[Mapping[str, Any]], cache: Path
    ) -> dict[str, Theirs]:
        """Play those that the cache has not, and return all by key. Raises CalledProcessError."""
        name = "-".join(map(str, (self.name, *astuple(problem))))
        kept = (cache / "rows" / name).absolute()
        kept.mkdir(parents=True, exist_ok=True)
        missing = [t for t in tasks if t["key"] not in _rows(kept)]
        if missing:
            python = self.python(cache)
            with tempfile.TemporaryDirectory() as folder:
                file, asked = Path(folder, "problem.npz"), Path(folder, "tasks.json")
                problem.write(file)
                asked.write_text(json.dumps([*map(dict, missing)]))
                script = Path(__file__).with_name(self.script)
                subprocess.run(
                    [str(python), str(script), str(file), str(asked), str(kept)],
                    env={**_without_shoal(), "OMP_NUM_THREADS": "1"},
                    stdout=subprocess.DEVNULL,
                    check=True,
                )
        rows = _rows(kept)
        return {t["key"]: _read(kept, rows[t["key"]]) for t in tasks}


FLOWER = Framework("flower", ("flwr[simulation]==1.42.0",), "flower_side.py")
PFL = Framework("pfl", ("pfl==0.6.0",), "pfl_side.py")


def _without_shoal() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}


def _rows(folder: Path) -> dict[str, dict[str, Any]]:
    file = folder / "rows.jsonl"
    found = map(json.loads, file.read_text().splitlines()) if file.exists() else ()
    return {row["key"]: row for row in found}


def _read(folder: Path, row: Mapping[str, Any]) -> Theirs:
    with np.load(folder / f"{row['key']}.npz") as data:
        weights = [data[f"w{i}"] for i in range(len(data.files))]
    return Theirs(row["accuracies"], row["round_cpu"], row["round_s"], row["mib"], weights)
