"""Starting weights by recipe: how fast peers make them, and whether a model learns as well from
them as from those of torch.

    python benchmarks/large/large.py --only recipe

recipe_mb_per_s          normal numbers in fp32, on one thread
recipe_threads_ratio     the same on two threads over one (equal bits; checked here)
recipe_1b3_seconds       all weights of a GPT-2 of 1.3B parameters, one tensor after another, on
                         every thread that torch has: what one process would take for the whole
recipe_record_seconds    building that model without weights, recipe included
recipe_loss_over_torch   held-out loss after 300 steps of the byte-level GPT of examples/, begun
                         by the recipe, over the same begun by torch's initialisers: means over
                         three seeds, dropout off, in plain loops over the same microbatches
recipe_loss_in_spreads   their difference, in standard deviations of torch's seeds
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

import shoal
from shoal.benchmarks.table import Figure
from shoal.client.models import models
from shoal.client.models.initialise import recording_of
from shoal.client.models.recording import recipe_of
from shoal.client.submission import prepare
from shoal.dag.ir.recipe import Initial, RecipeStep, make
from shoal.examples.gpt import gpt
from shoal.job import Job
from shoal.peer.data.reader import Reader
from shoal.sim.plain.oracle import train

__all__ = ["figures"]

SEEDS = (0, 1, 2)
STEPS, BATCH, HELD_OUT = 300, 16, 20
MODEL: dict[str, Any] = {"layers": 4, "width": 128, "heads": 4, "length": 64, "dropout": 0.0}


def figures() -> list[Figure]:
    """See the module."""
    return [*_speed(), *_large(), *_learning()]


def _speed() -> list[Figure]:
    count = 1 << 24
    initial = Initial((count,), "float32", (RecipeStep("normal", 0, count, (0.0, 0.02), "w"),))
    seconds: dict[int, list[float]] = {1: [], 2: []}
    made: dict[int, Tensor] = {}
    for _ in range(5):
        for threads in seconds:
            began = time.perf_counter()
            made[threads] = make(initial, 0, threads=threads)
            seconds[threads].append(time.perf_counter() - began)
    if not torch.equal(made[1], made[2]):
        raise SystemExit("two threads make other bits than one")
    ratios = [a / b for a, b in zip(seconds[1], seconds[2], strict=True)]
    rate = 4 * count / 1e6 / statistics.median(seconds[1])
    return [
        Figure("recipe_mb_per_s", rate, "MB/s", "higher"),
        Figure("recipe_threads_ratio", statistics.median(ratios), "ratio", "higher"),
    ]


def _large() -> list[Figure]:
    config = GPT2Config(n_layer=24, n_embd=2048, n_head=16)  # GPT-3 XL's sizes
    began = time.perf_counter()
    module = shoal.deferred_init(lambda: GPT2LMHeadModel(config))
    recording = recording_of(module)
    assert recording is not None, "it was deferred"
    recipe, others, _ = recipe_of(module, recording, 0)
    recorded = time.perf_counter() - began
    assert not others, "all of GPT-2 has a recipe"
    began = time.perf_counter()
    for initial in recipe.tensors.values():
        make(initial, 0, threads=torch.get_num_threads())
    took = time.perf_counter() - began
    size = sum(i.elements for i in recipe.tensors.values())
    print(f"  {size / 1e9:.2f}B parameters: {recorded:.1f} s to record, {took:.0f} s to make")
    return [
        Figure("recipe_1b3_seconds", took, "s", "lower"),
        Figure("recipe_record_seconds", recorded, "s", "lower"),
    ]


def _learning() -> list[Figure]:
    job = Job.from_table(
        {
            "version": 1,
            "name": "recipe",
            "model": {"factory": "shoal.examples.gpt:gpt", "args": MODEL},
            "data": {"length": 64},
            "train": {"steps": STEPS, "batch": BATCH, "microbatch": BATCH, "lr": 2e-3},
        }
    )

    def by_recipe(seed: int) -> nn.Module:
        return models.build(replace(job, seed=seed))

    def by_torch(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return gpt(**MODEL)

    losses: dict[str, list[float]] = {}
    ways: dict[str, Callable[[int], nn.Module]] = {"recipe": by_recipe, "torch": by_torch}
    with tempfile.TemporaryDirectory(), prepare(job) as prepared:
        for seed in SEEDS:
            for name, build in ways.items():
                reader = Reader(
                    prepared.manifest, prepared.shards.__getitem__, seed=seed, microbatches=1
                )
                losses.setdefault(name, []).append(_learned(build(seed), reader, prepared.job))
            print(f"  seed {seed}: " + ", ".join(f"{n} {x[-1]:.4f}" for n, x in losses.items()))
    recipe, torchs = (statistics.fmean(losses[name]) for name in ways)
    spread = statistics.stdev(losses["torch"])
    return [
        Figure("recipe_loss_over_torch", recipe / torchs, "ratio", "lower"),
        Figure("recipe_loss_in_spreads", (recipe - torchs) / spread, "deviations", "lower"),
    ]


def _learned(module: nn.Module, reader: Reader, job: Job) -> float:
    """The held-out loss after training."""
    module.train()

    def batch(step: int, microbatch: int) -> Mapping[str, Tensor]:
        return reader.batch(step, microbatch, BATCH)

    train(module, batch, job.train, steps=STEPS, microbatches=1)
    module.eval()
    with torch.no_grad():
        return statistics.fmean(_loss(module(**reader.held_out(m, BATCH))) for m in range(HELD_OUT))


def _loss(output: Any) -> float:
    return float(output if isinstance(output, Tensor) else output["loss"])


if __name__ == "__main__":
    from shoal.benchmarks.table import report

    report("recipe", figures())
