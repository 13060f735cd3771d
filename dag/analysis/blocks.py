"""Blocks: what people and planners see in place of hundreds of operators.

Repetition is found from structure alone; only the names come from the modules of the user's model.

1. Every operator gets a token: target, attributes, specs of its results and of what it reads. What
   may differ from layer to layer does not count: numbers that it calculates with, and which part of
   a value it takes.
2. Among consecutive equal token sequences the one that covers most operators is taken, the shorter
   period first, and the rest to its left and right is searched in the same way.
3. A repeated sequence can begin at any operator of its period. The beginning is taken at which each
   repetition holds the parameters of one submodule and fewest operators of others; else, and among
   equals, the one that fewest values cross.
4. Repetitions are blocks of one kind only if they are isomorphic: inside, the same operator reads
   the same operator; from outside, equal specs in the same pattern; and the same results leave.
5. What does not repeat is named by submodules as deep as those of the repeated blocks.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from ..ir.graph import Arg, Graph, Operator, Ref
from ..ir.operators import takes_key

__all__ = ["Block", "blocks", "describe_interval"]


MOST_WORDS = 8
"""Runs of blocks that an interval is described by; of more, only the first and the last block."""


@dataclass(frozen=True, slots=True)
class Block:
    """Operators [start, stop). Blocks of equal kind are isomorphic; a name occurs once."""

    name: str
    start: int
    stop: int
    kind: str


def blocks(graph: Graph) -> tuple[Block, ...]:
    """The blocks of a graph, bound or not, in order; together they are all of its operators. Found
    once for a graph."""
    return graph.once("blocks", lambda: _blocks(graph))


def _blocks(graph: Graph) -> tuple[Block, ...]:
    finder = _Finder(graph)
    runs = list(finder.runs(0, len(graph.operators)))
    # Blocks at `model.layers.3` stand beside `model.norm` and an odd `model.layers.4`.
    containers = {_path(finder.names(run)[0])[:-1] for run in runs}
    common = len(_common([op.module for op in graph.operators if op.module]))
    depth = max([common + 1, *map(len, containers)])
    found: list[Block] = []
    at = 0
    for run in [*runs, None]:
        stop = len(graph.operators) if run is None else run.start
        found += _by_module(graph, at, stop, depth, containers)
        if run is not None:
            names = finder.names(run)
            for i, name in enumerate(names):
                start = run.start + i * run.period
                found.append(Block(name, start, start + run.period, names[0]))
            at = run.stop
    return tuple(_unique(found))


def describe_interval(graph: Graph, start: int, stop: int) -> str:
    """Operators [start, stop) in words, e.g. `embed, layers.0 to layers.3 (begin)`: of a block of
    which it has a part, whether that is its begin, its end or a middle. The path that all names of
    repeated blocks begin with is left out, but for its last word."""
    named = blocks(graph)
    short = _short_names(named)
    parts: list[tuple[str, str]] = []  # the row that it is of, and words
    for block in named:
        low, high = max(start, block.start), min(stop, block.stop)
        if low < high:
            whole = (low == block.start, high == block.stop)
            which = _PARTS[whole]
            parts.append((_row(short[block.name]), short[block.name] + which))
    words: list[str] = []
    for _, group in groupby(parts, key=lambda part: part[0]):
        names = [name for _, name in group]
        words.append(names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}")
    if len(words) > MOST_WORDS:
        return f"{words[0].split(' to ')[0]} to {words[-1].split(' to ')[-1]}"
    return ", ".join(words)


def _row(name: str) -> str:
    """What all layers of one list have in common, also those of other kinds: `layers` of
    `layers.3`, `block` of `block[3]`. Any other block is alone."""
    found = re.fullmatch(r"(.*)(\.\d+|\[\d+\])", name)
    return found[1] if found else name


_PARTS = {
    (True, True): "",
    (True, False): " (begin)",
    (False, True): " (end)",
    (False, False): " (middle)",
}


def _short_names(named: Sequence[Block]) -> dict[str, str]:
    """By name of a block what people read: `model.layers.3` is `layers.3`, and `model.norm` beside
    it `norm`, unless two blocks were called alike then."""
    counts = Counter(block.kind for block in named)
    several = [_path(block.name)[:-1] for block in named if counts[block.kind] > 1]
    prefix = _common([".".join(path) for path in several])[:-1]
    if not prefix:
        return {block.name: block.name for block in named}
    found = {b.name: b.name.removeprefix(".".join(prefix) + ".") for b in named}
    return found if len(set(found.values())) == len(found) else {b.name: b.name for b in named}


@dataclass(frozen=True, slots=True)
class _Run:
    """`times` isomorphic repetitions of `period` operators from `start` on."""

    start: int
    period: int
    times: int

    @property
    def stop(self) -> int:
        return self.start + self.period * self.times


class _Finder:
    def __init__(self, graph: Graph) -> None:
        self._operators = graph.operators
        numbers: dict[Any, int] = {}
        self._tokens = np.array(
            [numbers.setdefault(_token(graph, op), len(numbers)) for op in graph.operators],
            dtype=np.int64,
        )
        self._trains = [any(v.startswith("param:") for v in op.reads) for op in graph.operators]
        self._last = {value: at[-1] for value, at in graph.readers.items()}
        """The last operator that reads a value."""
        self._last |= dict.fromkeys(graph.results, len(graph.operators))

    def runs(self, low: int, high: int) -> Iterator[_Run]:
        """Disjoint runs within [low, high), in order."""
        for start, end, period in self._candidates(low, high):
            run = self._placed(start, end, period)
            if run is not None:
                yield from self.runs(low, run.start)
                yield run
                yield from self.runs(run.stop, high)
                return

    def _candidates(self, low: int, high: int) -> list[tuple[int, int, int]]:
        """(start, end, period) such that token[k] == token[k + period] for start ≤ k < end, at
        least `period` long; what covers most operators comes first, then the shorter period."""
        tokens, found = self._tokens[low:high], []
        for period in range(2, len(tokens) // 2 + 1):
            same = np.concatenate(([False], tokens[:-period] == tokens[period:], [False]))
            edges = np.flatnonzero(same[1:] != same[:-1])
            for start, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
                if end - start >= period:
                    found.append((low + start, low + end, period))
        return sorted(found, key=lambda c: (-(1 + (c[1] - c[0]) // c[2]) * c[2], c[2], c[0]))

    def _placed(self, start: int, end: int, period: int) -> _Run | None:
        """The run of a candidate at its best beginning; None if nothing in it is isomorphic."""
        options = []
        for at in range(start, start + period):
            run = _Run(at, period, 1 + (end - at) // period)
            if run.times < 2 or not any(self._trains[at : at + period]):
                continue
            names = self._modules(run)
            aligned = all(names) and len(set(names)) == len(names)
            strays = self._strays(run, names) if aligned else 0
            options.append((not aligned, -run.times, strays, self._width(at), at, run))
        for *_, run in sorted(options, key=lambda option: option[:-1]):
            isomorphic = self._isomorphic(run)
            if isomorphic is not None:
                return isomorphic
        return None

    def _strays(self, run: _Run, names: Sequence[str]) -> int:
        """How many operators lie outside their repetition's submodule."""
        return sum(
            not f"{op.module}.".startswith(f"{names[i // run.period]}.")
            for i, op in enumerate(self._operators[run.start : run.stop])
        )

    def _width(self, at: int) -> int:
        """How many values cross the cut before operator `at`."""
        return sum(
            1
            for op in self._operators[:at]
            for value in op.values
            if self._last.get(value, -1) >= at
        )

    def _isomorphic(self, run: _Run) -> _Run | None:
        """The longest part of the run in which all repetitions are isomorphic."""
        shapes = [self._shape(run.start + i * run.period, run.period) for i in range(run.times)]
        best: _Run | None = None
        at = 0
        for _, group in groupby(shapes):
            times = len(list(group))
            if times >= 2 and (best is None or times > best.times):
                best = _Run(run.start + at * run.period, run.period, times)
            at += times
        return best

    def _shape(self, start: int, period: int) -> tuple[Any, ...]:
        """Describe which operators of [start, start + period) read which, and what leaves it: equal
        for two intervals with equal tokens exactly if they are isomorphic."""
        stop = start + period
        inside = {
            value: (i, j)
            for i, op in enumerate(self._operators[start:stop])
            for j, value in enumerate(op.values)
        }
        outside: dict[str, int] = {}
        edges = [
            inside.get(value) or outside.setdefault(value, len(outside))
            for op in self._operators[start:stop]
            for value in op.mentions
        ]
        leaves = tuple(inside[v] for v in inside if self._last.get(v, -1) >= stop)
        return (tuple(edges), leaves)

    def _modules(self, run: _Run) -> list[str]:
        """Per repetition the submodule that holds its parameters; empty where there is none."""
        return [
            ".".join(
                _common(
                    [
                        self._operators[k].module
                        for k in range(start, start + run.period)
                        if self._trains[k]
                    ]
                )
            )
            for start in range(run.start, run.stop, run.period)
        ]

    def names(self, run: _Run) -> list[str]:
        """The repetitions' submodules; numbered where they share one."""
        names = self._modules(run)
        if all(names) and len(set(names)) == len(names):
            return names
        return [f"{names[0] or 'block'}[{i}]" for i in range(run.times)]


