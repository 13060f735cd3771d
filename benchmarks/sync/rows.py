"""What learning.py compares: methods between replicas, what they send, and how many bytes that is.

Bytes are sent + received per peer, over a whole run, with N parameters, P replicas of a peer each,
S steps and a round every H steps:

dense        ring of fp32 gradients, each step                     S · 4 · (P-1)/P · 4·N
aggregated   each peer sums a P-th of the model: encoded changes
             to it, the encoded mean back (of fragments in turn,
             and at the end of all; or sparse both ways)           S/H · 2 · (P-1)/P · (up + down)
gathered     sparse changes, to everybody by way of who would
             add them up                                           S/H · 2 · (P-1) · (1 + 1/P) · up
pairs        one fp32 model of NoLoCo, or the c-th part of one     S/H · 2 · (4·N or 4·N/c)
in step      methods of kind "allreduce": one message up and down
             a tree, or factors of low rank over a ring            S · 4 · (P-1)/P · messages
             messages that go to all, of lags and demo             S · 2 · (P-1) · message

`up` and `down` are what one model's changes take, encoded, with all indices and scales. Where the
replicas differ at the end, one fp32 average over the ring is added: 4 · (P-1)/P · 4·N.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from shoal.benchmarks.learning.chain import Setting
from shoal.benchmarks.sync.batched import BatchedSparseLoCo
from shoal.benchmarks.sync.in_step import IN_STEP
from shoal.compression.echo import TensorShape
from shoal.compression.sparse.chunks import Chunks
from shoal.dag.ir.graph import TensorSpec
from shoal.dag.plan.strategies import StrategyChoice, parse_strategy
from shoal.sim.plain.round_methods import (
    Average,
    DiLoCo,
    Encode,
    NoLoCo,
    Saps,
    Streaming,
    e3m0,
    raw,
    sign,
    top_of_chunks,
    two_bits,
)
from shoal.sim.plain.round_oracle import PlainMethod

__all__ = ["GRID", "ROWS", "Row", "pairs_of"]

CHUNK, MASK_ONE_IN = 4096, 100
KEEP = {f"top_{n}": n / CHUNK for n in (44, 64, 172)}
"""By code, the share of each chunk that is given."""
GRID = {"lr": (1e-3, 2e-3, 4e-3, 8e-3, 16e-3, 32e-3), "beta2": (0.95, 0.99)}
"""Of every row, the dense one too."""


def int8(x: Tensor) -> Tensor:
    scale = x.abs().max() / 127
    return torch.where(scale > 0, (x / scale).round() * scale, 0.0)


def chunked_two_bits(x: Tensor) -> Tensor:
    return top_of_chunks(1.0, CHUNK, two_bits)(x)


def _top_bits(n: int, keep: float) -> float:
    """As the codec writes them."""
    return 8 * Chunks(keep, CHUNK).size_bytes(TensorShape((n,), "float32", 4 * n))


CODES: Mapping[str, tuple[Encode, Callable[[int], float]]] = {
    "raw": (raw, lambda n: 32 * n),
    "int8": (int8, lambda n: 8 * n + 32),
    "e3m0": (e3m0, lambda n: 4 * n + 32),
    "two": (chunked_two_bits, lambda n: 2 * n + 32 * math.ceil(n / CHUNK)),
    "sign": (sign, lambda n: n + 16),
    **{
        name: (top_of_chunks(keep, CHUNK, two_bits), partial(_top_bits, keep=keep))
        for name, keep in KEEP.items()
    },
}
"""By name: what arrives of a tensor, and the bits of one of n entries."""


@dataclass(frozen=True, slots=True)
class Row:
    """`lr` and `beta2`: of GRID. `code`: both ways where a mean comes back, but of `sparse`, whose
    mean comes back as `back` says, or all of it. `options`: of a method of kind "allreduce", as
    plans write them."""

    name: str
    method: Literal[
        "dense",
        "average",
        "diloco",
        "streaming",
        "sparse",
        "noloco",
        "saps",
        "gtopk",
        "lags",
        "powersgd",
        "acp-sgd",
        "demo",
    ]
    every: int = 1
    code: str = "raw"
    back: str = ""
    outer: float = 1.0
    momentum: float = 0.0
    fragments: int = 1
    late: int = 0
    mix: float = 0.5
    decay: float = 0.95
    lr: float = 16e-3
    beta2: float = 0.99
    options: str = ""

    def setting(self, setting: Setting) -> Setting:
        return replace(setting, lr=self.lr, beta2=self.beta2)

    @property
    def round_steps(self) -> int:
        """A fragment's turn comes every `every` steps."""
        return self.every // self.fragments

    @property
    def strategy(self) -> StrategyChoice:
        """Of a method of kind "allreduce", as plans have it."""
        return parse_strategy(f"{self.method}:{self.options}")

    def build(self, names: Sequence[str], seed: int) -> PlainMethod:
        """Fresh, for parameters of these names."""
        encode = CODES[self.code][0]
        match self.method:
            case "dense" | "average":
                return Average()
            case "diloco":
                return DiLoCo(self.outer, self.momentum, up=encode, down=encode)
            case "streaming":
                return Streaming(
                    self.outer,
                    self.momentum,
                    fragments=self.fragments,
                    mix=self.mix,
                    up=encode,
                    down=encode,
                )
            case "sparse":
                return BatchedSparseLoCo(
                    self.outer,
                    self.decay,
                    keep=KEEP[self.code],
                    chunk=CHUNK,
                    back=KEEP[self.back] if self.back else 0.0,
                )
            case "noloco":
                return NoLoCo(self.outer, self.momentum)
            case "saps":
                order = {name: i for i, name in enumerate(names)}

                def mask(count: int, name: str, shape: torch.Size) -> Tensor:
                    word = (seed * 2**20 + count) * 2**12 + order[name]
                    drawn = torch.rand(shape, generator=torch.Generator().manual_seed(word))
                    return drawn < 1 / MASK_ONE_IN

                return Saps(mask)
            case _:
                raise ValueError(f"{self.method} has no rounds: in_step.py trains it")

    @property
    def gossips(self) -> bool:
        return self.method in ("noloco", "saps")

    @property
    def in_step(self) -> bool:
        """Whether weights are equal after every step, by another exchange than dense's."""
        return self.method in IN_STEP

    def bytes(self, specs: Sequence[TensorSpec], replicas: int, steps: int) -> float:
        """Of a peer, sent + received; `specs`: of the parameters. See the module."""
        n, share = sum(spec.elements for spec in specs), (replicas - 1) / replicas
        ring = 4 * share * 4 * n
        if self.method == "dense":
            return steps * ring
        rounds = math.ceil(steps / self.every)
        encoded = sum(CODES[self.code][1](spec.elements) for spec in specs) / 8
        match self.method:
            case "average" | "diloco":
                return rounds * 2 * share * 2 * encoded
            case "sparse" if self.back:
                back = sum(CODES[self.back][1](spec.elements) for spec in specs) / 8
                return rounds * 2 * share * (encoded + back)
            case "streaming":
                turns = math.ceil(steps / self.round_steps) - 1
                return (turns / self.fragments + 1) * 2 * share * 2 * encoded
            case "sparse":
                return rounds * 2 * (replicas - 1) * (1 + 1 / replicas) * encoded
            case "noloco":
                return rounds * 2 * 4 * n + ring
            case "saps":
                return rounds * 2 * 4 * n / MASK_ONE_IN + ring
            case _:
                found = self.strategy
                sent = 4 * sum(found.elements(specs, which) for which in range(found.traits.sums))
                to_all = found.traits.collective == "gather"
                return steps * sent * (2 * (replicas - 1) if to_all else 4 * share)

    def ratio(self, specs: Sequence[TensorSpec], replicas: int, steps: int) -> float:
        """How many times fewer bytes than dense."""
        dense = Row("", "dense").bytes(specs, replicas, steps)
        return dense / self.bytes(specs, replicas, steps)


