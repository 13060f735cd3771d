"""What a ghost computes in place of tensors: 64-bit hashes of an operator graph, exactly.

All numbers are modulo 2⁶⁴. a and c are fixed odd numbers, of names only; `mix` is a bijection that
spreads every bit (the finalizer of splitmix64, Steele, Lea and Flood 2014).

    sample    x(name, step, m)  = mix of (seed, name, step, microbatch)
    value     h(v)              = c(v) + Σ a(v, u) · h(u)      over what its operator reads
    loss      l(m)              = mix(h(loss) + weight and metrics, each times its own a)
    gradient  d(loss) = l(m);  d(u) = Σ a'(v, u) · d(v)        over the values v made from u
    parameter g(p)   = Σ over microbatches and operators that read p of mix(c(v, p) + d(v) + a·h(v))
    step      T      = Σ l(m) + Σ over parameters of mix(c(p) + g(p))
    update    h(p)  <- mix(a · h(p) + g(p) + c · T)

Values and gradients are linear in what comes into an interval of operators, whatever the interval
is. So a stage is two matrices, made once, and any cut of the graph gives the hashes of the graph as
a whole: associativity, not an approximation. What is not linear (`mix`) stands at the ends only:
samples, losses and the gradient of a parameter by one microbatch, none of which a cut can divide.
Sums over microbatches and holders commute. A sample that is left out, applied twice, or meets other
weights than those of its step changes T, and T changes every weight.

`expected` is the plain loop: operator by operator, microbatch by microbatch, without any matrix.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ...dag.ir.graph import Graph, Parameter
from ...dag.plan.routes import Segment

__all__ = [
    "MASK",
    "Expected",
    "Hash",
    "Hashes",
    "PlainLoop",
    "Words",
    "expected",
    "figure",
    "mix",
    "mixed",
    "name_hash",
    "odd",
]

MASK = (1 << 64) - 1
Words = NDArray[np.uint64]
Hash = int | Words
"""What stands for a tensor: one hash, or one for each parameter of a shard."""

_M1, _M2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_N1, _N2 = np.uint64(_M1), np.uint64(_M2)
_S30, _S27, _S31 = np.uint64(30), np.uint64(27), np.uint64(31)


@lru_cache(maxsize=1 << 16)
def name_hash(*parts: str | int) -> int:
    """64 bits of names and numbers."""
    text = "\0".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def odd(*parts: str | int) -> int:
    """An odd 64-bit hash of the parts, hence invertible modulo 2⁶⁴."""
    return name_hash(*parts) | 1


def mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * _M1) & MASK
    x = ((x ^ (x >> 27)) * _M2) & MASK
    return x ^ (x >> 31)


def mixed(x: Words) -> Words:
    """`mix` of every element; `x` is overwritten."""
    x ^= x >> _S30
    x *= _N1
    x ^= x >> _S27
    x *= _N2
    x ^= x >> _S31
    return x


def figure(total: int) -> float:
    """What a person is shown of a hash: a number from 0 to 1 that differs where the hashes do."""
    return (total >> 11) / 2.0**53


_STEP, _MICROBATCH, _KEEP, _TOTAL, _VALUE, _RESULT = (
    odd(word) for word in ("step", "microbatch", "keep", "total", "value", "result")
)


@dataclass(frozen=True)
class Hashes:
    """The definitions of the module for one bound graph and seed."""

    graph: Graph
    seed: int

    # ------------------------------------------------------------ numbers of names

    def constant(self, value: str) -> int:
        return name_hash("constant", value)

    def factor(self, value: str, read: str) -> int:
        """Return a(v, u)."""
        return odd("reads", value, read)

    def back(self, value: str, read: str) -> int:
        """Return a'(v, u)."""
        return odd("gradient", value, read)

    def salt(self, value: str, parameter: str) -> int:
        return name_hash("reader", value, parameter)

    def start(self, name: str) -> int:
        """A parameter or buffer before the first step; `name` with its kind, `param:w`."""
        return mix(name_hash("start", self.seed, name))

    # ------------------------------------------------------------ what is not linear

    def sample(self, name: str, step: int, microbatch: int) -> int:
        """The hash of the data input `name`; step -1: held out."""
        at = (step + 1) * _STEP + microbatch * _MICROBATCH
        return mix((name_hash("sample", self.seed, name) + mix(at & MASK)) & MASK)

    def loss(self, results: Mapping[str, int]) -> int:
        """The hash of one microbatch's loss, weight and metrics, given the hash of each value."""
        graph = self.graph
        names = dict.fromkeys((graph.loss, graph.weight, *(v for _, v in graph.metrics)))
        return mix(sum(odd("result", v) * results[v] for v in names if v) & MASK)

    def seed_gradient(self, results: Mapping[str, int]) -> int:
        """d(loss): of loss and weight."""
        graph = self.graph
        weight = results[graph.weight] if graph.weight else 0
        return mix((results[graph.loss] + _RESULT * weight) & MASK)

    def reached(self, value: str, parameter: str, gradient: int, result: int) -> int:
        """One term of g(p)."""
        return mix((self.salt(value, parameter) + gradient + _VALUE * result) & MASK)

    def reached_all(self, salts: Words, gradients: Words, results: Words) -> Words:
        """Many terms; `results` is overwritten."""
        results *= np.uint64(_VALUE)
        results += gradients
        results += salts
        return mixed(results)

    def answered(self, gradients: Mapping[str, int]) -> int:
        """The share of these parameters in T."""
        return sum(mix((name_hash("norm", p) + g) & MASK) for p, g in gradients.items()) & MASK

    def updated(self, weight: int, gradient: int, total: int) -> int:
        return mix((_KEEP * weight + gradient + _TOTAL * total) & MASK)

    def updated_all(self, weights: Words, gradients: Words, total: int) -> Words:
        return mixed(weights * np.uint64(_KEEP) + gradients + np.uint64(_TOTAL * total & MASK))

    def statistic(self, microbatch: int, value: int) -> int:
        """One microbatch's part in the update of a buffer."""
        return mix((value + microbatch * _MICROBATCH) & MASK)

    def buffered(self, buffer: int, statistics: int) -> int:
        """The buffer after a step: of the sum of its statistics, 0 for a counter."""
        return mix((_KEEP * buffer + statistics + 1) & MASK)

    # ------------------------------------------------------------ what is trained

    @property
    def trained(self) -> tuple[Parameter, ...]:
        """The trainable parameters that some operator reads."""
        read = {v for op in self.graph.operators for v in op.reads}
        return tuple(p for p in self.graph.parameters if p.trainable and f"param:{p.name}" in read)