_CALCULATES = frozenset(
    f"aten.{name}.{overload}"
    for name in ("add", "sub", "rsub", "mul", "div", "pow", "eq", "ne", "lt", "le", "gt", "ge")
    for overload in ("Tensor", "Scalar", "Tensor_Scalar")
)
"""Operators whose second argument may be a number, and one layer's another one than the next's."""
_TAKES_PART = frozenset({"aten.select.int", "aten.slice.Tensor"})
"""Operators that take a part of a value: which one is said from the third argument on, and how
large it is by their results."""


def _token(graph: Graph, op: Operator) -> Any:
    """What two operators must share to stand in one place of two blocks."""
    # The number of a random operator, its last argument, differs from each to the next.
    args = op.args[:-1] if takes_key(op.target) else op.args
    fixed = 1 if op.target in _CALCULATES else 2 if op.target in _TAKES_PART else len(args)
    return (
        op.target,
        tuple(_abstract(graph, a) for a in args[:fixed]),
        tuple(_of_any_number(_abstract(graph, a)) for a in args[fixed:]),
        tuple((k, _abstract(graph, a)) for k, a in op.kwargs),
        op.outputs,
    )


def _of_any_number(abstract: Any) -> Any:
    return abstract[0] if abstract[0] in (int, float) else abstract


