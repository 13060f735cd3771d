"""Muon with the iteration in float64 in place of torch's bfloat16, for both sides of a comparison:
what is left of their difference is not of that rounding."""

from __future__ import annotations

import pytest
from torch import Tensor, float64
from torch.optim import _muon

__all__ = ["in_float64"]


def in_float64(patch: pytest.MonkeyPatch) -> None:
    """Torch's Muon iterates in float64 until the patch is undone."""
    patch.setattr(_muon, "_zeropower_via_newtonschulz", _newton_schulz)


def _newton_schulz(
    grad: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> Tensor:
    """Return p(x)·…·p(x) of x = grad / ‖grad‖ with p(x) = (a + b·xxᵀ + c·(xxᵀ)²)·x."""
    a, b, c = coefficients
    x = grad.to(float64)
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T if len(x) <= x.shape[1] else x.T @ x
        rule = b * gram + c * gram @ gram
        x = a * x + (rule @ x if len(x) <= x.shape[1] else x @ rule)
    return x.to(grad.dtype)
