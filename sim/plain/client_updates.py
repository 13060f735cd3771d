"""What clients send of their updates, the boring way (BCRS and OPWA: Tang et al. 2024,
2408.14736): of each the numbers of the largest magnitude, and a mean in which numbers that few sent
count for more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from .client_methods import Named, Update

__all__ = ["overlapped", "sent"]


def sent(moved: Named, kept: int) -> tuple[Named, Named]:
    """Return an update of which only so many numbers are left, the largest of all parameters
    together and of equal ones the first, and by name which these are."""
    whole = torch.cat([m.float().reshape(-1) for m in moved.values()])
    order = whole.abs().sort(descending=True, stable=True).indices
    mask = torch.zeros(len(whole), dtype=torch.bool)
    mask[order[:kept]] = True
    parts = torch.split(mask, [m.numel() for m in moved.values()])
    chosen = {n: part.view_as(m) for (n, m), part in zip(moved.items(), parts, strict=True)}
    return {n: m * chosen[n] for n, m in moved.items()}, chosen


def overlapped(
    came: Sequence[Update], masks: Sequence[Named], gamma: float, degree: int
) -> list[Update]:
    """Return updates whose mean is OPWA's: what 1 to `degree` clients sent counts gamma times.
    `masks`: of each update, what it has."""
    counts: Named = {name: torch.stack([m[name] for m in masks]).sum(0) for name in came[0].moved}

    def times(name: str) -> Tensor:
        few = (counts[name] >= 1) & (counts[name] <= degree)
        return torch.where(few, gamma, 1.0)

    by = {name: times(name) for name in counts}
    return [replace(u, moved={n: m * by[n] for n, m in u.moved.items()}) for u in came]
