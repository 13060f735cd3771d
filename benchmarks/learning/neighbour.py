"""What losing stages without a copy does to learning: a byte GPT in six stages, made anew in
several ways.

    python benchmarks/learning/neighbour.py [--json FILE] [--rows NAME,…] [--seeds N] [--jobs N]

12 blocks in 6 stages, 2,000 steps on the standard library's sources (the setting of learning.py).
After each step each stage is lost with a probability that makes 5, 10 or 16 % an hour at 91.3 s a
step, as in CheckFree (arXiv 2506.15461, section 5): a run is 50.7 such hours, so about 15, 30 and
50 losses. A seed decides the model's start, the order of the data and what is lost when; all rows
of a rate lose the same. The embedding, the head and the last norm are kept twice in all rows.

none            no failures; none_swapped: the same with CheckFree+'s order of stages
random          lost blocks begin anew as the model did
copy            they become the surviving block before them (of the first stage: behind)
checkfree       the mean of the blocks around them, weighted by squared gradient norms
checkfree_plus  the same, with swapped stages in half the microbatches; first and last are copies of
                the stages that they change places with

Rebuilt blocks begin without optimizer state, at 1.1 times the learning rate, in all rows. `rise` is
by how much the training loss of the step after a loss lies above the mean of the ten before.
Finished runs are kept in .cache/neighbour and not repeated.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from shoal.benchmarks.learning.chain import Data, Setting
from shoal.benchmarks.learning.neighbour_chain import Chain, losses
from shoal.benchmarks.learning.runs import Run, finished, workers
from shoal.benchmarks.table import Figure, arguments, report

ROOT = Path(__file__).parents[2]
VERSION = 1
"""Of what decides a run's numbers beside the setting."""


@dataclass(frozen=True, slots=True)
class Row:
    """`how`: as in `Chain.lose`; `hourly`: of a stage."""

    name: str
    how: str = ""
    hourly: float = 0.0
    swaps: bool = False


def _rows() -> tuple[Row, ...]:
    """The most telling first: an interrupted run has them."""
    found = [Row("none")]
    for hourly in (0.16, 0.05, 0.10):
        of = f"{100 * hourly:.0f}"
        found += [
            Row(f"checkfree_{of}", "mean", hourly),
            Row(f"checkfree_plus_{of}", "mean", hourly, swaps=True),
            Row(f"random_{of}", "random", hourly),
            Row(f"copy_{of}", "copy", hourly),
        ]
    return (*found, Row("none_swapped", swaps=True))


ROWS = _rows()


def train(row: Row, seed: int, setting: Setting, source: Data) -> Run:
    """One run, on one thread."""
    torch.set_num_threads(1)
    began = time.thread_time()
    chain = Chain(setting, seed, swaps=row.swaps)
    data = source.reader(seed, chain.microbatches)
    held_out = source.reader(0, 1)
    lost = losses(setting, row.hourly, seed) if row.how else {}
    curve, trained, rises = [], list[float](), list[float]()
    for step in range(setting.steps):
        trained.append(chain.step(step, data))
        if step in lost:  # of so many updates, all but this step's
            rises.append(trained[-1] - statistics.fmean(trained[-11:-1]))
        if step + 1 in lost:
            chain.lose(lost[step + 1], row.how, step + 1)
        if (step + 1) % setting.eval_every == 0:
            curve.append([step + 1, round(chain.evaluate(held_out, setting.eval_windows), 5)])
    return {
        "row": row.name,
        "seed": seed,
        "key": key_of(row, seed, setting),
        "loss": chain.evaluate(held_out, setting.final_windows),
        "losses": sum(map(len, lost.values())),
        "rise": statistics.fmean(rises) if rises else 0.0,
        "curve": curve,
        "cpu_seconds": round(time.thread_time() - began, 1),
    }


