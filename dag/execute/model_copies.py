"""Many copies of one model at once: their losses and gradients, each on a batch of its own.

Parameters and buffers are stacked, (copies, ...) each. The forward is vectorised over the copies
(`torch.func.vmap`); where an operator draws random numbers, or has no such form, it runs copy by
copy. Either way one backward gives the gradients of all, since no copy's loss has to do with
another copy. What one copy comes to differs from the model alone by rounding only.

Small models wait for Python more than for numbers. So where as many copies come again and again,
with batches of one size, what a vectorised forward and backward do is recorded once, operator by
operator (`records.py`), and the record is run from then on: the same operators without what finds
out which they are.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..ir.graph import Graph
from .records import record
from .stage_module import StageModule, build

__all__ = ["CopiesForward", "LossOf", "ModelCopies"]

LossOf = Callable[[Mapping[str, Tensor]], Tensor]
"""Losses of copies, (copies,), of values that their graph made, (copies, ...) by name."""

_log = logging.getLogger(__name__)

RECORDED_AFTER, MOST_RECORDS = 16, 8
"""Times that so many copies came, with batches of one size, before that is recorded; and records of
one size of batches."""

Tensors = Mapping[str, Tensor]
_Shape = tuple[tuple[str, ...], tuple[tuple[int, ...], ...], float]
"""Which parameters are trained, the strides of everything, and the scale of losses: a record holds
for no others."""
_Made = tuple[list[Tensor | None], list[Tensor]]


@dataclass(frozen=True, slots=True)
class CopiesForward:
    """What a batch of each copy came to. grads: by name, the gradient of loss times weight,
    (copies, *shape); None: no gradient reached the parameter, in any copy. losses, weights:
    (copies,). metrics: by name, (copies, ...); none beside gradients. statistics: by buffer with an
    `ema` update, (copies, ...)."""

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
        # An operator that vmap calls copy by copy, a batch norm, it would complain of at each call.
        torch._C._functorch._set_vmap_fallback_warning_enabled(False)  # type: ignore[attr-defined]

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
        scale: float = 1.0,
    ) -> CopiesForward:
        """`parameters`, `buffers`: by name, those that operators read at least, (copies, *shape);
        gradients are those of parameters that require one, none where none does. `inputs`: by
        argument, (copies, batch, ...). `keys`: of each copy's random numbers (`dag/ir/random.py`),
        where operators draw some. `loss_of`: in place of the graph's loss; such steps are never
        replayed from a record, which would keep what the first one's loss read. `scale`: gradients
        are those of losses times it."""
        batch = next(iter(inputs.values())).shape[1]
        return self._of(batch).run(parameters, buffers, inputs, keys, loss_of, scale)

    def evaluate(
        self, version: Mapping[str, Tensor], inputs: Mapping[str, Tensor]
    ) -> CopiesForward:
        """As `run` without gradients, of copies that are all alike, which need no keys: `version`
        has parameters and buffers by name, (*shape), those that operators read at least."""
        count = len(next(iter(inputs.values())))
        parameters, buffers = (
            {
                t.name: version[t.name].detach().expand(count, *version[t.name].shape)
                for t in of
                if t.name in version
            }
            for of in (self._graph.parameters, self._graph.buffers)
        )
        return self.run(parameters, buffers, inputs)

    def _of(self, batch: int) -> _Bound:
        if batch not in self._built:
            self._built[batch] = _Bound(self._graph.bind(batch), self._device, self._also)
        return self._built[batch]


class _Bound:
    """The model for batches of one size."""

    def __init__(self, graph: Graph, device: torch.device, also: Sequence[str]) -> None:
        self._graph = graph
        self._rules = {b.name: b.update.value for b in graph.buffers if b.update and b.update.value}
        metrics = [value for _, value in graph.metrics]
        results = (graph.loss, graph.weight, *self._rules.values(), *also)
        trains = dict.fromkeys(v for v in results if v)
        self._trains, gives = [*trains], [*dict.fromkeys([*trains, *metrics])]
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
        read = {*self._names.values()}
        self._standing = tuple(v for v in hollow if v in read)
        self._apart = self.module.takes_key
        self._came, self._records = Counter[_Shape](), dict[_Shape, Callable[..., _Made]]()

    def run(
        self,
        parameters: Tensors,
        buffers: Tensors,
        inputs: Tensors,
        keys: Sequence[int],
        loss_of: LossOf | None = None,
        scale: float = 1.0,
    ) -> CopiesForward:
        """Run the copies; see `ModelCopies.run`."""
        standing = {f"param:{n}": p for n, p in parameters.items()}
        standing |= {f"buffer:{n}": b for n, b in buffers.items()}
        trained = tuple(v for v in self._standing if standing[v].requires_grad)
        flat = [standing[v].detach() for v in self._standing]
        flat += [inputs[value.removeprefix("in:")] for value in self.module.takes]
        shape = trained, (flat[-1].shape, *(t.stride() for t in flat)), scale
        if loss_of is not None:
            made = self._made(trained, keys, flat, loss_of, scale)
        elif (recorded := self._records.get(shape)) is None:
            made = self._made(trained, keys, flat, scale=scale)
            self._count(shape, flat)
        else:
            with torch.no_grad():
                made = recorded(*flat)
        grads, given = made
        found = dict(zip(self._gives(trained), given, strict=True))
        losses, weight = found[self._graph.loss], self._graph.weight
        return CopiesForward(
            {v.removeprefix("param:"): g for v, g in zip(trained, grads, strict=True)},
            losses,
            found[weight] if weight else torch.ones_like(losses),
            {} if trained else {name: found[value] for name, value in self._graph.metrics},
            {name: found[value] for name, value in self._rules.items()},
        )

    def _gives(self, trained: Sequence[str]) -> Sequence[str]:
        """Values that are given beside gradients of these."""
        return self._trains if trained else self.module.gives

    def _count(self, shape: _Shape, flat: Sequence[Tensor]) -> None:
        """Record what has come often."""
        self._came[shape] += 1
        if self._apart or self._came[shape] != RECORDED_AFTER or len(self._records) >= MOST_RECORDS:
            return
        try:
            found = record(lambda *values: self._made(shape[0], (), values, scale=shape[2]), flat)
        except RuntimeError as error:
            _log.info("copies run without a record: %s", error)
            return
        self._records[shape] = found

    def _made(
        self,
        trained: Sequence[str],
        keys: Sequence[int],
        flat: Sequence[Tensor],
        loss_of: LossOf | None = None,
        scale: float = 1.0,
    ) -> _Made:
        """Gradients of `trained`, and what the module gives. `flat`: what stands in the model,
        then inputs."""
        count = len(self._standing)
        leaves = {
            v: t.detach().requires_grad_(v in trained)
            for v, t in zip(self._standing, flat[:count], strict=True)
        }
        made = self._forward(leaves, tuple(flat[count:]), keys)
        if loss_of is not None:
            made[self._graph.loss] = loss_of(made)
        total, weight, counts = made[self._graph.loss], self._graph.weight, None
        if weight:
            weights = made[weight].detach()
            counts = weights != 0
            # The mean over nothing is NaN, and so would be its gradient.
            total = torch.where(counts, total, 0.0).mul(weights)
        wanted = [leaves[v] for v in trained]
        grads: list[Tensor | None] = []
        if wanted:
            whole = total.sum()
            seed = torch.full_like(whole, scale)
            grads += torch.autograd.grad(whole, wanted, seed, allow_unused=True)
        if counts is not None:
            grads = [None if g is None else _where(counts, g) for g in grads]
        return grads, [made[value].detach() for value in self._gives(trained)]

    def _forward(
        self, standing: Tensors, taken: tuple[Tensor, ...], keys: Sequence[int]
    ) -> dict[str, Tensor]:
        """By value name, (copies, ...)."""
        tensors = {name: standing[value] for name, value in self._names.items()}
        if not self._apart:
            try:
                with sdpa_kernel(SDPBackend.MATH):  # others have no vectorised form
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


def _where(counts: Tensor, grad: Tensor) -> Tensor:
    """The gradients of copies that count, 0 for others."""
    mine = counts.view(-1, *(1,) * (grad.dim() - 1))
    return torch.where(mine, grad, torch.zeros_like(grad))
