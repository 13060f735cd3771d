"""LAGS, layer-wise sparse gradients (Shi et al. 2019, 1911.08727), with error feedback.

    of each parameter     the k largest of A, as values and places, from every holder to all
    taken                 their sum

k is the `ratio`-th part of the parameter, and the plan says the ratio stage by stage: the smallest
whose messages are through while earlier stages still have backward passes to do, and at most the
job's (`planner/search/sparsity.py`). So a stage sends what costs no time, all of it where
links are idle. A parameter of which pairs would not be shorter goes as it is
(`dag/plan/messages.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...dag.plan.messages import layer_share
from .feedback import ErrorFeedback
from .pairs import joined, pack_pairs, parts_like, unpack_pairs
from .strategy import Holder

__all__ = ["LAGS"]


class LAGS(ErrorFeedback):
    """The largest numbers of each parameter of every holder."""

    def __init__(self, holder: Holder) -> None:
        super().__init__(holder)
        ratio = holder.choice.options["ratio"]
        self.shares = {n: layer_share(p.numel(), ratio) for n, p in self.trained.items()}
        """k of each parameter; 0: it goes as it is."""

    @torch.no_grad()
    def message(self, which: int) -> Tensor:
        parts: list[Tensor] = []
        self._own: dict[str, Tensor] = {}
        for name, whole in self.whole.items():
            flat, k = whole.view(-1), self.shares[name]
            self._own[name] = whole
            if k:
                places = flat.abs().topk(k).indices
                parts += pack_pairs(flat[places], places)
                self._own[name] = torch.zeros_like(flat).index_copy(0, places, flat[places])
                self._own[name] = self._own[name].view_as(whole)
            else:
                parts.append(flat)
        return self.flagged(parts)

    @torch.no_grad()
    def add(self, parts: Sequence[Tensor]) -> Tensor:
        """Messages as whole vectors, which are added up in the plan's order."""
        trained, device = self.trained, self.holder.device
        sums = {n: parts[0].new_zeros(p.numel(), device=device) for n, p in trained.items()}
        flags = parts[0].new_zeros(len(trained), device=device)
        for part in parts:
            at, part = 0, part.to(device)
            for name, total in sums.items():
                k = self.shares[name]
                if k:
                    values, places = unpack_pairs(part[at : at + 2 * k], k)
                    total[places] += values  # all different: the order is that of parts
                else:
                    total += part[at : at + total.numel()]
                at += 2 * k or total.numel()
            flags += part[at:]
        return torch.cat([joined(sums), flags])

    @torch.no_grad()
    def take(self, which: int, total: Tensor) -> None:
        self.sent(self._own, parts_like(total, self.whole), self.flags(total))
