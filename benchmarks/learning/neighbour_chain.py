"""A pipeline of six stages in one process, which loses stages and makes them anew.

Executors, optimizers and the rebuilding (dag/execute/neighbour.py) are those of peers; only time
and frames are missing. The embedding, its tied twin the head, and the last norm are parts of their
own here, which are never lost: a run keeps them twice. So what a loss takes is two blocks of the
twelve, with their optimizer's state.

With `swaps` every second microbatch visits the first stage after the second one, and the last
before the last but one (CheckFree+). Evaluations visit them in order.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

from shoal.benchmarks.learning.chain import Setting, fuse
from shoal.dag.analysis.blocks import blocks
from shoal.dag.capture.capture import capture
from shoal.dag.execute.execute import StageExecutor
from shoal.dag.execute.neighbour import BOOST, rebuild
from shoal.dag.ir.graph import Graph
from shoal.dag.plan.cut import cut, tied_groups
from shoal.peer.data.reader import Reader
from shoal.peer.sync.gradient_vector import add
from shoal.peer.sync.optimizer import StageOptimizer

__all__ = ["HOURLY_STEPS", "Chain", "losses"]

HOURLY_STEPS = 3600 / 91.3
"""Of the paper's set-up, whose step takes 91.3 s."""
SWAPPED = ((1, 2), (5, 6))
"""Parts that change places; 0 is the embedding and 7 the head."""


def losses(setting: Setting, hourly: float, seed: int) -> dict[int, list[int]]:
    """By number of updates done, the stages (from 0) that are lost then; each with probability
    1 - (1 - hourly)^(1 / HOURLY_STEPS) after each step."""
    chance, rng = 1 - (1 - hourly) ** (1 / HOURLY_STEPS), random.Random(f"{hourly} {seed}")
    drawn = {
        done: [k for k in range(setting.stages) if rng.random() < chance]
        for done in range(1, setting.steps)
    }
    return {done: lost for done, lost in drawn.items() if lost}


class Chain:
    """Embedding, six stages of two blocks, head."""

    def __init__(self, setting: Setting, seed: int, *, swaps: bool) -> None:
        self.setting, self.seed, self.swaps = setting, seed, swaps
        torch.manual_seed(seed)
        tensors = dict(setting.model().named_parameters())
        self.microbatches = 2 if swaps else 1
        self.size = setting.batch // self.microbatches
        self.graph = _graph(setting).bind(self.size)
        first = {b.name: b.start for b in blocks(self.graph)}
        last = next(b for b in blocks(self.graph) if b.name == f"blocks.{setting.blocks - 1}")
        each = setting.blocks // setting.stages
        starts = [first[f"blocks.{each * k}"] for k in range(setting.stages)]
        bounds = list(pairwise([0, *starts, last.stop, len(self.graph.operators)]))
        self.parts = cut(self.graph, bounds)
        assert all(len(p.sends) == 1 and p.sends[0].grad for p in self.parts[:-1]), "not a chain"
        self.tied = tied_groups(self.graph, self.parts)
        self.executors = [StageExecutor(self.graph, p, tensors) for p in self.parts]
        large = _graph(setting).bind(setting.eval_size)
        self._judges = [StageExecutor(large, p, tensors) for p in cut(large, bounds)]
        self.optimizers = [
            StageOptimizer(setting.train, e.parameters, weighs=True) for e in self.executors
        ]
        for optimizer in self.optimizers:
            fuse(optimizer)

    # ------------------------------------------------------------ a step

    def step(self, step: int, data: Reader) -> float:
        """One update; the mean loss."""
        found = [
            self._forward_backward(step, m, data.batch(step, m, self.size))
            for m in range(self.microbatches)
        ]
        for group in self.tied:
            copies = [self.executors[k].parameters[group.parameter] for k in group.stages]
            total = add([c.grad for c in copies if c.grad is not None])
            for copy in copies:
                copy.grad = total.clone()
        squares = {
            name: float(torch.linalg.vector_norm(p.grad)) ** 2
            for e in self.executors
            for name, p in e.parameters.items()
            if p.grad is not None
        }
        norm = math.sqrt(math.fsum(squares.values())) / self.microbatches
        for optimizer, executor in zip(self.optimizers, self.executors, strict=True):
            optimizer.step(step, weight=self.microbatches, norm=norm)
            executor.zero_grad()
        return sum(found) / len(found)

    def order(self, microbatch: int) -> list[int]:
        """The parts that a microbatch visits."""
        order = list(range(len(self.parts)))
        for a, b in SWAPPED if self.swaps and microbatch % 2 else ():
            order[a], order[b] = b, a
        return order

    def _forward_backward(self, step: int, m: int, inputs: Mapping[str, Tensor]) -> float:
        order, value = self.order(m), dict[str, Tensor]()
        for k in order:
            ports = {p.value: value[""] for p in self.parts[k].receives}
            made = self.executors[k].forward(step, m, ports, inputs)
            value = dict.fromkeys([""], *made.ports.values())  # none behind the last
        grad: Tensor | None = None
        for k in reversed(order):
            grads = {p.value: grad for p in self.parts[k].sends}
            (grad,) = self.executors[k].backward(step, m, grads).values() or (None,)
        return float(made.results[self.graph.loss])

    # ------------------------------------------------------------ losses

    def lose(self, stages: Sequence[int], how: str, step: int) -> None:
        """What these stages (from 0) had is gone: weights and state of the optimizer. `how` says
        what they get instead: "random", "copy" (of the block before, or the one behind the first),
        or "mean" (CheckFree)."""
        gone = [k + 1 for k in stages]
        alive = [k for k in range(len(self.parts)) if k not in gone]
        plan = rebuild(self.graph, self.parts, gone, alive, swapped=SWAPPED if self.swaps else ())
        assert not plan.lacking, plan.why_not
        tensors = {n: t for k in alive for n, t in self.executors[k].parameters.items()}
        squares = {n: float(s) for k in alive for n, s in self.optimizers[k].squares.items()}
        if how == "random":
            torch.manual_seed(hash((self.seed, step)) % 2**31)
            fresh = dict(self.setting.model().named_parameters())
            made = {name: fresh[name].detach() for name in plan.means}
        elif how == "copy":
            made = {n: tensors[origins[0][0]].detach().clone() for n, origins in plan.means.items()}
        else:
            made = dict(plan.made(tensors, squares))
        for k in gone:
            mine = self.executors[k].parameters
            assert mine.keys() <= made.keys()
            for name, parameter in mine.items():
                parameter.data.copy_(made[name])
            self.optimizers[k].reset(mine)
            self.optimizers[k].boost(mine, BOOST)

    # ------------------------------------------------------------ evaluation

    def evaluate(self, data: Reader, windows: int) -> float:
        """Mean loss over the first held-out `windows`."""
        size = self.setting.eval_size
        for judge, executor in zip(self._judges, self.executors, strict=True):
            for name, parameter in judge.parameters.items():
                parameter.data.copy_(executor.parameters[name].data)
        count: int = windows // size
        total = 0.0
        assert count * size == windows > 0, f"{windows} windows in microbatches of {size}"
        for m in range(count):
            inputs, value = data.held_out(m, size), dict[str, Tensor]()
            for judge in self._judges:
                made = judge.evaluate(value, inputs)
                value = made.ports
            total += float(made.results[self.graph.loss])
        return total / count


@cache
def _graph(setting: Setting) -> Graph:
    """Captured once in a process."""
    example = torch.zeros(2, setting.length, dtype=torch.int64)
    return capture(setting.model(), {"x": example, "y": example}).graph
