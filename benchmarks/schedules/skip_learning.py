"""What skipping and reordering do to learning: held-out loss of a byte GPT whose microbatches leave
stages out.

    python benchmarks/schedules/skip_learning.py [--rows NAME,…] [--seeds 3] [--json FILE]
        [--warmup 10%] [--fade-out 5%] [--scaling sum]
    python benchmarks/schedules/skip_learning.py --cached --picture docs/skip-learning.png

12 blocks of width 64 in six stages over windows of 32 bytes of the standard library's sources,
1,500 steps of eight microbatches of two windows. Embedding and blocks 0 and 1 are the first stage,
blocks 10 and 11 and the head the last one: every microbatch visits these two. `skip_33` leaves out
a third of all visits, the same number at each of the four stages between; `_swaps` visits two
neighbours the other way round where a microbatch visits both, every second time. As in a plan, a
microbatch's route stays the same in all steps. Gradients of a stage count by its visits, as peers
count them, or as --scaling says (`plan.skip_scaling`); in the first steps and the last ones that
--warmup and --fade-out say (`plan.skip_warmup`, `plan.skip_fade_out`) all microbatches visit all
stages in order. Here one process trains. A seed decides the model's start, the data's order and the
routes.

`skip_NAME_loss`: held-out loss of the whole model, stages in order, over that of the plain run at
equal steps, means over seeds; `_at_equal_time`: over that of the plain run at as many steps as the
same modelled time allows; `_half`: the loss of the model without every second block of the stages
between, over the plain run's whole one; `skip_plain_half`: the plain run's own.
Times are of listed plans of six equal peers where a hop takes as long as a forward (wan.py).

Finished runs are kept in .cache/skip-learning by what they were made with, and are not repeated;
about four CPU minutes each.
"""

from __future__ import annotations

import hashlib
import json
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from shoal.benchmarks.learning.chain import Data, Setting, fuse
from shoal.benchmarks.learning.runs import finished
from shoal.benchmarks.schedules.wan import Wan, chain
from shoal.benchmarks.table import Figure, arguments, report
from shoal.dag.plan.plan import Route, Visit
from shoal.dag.schedule.orders import one_f_one_b
from shoal.dag.schedule.schedule import check_listed, executed_s, with_visits
from shoal.examples.gpt import GPT
from shoal.job import Job, PlanOptions, SettingsError
from shoal.job.plan_options import SkipScaling
from shoal.peer.sync.optimizer import StageOptimizer

ROOT = Path(__file__).parents[2]
SETTING = Setting(steps=1500, width=64, heads=4, batch=16, eval_every=50)
STAGES, MICROBATCHES = 6, 8
INNER = range(1, STAGES - 1)
BLOCKS = SETTING.blocks // STAGES
HALF = tuple(b for b in range(SETTING.blocks) if b not in range(BLOCKS + 1, SETTING.blocks - 2, 2))
"""The blocks of the smaller model."""
Run = dict[str, Any]
Order = tuple[int, ...]
"""Stages in the order in which a microbatch visits them."""
IN_ORDER: tuple[Order, ...] = (tuple(range(STAGES)),) * MICROBATCHES
"""All of them, by microbatch."""