def _abstract(graph: Graph, arg: Arg) -> Any:
    if isinstance(arg, tuple):
        return tuple(_abstract(graph, item) for item in arg)
    if isinstance(arg, Ref):
        kind = arg.value.partition(":")[0]
        return (kind if kind in ("param", "buffer") else "value", graph.spec[arg.value])
    return (float, 0.0) if isinstance(arg, float) else (type(arg), arg)


def _by_module(
    graph: Graph, start: int, stop: int, depth: int, containers: Collection[tuple[str, ...]]
) -> Iterator[Block]:
    """What does not repeat, split where the submodule of the given depth changes (one deeper in the
    containers of repeated blocks). Operators of modules around those belong to the part before
    them, or to the first one."""
    around = {_path(op.module)[:i] for op in graph.operators for i in range(len(_path(op.module)))}
    names: list[str] = []
    for op in graph.operators[start:stop]:
        path = _path(op.module)[:depth]
        size = depth
        if path in containers:
            size = depth + 1
            path = _path(op.module)[:size]
        inner = len(path) == size or path not in around
        names.append(".".join(path) if inner else names[-1] if names else "")
    first = next((name for name in names if name), "operators")
    for name, group in groupby(name or first for name in names):
        count = len(list(group))
        yield Block(name, start, start + count, name)
        start += count


def _unique(found: list[Block]) -> Iterator[Block]:
    """Yields the blocks with every name made unique: the second `drop` becomes `drop (2)`."""
    count: dict[str, int] = {}
    for block in found:
        times = count[block.name] = count.get(block.name, 0) + 1
        if times == 1:
            yield block
        else:
            name = f"{block.name} ({times})"
            kind = name if block.kind == block.name else block.kind
            yield Block(name, block.start, block.stop, kind)


def _path(module: str) -> tuple[str, ...]:
    return tuple(module.split(".")) if module else ()


def _common(modules: Sequence[str]) -> tuple[str, ...]:
    """The longest path that all begin with."""
    paths = sorted(_path(m) for m in modules)
    if not paths:
        return ()
    low, high = paths[0], paths[-1]
    same = 0
    while same < min(len(low), len(high)) and low[same] == high[same]:
        same += 1
    return low[:same]
