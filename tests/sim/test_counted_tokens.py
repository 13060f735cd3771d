"""A loss that is a mean over counted tokens, of which samples have none to all: whatever the plan
and the microbatches, a step is that of one backward pass over the mean of the whole batch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.dag.plan.plan import PeerId, Plan, StageSlot, Visit
from shoal.job import Job
from shoal.sim.virtual.orders import Orders
from shoal.sim.virtual.world import PeerSpec
from shoal.tests.sim.played_rounds import Rounds, sites, sync_of

STEPS, BATCH, LENGTH, WORDS, CLIP, LR = 6, 8, 6, 9, 0.5, 0.5


class Next(nn.Module):
    """Mean cross-entropy over the labels that are not -100, and their number as weight."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.middle = nn.Embedding(WORDS, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, WORDS)

    def logits(self, x: Tensor) -> Tensor:
        made: Tensor = self.head(self.middle(self.words(x)).tanh())
        return made

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        count = (y != -100).sum()
        flat = self.logits(x).flatten(0, 1)
        total = F.cross_entropy(flat, y.flatten(), reduction="sum")
        return {"loss": total / count.clamp(min=1), "weight": count.float()}


def job_of(folder: Path, microbatch: int) -> Job:
    rng = np.random.default_rng(1)
    x = rng.integers(0, WORDS, (60, LENGTH))
    y = rng.integers(0, WORDS, (60, LENGTH))
    for sample, counted in enumerate(rng.permutation(60) % (LENGTH + 1)):
        y[sample, counted:] = -100
    y[:, 0][rng.random(60) < 0.3] = -100
    np.savez(folder / "data.npz", x=x, y=y)
    torch.manual_seed(3)
    return Job(
        name=f"counted {microbatch}",
        model=Next(),
        data={"kind": "arrays", "source": "data.npz", "holdout": 0.3},
        train={"steps": STEPS, "batch": BATCH, "microbatch": microbatch, "optimizer": "sgd"}
        | {"lr": LR, "momentum": 0.0, "weight_decay": 0.0, "schedule": "constant", "warmup": 0}
        | {"clip": CLIP, "eval_every": STEPS, "eval_batches": 2},
        folder=folder,
    )


def joined(parts: list[dict[str, Tensor]]) -> tuple[Tensor, Tensor]:
    return torch.cat([p["x"] for p in parts]), torch.cat([p["y"] for p in parts])


def mean_over_all(module: Any, parts: list[dict[str, Tensor]]) -> Tensor:
    x, y = joined(parts)
    return F.cross_entropy(module.logits(x).flatten(0, 1), y.flatten(), ignore_index=-100)


def plan_of(lab: Any, schedule: Any) -> Plan:
    """Two stages, whose microbatches are divided among their holders unevenly."""
    a, b, c, d = (PeerId(p) for p in "abcd")
    n, count = len(lab.graph.operators), lab.job.train.microbatches
    slots = (StageSlot(0, n // 2, (a, b)), StageSlot(n // 2, n, (c, d)))
    first, second = (a, a, a, b), (c, d, d, d)
    routes = tuple((Visit(0, first[m % 4]), Visit(1, second[m % 4])) for m in range(count))
    tried = (routes * 2)[: lab.job.train.evaluation_microbatches]
    return Plan(
        slots, routes, lab.job.train.microbatch_size, schedule=schedule, evaluation_routes=tried
    )


@pytest.mark.parametrize(
    ("microbatch", "schedule"),
    [
        (2, "zero-bubble"),
        *(pytest.param(m, "gpipe", marks=pytest.mark.slow) for m in (1, 4, 8)),
    ],
)
def test_a_step_is_one_backward_over_the_whole_batch(
    laboratory: Callable[..., Any], tmp_path: Path, microbatch: int, schedule: str
) -> None:
    lab = laboratory(job_of(tmp_path, microbatch))
    module, reader, train = copy.deepcopy(lab.module), lab.reader(), lab.job.train
    optimizer = torch.optim.SGD(module.parameters(), lr=LR)
    losses, norms, counts = [], [], set()
    for step in range(STEPS):
        parts = [reader.batch(step, m, microbatch) for m in range(train.microbatches)]
        counts |= {int((p["y"] != -100).sum()) for p in parts}
        loss = mean_over_all(module, parts)
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), CLIP)))
        optimizer.step()
        losses.append(float(loss.detach()))
    assert microbatch == BATCH or len(counts) > 3, "microbatches count for much, little or nothing"
    assert max(norms) > CLIP > min(norms)
    got = lab.train(lab.world([PeerSpec(name=p) for p in "abcd"]), plan_of(lab, schedule))
    assert got.losses == pytest.approx(losses, rel=1e-5)
    assert got.norms == pytest.approx(norms, rel=1e-4)
    for name, tensor in module.state_dict().items():
        torch.testing.assert_close(got.weights[name], tensor, rtol=1e-4, atol=1e-6)
    count = train.evaluation_microbatches
    with torch.no_grad():
        held = mean_over_all(module, [reader.held_out(m, microbatch) for m in range(count)])
    assert got.evaluations == [pytest.approx(float(held), rel=1e-5)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "optimizer"),
    [
        *((m, {}) for m in ("average", "diloco", "streaming-diloco", "noloco")),
        # No parameter of this model is without a gradient.
        ("average", {"optimizer": "lion", "lr": 0.01, "betas": [0.9, 0.99]}),
    ],
)
def test_in_rounds_each_replica_steps_by_the_mean_over_its_own(
    laboratory: Callable[..., Any], tmp_path: Path, method: str, optimizer: dict[str, Any]
) -> None:
    job = job_of(tmp_path, 1)
    lab = laboratory(replace(job, name="counted rounds"))
    rounds = Rounds.__new__(Rounds)
    rounds.lab, rounds.orders = lab, Orders()
    train = {"steps": 12, "batch": 12, "eval_every": 6, "eval_batches": 1} | optimizer
    sync = sync_of(method) | {"every": 4 if method == "streaming-diloco" else 2}
    world, run = rounds.play(sites(1e6, 3e6), train=train, sync=sync, plan={"replicas": 2})
    counts = {(e.replica, e.step.outcome.weight) for e in world.events(run) if e.HasField("step")}
    assert len(counts) > 6, "their steps count differently many"
    rounds.assert_expected(world, run)
