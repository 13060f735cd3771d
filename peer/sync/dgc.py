"""Deep gradient compression (Lin et al. 2018, 1712.01887): momentum before what is sent is chosen.

    u = m·u + g      sent: C(u + e)      e' = u + e - C(u + e)      u' = 0 where C sent something

g the gradients that this holder accumulated, m the job's momentum, and e what its codec with error
feedback keeps: so the sum of e' and of all that was sent is the sum of all u. The optimizer has no
momentum of its own then. Masking u keeps what is late from going on in an old direction: with a
codec that sends all it is plain SGD. Every holder's part goes to all, for it is momentum already,
and no sum may go through that again. `clip` is of the sum of what arrived.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ...dag.plan.plan import PeerId
from .gradient_vector import parts_of
from .optimizer import KEPT
from .strategy import Holder, Strategy

__all__ = ["DGC"]

VELOCITY = f"{KEPT}velocity"


class DGC(Strategy):
    """Momentum of a holder's own gradients, forgotten where it was sent."""

    keeps = 1

    def __init__(self, holder: Holder) -> None:
        super().__init__(holder)
        self.velocity: dict[str, Tensor] = {}
        self._next: dict[str, Tensor] = {}

    @torch.no_grad()
    def on_gradient(self, step: int) -> None:
        """Turns this holder's gradients into u."""
        self._next = dict(self.velocity)
        for name, p in self.trained.items():
            if p.grad is not None:
                if name in self.velocity:
                    p.grad.add_(self.velocity[name], alpha=self.holder.momentum)
                self._next[name] = p.grad.to(self.holder.layout.dtype, copy=True)

    @torch.no_grad()
    def add(self, parts: Sequence[Tensor]) -> Tensor:
        """The sum; codecs have left of this holder's own part what arrived at the others."""
        self.sent(parts[self.holder.holders.index(self.holder.peer)])
        return super().add(parts)

    def sent(self, own: Tensor) -> None:
        """What of this holder's own message arrived at the others."""
        for name, part in parts_of(self.holder.layout, own).items():
            if name in self._next:
                self._next[name].masked_fill_(part.to(self._next[name].device) != 0, 0.0)

    def update(self, step: int, *, weight: float, norm: float) -> None:
        super().update(step, weight=weight, norm=norm)
        if weight:
            self.velocity = self._next
        self._next = {}

    def own_tensors(self) -> dict[str, Tensor]:
        return {f"{name}:{VELOCITY}": u for name, u in self.velocity.items()}

    def load_own_tensors(self, of: Mapping[PeerId, Mapping[str, Tensor]]) -> None:
        """Load the momentum; without any in the file it begins at zero."""
        super().load_own_tensors(of)
        mine, device = of.get(self.holder.peer, {}), self.holder.device
        found = {n: mine.get(f"{n}:{VELOCITY}") for n in self.trained}
        self.velocity = {n: u.to(device, copy=True) for n, u in found.items() if u is not None}
