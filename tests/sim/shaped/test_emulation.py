"""By how much a core is stretched to stand for a device."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from shoal.client.submission import prepare
from shoal.dag.cost.cost import cost
from shoal.dag.cost.speed import Speeds, Work
from shoal.job import Job, Train
from shoal.sim.shaped.staging import STEPS, cpu_seconds, step_work, stretch_of


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return ((x * self.weight) ** 2).sum()


def test_the_cpu_time_of_a_step_is_the_median_after_the_first() -> None:
    """A clock that goes on in the batches only: 9 s in the first step, then 2, 4 and 3 s."""
    now, steps = [100.0], {0: 9.0, 1: 2.0, 2: 4.0, 3: 3.0}

    def batches(step: int, microbatch: int) -> Mapping[str, Tensor]:
        now[0] += steps[step] / 2
        return {"x": torch.ones(3)}

    assert STEPS == 3
    threads = torch.get_num_threads()
    train = Train(steps=4, batch=2, microbatch=1)
    assert cpu_seconds(Line(), batches, train, clock=lambda: now[0]) == 3.0
    assert torch.get_num_threads() == threads


def test_the_work_of_a_step_is_that_of_its_microbatches_and_its_update(tmp_path: Path) -> None:
    job = Job.from_table(
        {
            "version": 1,
            "name": "emulation",
            "model": {
                "factory": "shoal.examples.gpt:gpt",
                "args": {"layers": 1, "width": 32, "heads": 1, "length": 16, "dropout": 0.0},
            },
            "data": {"length": 16},
            "train": {"steps": 1, "batch": 6, "microbatch": 2, "eval_every": 0},
        }
    )
    with prepare(job) as prepared:
        graph, train = prepared.graph, prepared.job.train
    found = step_work(graph, train)
    products = sum(c.forward.product + c.backward.product for c in cost(graph.bind(2)))
    assert found.product == pytest.approx(3 * products)
    # Twice the microbatches: everything but the update twice, and gradients are added up 3 times.
    more = step_work(graph, Train(steps=1, batch=12, microbatch=2))
    assert more.product == pytest.approx(2 * found.product)
    trained = 4 * sum(p.spec.elements for p in graph.parameters if p.trainable)
    assert found.memory > (3 * 2 + 1 + 5 + 4) * trained
    sgd = step_work(graph, Train(steps=1, batch=6, microbatch=2, optimizer="sgd"))
    assert found.memory - sgd.memory == pytest.approx(2 * trained)


def test_a_core_is_stretched_to_the_time_that_the_device_takes() -> None:
    device, work = Speeds.of_flops(1e9), Work(product=4e9)
    assert stretch_of(device, work, here_s=0.5) == 8.0
    assert stretch_of(device, work, here_s=0.5, time_scale=2.0) == 16.0


def test_a_device_that_is_faster_than_a_core_needs_a_time_scale() -> None:
    device, work = Speeds.of_flops(1e9), Work(product=1e9)
    with pytest.raises(ValueError, match="time_scale of at least 4"):
        stretch_of(device, work, here_s=4.0)
    assert stretch_of(device, work, here_s=4.0, time_scale=4.0) == 1.0
