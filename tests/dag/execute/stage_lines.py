"""Stages of a cut of small models, trained for one step in one process."""

from __future__ import annotations

import itertools
import random
from functools import cache

import torch
from torch import Tensor

from shoal.dag.capture.capture import Captured, capture
from shoal.dag.execute.execute import Forwarded, StageExecutor
from shoal.dag.execute.gradients import Gradients
from shoal.dag.ir.graph import Graph, Lowered
from shoal.dag.plan.cut import cut
from shoal.dag.transforms.lower import lower
from shoal.examples.gpt import gpt
from shoal.examples.moe import moe
from shoal.examples.resnet_digits import resnet
from shoal.examples.unet import unet

BATCH, MICROBATCHES = 3, 3
MODELS = {
    "gpt": lambda: gpt(layers=2, width=16, heads=2, length=8, dropout=0.2),
    "moe": lambda: moe(layers=1, width=16, heads=2, experts=3, length=8),
    "resnet": lambda: resnet(width=4, blocks=1),
    "unet": lambda: unet(width=4, depth=1),
}


def batch(name: str, seed: int) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    if name in ("gpt", "moe"):
        x, y = torch.randint(0, 256, (2, BATCH, 8), generator=rng)
        return {"x": x, "y": y}
    if name == "resnet":
        x = torch.rand(BATCH, 1, 8, 8, generator=rng)
        return {"x": x, "y": torch.randint(0, 10, (BATCH,), generator=rng)}
    x, y = torch.rand(2, BATCH, 1, 8, 8, generator=rng)
    return {"x": x, "y": y.round()}


@cache
def model(name: str) -> tuple[Captured, Graph, Lowered]:
    torch.manual_seed(7)
    captured = capture(MODELS[name](), batch(name, 0))
    graph = captured.graph.bind(BATCH)
    return captured, graph, lower(graph)


class Line:
    """The stages of a cut in one process, those in `again` with recomputation; with `halves`, each
    backward is split, and second halves come at times drawn from it."""

    def __init__(
        self,
        name: str,
        cuts: list[int],
        again: set[int],
        core: bool = False,
        halves: random.Random | None = None,
    ) -> None:
        self.halves = halves
        captured, graph, lowered = model(name)
        edges = [0, *cuts, len(graph.operators)]
        self.stages = cut(graph, list(itertools.pairwise(edges)))
        self.executors = [
            StageExecutor(
                lowered.graph if core else graph,
                stage,
                captured.tensors,
                seed=11,
                operators=(lowered.start[stage.start], lowered.start[stage.stop]) if core else None,
                recompute=stage.index in again,
                split=halves is not None,
            )
            for stage in self.stages
        ]

    def backward(
        self, executor: StageExecutor, m: int, grads: Gradients
    ) -> dict[str, Tensor | None]:
        if self.halves is None:
            return executor.backward(4, m, grads, weight=0.5)
        back = executor.backward_input(4, m, grads, weight=0.5)
        while executor.waiting and (m == MICROBATCHES - 1 or self.halves.random() < 0.5):
            executor.backward_weight(*executor.waiting[0])
        return back

    def step(self, name: str) -> list[dict[str, Tensor | None]]:
        """One step of microbatches that are all live at once; everything that it made."""
        found: list[dict[str, Tensor | None]] = []
        outs: list[list[Forwarded]] = [[] for _ in self.stages]
        for m in range(MICROBATCHES):
            values: dict[str, Tensor] = {}
            for stage, executor in zip(self.stages, self.executors, strict=True):
                ports = {p.value: values[p.value].clone() for p in stage.receives}
                out = executor.forward(4, m, ports, batch(name, m))
                outs[stage.index].append(out)
                values |= out.ports
                found += [dict(out.ports), dict(out.results), dict(out.updates)]
        for m in range(MICROBATCHES):
            grads: dict[str, dict[int, Tensor | None]] = {}
            for stage, executor in reversed(list(zip(self.stages, self.executors, strict=True))):
                if not stage.has_backward:
                    continue
                given_ = {
                    p.value: [grads[p.value][t] for t in p.grad_targets]
                    for p in stage.sends
                    if p.grad
                }
                back = self.backward(executor, m, given_)
                found.append(dict(back))
                for value, grad in back.items():
                    grads.setdefault(value, {})[stage.index] = grad
        for executor, made in zip(self.executors, outs, strict=True):
            assert executor.live == executor.waiting == ()
            found.append({n: p.grad for n, p in executor.parameters.items()})
            executor.apply_updates([out.updates for out in made])
            found.append({**executor.buffers})
        return found


def assert_same_bits(
    got: list[dict[str, Tensor | None]], want: list[dict[str, Tensor | None]]
) -> None:
    for a, b in zip(got, want, strict=True):
        assert a.keys() == b.keys()
        for key, x in a.items():
            y = b[key]
            assert (x is None and y is None) or (
                x is not None and y is not None and torch.equal(x, y)
            ), key