@dataclass
class Expected:
    """What a ghost run must come to: figures by step and evaluation, and every hash that is
    exported at the end, `param:…` and `buffer:…`."""

    losses: list[float] = field(default_factory=list)
    evaluations: list[float] = field(default_factory=list)
    weights: dict[str, int] = field(default_factory=dict)


def expected(
    graph: Graph,
    seed: int,
    steps: int,
    microbatches: int,
    *,
    eval_every: int = 0,
    held_out: int = 0,
    orders: Sequence[Sequence[Segment]] = (),
    clips: bool = True,
    full: Callable[[int], bool] = lambda step: False,
) -> Expected:
    """The plain loop over the bound graph, knowing nothing of plans. `eval_every`: steps between
    evaluations of `held_out` microbatches, one after the last step too; 0: none. `orders`: of each
    microbatch, where some compute parts of the graph in another order. `clips`: whether updates go
    by the totals of the step. `full`: whether a step has no such orders."""
    loop = PlainLoop(Hashes(graph, seed), orders, clips)
    found = Expected()
    for step in range(steps):
        loop.orders = () if full(step) else orders
        found.losses.append(figure(loop.step([(step, m) for m in range(microbatches)])))
        last = step + 1 == steps
        if eval_every and held_out and ((step + 1) % eval_every == 0 or last):
            found.evaluations.append(figure(loop.evaluation(held_out)))
    found.weights = loop.state
    return found


