"""Rebuilding a lost stage from the blocks around it (CheckFree, arXiv 2506.15461, section 4).

A stage whose every copy is gone is made anew, parameter by parameter:

1. What a surviving stage holds too (a tied weight; another holder of the same stage) is copied,
   with the optimizer's state: copies stay equal.
2. A parameter of a repeated block becomes the weighted mean of the parameters in its place in the
   nearest surviving blocks of its kind, one before it and one behind it,

       W ← (w₁·W₁ + w₂·W₂) / (w₁ + w₂),    w_j = ‖∇W_j‖² + 1e-8,

   with the squared 2-norm of the last step's gradient of the whole block j. With a block on one
   side only it is copied from there. Block by block, so that stages need not be equal, and several
   in a row can be gone. The optimizer begins anew with it, at BOOST times the learning rate.
3. A frozen parameter is what it was at the start. Anything else (an embedding, a head, a buffer
   that is updated) cannot be made: it has to be held twice, else nothing here helps.

CheckFree+ gives half the microbatches the stages in another order, in which the first stage changes
places with the second one, and the last with the last but one (`swapped`). These learn each other's
part, so a lost one of them is a copy of the one that it changes places with.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..analysis.blocks import blocks
from ..ir.graph import Graph, Operator

if TYPE_CHECKING:
    from torch import Tensor

    from ..plan.cut import Stage

__all__ = ["BOOST", "LEARNED", "Rebuild", "Repeated", "mean", "rebuild", "repeated"]

BOOST = 1.1
"""What the learning rate of rebuilt parameters is multiplied with, once (124M and 1.5B there)."""
LEARNED = 1 / 3
"""In what share of the microbatches two stages have to change places, at least, for the one to have
learned the other's part."""
_LEAST = 1e-8
"""The least weight that counts: where both gradients are zero, the plain mean."""


@dataclass(frozen=True, slots=True)
class Repeated:
    """A block of a kind that repeats: `parameters[i]` has the place of every other one's [i]."""

    name: str
    kind: str
    parameters: tuple[str, ...]
    """Each once, in the order in which its operators read them; frozen ones too."""


@dataclass(frozen=True)
class Rebuild:
    """How the parameters of lost stages are made; see the module."""

    copies: tuple[str, ...]
    """Trainable parameters that a surviving stage holds."""
    means: Mapping[str, tuple[tuple[str, Repeated], ...]]
    """By lost parameter, the one or two parameters that it is the mean of, with their blocks."""
    lacking: tuple[str, ...]
    """Parameters and updated buffers that nothing can stand for. With some, it cannot be done."""

    @property
    def sources(self) -> tuple[str, ...]:
        """Parameters whose values are needed, each once."""
        found = dict.fromkeys(self.copies)
        for origins in self.means.values():
            found |= dict.fromkeys(name for name, _ in origins)
        return tuple(found)

    @property
    def weighed(self) -> tuple[str, ...]:
        """Parameters whose squared gradient norms are needed, each once."""
        found = dict[str, None]()
        for origins in self.means.values():
            for _, block in origins if len(origins) > 1 else ():
                found |= dict.fromkeys(block.parameters)
        return tuple(found)

    @property
    def why_not(self) -> str:
        """Why it cannot be done; empty: it can."""
        if not self.lacking:
            return ""
        more = f" and {len(self.lacking) - 1} more" if len(self.lacking) > 1 else ""
        return (
            f"nobody else holds {self.lacking[0]}{more}, and no block like it is left to make "
            "it from"
        )

    def made(
        self, tensors: Mapping[str, Tensor], squares: Mapping[str, float]
    ) -> Iterator[tuple[str, Tensor]]:
        """The lost parameters of `means`, one by one. `tensors`: at least `sources`; `squares`: of
        `weighed`, the squared 2-norm of the last gradient (0 where there was none)."""
        for name, origins in self.means.items():
            weights = [
                sum(squares.get(p, 0.0) for p in block.parameters) if len(origins) > 1 else 0.0
                for _, block in origins
            ]
            yield name, mean([tensors[source] for source, _ in origins], weights)


def mean(tensors: Sequence[Tensor], squares: Sequence[float]) -> Tensor:
    """The mean of tensors of one spec, weighted by squared gradient norms; a new tensor. Sums in
    float64, in the order given, so that every holder gets the same bits."""
    weights = [square + _LEAST for square in squares]
    total = torch.zeros_like(tensors[0], dtype=torch.float64)
    for tensor, weight in zip(tensors, weights, strict=True):
        total += (weight / sum(weights)) * tensor.detach().double()
    return total.to(tensors[0].dtype)