@dataclass(frozen=True, slots=True)
class Row:
    """`skipped`: of the step's visits at each stage between, how many are left out. `full`: the
    first of the steps that do, and the first of those behind them that do not."""

    name: str
    skipped: int = 0
    swaps: bool = False
    full: tuple[int, int] = (0, SETTING.steps)
    scaling: SkipScaling = "renormalise"

    def made_with(self, options: PlanOptions) -> Row:
        """The row with full steps and scaling as the options say, as far as it leaves anything
        out, and its name then."""
        full = options.full_steps(SETTING.steps) if self.skipped or self.swaps else self.full
        scaling = options.skip_scaling if self.skipped else self.scaling
        name = self.name
        if full != self.full:
            name += f"_from_{full[0]}_to_{full[1]}"
        if scaling != self.scaling:
            name += f"_{scaling}"
        return replace(self, name=name, full=full, scaling=scaling)

    def in_full(self, step: int) -> bool:
        """Whether all microbatches visit all stages in order in a step, from 0."""
        return not self.full[0] <= step < self.full[1]

    def orders(self, seed: int) -> tuple[Order, ...]:
        """The route of each microbatch."""
        draw, left_out = random.Random(seed), dict.fromkeys(INNER, 0)
        found = []
        for m in range(MICROBATCHES):
            due = round((m + 1) * self.skipped * len(INNER) / MICROBATCHES)
            many = due - sum(left_out.values())
            away = sorted(INNER, key=lambda k: (left_out[k], draw.random()))[:many]
            for k in away:
                left_out[k] += 1
            order = [k for k in range(STAGES) if k not in away]
            pairs = [i for i in range(1, len(order) - 2) if order[i + 1] == order[i] + 1]
            if self.swaps and m % 2 and pairs:
                i = draw.choice(pairs)
                order[i], order[i + 1] = order[i + 1], order[i]
            found.append(tuple(order))
        assert {*left_out.values()} == {self.skipped}, left_out
        return tuple(found)

    def key(self, seed: int) -> str:
        own = asdict(self)
        if self.full == (0, SETTING.steps):
            del own["full"]
        if self.scaling == "renormalise":
            del own["scaling"]
        what = json.dumps([asdict(SETTING), own, seed, STAGES, MICROBATCHES])
        return hashlib.sha256(what.encode()).hexdigest()[:16]


ROWS = (
    Row("plain"),
    Row("swaps", 0, swaps=True),
    *(Row(f"skip_{n}", k) for n, k in ((25, 3), (33, 4), (50, 6))),
    *(Row(f"skip_{n}_swaps", k, swaps=True) for n, k in ((25, 3), (33, 4))),
)
"""With half of all visits left out a microbatch visits one stage between: nothing to swap."""


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rows", default="", help="names, comma between; empty: all")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--cache", type=Path, default=ROOT / ".cache" / "skip-learning")
    parser.add_argument("--cached", action="store_true", help="only what the cache has")
    parser.add_argument("--picture", type=Path, help="draw the curves into this file")
    parser.add_argument("--warmup", default="0%", help="full steps at the begin, or their share")
    parser.add_argument("--fade-out", default="0%", help="the same at the end")
    parser.add_argument(
        "--scaling", default="renormalise", help="renormalise, sum or stochastic-depth"
    )
    asked = parser.parse_args()
    options = options_of(asked.warmup, asked.fade_out, asked.scaling)
    names = asked.rows.split(",") if asked.rows else [row.name for row in ROWS]
    rows = [row.made_with(options) for row in ROWS if row.name in {"plain", *names}]
    if unknown := set(names) - {row.name for row in ROWS}:
        sys.exit(f"no row {', '.join(unknown)}: expected of {', '.join(r.name for r in ROWS)}")
    runs = trained(rows, range(asked.seeds), asked.cache, train=not asked.cached)
    report("skip_learning", figures(rows, runs), asked.json)
    if asked.picture is not None:
        draw(rows, runs, asked.picture)


def options_of(warmup: str, fade_out: str, scaling: Any) -> PlanOptions:
    """What a job's [plan] would say. Ends the program for what it could not."""
    steps = [int(text) if text.isdigit() else text for text in (warmup, fade_out)]
    plan = {"skip": 0.5, "skip_warmup": steps[0], "skip_fade_out": steps[1]}
    try:
        job = Job(model="a:b", steps=SETTING.steps, plan={**plan, "skip_scaling": scaling})
    except SettingsError as error:
        sys.exit(str(error))
    return job.plan


def trained(rows: Sequence[Row], seeds: range, cache: Path, *, train: bool) -> list[Run]:
    cache.mkdir(parents=True, exist_ok=True)
    file = cache / "runs.jsonl"
    there = finished(file)
    wanted = [(row, seed) for seed in seeds for row in rows]
    todo = [(row, seed) for row, seed in wanted if row.key(seed) not in there]
    with TemporaryDirectory() as folder:
        source = Data.write(Path(folder), SETTING)
        for i, (row, seed) in enumerate(todo if train else ()):
            run = train_one(row, seed, source)
            there[run["key"]] = run
            with file.open("a") as out:
                out.write(json.dumps(run) + "\n")
            print(
                f"{i + 1}/{len(todo)} {row.name} seed {seed}: {run['loss']:.4f}, half "
                f"{run['half_loss']:.4f}, {run['cpu_s']:.0f} CPU s",
                flush=True,
            )
    return [there[key] for row, seed in wanted if (key := row.key(seed)) in there]


