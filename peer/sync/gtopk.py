"""Global Top-K (Shi et al. 2019, 1901.04359): of the sum of what all holders have, about its k
largest numbers, in messages of k pairs whatever the number of holders.

    given   the k largest of A, by magnitude, as values and places
    up      who is inside of the tree adds up equal places, keeps the k largest, and prunes the rest
    down    the k pairs that are left at the root; on its way down a pair is marked by who had
            pruned its place: no value from below is in it
    taken   the k pairs, the same at all holders

What a holder sent is what it gave at places that came back unmarked. All else stays with it: what
was not selected, what is in no pair at last, and what was pruned on one branch while its place came
through on another, which would be lost if holders cleared what they kept by place alone. So nothing
is lost with any number of holders; the error feedback is in `feedback.py`. A mark is the place's
complement: it costs no bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...dag.plan.messages import share_of
from .feedback import ErrorFeedback
from .pairs import joined, pack_pairs, parts_like, unpack_pairs
from .strategy import Holder

__all__ = ["GTopK"]


class GTopK(ErrorFeedback):
    """The k largest numbers of the sum."""

    pruned: Tensor
    """Places that this holder had in its hands and did not pass on."""

    def __init__(self, holder: Holder) -> None:
        """Raises ValueError for a stage whose places do not fit into the bits of a number."""
        super().__init__(holder)
        numbers, wide = sum(p.numel() for p in self.trained.values()), holder.layout.dtype.itemsize
        if numbers >= 2 ** (8 * wide - 1):
            raise ValueError(
                f"the stage trains {numbers} numbers: expected fewer than {2 ** (8 * wide - 1)} "
                "for gtopk; cut it into more stages"
            )

    @property
    def count(self) -> int:
        """Number k of elements that are kept."""
        numbers = sum(p.numel() for p in self.trained.values())
        return share_of(numbers, self.holder.choice.options["ratio"])

    @torch.no_grad()
    def message(self, which: int) -> Tensor:
        whole = joined(self.whole)
        self._given = whole.abs().topk(self.count).indices
        return self.flagged(pack_pairs(whole[self._given], self._given))

    @torch.no_grad()
    def add(self, parts: Sequence[Tensor]) -> Tensor:
        """The sums by place, pruned."""
        k, parts = self.count, [part.to(self.holder.device) for part in parts]
        pairs = [unpack_pairs(part, k) for part in parts]
        places, at = torch.unique(torch.cat([p for _, p in pairs]), return_inverse=True)
        sums = parts[0].new_zeros(places.numel())
        for (values, _), where in zip(pairs, at.split(k), strict=True):
            sums[where] += values  # places of one part are all different: the order is fixed
        kept = torch.zeros_like(places, dtype=torch.bool)
        kept[sums.abs().topk(k).indices] = True
        self.pruned = places[~kept]
        return torch.cat([*pack_pairs(sums[kept], places[kept]), self.flags_of(parts)])

    def relay(self, total: Tensor) -> Tensor:
        """The sum with a mark at what was pruned here."""
        k = self.count
        values, places = unpack_pairs(total, k)
        marked = torch.where(torch.isin(places, self.pruned), ~places, places)
        return torch.cat([*pack_pairs(values, marked), total[2 * k :]])

    @torch.no_grad()
    def take(self, which: int, total: Tensor) -> None:
        values, places = unpack_pairs(total, self.count)
        counted, places = places >= 0, torch.where(places < 0, ~places, places)
        whole = joined(self.whole)
        found = torch.zeros_like(whole)
        found[places] = values
        own = torch.zeros_like(whole)
        mine = self._given[torch.isin(self._given, places[counted])]
        own[mine] = whole[mine]
        self.sent(parts_like(own, self.whole), parts_like(found, self.whole), self.flags(total))