def key_of(row: Row, seed: int, setting: Setting) -> str:
    what = json.dumps([VERSION, asdict(setting), seed, asdict(row)])
    return hashlib.sha256(what.encode()).hexdigest()[:16]


def run_all(
    rows: Sequence[Row], setting: Setting, cache: Path, *, jobs: int, seeds: int, only: bool
) -> list[Run]:
    """By seed and then in the order of the rows; `only`: those that the cache has."""
    cache.mkdir(parents=True, exist_ok=True)
    file = cache / "runs.jsonl"
    wanted = [(row, seed) for seed in range(seeds) for row in rows]
    keys = [key_of(row, seed, setting) for row, seed in wanted]
    there = finished(file)
    todo = [pair for pair, key in zip(wanted, keys, strict=True) if key not in there]
    with TemporaryDirectory() as folder, workers(jobs) as run_some:
        source = Data.write(Path(folder), setting)
        for run in () if only else run_some(_train, [(*pair, setting, source) for pair in todo]):
            there[run["key"]] = run
            with file.open("a") as out:
                out.write(json.dumps(run) + "\n")
            print(
                f"{run['row']} seed {run['seed']}: loss {run['loss']:.4f}, {run['losses']} losses, "
                f"rise {run['rise']:.3f}, {run['cpu_seconds']:.0f} CPU s",
                flush=True,
            )
    return [there[key] for key in keys if key in there]


def _train(what: tuple[Row, int, Setting, Data]) -> Run:
    return train(*what)


def describe(runs: Sequence[Run]) -> str:
    """The table of benchmarks/README.md: held-out loss, mean over the seeds that there are, and
    the excess over the same seeds without failures."""
    none = {run["seed"]: run["loss"] for run in runs if run["row"] == "none"}
    lines = ["| row | seeds | losses of stages | held-out loss | over none | rise |"]
    lines.append("|---|---|---|---|---|---|")
    for row in ROWS:
        found = [run for run in runs if run["row"] == row.name and run["seed"] in none]
        if not found:
            continue
        over = statistics.fmean(run["loss"] - none[run["seed"]] for run in found)
        spread = " … ".join(
            f"{end(run['loss'] for run in found):.3f}" for end in (min, max) if len(found) > 1
        )
        mean = statistics.fmean(run["loss"] for run in found)
        lines.append(
            f"| `{row.name}` | {len(found)} | {'/'.join(str(run['losses']) for run in found)} | "
            f"{mean:.3f}{f' ({spread})' if spread else ''} | {over:+.3f} | "
            f"{statistics.fmean(run['rise'] for run in found):.3f} |"
        )
    return "\n".join(lines)


def figures(runs: Sequence[Run]) -> list[Figure]:
    found = []
    for row in ROWS:
        of_row = [run["loss"] for run in runs if run["row"] == row.name]
        if of_row:
            mean = statistics.fmean(of_row)
            found.append(Figure(f"{row.name}_loss", mean, "nats/byte", "lower"))
    return found


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--rows", default="", help="names, comma between; empty: all")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=0, help="0: 2,000")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, one thread each")
    parser.add_argument("--cache", type=Path, default=ROOT / ".cache" / "neighbour")
    parser.add_argument("--cached", action="store_true", help="only what the cache has")
    options = parser.parse_args()
    wanted = [name for name in options.rows.split(",") if name] or [row.name for row in ROWS]
    unknown = sorted(set(wanted) - {row.name for row in ROWS})
    if unknown:
        known = ", ".join(row.name for row in ROWS)
        parser.error(f"there is no row {', '.join(unknown)}: expected some of {known}")
    setting = Setting()
    setting = replace(setting, steps=options.steps or setting.steps)
    runs = run_all(
        [row for row in ROWS if row.name in wanted],
        setting,
        options.cache,
        jobs=options.jobs,
        seeds=options.seeds,
        only=options.cached,
    )
    print(describe(runs))
    report("neighbour", figures(runs), options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
