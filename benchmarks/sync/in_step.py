"""Methods of kind "allreduce" for learning.py: replicas whose weights are equal after every step.

A method gets the gradients of all replicas side by side, and gives what all of them take for the
mean: each number of (replicas, numbers) float32 belongs to a parameter, equal shapes side by side
(`Shapes`). What a message holds is counted as runs count it (`dag/plan/messages.py`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from shoal.benchmarks.sync.together import Together
from shoal.dag.ir.graph import TensorSpec
from shoal.dag.plan.messages import Blocks, blocks_of, layer_share, low_rank, share_of
from shoal.job import Train
from shoal.peer.sync.demo import dct
from shoal.peer.sync.low_rank import orthonormal
from shoal.sim.plain.oracle import learning_rate, optimizer_of
from shoal.sim.plain.round_oracle import Batches

__all__ = ["IN_STEP", "InStep", "train"]

Options = Mapping[str, float]
Kind = TypeVar("Kind")


class Group(NamedTuple):
    """Parameters that are handled alike. `at`: of the first number; `many`: how many they are."""

    at: int
    many: int
    shape: tuple[int, ...]

    @property
    def numbers(self) -> int:
        return self.many * math.prod(self.shape)

    def of(self, numbers: Tensor) -> Tensor:
        """(replicas, numbers) as (replicas, count, *shape), a view of them."""
        part = numbers[:, self.at : self.at + self.numbers]
        return part.view(-1, self.many, *self.shape)


@dataclass(frozen=True)
class Shapes:
    """A module's parameters, in an order in which equal ones are neighbours."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, module: nn.Module) -> Shapes:
        found = sorted((tuple(p.shape), n) for n, p in module.named_parameters())
        return cls(tuple(n for _, n in found), tuple(s for s, _ in found))

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        return tuple(TensorSpec(s, "float32") for s in self.shapes)

    @property
    def numbers(self) -> int:
        return sum(spec.elements for spec in self.specs)

    def groups(self, what: Sequence[Kind]) -> Iterator[tuple[Group, Kind]]:
        """Neighbours of one shape of which `what` is equal, too, and that."""
        at = 0
        for (shape, one), same in groupby(zip(self.shapes, what, strict=True)):
            group = Group(at, len(list(same)), shape)
            yield group, one
            at += group.numbers


class InStep(ABC):
    """`left`: what each replica has not sent yet."""

    optimizer = "adamw"

    def __init__(self, shapes: Shapes, replicas: int, options: Options) -> None:
        self.shapes, self.replicas, self.options = shapes, replicas, options
        self.left = torch.zeros(replicas, shapes.numbers)

    @abstractmethod
    def __call__(self, gradients: Tensor, step: int, lr: float) -> Tensor:
        """What all take for the mean of (replicas, numbers)."""


class GTopK(InStep):
    """A binary tree adds up the k largest numbers of each, and prunes; what is pruned stays with
    who gave it."""

    def __call__(self, gradients: Tensor, step: int, lr: float) -> Tensor:
        k = share_of(self.shapes.numbers, self.options["ratio"])
        whole = self.left + gradients
        given = largest(whole, k)

        def merged(i: int) -> tuple[Tensor, Tensor]:
            """The sum at replica i, and whose numbers are in it."""
            total, inside = given[i].clone(), torch.zeros_like(given, dtype=torch.bool)
            inside[i] = given[i] != 0
            for below in range(2 * i + 1, min(2 * i + 3, self.replicas)):
                part, came = merged(below)
                total += part
                inside |= came
            total = largest(total, k)
            return total, inside & (total != 0)

        total, inside = merged(0)
        self.left = whole.masked_fill(inside, 0.0)
        return total / self.replicas


class Lags(InStep):
    """The largest numbers of each parameter go to all; of a short one all numbers."""

    def __call__(self, gradients: Tensor, step: int, lr: float) -> Tensor:
        whole = self.left + gradients
        sent = whole.clone()
        for group, size in self.shapes.groups([s.elements for s in self.shapes.specs]):
            if k := layer_share(size, self.options["ratio"]):
                part = group.of(sent).flatten(2)
                part.copy_(largest(part, k))
        self.left = whole - sent
        return sent.mean(0)


