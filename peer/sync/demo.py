"""DeMo, decoupled momentum (Peng et al. 2024, 2411.19870): holders exchange the fastest components
of their momentum, and step by a sign.

    D = decay·D + lr·g          g the mean gradient of this holder's microbatches
    q = the `top` largest numbers of each block of DCT(D)           D' = D - DCT⁻¹(q)
    all q to all holders; of each number the mean over those who sent it
    x' = x - lr·sign(DCT⁻¹(mean q)) - lr·weight_decay·x

A parameter is a matrix, its first dimension by all others (a vector is one row), in blocks of at
most `block` by `block`, filled up with zeros at its ends; the DCT is orthonormal, so that D' has
exactly what is not in q. What holders sent is added up in the plan's order, never in that of
arrival: replicas stay equal bit for bit. Of a parameter that no microbatch reached nothing is
taken. A stage with one holder steps in the same way, alone.

The momentum is the optimizer: with it stands SGD without momentum of its own. `clip` changes
nothing, for a sign has no length.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from ...dag.plan.messages import Blocks, blocks_of
from .feedback import ErrorFeedback
from .optimizer import learning_rate
from .pairs import parts_like
from .strategy import Holder

__all__ = ["DeMo", "dct"]


class DeMo(ErrorFeedback):
    """Momentum that stays apart, but for its fastest components."""

    def __init__(self, holder: Holder) -> None:
        super().__init__(holder)
        specs = (spec for _, spec in holder.layout.parameters)
        self.blocks = {
            n: blocks_of(spec, holder.choice.options)
            for n, spec in zip(self.trained, specs, strict=True)
        }

    @property
    def decay(self) -> float:
        return self.holder.choice.options["decay"]

    @torch.no_grad()
    def on_gradient(self, step: int) -> None:
        scale = learning_rate(self.holder.optimizer.train, step) / max(1, self.holder.own)
        for p in self.trained.values():
            if p.grad is not None:
                p.grad.mul_(scale)
        super().on_gradient(step)

    @torch.no_grad()
    def message(self, which: int) -> Tensor:
        values, places = [], []
        for name, b in self.blocks.items():
            coded = transformed(self.whole[name], b)
            found = coded.abs().topk(b.top, dim=1).indices
            values.append(coded.gather(1, found).view(-1))
            places.append(found.view(-1))
        self._own = torch.cat(values), torch.cat(places)
        words = self._own[1].to(torch.int16)
        filled = F.pad(words, (0, -words.numel() % 4)).view(self._own[0].dtype)
        return self.flagged([self._own[0], filled])

    @torch.no_grad()
    def add(self, parts: Sequence[Tensor]) -> Tensor:
        """For each number the mean over those who sent it, transformed back."""
        parts = [part.to(self.holder.device) for part in parts]
        sent = sum(b.sent for b in self.blocks.values())
        words = -(-sent // 4) * 8 // parts[0].itemsize
        places = [p[sent : sent + words].view(torch.int16).long() for p in parts]
        found, at = [], 0
        for b in self.blocks.values():
            sums, count = (parts[0].new_zeros(b.number, b.rows * b.columns) for _ in range(2))
            for part, place in zip(parts, places, strict=True):
                index = place[at : at + b.sent].view(b.number, b.top)
                values = part[at : at + b.sent].view(b.number, b.top)
                sums.scatter_add_(1, index, values)  # all different: the order is that of parts
                count.scatter_add_(1, index, torch.ones_like(values))
            found.append(inverse(sums / count.clamp(min=1), b).reshape(-1))
            at += b.sent
        return torch.cat([*found, self.flags_of(parts)])

    @torch.no_grad()
    def take(self, which: int, total: Tensor) -> None:
        own, at = {}, 0
        for name, b in self.blocks.items():
            p = self.trained[name]
            own[name] = back(b, *(part[at : at + b.sent] for part in self._own)).view_as(p)
            at += b.sent
        self.sent(own, parts_like(total, self.whole), self.flags(total))

    @torch.no_grad()
    def update(self, step: int, *, weight: float, norm: float) -> None:
        if len(self.holder.holders) == 1:
            self.on_gradient(step)
            self.take(0, self.add([self.message(0)]))
        for p in self.trained.values():
            if p.grad is not None:
                p.grad.sign_()
        super().update(step, weight=float(weight != 0), norm=0.0)


@cache
def dct(side: int) -> Tensor:
    """The orthonormal DCT-II of so many numbers, a float64 matrix: its transpose is the inverse."""
    n = torch.arange(side, dtype=torch.float64)
    found = torch.cos(math.pi / side * (n + 0.5) * n[:, None]) * math.sqrt(2 / side)
    found[0] /= math.sqrt(2)
    return found


def transformed(whole: Tensor, b: Blocks) -> Tensor:
    """(blocks, numbers) of a parameter's blocks."""
    lacking = (0, -b.width % b.columns, 0, -b.height % b.rows)
    padded = F.pad(whole.reshape(b.height, b.width), lacking)
    tiles = padded.unfold(0, b.rows, b.rows).unfold(1, b.columns, b.columns)
    left, right = dct(b.rows).to(whole), dct(b.columns).to(whole)
    return (left @ tiles.reshape(-1, b.rows, b.columns) @ right.T).flatten(1)


def inverse(coded: Tensor, b: Blocks) -> Tensor:
    """(height, width): the reverse."""
    left, right = dct(b.rows).to(coded), dct(b.columns).to(coded)
    tiles = left.T @ coded.view(-1, b.rows, b.columns) @ right
    down, across = -(-b.height // b.rows), -(-b.width // b.columns)
    whole = tiles.view(down, across, b.rows, b.columns).transpose(1, 2)
    return whole.reshape(down * b.rows, across * b.columns)[: b.height, : b.width]


def back(b: Blocks, values: Tensor, places: Tensor) -> Tensor:
    """What some numbers of each block stand for."""
    coded = values.new_zeros(b.number, b.rows * b.columns)
    coded.scatter_(1, places.view(b.number, b.top), values.view(b.number, b.top))
    return inverse(coded, b)