def train_one(row: Row, seed: int, source: Data) -> Run:
    """One run, on one thread."""
    torch.set_num_threads(1)
    began = time.thread_time()
    torch.manual_seed(seed)
    model, routes = SETTING.model(), row.orders(seed)
    data, held_out = source.reader(seed, MICROBATCHES), source.reader(0, MICROBATCHES)
    optimizer = StageOptimizer(SETTING.train, dict(model.named_parameters()))
    fuse(optimizer)
    size, whole = SETTING.batch // MICROBATCHES, range(SETTING.blocks)
    curve = []
    for step in range(SETTING.steps):
        model.zero_grad()
        orders = IN_ORDER if row.in_full(step) else routes
        batches = [data.batch(step, m, size) for m in range(MICROBATCHES)]
        deeper = row.scaling == "stochastic-depth"
        loss_by(model, batches, orders, deeper=deeper).backward()  # type: ignore[no-untyped-call]
        for k, share in enumerate(shares(orders) if row.scaling == "renormalise" else ()):
            for p in model.blocks[BLOCKS * k : BLOCKS * (k + 1)].parameters():
                p.grad = p.grad * (1 / share) if p.grad is not None else None
        norm = torch.nn.utils.get_total_norm(
            [p.grad for p in model.parameters() if p.grad is not None]
        )
        optimizer.step(step, weight=1, norm=float(norm))
        if (step + 1) % SETTING.eval_every == 0:
            curve.append([step + 1, judged(model, held_out, whole, SETTING.eval_windows)])
    return {
        "row": row.name,
        "seed": seed,
        "key": row.key(seed),
        "orders": routes,
        "full": row.full,
        "loss": judged(model, held_out, whole, SETTING.final_windows),
        "half_loss": judged(model, held_out, HALF, SETTING.final_windows),
        "curve": curve,
        "cpu_s": round(time.thread_time() - began, 1),
    }


def shares(orders: Sequence[Order]) -> list[float]:
    """By stage, the share of the microbatches that visit it."""
    return [sum(k in order for order in orders) / len(orders) for k in range(STAGES)]


def loss_by(
    model: GPT,
    batches: Sequence[Mapping[str, Tensor]],
    orders: Sequence[Order],
    *,
    deeper: bool = False,
) -> Tensor:
    """Mean loss per byte of microbatches, each through the stages of its order: those that come to
    a stage next go through it together. `deeper`: what a stage adds is divided by the share of them
    that visit it."""
    by_stage = shares(orders)
    left, value = [list(o) for o in orders], [_embedded(model, batch["x"]) for batch in batches]
    while ahead := Counter(order[0] for order in left if order):
        stage, many = max(ahead.items(), key=lambda item: (item[1], -item[0]))
        here = [m for m, order in enumerate(left) if order and order[0] == stage]
        came = h_btd = torch.cat([value[m] for m in here])
        for block in model.blocks[BLOCKS * stage : BLOCKS * (stage + 1)]:
            h_btd = block(h_btd)
        if deeper and by_stage[stage] < 1:
            h_btd = came + (h_btd - came) / by_stage[stage]
        for m, part in zip(here, h_btd.chunk(many), strict=True):
            left[m].pop(0)
            value[m] = part
    return _loss(model, torch.cat(value), torch.cat([batch["y"] for batch in batches]))


def _embedded(model: GPT, x: Tensor) -> Tensor:
    h_btd: Tensor = model.bytes(x) + model.positions(torch.arange(x.shape[1]))
    return h_btd


def _loss(model: GPT, h_btd: Tensor, y: Tensor) -> Tensor:
    logits_btv = model.head(model.norm(h_btd))
    return torch.nn.functional.cross_entropy(logits_btv.flatten(0, 1), y.flatten())


def loss_of(model: GPT, batch: Mapping[str, Tensor], blocks: Iterable[int]) -> Tensor:
    """Mean loss per byte of a batch that goes through these blocks, in this order."""
    h_btd = _embedded(model, batch["x"])
    for b in blocks:
        h_btd = model.blocks[b](h_btd)
    return _loss(model, h_btd, batch["y"])


