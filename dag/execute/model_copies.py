"""Many copies of one model at once: their losses and gradients, each on a batch of its own.

Parameters and buffers are stacked, (copies, ...) each. The forward is vectorised over the copies
(`torch.func.vmap`); where an operator draws random numbers, or has no such form, it runs copy by
copy. Either way one backward gives the gradients of all, since no copy's loss has to do with
another copy. What one copy comes to differs from the model alone by rounding only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx
from torch.func import functional_call, vmap

from ..ir.graph import Graph
from .stage_module import StageModule, build

__all__ = ["CopiesForward", "LossOf", "ModelCopies"]

LossOf = Callable[[Mapping[str, Tensor]], Tensor]
"""Losses of copies, (copies,), of values that their graph made, (copies, ...) by name."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CopiesForward:
    """What a batch of each copy came to. grads: by name, the gradient of loss times weight,
    (copies, *shape); None: no gradient reached the parameter, in any copy. losses, weights:
    (copies,). metrics: by name, (copies, ...). statistics: by buffer with an `ema` update,
    (copies, ...)."""

    grads: dict[str, Tensor | None]
    losses: Tensor
    weights: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict)
    statistics: dict[str, Tensor] = field(default_factory=dict)


class ModelCopies:
    """A whole model. `graph` is not bound: batches may be of different sizes, one at a time.
    `also`: values that a loss reads which is not the graph's."""

    def __init__(
        self, graph: Graph, device: torch.device | str = "cpu", also: Sequence[str] = ()
    ) -> None:
        self._graph, self._device, self._also = graph, torch.device(device), also
        self._built: dict[int, _Bound] = {}

    @property
    def takes_key(self) -> bool:
        """Whether operators draw random numbers."""
        return self._of(1).module.takes_key

    def run(
        self,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        inputs: Mapping[str, Tensor],
        keys: Sequence[int] = (),
        loss_of: LossOf | None = None,
    ) -> CopiesForward:
        """`parameters`, `buffers`: by name, (copies, *shape); gradients are those of parameters
        that require one. `inputs`: by argument, (copies, batch, ...). `keys`: of each copy's random
        numbers (`dag/ir/random.py`), where operators draw some. `loss_of`: in place of the graph's
        loss."""
        batch = next(iter(inputs.values())).shape[1]
        bound = self._of(batch)
        leaves = {n: p.detach().requires_grad_(p.requires_grad) for n, p in parameters.items()}
        trained = {n: p for n, p in leaves.items() if p.requires_grad}
        standing = {f"param:{n}": p for n, p in leaves.items()}
        standing |= {f"buffer:{n}": b for n, b in buffers.items()}
        made = bound.forward(standing, {f"in:{n}": t for n, t in inputs.items()}, keys)
        graph = self._graph
        losses = loss_of(made) if loss_of else made[graph.loss]
        weights = made[graph.weight].detach() if graph.weight else torch.ones_like(losses.detach())
        counts = weights != 0
        # The mean over nothing is NaN, and so would be its gradient.
        total = torch.where(counts, losses, 0.0).mul(weights).sum()
        found = torch.autograd.grad(total, list(trained.values()), allow_unused=True)
        grads: dict[str, Tensor | None] = {}
        for name, grad in zip(trained, found, strict=True):
            if grad is not None and not bool(counts.all()):
                mine = counts.view(-1, *(1,) * (grad.dim() - 1))
                grad = torch.where(mine, grad, torch.zeros_like(grad))
            grads[name] = grad
        return CopiesForward(
            grads,
            losses.detach(),
            weights,
            {name: made[value].detach() for name, value in graph.metrics},
            {n: made[v].detach() for n, v in bound.statistics.items()},
        )

    def _of(self, batch: int) -> _Bound:
        if batch not in self._built:
            self._built[batch] = _Bound(self._graph.bind(batch), self._device, self._also)
        return self._built[batch]


class _Bound:
    """The model for batches of one size."""

    def __init__(self, graph: Graph, device: torch.device, also: Sequence[str]) -> None:
        rules = {b.name: b.update.value for b in graph.buffers if b.update and b.update.value}
        self.statistics = rules
        results = (graph.loss, graph.weight, *(value for _, value in graph.metrics), *also)
        gives = [*dict.fromkeys(v for v in (*results, *rules.values()) if v)]
        hollow: dict[str, Tensor] = {}
        for kind, named in (("param", graph.parameters), ("buffer", graph.buffers)):
            for tensor in named:
                value = f"{kind}:{tensor.name}"
                spec = graph.spec[value]
                dtype = getattr(torch, spec.dtype)
                hollow[value] = torch.empty(spec.sizes, dtype=dtype, device="meta")
        self.module: StageModule = build(graph, 0, len(graph.operators), gives, hollow, device)
        by_tensor = {id(t): value for value, t in hollow.items()}
        owner: fx.GraphModule = self.module.module
        named_tensors = [*owner.named_parameters(), *owner.named_buffers()]
        self._names = {name: by_tensor[id(t)] for name, t in named_tensors}
        self._apart = self.module.takes_key

    def forward(
        self, standing: Mapping[str, Tensor], inputs: Mapping[str, Tensor], keys: Sequence[int]
    ) -> dict[str, Tensor]:
        """By value name, (copies, ...)."""
        tensors = {name: standing[value] for name, value in self._names.items()}
        taken = tuple(inputs[value] for value in self.module.takes)
        if not self._apart:
            try:
                found = vmap(self._one)(tensors, taken)
                return dict(zip(self.module.gives, found, strict=True))
            except RuntimeError as error:
                _log.info("copies run one after the other: %s", error)
                self._apart = True
        count = len(taken[0])
        each = [
            self._one(
                {n: t[c] for n, t in tensors.items()},
                tuple(t[c] for t in taken),
                *((keys[c],) if self.module.takes_key else ()),
            )
            for c in range(count)
        ]
        stacked = (torch.stack(values) for values in zip(*each, strict=True))
        return dict(zip(self.module.gives, stacked, strict=True))

    def _one(
        self, tensors: Mapping[str, Tensor], taken: tuple[Tensor, ...], *key: int
    ) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = functional_call(
            self.module.module, dict(tensors), (*taken, *key)
        )
        return found
