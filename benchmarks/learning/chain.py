"""A model as a pipeline of six stages in one process, whose every crossing goes through a codec.

The stages are those of capture and cut, the codecs those of peers, and so is the update. What
crosses a cut becomes bytes and is decoded from these bytes alone: activations on their way there,
their gradients on their way back, and with several replicas the gradients of the parameters. So the
mathematics is that of a run on six peers; only time is missing.

Codecs are named by their texts (compression/codec.py). Held-out loss is measured twice: through the
codecs, which is what a run reports, and of the weights alone, which is what its user gets.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from shoal.benchmarks.learning.wire import SUPPORT, Codecs, Crossing, Use
from shoal.dag.capture.capture import capture
from shoal.dag.execute.execute import StageExecutor
from shoal.dag.ir.graph import Graph
from shoal.dag.ir.random import step_key
from shoal.dag.plan.cut import cut, tied_groups
from shoal.dag.plan.plan import PeerId
from shoal.dag.plan.strategies import parse_strategy
from shoal.examples.gpt import GPT, gpt
from shoal.job import Train
from shoal.peer.data.manifest import Manifest
from shoal.peer.data.reader import Reader
from shoal.peer.data.sources import resolve
from shoal.peer.sync.ahead import StepAheadEF
from shoal.peer.sync.gradient_vector import Layout, add, grads_of, parts_of, set_grads, vector_of
from shoal.peer.sync.optimizer import StageOptimizer
from shoal.peer.sync.strategy import Holder

__all__ = ["Data", "Pipeline", "Setting", "fuse"]


@dataclass(frozen=True, slots=True)
class Setting:
    """The model, its training and how it is judged. The byte GPT of examples/, small."""

    steps: int = 2000
    blocks: int = 12
    stages: int = 6
    width: int = 32
    heads: int = 2
    length: int = 32
    """Bytes of a window."""
    batch: int = 16
    """Windows of a step, over all replicas. Fewer leave runs further apart that differ in rounding
    only."""
    lr: float = 4e-3
    beta2: float = 0.95
    """Of AdamW, the job's default."""
    eval_every: int = 100
    eval_windows: int = 128
    """Of an evaluation on the way; all runs see the same windows."""
    eval_size: int = 64
    """Windows at a time where the weights alone are judged."""
    final_windows: int = 2048
    """Of the last evaluation."""

    @property
    def train(self) -> Train:
        return Train(steps=self.steps, batch=self.batch, lr=self.lr, betas=(0.9, self.beta2))

    def model(self) -> GPT:
        """Fresh, from torch's random numbers."""
        return gpt(self.blocks, self.width, self.heads, self.length, dropout=0.0)