def pairs_of(seed: int, replicas: int) -> Callable[[int], tuple[tuple[int, int], ...]]:
    """Random pairs by round."""

    def pairs(count: int) -> tuple[tuple[int, int], ...]:
        generator = torch.Generator().manual_seed(seed * 2**20 + count)
        order = torch.randperm(replicas, generator=generator).tolist()
        return tuple(zip(order[::2], order[1::2], strict=False))

    return pairs


ROWS: tuple[Row, ...] = (
    Row("dense", "dense", lr=8e-3, beta2=0.95),
    Row("diloco_12", "diloco", 12, momentum=0.5),
    Row("diloco_12_default", "diloco", 12, outer=0.7, momentum=0.9),
    Row("diloco_26_two", "diloco", 26, "two", momentum=0.5, lr=8e-3),
    Row("diloco_51_e3m0", "diloco", 51, "e3m0", momentum=0.5),
    Row("sparse_12", "sparse", 12, "top_64", decay=1.0),
    Row("both_ways_5", "sparse", 5, "top_172", "top_172", decay=1.0),
    Row("both_ways_5_low", "sparse", 5, "top_172", "top_172", decay=1.0, lr=8e-3),
    Row("both_ways_5_sparse", "sparse", 5, "top_44", "top_44", decay=1.0),
    Row("streaming_100", "streaming", 100, "e3m0", outer=0.4, momentum=0.9, fragments=4, late=5),
    Row("noloco_50", "noloco", 50, outer=0.7, momentum=0.5),
    Row("average_12", "average", 12),
    Row("diloco_13_sign", "diloco", 13, "sign", momentum=0.5),
    Row("saps", "saps"),
    Row("gtopk_800", "gtopk", options="ratio=800"),
    Row("lags_1000", "lags", options="ratio=1000"),
    Row("powersgd_4", "powersgd", options="rank=4,saving=2", lr=8e-3, beta2=0.95),
    Row("acp_sgd_4", "acp-sgd", options="rank=4,saving=2", lr=8e-3, beta2=0.95),
    Row("demo_128th", "demo", options="block=32,top=8,decay=0.999", lr=8e-3, beta2=0.95),
    Row("demo_1", "demo", options="block=128,top=1,decay=0.999", lr=4e-3),
)
"""Among them some that send about 400 times fewer bytes, and one that sends 1,000 times fewer."""