@torch.no_grad()
def judged(model: GPT, data: Any, blocks: Sequence[int], windows: int) -> float:
    """Mean held-out loss of the model of these blocks over the first windows."""
    size = SETTING.eval_size
    losses = [loss_of(model, data.held_out(m, size), blocks) for m in range(windows // size)]
    return round(float(torch.stack(losses).mean()), 5)


def elapsed_s(run: Run, steps: int) -> float:
    """Modelled seconds of the first steps of a run."""
    before, since = run.get("full", (0, SETTING.steps))  # older rows have no full steps
    out: int = max(0, min(steps, since) - before)
    orders = tuple(map(tuple, run["orders"]))  # lists, where they come from the cache
    return out * modelled_s(orders) + (steps - out) * modelled_s(IN_ORDER)


@cache
def modelled_s(orders: tuple[Order, ...]) -> float:
    """A step of six equal peers by these routes, listed with their times; a forward takes 1."""
    plan, stages = chain(MICROBATCHES, STAGES)
    holder = {k: slot.holders[0] for k, slot in enumerate(plan.stages)}
    routes: tuple[Route, ...] = tuple(tuple(Visit(k, holder[k]) for k in o) for o in orders)
    plan, wan = replace(plan, routes=routes), Wan(latency=1.0, hold=0.0)
    lists = one_f_one_b.order(plan, stages, wan, dict.fromkeys(range(STAGES), MICROBATCHES))
    listed = with_visits(plan, stages, tuple(tuple(lists[p]) for p in plan.peers))
    check_listed(listed, stages)
    return executed_s(listed, stages, wan)


def figures(rows: Sequence[Row], runs: Sequence[Run]) -> list[Figure]:
    found: list[Figure] = []
    plain = {r["seed"]: r for r in runs if r["row"] == "plain"}
    for row in rows:
        own = [r for r in runs if r["row"] == row.name and r["seed"] in plain]
        if not own:
            continue
        name = row.name.removeprefix("skip_")

        def over(key: str, own: Sequence[Run] = own) -> float:
            base = statistics.fmean(plain[r["seed"]]["loss"] for r in own)
            return statistics.fmean(r[key] for r in own) / base

        found.append(Figure(f"skip_{name}_half", over("half_loss"), "ratio", "lower"))
        if row.name == "plain":
            continue
        found.append(Figure(f"skip_{name}_loss", over("loss"), "ratio", "lower"))
        times, then = [], []
        for r in own:
            base = plain[r["seed"]]
            times.append(elapsed_s(r, SETTING.steps) / elapsed_s(base, SETTING.steps))
            at = min(base["curve"], key=lambda point: abs(point[0] - SETTING.steps * times[-1]))
            then.append(at[1])
        mine = statistics.fmean(r["curve"][-1][1] for r in own)
        found.append(Figure(f"skip_{name}_time", statistics.fmean(times), "ratio", "lower"))
        ratio = mine / statistics.fmean(then)
        found.append(Figure(f"skip_{name}_at_equal_time", ratio, "ratio", "lower"))
    return found


def draw(rows: Sequence[Row], runs: Sequence[Run], file: Path) -> None:
    """Held-out loss of the whole model over steps, and over modelled time, the mean of seeds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    picture, panels = pyplot.subplots(1, 2, figsize=(13, 5.0), sharey=True)
    for row in rows:
        own = [r for r in runs if r["row"] == row.name]
        if not own:
            continue
        steps = [point[0] for point in own[0]["curve"]]
        seconds = [statistics.fmean(elapsed_s(r, n) for r in own) for n in steps]
        means = [statistics.fmean(r["curve"][i][1] for r in own) for i in range(len(steps))]
        style = {"color": "black"} if row.name == "plain" else {}
        for panel, times in zip(panels, (steps, seconds), strict=True):
            panel.plot(times, means, label=row.name, **style)
    panels[0].set_xlabel("steps")
    panels[1].set_xlabel("modelled time, in forwards of a stage")
    panels[0].set_ylabel("held-out loss of the whole model, nats per byte")
    panels[0].legend(fontsize=8, frameon=False)
    for panel in panels:
        panel.set_ylim(top=3.2)
        panel.grid(alpha=0.3)
    picture.tight_layout()
    picture.savefig(file, dpi=110)


if __name__ == "__main__":
    main()
