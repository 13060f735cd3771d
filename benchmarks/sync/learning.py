"""Bytes against loss: held-out loss of one small byte GPT trained by 4 and 8 replicas that seldom
meet, over dense all-reduce of every step's gradient with as many samples.

    python benchmarks/sync/learning.py [--rows NAME,…] [--seeds 5] [--replicas 4,8] [--json FILE]
    python benchmarks/sync/learning.py --tune --rows NAME,…   # seed 0: up the grid to the best
    python benchmarks/sync/learning.py --cached               # what has been trained, no training
    python benchmarks/sync/learning.py --cached --picture docs/strategies-learning.png

The model is that of benchmarks/learning/learning.py: 12 blocks of width 32 over windows of 32
bytes of the standard library's sources; a step has 8 windows over all replicas. A seed decides the
model's start and the order of the data, and is the same for all rows. Every replica keeps its own
AdamW. Rows, codes and the formulas of bytes stand in rows.py; learning rate and β₂ of every row,
and of dense, are from GRID; `--tune` climbs it, on seed 0 and with the first of --replicas, and
benchmarks/README.md says of which rows that was done. Ratios to dense are of means over the seeds
that both have, for the worse of 4 and 8 replicas.

Behind the figures stands a table of them, with modelled times to a loss (modelled.py). A table that
was interrupted has fewer seeds, and says how many.

Finished runs are kept in .cache/sync-learning by what decides their numbers, the code of the loops
with it, and are not repeated; an interrupted table goes on where it was. One process, one thread.
"""

from __future__ import annotations

import ast
import hashlib
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from shoal.benchmarks.learning.chain import Data, Setting
from shoal.benchmarks.learning.runs import finished
from shoal.benchmarks.sync import in_step
from shoal.benchmarks.sync.in_step import IN_STEP, Shapes
from shoal.benchmarks.sync.modelled import NETWORKS, curve, plot, seconds_to
from shoal.benchmarks.sync.rows import GRID, ROWS, Row, pairs_of
from shoal.benchmarks.sync.together import Together
from shoal.benchmarks.table import Figure, arguments, report
from shoal.sim.plain.round_oracle import PlainResult, even

ROOT = Path(__file__).parents[2]
PLAIN = ROOT / "sim" / "plain"
METHODS, IN_STEP_METHODS = PLAIN / "round_methods.py", Path(__file__).with_name("in_step.py")
BATCHED = Path(__file__).with_name("batched.py")
CODE = [PLAIN / "oracle.py", PLAIN / "round_oracle.py"]
CODE += [Path(__file__).with_name("together.py")]
SETTING = Setting(steps=4000, batch=8, eval_every=400)
"""Of the first search; eight replicas have one window of a step each."""
TARGET = 1.15
"""Times the final loss of dense: the loss to which time is reckoned."""
BARS = {"sync_bytes_ratio_1pct": 0.01, "sync_bytes_ratio_3pct": 0.03}
Run = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Wanted:
    """One run. Dense is the same for any number of replicas, and is trained as one."""

    row: Row
    replicas: int
    seed: int

    def key(self, setting: Setting) -> str:
        """Of all that decides its numbers: setting, row and the code, docstrings apart."""
        what = [asdict(self.row.setting(setting)), asdict(self.row), self.replicas, self.seed]
        text = json.dumps(what) + _code(self.row)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def _code(row: Row) -> str:
    """Of the loops, without docstrings, and of the methods what the row's class needs."""
    found, methods = [], [IN_STEP_METHODS] if row.in_step else [METHODS, BATCHED]
    method = (IN_STEP[row.method] if row.in_step else type(row.build([], 0))).__name__
    for file in [*CODE, *methods]:
        tree = ast.parse(file.read_text())
        for node in ast.walk(tree):
            body: list[ast.stmt] = getattr(node, "body", [])
            if isinstance(body, list):
                node.body = [x for x in body if not _is_text(x)]  # type: ignore[attr-defined]
        found += [
            ast.dump(x) for x in (_needed(tree, method, "train") if file in methods else [tree])
        ]
    return "".join(found)


