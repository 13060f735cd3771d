"""What clients send of what they moved: of each the numbers of the largest magnitude, over all its
parameters together. The others are as if it had not moved them. What they were is lost or, with
error feedback (Seide et al. 2014; EF-SGD, Karimireddy et al. 2019, 1901.09847, algorithm 1), added
to what the client moves in its next round.

Parameters stand end to end in the graph's order; of equal magnitudes the first ones are sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ...compression.sparse.select import largest
from .client_states import RoundStates
from .cohort import Trained, as_rows

__all__ = ["SparseUpdates"]


class SparseUpdates:
    """Updates of one round. `base`: by name, the parameters that clients began from. `kept`: by
    participant, how many numbers of its update it sends, at least 1, at most all. `rests`: what
    participants have not sent until now; None: it is lost.

    senders: (numbers of an update,) float32, how many of the participants so far sent each."""

    def __init__(
        self,
        base: Mapping[str, Tensor],
        kept: Mapping[int, int],
        rests: RoundStates | None = None,
    ) -> None:
        self._rests = rests
        self._base, self._kept = {n: t.detach().clone() for n, t in base.items()}, kept
        self._sizes = [t.numel() for t in self._base.values()]
        device = next(iter(self._base.values())).device
        self.senders = torch.zeros(sum(self._sizes), device=device)

    def sent(self, trained: Iterable[Trained]) -> Iterator[Trained]:
        """Yield participants as if each had moved by what it sends, and nothing else. Raises
        DataError where the rest cannot be kept."""
        for some in trained:
            moved = [as_rows(some.values[n] - t) for n, t in self._base.items()]
            whole = torch.cat(moved, dim=1)  # (participants, numbers of an update)
            if self._rests is not None:
                whole += self._rests.rows(some.participants).to(whole.device)
                every = whole.clone()
            for update, number in zip(whole, some.participants, strict=True):
                self._keep(update, self._kept[number])
            if self._rests is not None:
                self._rests.keep(some.participants, every - whole)
            parts = zip(self._base.items(), torch.split(whole, self._sizes, dim=1), strict=True)
            sent = {n: t + part.view(-1, *t.shape) for (n, t), part in parts}
            yield replace(some, values={**some.values, **sent})

    def _keep(self, update: Tensor, kept: int) -> None:
        """Set to 0 what is not sent."""
        if kept == len(update):
            self.senders += 1
            return
        at = largest(update.contiguous(), kept)
        numbers = update[at]
        update.zero_()
        update[at] = numbers
        self.senders[at] += 1

    def by_name(self) -> dict[str, Tensor]:
        """Return `senders` of each parameter, flat, on the host."""
        parts = torch.split(self.senders.cpu(), self._sizes)
        return dict(zip(self._base, parts, strict=True))
