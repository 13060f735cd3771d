"""What optimizer states in 8 and 16 bits and weights in bfloat16 cost in learning, with the
rounding that peers have and with rounding to the nearest.

    python benchmarks/learning/states.py [--json FILE] [--steps 400] [--seeds 3] [--only VARIANT]

The examples' GPT, small (two blocks of width 32 over windows of 32 bytes), trained on the standard
library's sources by one process with a peer's own optimizer (`peer/sync/optimizer.py`). All is
computed in float32, so that nothing differs but what is kept between two steps:

states    AdamW's two moments in bfloat16 (`train.state_dtype`)
weights   trained weights and their gradients in bfloat16, no other copy (`model.trained_dtype`)
both      the two together: 6 bytes a trained number in place of 16
8bit      the two moments of matrices in 8 bits (`train.optimizer = "adamw8bit"`), 2 bytes in place
          of 8; what is too small for a code is rounded up, to the nearest it would be a 0

Each at two second betas: 0.95, Shoal's default, of which a step changes the moment by 5 %, and
0.999, by 0.1 %, which is less than half the distance of two bfloat16 numbers. The figures
`states_VARIANT_RULE_BETA` are how much higher the held-out loss is at the end than with everything
in float32, relatively, as the mean over seeds; `states_spread` is the largest difference of two
seeds in float32, relatively.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from shoal.benchmarks.table import Figure, arguments, report
from shoal.client.front import SimulationFront
from shoal.job import Job
from shoal.peer.data.reader import Reader
from shoal.peer.optimizers import blockwise
from shoal.peer.sync import narrow
from shoal.peer.sync.optimizer import StageOptimizer

FAST, SLOW = 0.95, 0.999
BATCH, HELD_OUT = 8, 32
VARIANTS = {
    "states": {"state_dtype": "bf16"},
    "weights": {"weights": "bf16"},
    "both": {"state_dtype": "bf16", "weights": "bf16"},
    "8bit": {"optimizer": "adamw8bit"},
}
OF_WEIGHTS = ("weights", "both")
"""Variants of which betas change little."""


def figures(steps: int = 400, seeds: int = 3, only: str = "") -> list[Figure]:
    found: list[Figure] = []
    spread = 0.0
    for second in (FAST, SLOW):
        plain = [_held_out(seed, steps, second) for seed in range(seeds)]
        spread = max(spread, (max(plain) - min(plain)) / min(plain))
        print(f"fp32 beta2 {second}:", *(f"{x:.4f}" for x in plain), flush=True)
        for name, options in VARIANTS.items():
            if only not in ("", name) or (second == SLOW and name in OF_WEIGHTS):
                continue
            for rule in ("up" if name == "8bit" else "stochastic", "nearest"):
                with _rounding(rule):
                    losses = [_held_out(seed, steps, second, **options) for seed in range(seeds)]
                print(f"{name} {rule} beta2 {second}:", *(f"{x:.4f}" for x in losses), flush=True)
                worse = statistics.mean(a / b - 1 for a, b in zip(losses, plain, strict=True))
                found.append(Figure(f"states_{name}_{rule}_{second}", worse, "ratio", "lower"))
    return [*found, Figure("states_spread", spread, "ratio", "lower")]


def _job(seed: int, steps: int, second: float, optimizer: str, state_dtype: str) -> Job:
    args = {"layers": 2, "width": 32, "heads": 2, "length": 32, "dropout": 0.0}
    train: dict[str, Any] = {
        **{"steps": steps, "batch": BATCH, "microbatch": BATCH, "lr": 2e-3, "eval_every": 0},
        **{"optimizer": optimizer, "betas": [0.9, second], "state_dtype": state_dtype},
    }
    return Job.from_table(
        {
            **{"version": 1, "name": "states", "seed": seed},
            "model": {"factory": "shoal.examples.gpt:gpt", "args": args},
            "data": {"length": 32},
            "train": train,
        }
    )


def _held_out(
    seed: int,
    steps: int,
    second: float,
    *,
    optimizer: str = "adamw",
    state_dtype: str = "fp32",
    weights: str = "fp32",
) -> float:
    """The held-out loss after training."""
    job = _job(seed, steps, second, optimizer, state_dtype)
    front = SimulationFront()
    facts = front.prepared(job)
    reader = Reader(facts.manifest, facts.shards.__getitem__, seed=seed, microbatches=1)
    with front.module(job) as module:
        kept = torch.bfloat16 if weights == "bf16" else torch.float32
        parameters = {n: nn.Parameter(p.detach().to(kept)) for n, p in module.named_parameters()}
        update = StageOptimizer(job.train, parameters, seed=seed)

        def loss(batch: dict[str, Tensor]) -> Tensor:
            wide = {n: p.float() for n, p in parameters.items()}
            out: Any = functional_call(module, wide, (), batch)
            found: Tensor = out if isinstance(out, Tensor) else out["loss"]
            return found

        for step in range(steps):
            loss(reader.batch(step, 0, BATCH)).backward()  # type: ignore[no-untyped-call]
            grads = [p.grad for p in parameters.values() if p.grad is not None]
            norm = float(torch.stack([g.double().norm() for g in grads]).norm())
            update.step(step, weight=1.0, norm=norm)
            for p in parameters.values():
                p.grad = None
        module.eval()
        with torch.no_grad():
            each = [float(loss(reader.held_out(m, BATCH))) for m in range(HELD_OUT)]
        module.train()
    return statistics.mean(each)


@contextmanager
def _rounding(rule: str) -> Iterator[None]:
    parts, ends = vars(narrow), blockwise._ends(False)
    own, first_end = parts["rounded"], ends[0].clone()
    if rule == "nearest":
        parts["rounded"] = lambda x, first, *, key: x.to(torch.bfloat16)
        ends[0] = blockwise.dynamic_table(False)[1] / 2
        blockwise._first_codes.cache_clear()
    try:
        yield
    finally:
        parts["rounded"] = own
        ends[0] = first_end
        blockwise._first_codes.cache_clear()


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="", choices=VARIANTS)
    options = parser.parse_args()
    began = time.monotonic()
    found = figures(options.steps, options.seeds, options.only)
    report("large_states", found, options.json)
    print(f"took {time.monotonic() - began:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
