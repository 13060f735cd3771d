"""Gradients that come back for the values that a stage sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

__all__ = ["Gradients", "total"]

Gradients = Mapping[str, "Tensor | Sequence[Tensor | None] | None"]
"""Gradients of values that left: one tensor, or one per reading stage in stage order. None: the
reader has no gradient for it."""


def total(grad: Tensor | Sequence[Tensor | None] | None, device: torch.device) -> Tensor | None:
    """The sum in the given order, on the device; never written into what was given."""
    parts = (grad,) if grad is None or isinstance(grad, Tensor) else grad
    found: Tensor | None = None
    for part in parts:
        if part is not None:
            part = part.to(device, non_blocking=True)
            found = part if found is None else found + part
    return found