def repeated(graph: Graph) -> tuple[Repeated, ...]:
    """The blocks that repeat and have parameters, in order. Those of a kind whose parameters do not
    correspond one to one are left out."""
    return graph.once("repeated", lambda: _repeated(graph))


def _repeated(graph: Graph) -> tuple[Repeated, ...]:
    found: list[Repeated] = []
    for block in blocks(graph):
        names = _in_places(graph.operators[block.start : block.stop])
        found.append(Repeated(block.name, block.kind, names))
    shapes: dict[str, set[tuple[object, ...]]] = {}
    count: dict[str, int] = {}
    for b in found:
        places = tuple(b.parameters.index(p) for p in b.parameters)
        specs = tuple(graph.spec[f"param:{p}"] for p in b.parameters)
        shapes.setdefault(b.kind, set()).add((places, specs))
        count[b.kind] = count.get(b.kind, 0) + 1
    alike = {kind for kind, n in count.items() if n > 1 and len(shapes[kind]) == 1}
    return tuple(
        Repeated(b.name, b.kind, tuple(dict.fromkeys(b.parameters)))
        for b in found
        if b.kind in alike and b.parameters
    )


def rebuild(
    graph: Graph,
    stages: Sequence[Stage],
    lost: Collection[int],
    alive: Collection[int],
    *,
    swapped: Collection[tuple[int, int]] = (),
) -> Rebuild:
    """How the stages `lost` are made from those of which a holder is `alive`; a stage of both has
    another holder. `swapped`: pairs of stages that change places in many microbatches (LEARNED)."""
    here = {p for k in alive for p in stages[k].parameters}
    trained = {p.name for p in graph.parameters if p.trainable}
    wanted = dict.fromkeys(p for k in sorted(lost) for p in stages[k].trainable)
    kinds: dict[str, list[Repeated]] = {}
    for block in repeated(graph):
        kinds.setdefault(block.kind, []).append(block)
    at = {
        p: (kind, i, place)
        for kind, of_kind in kinds.items()
        for i, block in enumerate(of_kind)
        for place, p in enumerate(block.parameters)
        if p in trained
    }
    whole = {
        kind: [i for i, b in enumerate(of_kind) if here.issuperset(trained & {*b.parameters})]
        for kind, of_kind in kinds.items()
    }
    instead = _stand_ins(stages, kinds, lost, swapped)
    means: dict[str, tuple[tuple[str, Repeated], ...]] = {}
    lacking: list[str] = []
    for name in wanted:
        if name in here:
            continue
        if name not in at:
            lacking.append(name)
            continue
        kind, i, place = at[name]
        stand_in = instead.get((kind, i))
        if stand_in in whole[kind]:
            near = [stand_in]
        else:
            before = [j for j in whole[kind] if j < i][-1:]
            near = before + [j for j in whole[kind] if j > i][:1]
        origins = [(kinds[kind][j].parameters[place], kinds[kind][j]) for j in near]
        if origins:
            means[name] = tuple(origins)
        else:
            lacking.append(name)
    kept = {b for k in alive for b in stages[k].updates}
    lacking += [b for k in sorted(lost) for b in stages[k].updates if b not in kept]
    return Rebuild(tuple(p for p in wanted if p in here), means, tuple(lacking))


def _stand_ins(
    stages: Sequence[Stage],
    kinds: Mapping[str, Sequence[Repeated]],
    lost: Collection[int],
    swapped: Collection[tuple[int, int]],
) -> dict[tuple[str, int], int]:
    """By lost block (kind, number), the block in its place in the stage that changes places with
    its own, where the two have equally many of the kind."""
    found: dict[tuple[str, int], int] = {}
    for pair in swapped:
        for mine, other in (pair, pair[::-1]):
            for kind, of_kind in kinds.items() if mine in lost else ():
                a, b = (
                    [i for i, x in enumerate(of_kind) if {*x.parameters} <= {*stages[k].parameters}]
                    for k in (mine, other)
                )
                if len(a) == len(b):
                    found |= {(kind, i): j for i, j in zip(a, b, strict=True)}
    return found


def _in_places(operators: Sequence[Operator]) -> tuple[str, ...]:
    """The parameter at each place where one is read, repetitions included."""
    return tuple(
        value.removeprefix("param:")
        for op in operators
        for value in op.mentions
        if value.startswith("param:")
    )
