"""Which blocks of a model a microbatch may leave out, and why the others not.

A block may be left out if the model without it is a model of the same kind (stochastic depth, arXiv
1603.09382; SkipPipe, arXiv 2502.19913):

- it repeats: another block is isomorphic to it (`dag/analysis/blocks.py`). Embedding, head and loss
  never do;
- one value leaves it, and stands for one value that came in, of the same shape and dtype;
- it is residual: what leaves is a sum in which what came in stands as it is. A ReLU behind the sum
  changes nothing of what came in where that came out of one. What all blocks of a kind add alike
  (an embedding that each gets once more) came in for none of them.

Left out, what came in goes on in place of what leaves, so it has a gradient, as that has, and
nothing behind the block reads it, too. Whatever else a block reads (masks, rotary tables, what an
encoder made) is made by no block of its kind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ..ir.graph import Graph, Operator, Ref
from ..ir.operators import aten
from .blocks import Block, blocks

__all__ = ["Bypass", "bypass_of", "describe_skippable", "skippable_blocks"]

_SAME = aten("alias clone contiguous")
_RELU = frozenset({"aten.relu.default"})
_KEEPS_SIGN = frozenset({"aten.max_pool2d.default", "aten.max_pool1d.default", *_SAME})


@dataclass(frozen=True, slots=True)
class Bypass:
    """Whether operators [start, stop) can be left out, and what goes on in place of what."""

    name: str
    start: int
    stop: int
    taken: str = ""
    """The value that comes in."""
    made: str = ""
    """The value that leaves, in place of which `taken` goes on."""
    why_not: str = ""
    """Why they cannot be left out, in words; empty: they can."""
    clamped: bool = False
    """Whether a ReLU is behind the sum."""

    @property
    def why_not_scaled(self) -> str:
        """Why what they add to what came in cannot be scaled (stochastic depth); empty: it can."""
        behind = "has a ReLU behind its sum: what it adds cannot be scaled alone"
        return self.why_not or (behind if self.clamped else "")


def skippable_blocks(graph: Graph) -> tuple[Bypass, ...]:
    """All blocks of a graph, bound or not, in order, each with what it is bypassed by or why it
    cannot be. Found once for a graph."""
    return graph.once("skippable", lambda: tuple(_Judge(graph).all()))


def bypass_of(graph: Graph, start: int, stop: int) -> Bypass:
    """Whether operators [start, stop), e.g. those of a stage, can be left out: they are whole
    blocks, each of which can be, one after another."""
    within = [b for b in skippable_blocks(graph) if b.start < stop and b.stop > start]
    name = within[0].name if len(within) == 1 else f"{within[0].name} to {within[-1].name}"
    for block in within:
        if block.why_not:
            return Bypass(name, start, stop, why_not=f"{block.name} {block.why_not}")
        if block.start < start or block.stop > stop:
            words = f"has a part of {block.name}: expected whole blocks"
            return Bypass(name, start, stop, why_not=words)
    for one, two in pairwise(within):
        if one.made != two.taken:
            words = f"has operators between {one.name} and {two.name}"
            return Bypass(name, start, stop, why_not=words)
    clamped = any(block.clamped for block in within)
    return Bypass(name, start, stop, within[0].taken, within[-1].made, clamped=clamped)


def describe_skippable(graph: Graph) -> list[str]:
    """What can be skipped, in words: a line for all blocks that can be, and one for each reason
    that others cannot."""
    found = skippable_blocks(graph)
    can = [b.name for b in found if not b.why_not]
    lines = [f"skippable: {', '.join(can)}"] if can else []
    reasons: dict[str, list[str]] = {}
    for block in found:
        if block.why_not:
            reasons.setdefault(block.why_not, []).append(block.name)
    lines += [f"not skippable: {', '.join(names)}: {why}" for why, names in reasons.items()]
    if not can:
        lines.insert(0, "not skippable: no block of this model can be left out")
    return lines


class _Judge:
    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._blocks = blocks(graph)
        self._counts = Counter(b.kind for b in self._blocks)
        self._results = {graph.loss, graph.weight, *(v for _, v in graph.metrics)} - {""}

    def all(self) -> Iterator[Bypass]:
        for block in self._blocks:
            made = self._leaving(block)
            at = block.name, block.start, block.stop
            taken = ""
            why = self._why_not(block, made)
            if not why:
                taken, why = self._taken(block, made[0])
            if why:
                yield Bypass(*at, why_not=why)
            else:
                yield Bypass(*at, taken, made[0], clamped=taken in self._passed(block, made[0])[1])

    def _leaving(self, block: Block) -> list[str]:
        """Values of a block that others read, or that are results."""
        return [
            v
            for op in self._graph.operators[block.start : block.stop]
            for v in op.values
            if v in self._results
            or any(not block.start <= i < block.stop for i in self._graph.readers.get(v, ()))
        ]

    def _why_not(self, block: Block, made: list[str]) -> str:
        if self._graph.loss in made:
            return "makes the loss"
        if self._counts[block.kind] < 2:
            return "is no repeated block: no other one is like it"
        if len(made) > 1:
            return f"makes {len(made)} values that others read ({', '.join(made[:3])}): expected 1"
        return "" if made else "makes nothing that others read"

    def _taken(self, block: Block, made: str) -> tuple[str, str]:
        """The value that a block passes on in a sum, and why there is none."""
        found, clamped = self._passed(block, made)
        if len(found) > 1:  # what every block adds alike is not what goes through them
            alike = self._alike(block, found.keys())
            found = {value: n for value, n in found.items() if value not in alike}
        if not found:
            return "", "is not residual: what comes in does not stand in what leaves as it is"
        if len(found) > 1:
            return "", f"adds up {len(found)} values from outside ({', '.join(sorted(found))})"
        [(taken, count)] = found.items()
        if count > 1:
            return "", f"is not residual: {taken} stands {count} times in what leaves"
        specs = self._graph.spec
        if specs[taken] != specs[made]:
            return "", f"takes {specs[taken]!r} and makes {specs[made]!r}: expected the same"
        if taken not in self._graph.grads:
            return "", f"takes {taken}, which has no gradient: nothing is trained before it"
        if any(i >= block.stop for i in self._graph.readers[taken]):
            return "", f"takes {taken}, which operators behind the block read, too"
        if taken in clamped and not self._not_negative(taken):
            return "", f"has a ReLU behind its sum, and {taken} did not come out of one"
        of_kind = {
            v
            for other in self._blocks
            if other.kind == block.kind
            for op in self._graph.operators[other.start : other.stop]
            for v in op.values
        }
        own = self._operators(block)
        reads = {v for op in own for v in op.reads} - {v for op in own for v in op.values}
        if others := sorted((reads - {taken}) & of_kind):
            return "", f"also reads {others[0]} of another block of its kind"
        return taken, ""

    def _alike(self, block: Block, values: Collection[str]) -> set[str]:
        """The values of these that every other block of its kind reads, too, and none of them
        makes."""
        others = [b for b in self._blocks if b.kind == block.kind and b != block]
        reads = [{v for op in self._operators(b) for v in op.reads} for b in others]
        made = {v for b in others for op in self._operators(b) for v in op.values}
        return {v for v in values if v not in made and all(v in r for r in reads)}

    def _operators(self, block: Block) -> Sequence[Operator]:
        return self._graph.operators[block.start : block.stop]

    def _passed(self, block: Block, made: str) -> tuple[dict[str, int], set[str]]:
        """Values from outside that reach `made` by sums alone, with how often each stands in them,
        and those of them with a ReLU on their way."""
        times, clamped = Counter({made: 1}), set[str]()
        for op in reversed(self._operators(block)):
            count = sum(times.pop(v, 0) for v in op.values)
            if not count:
                continue
            behind = op.target in _RELU or not clamped.isdisjoint(op.values)
            for arg in op.args[: _terms(op)]:
                # What a sum spreads over a larger one stands for no whole.
                if isinstance(arg, Ref) and self._graph.spec[arg.value] == self._graph.spec[made]:
                    times[arg.value] += count
                    clamped |= {arg.value} if behind else set()
        inputs = {v: n for v, n in times.items() if not v.startswith(("param:", "buffer:"))}
        return inputs, clamped & inputs.keys()

    def _not_negative(self, value: str) -> bool:
        """Whether a value came out of a ReLU, through nothing that changes signs."""
        at = self._graph.producer.get(value)
        if at is None:
            return False
        op = self._graph.operators[at]
        if op.target in _RELU:
            return True
        first = op.args[0] if op.args else None
        if op.target not in _KEEPS_SIGN or not isinstance(first, Ref):
            return False
        return self._not_negative(first.value)


def _terms(op: Operator) -> int:
    """How many of its first arguments an operator adds up as they are."""
    if op.target == "aten.add.Tensor":
        return 2 if dict(op.kwargs).get("alpha", 1) == 1 else 1
    return 1 if op.target in _SAME | _RELU | {"aten.sub.Tensor"} else 0
