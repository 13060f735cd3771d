"""Gradients of low rank, which any collective adds up: PowerSGD (Vogels et al. 2019, 1905.13727)
and ACP-SGD (2306.08881), with error feedback.

    PowerSGD    P = orth(Σ A·Q)          Q = Σ Aᵀ·P       of each A sent: P·(Aᵀ·P)ᵀ     taken: P·Qᵀ
    ACP-SGD     even  F = orth(F), the last Q      P = Σ A·F       sent: (A·F)·Fᵀ       taken: P·Fᵀ
                odd   F = orth(F), the last P      Q = Σ Aᵀ·F      sent: F·(Aᵀ·F)ᵀ      taken: F·Qᵀ

A: a parameter's gradients with what is unsent, as a matrix; each step begins with the factor of the
last one, which all holders have alike, and the first with one from the run's seed. ACP-SGD adds up
once in a step, PowerSGD twice. What low rank does not make smaller goes as it is
(`dag/plan/messages.py`). What a holder keeps is what its own factor leaves: A - P·(Aᵀ·P)ᵀ, as in
algorithm 2 of the paper; and a factor is made whole by QR in float64 on the host, so that columns
that were zero can come back, and holders with other devices come to the same one.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ...dag.ir.random import rounding_key
from ...dag.plan.messages import low_rank
from .feedback import ErrorFeedback
from .optimizer import KEPT
from .pairs import parts_like
from .strategy import Holder

__all__ = ["ACPSGD", "PowerSGD"]

FACTOR = f"{KEPT}factor"


class _LowRank(ErrorFeedback):
    """What both have in common: factors, and how messages are put together."""

    def __init__(self, holder: Holder) -> None:
        super().__init__(holder)
        specs = [spec for _, spec in holder.layout.parameters]
        found = low_rank(specs, holder.choice.options)
        self.matrices = {n: m for n, m in zip(self.trained, found, strict=True) if m is not None}
        self.factors: dict[str, Tensor] = {}
        """The last one that was added up of each matrix, orthonormal."""
        self.own: dict[str, Tensor] = {}
        """Factors of this step that this holder made."""
        self.next: dict[str, Tensor] = {}

    def matrix(self, name: str) -> Tensor:
        """A of a matrix."""
        m = self.matrices[name]
        return self.whole[name].view(m.rows, m.columns)

    def factor(self, name: str, left: bool) -> Tensor:
        """What the step begins with: P if `left`, else Q."""
        m, known = self.matrices[name], self.factors.get(name)
        sizes = (m.rows if left else m.columns, m.rank)
        if known is not None and tuple(known.shape) == sizes:
            return known
        key = rounding_key(self.holder.seed, 0, f"{name}:{FACTOR}")
        made = torch.randn(sizes, generator=torch.Generator().manual_seed(key))
        return orthonormal(made.to(self.holder.device, self.holder.layout.dtype))

    def parts(self) -> dict[str, Tensor]:
        """This holder's factors, and what goes as it is."""
        return {name: self.own.get(name, whole) for name, whole in self.whole.items()}

    def update(self, step: int, *, weight: float, norm: float) -> None:
        super().update(step, weight=weight, norm=norm)
        self.factors, self.own, self.next = self.factors | self.next, {}, {}

    def state_tensors(self) -> dict[str, Tensor]:
        factors = {f"{name}:{FACTOR}": factor for name, factor in self.factors.items()}
        return super().state_tensors() | factors

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        found = {n: tensors.get(f"{n}:{FACTOR}") for n in self.matrices}
        device = self.holder.device
        self.factors = {n: f.to(device) for n, f in found.items() if f is not None}
        super().load_state_tensors(tensors)


class PowerSGD(_LowRank):
    """Adds up P, then Q."""

    @torch.no_grad()
    def message(self, which: int) -> Tensor:
        if which == 0:
            self.own = {n: self.matrix(n) @ self.factor(n, left=False) for n in self.matrices}
            return self.flagged(self.parts().values())
        self.own = {n: self.matrix(n).T @ self._basis[n] for n in self.matrices}
        return torch.cat([self._flags[:0], *(q.reshape(-1) for q in self.own.values())])

    @torch.no_grad()
    def take(self, which: int, total: Tensor) -> None:
        if which == 0:
            self._sums, self._there = parts_like(total, self.parts()), self.flags(total)
            self._basis = {n: orthonormal(self._sums[n]) for n in self.matrices}
            return
        right, own = parts_like(total, self.own), dict(self.whole)
        for name, p in self._basis.items():
            own[name] = (p @ self.own[name].T).view_as(own[name])
            self._sums[name] = (p @ right[name].T).view_as(own[name])
            self.next[name] = orthonormal(right[name])
        self.sent(own, self._sums, self._there)
        self._sums, self._basis = {}, {}


class ACPSGD(_LowRank):
    """Adds up one of both, in turns."""

    @torch.no_grad()
    def message(self, which: int) -> Tensor:
        for name in self.matrices:
            turn = self._turn(name)
            whole = self.matrix(name) if turn else self.matrix(name).T
            self.own[name] = whole @ self.factor(name, left=not turn)
        return self.flagged(self.parts().values())

    @torch.no_grad()
    def take(self, which: int, total: Tensor) -> None:
        sums, own = parts_like(total, self.parts()), dict(self.whole)
        for name in self.matrices:
            turn, made = self._turn(name), sums[name]
            other = self.factor(name, left=not turn).T
            both = self.own[name] @ other, made @ other
            one, all_ = both if turn else (both[0].T, both[1].T)
            own[name], sums[name] = one.reshape(own[name].shape), all_.reshape(own[name].shape)
            self.next[name] = orthonormal(made)
        self.sent(own, sums, self.flags(total))

    def _turn(self, name: str) -> bool:
        """Whether it is P's."""
        return self.matrices[name].first == (self.step % 2 == 0)


def orthonormal(matrix: Tensor) -> Tensor:
    """Return the matrix with orthonormal columns; those that depend on others are replaced."""
    found: Tensor = torch.linalg.qr(matrix.to("cpu", torch.float64)).Q
    return found.to(matrix.device, matrix.dtype)