def _needed(tree: ast.Module, *names: str) -> list[ast.AST]:
    """The definitions of names at the top of a module, if it has them, and those that they rest
    on."""
    defined: dict[str, ast.AST] = {}
    for x in tree.body:
        if isinstance(x, ast.ClassDef | ast.FunctionDef):
            defined[x.name] = x
    found, ahead = dict[str, ast.AST](), [*names]
    while ahead:
        if (word := ahead.pop()) in defined and word not in found:
            found[word] = defined[word]
            ahead += [x.id for x in ast.walk(found[word]) if isinstance(x, ast.Name)]
    return [found[word] for word in sorted(found)]


def _is_text(x: ast.stmt) -> bool:
    return isinstance(x, ast.Expr) and isinstance(x.value, ast.Constant)


class Trainer:
    """Compiles once for each number of replicas."""

    def __init__(self, setting: Setting, source: Data) -> None:
        self.setting, self.source = setting, source
        self.together: dict[int, Together] = {}

    def run(self, wanted: Wanted) -> Run:
        """One row, on one thread."""
        torch.set_num_threads(1)
        began = time.thread_time()
        row, count, seed = wanted.row, wanted.replicas, wanted.seed
        setting = row.setting(self.setting)
        torch.manual_seed(seed)
        module = setting.model()
        names = [n for n, _ in module.named_parameters()]
        held_out, curve = self.source.reader(0, 1), []
        marks = iter(range(setting.eval_every, setting.steps, setting.eval_every))
        mark = next(marks, math.inf)

        def look(done: int, weights: Callable[[], Mapping[str, Tensor]]) -> None:
            nonlocal mark
            if done >= mark:
                curve.append([done, round(_loss(module, weights(), held_out, 256), 5)])
                mark = next((m for m in marks if m > done), math.inf)

        if count not in self.together:
            self.together[count] = Together(setting.model(), count)
        together, start = self.together[count], module.state_dict()
        source = _batches(self.source, seed)
        if row.in_step:
            shapes, options = Shapes.of(module), row.strategy.options
            last = in_step.train(
                together,
                start,
                source,
                setting.train,
                IN_STEP[row.method](shapes, count, options),
                steps=setting.steps,
                done=lambda step, weights: look(step + 1, lambda: weights),
            )
        else:
            method = row.build(names, seed)
            rounds = even(
                count,
                steps=setting.steps,
                every=row.round_steps,
                batch=setting.batch,
                pairs=pairs_of(seed, count),
                fragments=row.fragments if row.method == "streaming" else 0,
                late=row.late,
            )

            def committed(number: int, result: PlainResult) -> None:
                look(
                    (number + 1) * row.round_steps,
                    lambda: result.mean() if row.gossips else method.shared,
                )

            last = together.train(
                start,
                rounds,
                source,
                setting.train,
                method,
                steps=setting.steps,
                committed=committed,
            ).mean()
        return {
            "row": row.name,
            "replicas": count,
            "seed": seed,
            "key": wanted.key(self.setting),
            "lr": row.lr,
            "beta2": row.beta2,
            "loss": _loss(module, last, held_out, setting.final_windows),
            "curve": curve,
            "cpu_seconds": round(time.thread_time() - began, 1),
        }


