"""What training on one device costs beside a plain loop: a whole GPT held by one peer, step by step
in turn with torch's own optimizer over the plain module, on the same windows.

    python benchmarks/gpu/whole.py [--json FILE] [--device cuda] [--pairs 14]

A step is two microbatches forward and backward, clipping to norm 1 and AdamW. The plain loop has
torch.autocast for bf16. Seconds are wall clock, and ratios are medians over neighbours, of which
every other pair begins with ours. Memory is what torch counted at most, ours beside what a plan
would say; for the models of benchmarks/steps/truth.py `beside_plan_…`, what it does not say: the
workspaces of libraries.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from shoal.benchmarks.steps.executor import interleave
from shoal.benchmarks.steps.truth_memory import Model, ModelRun, models
from shoal.benchmarks.table import Figure, arguments, report
from shoal.examples.gpt import gpt
from shoal.peer.data.reader import Reader
from shoal.planner.cost.candidate import Candidate, StageShare
from shoal.sim.plain.oracle import learning_rate, optimizer_of

ROWS: tuple[tuple[Literal["fp32", "bf16"], float], ...] = (
    ("fp32", 0.0),
    ("bf16", 0.0),
    ("bf16", 0.1),
)


@dataclass(frozen=True, slots=True)
class Size:
    layers: int
    width: int
    heads: int
    length: int
    batch: int


SIZES = {"cpu": Size(2, 64, 4, 64, 4), "cuda": Size(12, 768, 12, 1024, 16)}


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--pairs", type=int, default=14)
    options = parser.parse_args()
    figures = [
        figure
        for dtype, dropout in ROWS
        for figure in measured(torch.device(options.device), dtype, dropout, options.pairs)
    ]
    if options.device.startswith("cuda"):
        figures += memories()
    report("a whole GPT on one device", figures, options.json)
    return 0 if all(f.value < 0.02 for f in figures if f.name.startswith("loss_off")) else 1


def measured(
    device: torch.device, dtype: Literal["fp32", "bf16"], dropout: float, pairs: int
) -> Iterator[Figure]:
    size, name = SIZES[device.type], dtype + ("_dropout" if dropout else "")

    def make() -> nn.Module:
        torch.manual_seed(0)
        return gpt(size.layers, size.width, size.heads, size.length, dropout)

    model = Model("gpt", make, size.batch, size.batch // 2, size.length)
    with tempfile.TemporaryDirectory() as folder:
        run = ModelRun(model, Path(folder), dtype, steps=pairs)
        alone = Candidate(((StageShare(0, 0, run.operators),),), (2,), "1f1b")
        predicted = run.judge.device_bytes(alone)[0]
        if device.type == "cuda":
            our_bytes = run.world(alone).on_card(2)
            plain_bytes = bytes_of_plain(Plain(run, make(), device, dtype), device)
            yield Figure(f"whole_bytes_{name}", our_bytes, "bytes", "lower")
            yield Figure(f"plain_bytes_{name}", plain_bytes, "bytes", "lower")
            yield Figure(f"predicted_over_{name}", predicted / our_bytes, "ratio", "lower")
        plain, world = Plain(run, make(), device, dtype), run.world(alone)
        world.build_on(str(device))
        losses: tuple[list[float], list[float]] = ([], [])
        wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
        seconds = interleave(
            counted(plain.step, losses[0]), counted(world.step, losses[1]), pairs, wait
        )
    warm = [side[2:] for side in seconds]
    ratios = [b / a for a, b in zip(*warm, strict=True)]
    tokens = size.batch * size.length
    yield Figure(f"whole_s_{name}", statistics.median(warm[1]), "s", "lower")
    yield Figure(f"whole_tokens_{name}", tokens / statistics.median(warm[1]), "1/s", "higher")
    yield Figure(f"whole_over_plain_{name}", statistics.median(ratios), "ratio", "lower")
    yield Figure(f"loss_last_{name}", losses[1][-1], "nats", "lower")
    if not dropout:  # torch draws its own masks
        off = max(abs(a / b - 1) for a, b in zip(*losses, strict=True))
        yield Figure(f"loss_off_{dtype}", off, "ratio", "lower")


def memories() -> Iterator[Figure]:
    """On a card, of other models: what torch counts of a step's memory and a plan does not."""
    for model in models():
        with tempfile.TemporaryDirectory() as folder:
            run = ModelRun(model, Path(folder))
            alone = Candidate(
                ((StageShare(0, 0, run.operators),),), (model.batch // model.microbatch,), "1f1b"
            )
            found = run.world(alone).on_card(2) - run.judge.device_bytes(alone)[0]
        yield Figure(f"beside_plan_{model.name}", found, "bytes", "lower")


def counted(step: Callable[[int], float], losses: list[float]) -> Callable[[], Tensor]:
    """The next step, each time."""

    def following() -> Tensor:
        losses.append(step(len(losses)))
        return torch.empty(0)

    return following


def bytes_of_plain(plain: Plain, device: torch.device) -> int:
    torch.cuda.reset_peak_memory_stats(device)
    for step in range(2):
        plain.step(step)
    return torch.cuda.max_memory_allocated(device)


class Plain:
    """The plain loop."""

    def __init__(
        self,
        run: ModelRun,
        module: nn.Module,
        device: torch.device,
        dtype: Literal["fp32", "bf16"],
    ) -> None:
        self.train, self.device, self.bf16 = run.train, device, dtype == "bf16"
        self.size = run.model.microbatch
        self.module = module.to(device)
        self.optimizer = optimizer_of(self.module, run.train)
        get = run.paths.__getitem__
        self.reader = Reader(run.manifest, get, seed=0, microbatches=run.train.microbatches)

    def step(self, step: int) -> float:
        total = torch.zeros((), device=self.device)
        for m in range(self.train.microbatches):
            batch = self.reader.batch(step, m, self.size)
            there = {name: x.to(self.device) for name, x in batch.items()}
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
                loss = self.module(**there) / self.train.microbatches
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(self.module.parameters(), self.train.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.train, step, self.train.steps or 0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(total)


if __name__ == "__main__":
    raise SystemExit(main())