class PlainLoop:
    """The state of the plain loop: every parameter and buffer."""

    def __init__(
        self, hashes: Hashes, orders: Sequence[Sequence[Segment]] = (), clips: bool = True
    ) -> None:
        self.hashes, graph, self.clips = hashes, hashes.graph, clips
        self.orders = orders
        self.whole = (Segment(0, len(graph.operators), ()),)
        names = [f"param:{p.name}" for p in graph.parameters]
        names += [f"buffer:{b.name}" for b in graph.buffers]
        self.state = {name: hashes.start(name) for name in names}
        self.results = [v for v in (graph.loss, graph.weight, *(v for _, v in graph.metrics)) if v]
        self.trained = {f"param:{p.name}": p.name for p in hashes.trained}

    def forward(
        self, step: int, m: int, order: Sequence[Segment]
    ) -> list[tuple[Segment, dict[str, int]]]:
        """Return what is known at the end of each segment."""
        hashes, graph = self.hashes, self.hashes.graph
        value = dict(self.state)
        value |= {f"in:{x.name}": hashes.sample(x.name, step, m) for x in graph.inputs}
        found = []
        for segment in order:
            value = value | {taken: value[made] for taken, made in segment.renamed}
            for op in graph.operators[segment.start : segment.stop]:
                for v in op.values:
                    terms = (hashes.factor(v, u) * value[u] for u in op.reads)
                    value[v] = (hashes.constant(v) + sum(terms)) & MASK
            found.append((segment, value))
        return found

    def step(self, microbatches: Sequence[tuple[int, int]]) -> int:
        """By microbatch, the step and the number that its samples have. Returns T."""
        hashes, graph = self.hashes, self.hashes.graph
        gradients = dict.fromkeys(self.trained.values(), 0)
        statistics = {b.name: 0 for b in graph.buffers if b.update}
        total = 0
        for m, place in enumerate(microbatches):
            forwarded = self.forward(*place, self.orders[m] if self.orders else self.whole)
            last = forwarded[-1][1]
            results = {v: last[v] for v in self.results}
            total += hashes.loss(results)
            back = {graph.loss: hashes.seed_gradient(results)}
            for segment, value in reversed(forwarded):
                for op in reversed(graph.operators[segment.start : segment.stop]):
                    for v in op.values:
                        if v not in graph.grads:
                            continue
                        d = back.pop(v, 0)
                        for u in op.reads:
                            if u in self.trained:
                                p = self.trained[u]
                                gradients[p] += hashes.reached(v, p, d, value[v])
                            elif u in graph.grads:
                                back[u] = (back.get(u, 0) + hashes.back(v, u) * d) & MASK
                for taken, made in segment.renamed:
                    back[made] = back.pop(taken, 0)
            for b in graph.buffers:
                if b.update and b.update.value:
                    statistics[b.name] += hashes.statistic(m, last[b.update.value])
        gradients = {p: g & MASK for p, g in gradients.items()}
        total = (total + hashes.answered(gradients)) & MASK
        for p, g in gradients.items():
            name = f"param:{p}"
            self.state[name] = hashes.updated(self.state[name], g, total if self.clips else 0)
        for buffer, s in statistics.items():
            name = f"buffer:{buffer}"
            self.state[name] = hashes.buffered(self.state[name], s & MASK)
        return total

    def evaluation(self, held_out: int) -> int:
        total = 0
        for m in range(held_out):
            value = self.forward(-1, m, self.whole)[-1][1]
            total += self.hashes.loss({v: value[v] for v in self.results})
        return total & MASK
