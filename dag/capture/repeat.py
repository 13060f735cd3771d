"""The graph of N blocks from the graph of the few that were exported (blocks.py).

Of a run of equal periods the graph has two. The second says what every further one does: it reads
weights of its own, what the period before it made, and what was there before all blocks. It is
written again and again with the names moved on. torch numbers the nodes of a program by kind (add,
add_1, add_2, …), so from one period to the next each number grows by what it grew from the first to
the second: operators get the names, and random ones the numbers, that an export of the whole module
gives them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from ..ir.fx_args import dtype_name
from ..ir.graph import Arg, Buffer, Graph, Operator, Ref, TensorSpec, map_arg
from ..ir.operators import takes_key
from .blocks import Repeat
from .from_fx import Names

__all__ = ["DifferError", "repeated"]


class DifferError(Exception):
    """The graph of a shortened module has no two equal periods."""


def repeated(
    graph: Graph, found: tuple[Repeat, ...], names: Names, tensors: Mapping[str, Tensor]
) -> Graph:
    """The graph with every block. `names`, `tensors`: of the whole module. Raises DifferError."""
    for repeat in found:
        graph = _Run(graph, repeat, names.named).written()
    spec = {n: TensorSpec(tuple(t.shape), dtype_name(t.dtype)) for n, t in tensors.items()}
    read = {v for op in graph.operators for v in op.reads}
    known = {b.name: b for b in graph.buffers}
    own = dict.fromkeys(names.buffers.values())
    buffers = [known.get(n) or Buffer(n, spec[n], n in names.persistent) for n in own]
    constants = [b for b in graph.buffers if b.name not in own]
    return replace(
        graph,
        parameters=names.parameters_of(spec),
        buffers=tuple(
            b for b in (*buffers, *constants) if b.persistent or f"buffer:{b.name}" in read
        ),
    )


class _Run:
    """One run of a graph, of which two periods are there."""

    def __init__(self, graph: Graph, repeat: Repeat, named: Callable[[str], str]) -> None:
        self.graph, self.repeat = graph, repeat
        self.more = repeat.count - 2
        # Modules have their own names, tensors those of the graph.
        paths = {repeat.path, named(repeat.path)} if repeat.path else set()
        prefix = "|".join(re.escape(path + ".") for path in sorted(paths))
        self._numbered = re.compile(rf"(param:|buffer:|)({prefix})(\d+)(?=\.|$)")
        places = self._places()
        self.second_block = repeat.start + repeat.period
        self.behind_block = self.second_block + repeat.period
        begin, middle, end = (
            places[k] for k in (repeat.start, self.second_block, self.behind_block)
        )
        ops = graph.operators
        self.before = {v for op in ops[: places[0]] for v in op.values}
        self.first, self.second, self.behind = ops[begin:middle], ops[middle:end], ops[end:]
        self._check()
        self.steps, self.keys = self._strides()

    def _block(self, path: str) -> int | None:
        """The number of the block that a module, parameter or buffer is in."""
        found = self._numbered.match(path)
        return int(found[3]) if found else None

    def _moved(self, path: str, blocks: int, least: int = 0) -> str:
        """The path of the same thing `blocks` blocks further on, if it is in block `least` or
        behind."""
        found = self._numbered.match(path)
        if not found or int(found[3]) < least:
            return path
        return f"{found[1]}{found[2]}{int(found[3]) + blocks}{path[found.end() :]}"

    def _places(self) -> list[int]:
        """Where each exported block begins in the list of operators, and where that ends."""
        blocks = [self._block(op.module) for op in self.graph.operators]
        if set(blocks) - {None} != set(range(len(self.repeat.kept))):
            raise DifferError("a block has no operator")
        called = [k for k in blocks if k is not None]
        if called != sorted(called):
            raise DifferError("blocks run in another order than they have in the list")
        return [*(blocks.index(k) for k in range(len(self.repeat.kept))), len(blocks)]

    # ------------------------------------------------------------ what there is

    def _check(self) -> None:
        """Raises DifferError unless the second period is the first one, one period further."""
        period = self.repeat.period
        ours, theirs = _places_of(self.first), _places_of(self.second)
        if len(self.first) != len(self.second):
            raise DifferError(f"periods of {len(self.first)} and {len(self.second)} operators")
        for a, b in zip(self.first, self.second, strict=True):
            earlier = {
                v for v in a.reads if v not in ours and v not in self.before and ":" not in v
            }
            left = self._line(a, ours | dict.fromkeys(earlier, "earlier"), 0)
            right = self._line(b, ours.fromkeys(ours, "earlier") | theirs, -period)
            if left != right:
                raise DifferError(f"{a!r} is followed by {b!r}")

    def _line(self, op: Operator, places: Mapping[str, Any], blocks: int) -> Any:
        """What an operator does, seen from its period."""

        def plain(arg: Arg) -> Any:
            if not isinstance(arg, Ref):
                return repr(arg)  # which tells 1 from 1.0 and True
            if arg.value in places or arg.value in self.before:
                return places.get(arg.value, arg.value)
            block = self._block(arg.value)
            if ":" not in arg.value or (block is not None and block < self.repeat.start - blocks):
                raise DifferError(f"{op.name} reads {arg.value} of a block long before")
            return self._moved(arg.value, blocks)

        return (
            op.target,
            _parts(op.name)[0],
            [map_arg(a, plain) for a in _plain_args(op)],
            [(k, map_arg(a, plain)) for k, a in op.kwargs],
            op.outputs,
            op.returns_tuple,
            self._moved(op.module, blocks),
        )

    def _strides(self) -> tuple[dict[str, int], int]:
        """By how much the numbers in names grow from period to period, by kind of name, and those
        of random operators."""
        steps: dict[str, int] = {}
        keys: set[int] = set()
        for a, b in zip(self.first, self.second, strict=True):
            (kind, one), (_, two) = _parts(a.name), _parts(b.name)
            if steps.setdefault(kind, two - one) != two - one:
                raise DifferError(f"{b.name} has another number than {a.name} and its like say")
            if takes_key(a.target):
                keys.add(int(b.args[-1]) - int(a.args[-1]))  # type: ignore[arg-type]
        if len(keys) > 1:
            raise DifferError(f"the numbers of random operators grow by {sorted(keys)}")
        return steps, keys.pop() if keys else 0

    # ------------------------------------------------------------ what is written

    def written(self) -> Graph:
        """The graph with all periods."""
        graph, first, second = self.graph, _values(self.first), _values(self.second)
        operators = list(graph.operators[: len(graph.operators) - len(self.behind)])
        buffers = [b for b in graph.buffers if (self._block(b.name) or 0) < self.behind_block]
        last, now = first, second
        for number in range(1, self.more + 1):
            # What the second period reads of the first one, this one reads of the one before it.
            names = dict(zip(first, now, strict=True)) | self._named(self.second, number)
            operators += self._again(self.second, names, number, self.second_block)
            buffers += self._copied(names, number, self.second_block, self.behind_block)
            last, now = now, [names[v] for v in second]
        names = dict(zip(first, last, strict=True)) | dict(zip(second, now, strict=True))
        names |= self._named(self.behind, self.more)
        operators += self._again(self.behind, names, self.more, self.behind_block)
        buffers += self._copied(names, self.more, self.behind_block, len(self.repeat.kept))
        graph = graph.giving(names)
        return replace(graph, operators=tuple(operators), buffers=tuple(buffers))

    def _named(self, ops: Iterable[Operator], number: int) -> dict[str, str]:
        """The values of operators → the same so many periods further."""
        return {
            v: self._name(op, number) + v.removeprefix(op.name) for op in ops for v in op.values
        }

    def _name(self, op: Operator, number: int) -> str:
        kind, place = _parts(op.name)
        place += number * self.steps.get(kind, 0)
        return f"{kind}_{place}" if place else kind

    def _again(
        self, ops: Iterable[Operator], names: Mapping[str, str], number: int, least: int
    ) -> Iterable[Operator]:
        """The operators so many periods further. `names`: of the values that they read or make."""
        blocks = number * self.repeat.period

        def change(arg: Arg) -> Arg:
            if not isinstance(arg, Ref):
                return arg
            return Ref(names.get(arg.value) or self._moved(arg.value, blocks, least))

        for op in ops:
            args = tuple(map_arg(a, change) for a in _plain_args(op))
            if takes_key(op.target):
                args += (op.args[-1] + number * self.keys,)  # type: ignore[operator]
            yield replace(
                op,
                name=self._name(op, number),
                args=args,
                kwargs=tuple((k, map_arg(a, change)) for k, a in op.kwargs),
                module=self._moved(op.module, blocks, least),
            )

    def _copied(
        self, names: Mapping[str, str], number: int, least: int, stop: int
    ) -> Iterable[Buffer]:
        """The buffers of the blocks from `least` up to `stop`, so many periods further."""
        for buffer in self.graph.buffers:
            block, update = self._block(buffer.name), buffer.update
            if block is not None and least <= block < stop:
                if update is not None:
                    update = replace(update, value=names.get(update.value, update.value))
                name = self._moved(buffer.name, number * self.repeat.period)
                yield replace(buffer, name=name, update=update)


def _places_of(ops: Iterable[Operator]) -> dict[str, Any]:
    """Value → which result it is of which operator."""
    return {v: (i, j) for i, op in enumerate(ops) for j, v in enumerate(op.values)}


def _values(ops: Iterable[Operator]) -> list[str]:
    return [v for op in ops for v in op.values]


def _plain_args(op: Operator) -> tuple[Arg, ...]:
    """Without the number of a random operator."""
    return op.args[:-1] if takes_key(op.target) else op.args


def _parts(name: str) -> tuple[str, int]:
    """The kind and the number in the name of an operator."""
    found = re.fullmatch(r"(.*)_(\d+)", name, re.DOTALL)
    return (found[1], int(found[2])) if found else (name, 0)