class LowRank(InStep):
    """PowerSGD; ACP-SGD where `turns`."""

    turns = False

    def __init__(self, shapes: Shapes, replicas: int, options: Options) -> None:
        super().__init__(shapes, replicas, options)
        self.factors: dict[int, Tensor] = {}

    def __call__(self, gradients: Tensor, step: int, lr: float) -> Tensor:
        whole = self.left + gradients
        total, left = whole.mean(0, keepdim=True), torch.zeros_like(whole)
        for group, found in self.shapes.groups(low_rank(self.shapes.specs, self.options)):
            if found is None:
                continue
            right = not self.turns or found.first == (step % 2 == 0)
            a = group.of(whole) if right else group.of(whole).mT
            start = self.factor(group, a.shape[-1], found.rank)
            p = a @ start
            if self.turns:
                own, mean, after = p @ start.mT, p.mean(0) @ start.mT, p.mean(0)
            else:
                basis = orthonormal(p.mean(0))
                q = a.mT @ basis
                own, mean, after = basis @ q.mT, basis @ q.mean(0).mT, q.mean(0)
            self.factors[group.at] = orthonormal(after)
            rest = a - own
            group.of(left).copy_(rest if right else rest.mT)
            group.of(total).copy_(mean if right else mean.mT)
        self.left = left
        return total[0]

    def factor(self, group: Group, rows: int, rank: int) -> Tensor:
        """(parameters, rows, rank): the last one of a group, at first a random one."""
        if group.at not in self.factors:
            generator = torch.Generator().manual_seed(group.at)
            made = torch.randn(group.many, rows, rank, generator=generator)
            self.factors[group.at] = orthonormal(made)
        return self.factors[group.at]


class ACP(LowRank):
    turns = True


class DeMo(InStep):
    """`left` is the momentum. Its step is a sign, and the optimizer plain SGD."""

    optimizer = "sgd"

    def __call__(self, gradients: Tensor, step: int, lr: float) -> Tensor:
        self.left = self.left * self.options["decay"] + lr * gradients
        total = torch.zeros(1, self.shapes.numbers)
        for group, b in self.shapes.groups([blocks_of(s, self.options) for s in self.shapes.specs]):
            part = group.of(self.left).reshape(self.replicas, group.many, b.height, b.width)
            sent = largest(_transformed(part, b).flatten(-2), b.top)
            mean = sent.sum(0, keepdim=True) / (sent != 0).sum(0, keepdim=True).clamp(min=1)
            rest = part - _back(sent, b)
            group.of(self.left).copy_(rest.view(self.replicas, group.many, *group.shape))
            group.of(total).copy_(_back(mean, b).view(1, group.many, *group.shape))
        return total[0].sign()


def _transformed(part: Tensor, b: Blocks) -> Tensor:
    """(replicas, count, height, width) to (replicas, count, blocks, rows, columns)."""
    padded = nn.functional.pad(part, (0, -b.width % b.columns, 0, -b.height % b.rows))
    tiles = padded.unfold(2, b.rows, b.rows).unfold(3, b.columns, b.columns)
    return (dct(b.rows).float() @ tiles @ dct(b.columns).float().mT).flatten(2, 3)


def _back(coded: Tensor, b: Blocks) -> Tensor:
    """The reverse, of (replicas, count, blocks, numbers)."""
    down, across = -(-b.height // b.rows), -(-b.width // b.columns)
    tiles = coded.view(*coded.shape[:2], down, across, b.rows, b.columns)
    whole = (dct(b.rows).float().mT @ tiles @ dct(b.columns).float()).transpose(3, 4)
    return whole.flatten(4, 5).flatten(2, 3)[..., : b.height, : b.width]


def largest(x: Tensor, k: int) -> Tensor:
    """The k largest of the last dimension by magnitude; the others are 0."""
    at = x.abs().topk(k, -1).indices
    return torch.zeros_like(x).scatter(-1, at, x.gather(-1, at))


IN_STEP: Mapping[str, type[InStep]] = {
    "gtopk": GTopK,
    "lags": Lags,
    "powersgd": LowRank,
    "acp-sgd": ACP,
    "demo": DeMo,
}


def train(
    together: Together,
    start: Mapping[str, Tensor],
    batches: Batches,
    t: Train,
    method: InStep,
    *,
    steps: int,
    done: Callable[[int, Mapping[str, Tensor]], None],
) -> dict[str, Tensor]:
    """The weights after so many steps of t.batch samples; `done` sees them after each."""
    module, count = together.module, together.count
    module.load_state_dict(start)
    own = method.optimizer == "sgd"
    t = replace(t, optimizer="sgd", momentum=0.0, clip=0.0) if own else t
    optimizer, each = optimizer_of(module, t), t.batch // count
    parameters = dict(module.named_parameters())
    weights = {n: p.detach() for n, p in parameters.items()}
    for step in range(steps):
        first = step * t.batch
        got = [batches(range(first + k * each, first + (k + 1) * each)) for k in range(count)]
        inputs = {k: torch.stack([b[k] for b in got]) for k in got[0]}
        stacked = {
            n: w.expand(count, *w.shape).clone().requires_grad_() for n, w in weights.items()
        }
        with sdpa_kernel(SDPBackend.MATH):
            together._losses(stacked, inputs).sum().backward()  # type: ignore[no-untyped-call]
        grads = [stacked[n].grad for n in method.shapes.names]
        lr = learning_rate(t, step, steps)
        with torch.no_grad():
            mean = method(torch.cat([g.flatten(1) for g in grads if g is not None], 1), step, lr)
        at = 0
        for n in method.shapes.names:
            p = parameters[n]
            p.grad = mean[at : at + p.numel()].view_as(p)
            at += p.numel()
        if t.clip > 0:
            nn.utils.clip_grad_norm_(module.parameters(), t.clip)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        done(step, weights)
    return weights