class Pipeline:
    """Six executors in a row, and an optimizer for each."""

    def __init__(self, setting: Setting, codecs: Codecs, seed: int) -> None:
        self.setting, self.codecs, self.seed = setting, codecs, seed
        graph_of_any = _graph(setting)
        torch.manual_seed(seed)
        tensors = dict(setting.model().named_parameters())
        self.size = setting.batch // codecs.replicas
        """Windows of a microbatch: what one replica has of a step."""
        graph = graph_of_any.bind(self.size)
        # A block begins with its first norm; two norms a block.
        norms = [i for i, o in enumerate(graph.operators) if o.name.startswith("layer_norm")]
        firsts = norms[:: 2 * setting.blocks // setting.stages][: setting.stages]
        starts = [0, *firsts[1:], len(graph.operators)]
        bounds = list(itertools.pairwise(starts))
        self.stages = cut(graph, bounds)
        assert all(len(s.sends) == 1 and s.sends[0].grad for s in self.stages[:-1]), "not a chain"
        self.tied = tied_groups(graph, self.stages)
        self.executors = [StageExecutor(graph, s, tensors) for s in self.stages]
        large = graph_of_any.bind(setting.eval_size)
        self._judges = [StageExecutor(large, s, tensors) for s in cut(large, bounds)]
        self.optimizers = [StageOptimizer(setting.train, e.parameters) for e in self.executors]
        for optimizer in self.optimizers:
            fuse(optimizer)
        self.layouts = [
            Layout(tuple((n, graph.spec[f"param:{n}"]) for n in s.trainable)) for s in self.stages
        ]
        self.loss = graph.loss
        cuts = range(setting.stages - 1)
        self.uses = {
            role: [Use() for _ in range(count)]
            for role, count in (
                ("activation", len(cuts)),
                ("activation_grad", len(cuts)),
                ("grad", len(self.stages)),
            )
        }
        # A stream belongs to one transfer of the plan: (role, microbatch, where).
        self._crossings: dict[tuple[str, int, int], Crossing] = {}
        self._ahead: list[list[StepAheadEF]] = []
        """Of each replica's stages, where they step ahead; in turn, for they share parameters."""
        for _ in range(codecs.replicas if codecs.ahead else 0):
            replica = len(self._ahead)
            self._ahead.append([self._stepping(replica, k) for k in self._numbers])

    # ------------------------------------------------------------ a step

    def _stepping(self, replica: int, k: int) -> StepAheadEF:
        executor = self.executors[k]
        optimizer = StageOptimizer(self.setting.train, executor.parameters)
        fuse(optimizer)
        layout, of = self.layouts[k], self.codecs.replicas
        return StepAheadEF(
            Holder(
                layout=layout,
                parameters=executor.parameters,
                optimizer=optimizer,
                own=1,
                count=of,
                unsent=lambda: self._unsent(replica, k),
                peer=PeerId(f"r{replica}"),
                holders=tuple(PeerId(f"r{i}") for i in range(of)),
                tied=frozenset(),
                choice=parse_strategy("ahead"),
                device=executor.device,
            )
        )

    def step(self, step: int, batches: Sequence[Mapping[str, Tensor]]) -> float:
        """One update from one batch per replica; the mean loss."""
        if self._ahead:
            return self._step_ahead(step, batches)
        losses, vectors = [], []
        for replica, inputs in enumerate(batches):
            for executor in self.executors:
                executor.zero_grad()
            losses.append(self._forward_backward(step, replica, inputs))
            if len(batches) > 1:
                vectors.append([self._sent_grads(step, replica, k) for k in self._numbers])
        for k in self._numbers if vectors else ():
            total = add([of_replica[k] for of_replica in vectors])
            set_grads(self.executors[k].parameters, grads_of(self.layouts[k], total))
        self._tie()
        squares = self._squares()
        for optimizer in self.optimizers:
            optimizer.step(step, weight=len(batches), norm=math.sqrt(squares) / len(batches))
        for executor in self.executors:
            executor.zero_grad()
        return sum(losses) / len(losses)

    def _step_ahead(self, step: int, batches: Sequence[Mapping[str, Tensor]]) -> float:
        losses, vectors = [], []
        for replica, inputs in enumerate(batches):
            for k, ahead in enumerate(self._ahead[replica]):
                self.executors[k].zero_grad()
                ahead.before_forward()
            losses.append(self._forward_backward(step, replica, inputs))
            self._tie()
            for ahead in self._ahead[replica]:
                ahead.on_gradient(step)
            vectors.append([self._sent_grads(step, replica, k) for k in self._numbers])
            for k, ahead in enumerate(self._ahead[replica]):
                self.executors[k].zero_grad()
                ahead.update(step, weight=1.0, norm=0.0)  # without a gradient: to where it left
        for k in self._numbers:
            total = add([of_replica[k] for of_replica in vectors])
            set_grads(self.executors[k].parameters, grads_of(self.layouts[k], total))
        self._tie(mean=True)
        for k, ahead in enumerate(self._ahead[0]):
            ahead.update(step, weight=1.0, norm=0.0)
            self.executors[k].zero_grad()
        return sum(losses) / len(losses)

    def _unsent(self, replica: int, k: int) -> dict[str, Tensor]:
        crossing = self._crossings.get(("grad", replica, k))
        left = crossing.unsent if crossing else None
        return {} if left is None else parts_of(self.layouts[k], left)

    def _forward_backward(self, step: int, replica: int, inputs: Mapping[str, Tensor]) -> float:
        value: dict[str, Tensor] = {}
        arrived: list[dict[str, Tensor]] = []
        """By cut."""
        for k, executor in enumerate(self.executors):
            made = executor.forward(step, replica, value, inputs)
            value = {
                name: self._cross("activation", replica, k, tensor, step)
                for name, tensor in made.ports.items()
            }
            arrived.append(value)
        grads: dict[str, Tensor | None] = {}
        for k in reversed(self._numbers):
            back = self.executors[k].backward(step, replica, grads)
            grads = {
                name: None
                if grad is None
                else self._cross(
                    "activation_grad", replica, k - 1, grad, step, arrived[k - 1][name]
                )
                for name, grad in back.items()
            }
        return float(made.results[self.loss])

    def _sent_grads(self, step: int, replica: int, k: int) -> Tensor:
        """The stage's flat gradients as the other replicas get them. The flags behind them say
        whether there was a gradient at all, and go as they are."""
        layout, executor = self.layouts[k], self.executors[k]
        found = {name: executor.parameters[name].grad for name, _ in layout.parameters}
        vector = vector_of(layout, found, torch.device("cpu"))
        there = layout.elements - len(layout.parameters)
        vector[:there] = self._cross("grad", replica, k, vector[:there], step)
        return vector

    def _tie(self, *, mean: bool = False) -> None:
        """Copies of a tied parameter get the sum of their gradients, or the mean."""
        for group in self.tied:
            copies = [self.executors[k].parameters[group.parameter] for k in group.stages]
            total = add([c.grad for c in copies if c.grad is not None])
            total /= len(copies) if mean else 1
            for copy in copies:
                copy.grad = total.clone()

    def _squares(self) -> float:
        """Σ of the squares of all gradients, each tied parameter once."""
        counted: dict[str, float] = {}
        for executor in self.executors:
            for name, p in executor.parameters.items():
                if p.grad is not None:
                    counted[name] = float(torch.linalg.vector_norm(p.grad)) ** 2
        return math.fsum(counted.values())

    @property
    def _numbers(self) -> range:
        return range(len(self.executors))

    def _cross(
        self,
        role: str,
        microbatch: int,
        where: int,
        tensor: Tensor,
        step: int,
        value: Tensor | None = None,
    ) -> Tensor:
        """`microbatch` below 0: of an evaluation, which has transfers of its own. `value`: as it
        arrived, of the one whose gradient this is."""
        crossing = self._crossings.get((role, microbatch, where))
        if crossing is None:
            text = self.codecs.grad
            if role != "grad":
                texts: Sequence[str] = getattr(self.codecs, role)
                text = texts[where]
            use = self.uses[role][where] if microbatch >= 0 else None
            crossing = self._crossings[role, microbatch, where] = Crossing(text, use)
        roles = ("activation", "activation_grad", "grad")
        number = where + len(self._numbers) * roles.index(role)
        key = step_key(self.seed, step, 64 * (microbatch % 2**20) + number)
        if crossing.text.startswith(SUPPORT):
            assert value is not None, "only gradients of activations have a support"
            came: Tensor = crossing.on_support(tensor, value, key)
        else:
            came = crossing(tensor, key)
        return came

    # ------------------------------------------------------------ evaluation

    def evaluate(self, data: Reader, windows: int) -> float:
        """Mean loss of the weights alone over the first held-out `windows`."""
        for judge, executor in zip(self._judges, self.executors, strict=True):
            for name, parameter in judge.parameters.items():
                parameter.data.copy_(executor.parameters[name].data)
        size = self.setting.eval_size
        return self._evaluate(self._judges, data, windows, size, lambda tensor, m, k: tensor)

    def evaluate_on_wire(self, step: int, data: Reader, windows: int) -> float:
        """The same through the codecs, in microbatches like those of training."""

        def cross(tensor: Tensor, m: int, k: int) -> Tensor:
            return self._cross("activation", -1 - m, k, tensor, step)

        return self._evaluate(self.executors, data, windows, self.size, cross)

    def _evaluate(
        self,
        executors: Sequence[StageExecutor],
        data: Reader,
        windows: int,
        size: int,
        cross: Callable[[Tensor, int, int], Tensor],
    ) -> float:
        count = windows // size
        assert count * size == windows > 0, f"{windows} windows in microbatches of {size}"
        total = 0.0
        for m in range(count):
            inputs = data.held_out(m, size)
            value: dict[str, Tensor] = {}
            for k, executor in enumerate(executors):
                made = executor.evaluate(value, inputs)
                value = {name: cross(tensor, m, k) for name, tensor in made.ports.items()}
            total += float(made.results[self.loss])
        return total / count


@cache
def _graph(setting: Setting) -> Graph:
    """Captured once in a process."""
    example = torch.zeros(2, setting.length, dtype=torch.int64)
    return capture(setting.model(), {"x": example, "y": example}).graph


def fuse(optimizer: StageOptimizer) -> None:
    """Lets torch update all parameters in one kernel: the same formula, a quarter of the time of so
    small a step. Peers leave it to torch's default."""
    for inner in optimizer._optimizers.values():
        if isinstance(inner, torch.optim.AdamW):
            for group in inner.param_groups:
                group["fused"] = True


@dataclass(frozen=True)
class Data:
    """The standard library's sources as windows of bytes, on this machine."""

    manifest: Manifest
    paths: dict[str, Path]

    @staticmethod
    def write(folder: Path, setting: Setting) -> Data:
        """Into a folder where no other reads: readers map the files into their memory."""
        return Data(*resolve(folder, kind="text", length=setting.length))

    def reader(self, seed: int, replicas: int) -> Reader:
        """The seed decides the order of the windows, and which of the held-out ones count."""
        get = self.paths.__getitem__
        return Reader(self.manifest, get, seed=seed, microbatches=replicas)
