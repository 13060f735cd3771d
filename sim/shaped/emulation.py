"""How a core of this machine stands for the device of a scenario: it is stretched.

    stretch = seconds of a step on the device, by the cost model / CPU seconds of the step here

The step is one of the job that is to run, measured as the plain loop on one thread; so whatever the
cost model gets wrong of this machine is not in it, and one number does for a device whose classes
of work are not slower in the same proportion: by the job's own mixture of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from statistics import median

import torch
from torch import nn

from ...dag.cost.cost import cost
from ...dag.cost.pace import UPDATE_CALLS, IntervalWork
from ...dag.cost.speed import Speeds, Work
from ...dag.ir.graph import Graph
from ...job import Train
from .. import oracle

__all__ = ["cpu_seconds", "step_work", "stretch_of"]

STEPS = 3
"""Steps that are measured, after one that is not."""


def step_work(graph: Graph, train: Train) -> Work:
    """The work of a step of a job on a device that does all of it, in microbatches: forward,
    backward, adding gradients up, the norm and the update (dag/cost/pace.py has the same terms)."""
    bound = graph.bind(train.microbatch_size)
    count, slots = train.microbatches, 2 if train.optimizer == "adamw" else 1
    forward, backward = IntervalWork(cost(bound)).work(0, len(bound.operators))
    parameters = [p.spec for p in bound.parameters if p.trainable]
    trained = 4 * sum(spec.elements for spec in parameters)
    passes = 3 * (count - 1) + 1 + 5 + 2 * slots
    rest = Work(memory=passes * trained, calls=UPDATE_CALLS * len(parameters))
    return (forward + backward).times(count) + rest


def cpu_seconds(
    module: nn.Module,
    batches: oracle.Batches,
    train: Train,
    *,
    clock: Callable[[], float] = time.thread_time,
) -> float:
    """The median CPU time of a step here, in one thread; it trains the module. `clock`: seconds of
    the calling thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    ends: list[float] = []

    def timed(step: int, microbatch: int) -> dict[str, torch.Tensor]:
        if microbatch == 0:
            ends.append(clock())
        return dict(batches(step, microbatch))

    try:
        oracle.train(module, timed, train, steps=STEPS + 1, microbatches=train.microbatches)
    finally:
        torch.set_num_threads(threads)
    ends.append(clock())
    return median(b - a for a, b in pairwise(ends[1:]))


def stretch_of(device: Speeds, work: Work, here_s: float, time_scale: float = 1.0) -> float:
    """How many times its CPU time a step must take here to take as long as on the device. Raises
    ValueError for a device that is faster than a core of this machine."""
    wanted = device.seconds(work)
    stretch = time_scale * wanted / here_s
    if stretch < 1:
        least = here_s / wanted
        raise ValueError(
            f"a step takes {wanted:.3g} s on the device and {here_s:.3g} s of a core here: "
            f"expected a slower device, or a time_scale of at least {least:.3g}"
        )
    return stretch
