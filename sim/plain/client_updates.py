"""What clients send of their updates, the boring way (BCRS and OPWA: Tang et al. 2024,
2408.14736): of each the numbers of the largest magnitude, and a mean in which numbers that few sent
count for more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from .client_methods import ClientUpdate, Named

__all__ = ["overlapped", "sent", "shared_positions"]

_PIECE = 1 << 20
"""Numbers of a parameter of which a share is sent."""


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


def shared_positions(
    last: Named, keep: float, explore: float, drawn: Callable[[str, int, int], Sequence[int]]
) -> Named:
    """Return which numbers of each parameter all clients of a round send, True or False. `last`:
    how far the version before moved each; `drawn`: by what of which parameter, of how many numbers,
    how many are drawn by lot, one after the other."""
    found: Named = {}
    for name, moved in last.items():
        mask = torch.zeros(moved.numel(), dtype=torch.bool)
        for start in range(0, moved.numel(), _PIECE):
            sizes = moved.reshape(-1)[start : start + _PIECE].abs().tolist()
            count = min(len(sizes), max(1, round(len(sizes) * keep)))
            fresh = max(1, round(count * explore))
            order = sorted((-size, i) for i, size in enumerate(sizes) if size)
            chosen = {i for _, i in order[: count - fresh]}
            for i in drawn(f"param:{name}:{start}", len(sizes), count):
                chosen |= {i} if len(chosen) < count else set()
            mask[[start + i for i in chosen]] = True
        found[name] = mask.view_as(moved)
    return found


def overlapped(
    came: Sequence[ClientUpdate], masks: Sequence[Named], gamma: float, degree: int
) -> list[ClientUpdate]:
    """Return updates whose mean is OPWA's: what 1 to `degree` clients sent counts gamma times.
    `masks`: of each update, what it has."""
    counts: Named = {name: torch.stack([m[name] for m in masks]).sum(0) for name in came[0].moved}

    def times(name: str) -> Tensor:
        few = (counts[name] >= 1) & (counts[name] <= degree)
        return torch.where(few, gamma, 1.0)

    by = {name: times(name) for name in counts}
    return [replace(u, moved={n: m * by[n] for n, m in u.moved.items()}) for u in came]