def _batches(source: Data, seed: int) -> Any:
    reader = source.reader(seed, 1)

    def batches(numbers: range) -> Mapping[str, Tensor]:
        size = len(numbers)
        if numbers.start % size == 0:
            return reader.batch(numbers.start // size, 0, size)
        each = [reader.batch(g, 0, 1) for g in numbers]
        return {name: torch.cat([x[name] for x in each]) for name in each[0]}

    return batches


def _loss(module: nn.Module, weights: Mapping[str, Tensor], data: Any, windows: int) -> float:
    with torch.no_grad():
        each = [
            float(functional_call(module, dict(weights), (), data.held_out(m, 64)))
            for m in range(windows // 64)
        ]
    return statistics.fmean(each)


def run_all(wanted: Sequence[Wanted], setting: Setting, cache: Path, *, only: bool) -> list[Run]:
    """In their order; `only`: those that the cache has."""
    cache.mkdir(parents=True, exist_ok=True)
    file = cache / "runs.jsonl"
    there = finished(file)
    keys = [w.key(setting) for w in wanted]
    with TemporaryDirectory() as folder:
        trainer = None if only else Trainer(setting, Data.write(Path(folder), setting))
        for w, key in zip(wanted, keys, strict=True):
            if trainer is None or key in there:
                continue
            run = there[key] = trainer.run(w)
            with file.open("a") as out:
                out.write(json.dumps(run) + "\n")
            print(
                f"{run['row']} {run['replicas']} replicas seed {run['seed']} lr {run['lr']} "
                f"β₂ {run['beta2']}: loss {run['loss']:.4f}, {run['cpu_seconds']:.0f} CPU s",
                flush=True,
            )
    return [there[key] for key in keys if key in there]


def tuned(row: Row, replicas: int, setting: Setting, cache: Path) -> tuple[Row, float]:
    """From a row's own rate and beta to the best neighbour in GRID, until none is better."""
    count = 1 if row.method == "dense" else replicas

    def losses(rows: Sequence[Row]) -> list[float]:
        wanted = [Wanted(x, count, 0) for x in rows]
        return [run["loss"] for run in run_all(wanted, setting, cache, only=False)]

    [best] = losses([row])
    while True:
        near = neighbours(row)
        loss, at = min(zip(losses(near), range(len(near)), strict=True))
        if loss >= best:
            return row, best
        row, best = near[at], loss


def neighbours(row: Row) -> list[Row]:
    """Those of GRID that are at most one place away in each direction; rate and beta depend on
    each other."""
    lrs, beta2s = GRID["lr"], GRID["beta2"]
    at = lrs.index(row.lr)
    near = product(lrs[max(0, at - 1) : at + 2], beta2s)
    return [
        replace(row, lr=lr, beta2=beta2) for lr, beta2 in near if (lr, beta2) != (row.lr, row.beta2)
    ]


def over_dense(runs: Sequence[Run], row: Row, replicas: int) -> float:
    """Of the means, with the seeds that both have; NaN without any."""
    dense = {r["seed"]: r["loss"] for r in runs if r["row"] == "dense"}
    own = {r["seed"]: r["loss"] for r in runs if (r["row"], r["replicas"]) == (row.name, replicas)}
    seeds = dense.keys() & own.keys()
    return sum(own[s] for s in seeds) / sum(dense[s] for s in seeds) if seeds else math.nan


def figures(
    runs: Sequence[Run], rows: Sequence[Row], counts: Sequence[int], steps: int
) -> list[Figure]:
    """Of each row the worse of its numbers of replicas, and the bars: the largest ratio of bytes
    among the rows within so much of dense."""
    specs = Shapes.of(SETTING.model()).specs
    found, best = [], dict.fromkeys(BARS, 0.0)
    for row in rows:
        losses = [over_dense(runs, row, count) for count in counts]
        if row.method == "dense" or any(map(math.isnan, losses)):
            continue
        loss = max(losses)
        ratio = min(row.ratio(specs, count, steps) for count in counts)
        found.append(Figure(f"{row.name}_loss_over_dense", loss, "ratio", "lower"))
        found.append(Figure(f"{row.name}_bytes_ratio", ratio, "ratio", "higher"))
        for bar, share in BARS.items():
            if loss <= 1 + share:
                best[bar] = max(best[bar], ratio)
    return [*(Figure(bar, value, "ratio", "higher") for bar, value in best.items()), *found]


Curves = dict[tuple[str, int], list[tuple[int, float]]]


def curves_of(runs: Sequence[Run], steps: int) -> Curves:
    """By row and replicas, over all of its seeds."""
    keys = dict.fromkeys((r["row"], r["replicas"]) for r in runs)
    return {
        key: curve([r for r in runs if (r["row"], r["replicas"]) == key], steps) for key in keys
    }


def table(runs: Sequence[Run], rows: Sequence[Row], steps: int) -> str:
    """Of each row and number of replicas: seeds, loss over dense, bytes, and hours to TARGET."""
    specs = Shapes.of(SETTING.model()).specs
    curves = curves_of(runs, steps)
    dense = next(row for row in rows if row.method == "dense")
    [(_, found)] = [x for x in curves.items() if x[0][0] == dense.name]
    goal = TARGET * found[-1][1]
    lines = [f"row, replicas, seeds, loss over dense, bytes ratio, hours to {goal:.3f} on"]
    lines[0] += f" {', '.join(NETWORKS)}"
    for row in rows:
        for name, count in [key for key in curves if key[0] == row.name]:
            seeds = sum((r["row"], r["replicas"]) == (name, count) for r in runs)
            among = max(count, 2)  # dense is trained as one, and reckoned among two
            hours = [
                seconds_to(goal, curves[name, count], row, among, specs, line) / 3600
                for line in NETWORKS.values()
            ]
            ratio, over = row.ratio(specs, among, steps), over_dense(runs, row, count)
            times = " ".join(f"{h:9.2f}" for h in hours)
            lines.append(f"{name:24} {count} {seeds} {over:7.4f} {ratio:7.0f} {times}")
    return "\n".join(lines)


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--rows", default="", help="names, comma between; empty: all")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--replicas", default="4,8")
    parser.add_argument("--steps", type=int, default=SETTING.steps)
    parser.add_argument("--batch", type=int, default=SETTING.batch, help="windows of a step")
    parser.add_argument("--cache", type=Path, default=ROOT / ".cache" / "sync-learning")
    parser.add_argument("--cached", action="store_true", help="only what the cache has")
    parser.add_argument("--picture", type=Path, help="draw the curves into this file")
    parser.add_argument("--tune", action="store_true", help="seed 0: up the grid to the best")
    options = parser.parse_args()
    names = [name for name in options.rows.split(",") if name] or [row.name for row in ROWS]
    unknown = sorted(set(names) - {row.name for row in ROWS})
    if unknown:
        known = ", ".join(row.name for row in ROWS)
        parser.error(f"there is no row {', '.join(unknown)}: expected some of {known}")
    setting = replace(SETTING, steps=options.steps, batch=options.batch)
    counts = [int(count) for count in options.replicas.split(",")]
    rows = [row for row in ROWS if row.name in names]
    if options.tune and options.cached:
        parser.error("--tune trains: expected no --cached with it")
    if options.tune:
        for row in rows:
            best, loss = tuned(row, counts[0], setting, options.cache)
            print(f"{row.name}: best at {best.lr} and β₂ {best.beta2}, {loss:.4f}", flush=True)
        return 0
    wanted = [
        Wanted(row, count, seed)
        for seed in range(options.seeds)
        for row in rows
        for count in ([1] if row.method == "dense" else counts)
    ]
    runs = run_all(wanted, setting, options.cache, only=options.cached)
    report("sync learning", figures(runs, rows, counts, setting.steps), options.json)
    if any(row.method == "dense" for row in rows):  # to which the others are compared
        print(table(runs, rows, setting.steps))
    if options.picture:
        curves, named = curves_of(runs, setting.steps), {row.name: row for row in rows}
        ends = {key: over_dense(runs, named[key[0]], key[1]) for key in curves}
        plot(options.picture, curves, ends, rows, Shapes.of(setting.model()).specs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
