"""What an operator's arguments must be, where its kernels trust their caller (I7).

torch checks most calls itself; some kernels read and write by what they were told, though: beyond a
bias of one element, a gate that is missing, in a mode that does not exist. Meta tensors, which tell
the shapes of results, do not notice. And some operators give one result for every row of a
tensor, or run a loop of Python's over one, so that a few bytes of graph cost gigabytes. So before
an operator is called, whether on meta tensors or on real ones, `check` looks at its arguments:

- each argument is of the kind that the schema names: torch takes any number for a dtype;
- how many results it gives is known from its arguments, and is what the graph says;
- an argument whose name is in `CHOICES` is one of few values;
- the rule of its own in `RULES`, if there is one, holds.

The rules were found by `benchmarks/operators/fuzz.py`, which calls every operator with arguments
that pass here in memory between guard pages. A new operator needs calls to begin with there, and a
rule here as soon as one of those misbehaves.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

from ..graph import (
    Arg,
    Device,
    Dtype,
    Graph,
    GraphError,
    MemoryFormat,
    Operator,
    Ref,
    TensorSpec,
)
from ..operators import is_own, resolve
from .table import CHOICES, RESULTS, STEPS, TABLE
from .windows import WINDOWS
from .words import Rule, RuleError

__all__ = ["MAX_GRAPH_STEPS", "MAX_RESULTS", "MAX_STEPS", "RULES", "check", "check_graph"]

RULES: dict[str, Rule] = TABLE | WINDOWS
"""By operator; none is in both tables."""

MAX_RESULTS = 1 << 14
"""The most results of one operator. A sequence cut into its tokens, a mixture into its experts:
some thousands."""

MAX_STEPS = 1 << 16
"""The most steps of the loops inside of one operator: 8,000 time steps of four layers in both
directions."""

MAX_GRAPH_STEPS = 1 << 18
"""The most steps of all loops of a graph's operators: as operators, twice what a graph may have."""


def check(op: Operator, specs: Mapping[str, TensorSpec]) -> None:
    """Raises GraphError when the arguments of an operator of a bound graph break a rule. `specs`
    has what the operator reads. To be asked before the operator is called in any way."""
    _steps(op, specs)


def check_graph(graph: Graph) -> None:
    """`check` for every operator of a bound graph, as its specs say, and for their loops
    together."""
    if "rules" in graph.found:
        return
    total = 0
    for op in graph.operators:
        total += _steps(op, graph.spec)
        if total > MAX_GRAPH_STEPS:
            raise GraphError(
                f"up to operator {op.name} ({op.target}) the graph has {total} steps in "
                f"loops within its operators: expected at most "
                f"{MAX_GRAPH_STEPS}; make sequences shorter"
            )
    graph.found["rules"] = True


def _steps(op: Operator, specs: Mapping[str, TensorSpec]) -> int:
    """Checks, and returns how often the loop inside runs."""
    try:
        return _checked(op, specs)
    except RuleError as broken:
        reads = ", ".join(repr(specs[v]) for v in op.reads)
        raise GraphError(f"operator {op.name} ({op.target}) on {reads}: {broken}") from None


def _checked(op: Operator, specs: Mapping[str, TensorSpec]) -> int:
    given = _given(op, specs)
    count = RESULTS[op.target](given) if op.target in RESULTS else _signature(op.target).results
    if op.outputs and count != len(op.outputs):
        raise RuleError(f"it gives {count} results, the graph says {len(op.outputs)}")
    if count > MAX_RESULTS:
        raise RuleError(f"it gives {count} results: expected at most {MAX_RESULTS}")
    steps = STEPS[op.target](given) if op.target in STEPS else 0
    if steps > MAX_STEPS:
        raise RuleError(f"it is a loop of {steps} steps: expected at most {MAX_STEPS}")
    for name, choices in CHOICES.items():
        if name in given and given[name] not in choices:
            expected = ", ".join(map(repr, choices))
            raise RuleError(f"{name} is {given[name]!r}: expected one of {expected}")
    if op.target in RULES:
        RULES[op.target](given)
    return steps


class _Signature(NamedTuple):
    kinds: dict[str, str]
    """By the name of each argument, in order, what it is, as torch writes it."""
    defaults: dict[str, Any]
    results: int


@cache
def _signature(target: str) -> _Signature:
    if is_own(target):
        found = inspect.signature(resolve(target)).parameters.values()
        return _Signature({p.name: _OWN[p.annotation] for p in found if p.name != "key"}, {}, 1)
    schema = resolve(target)._schema  # type: ignore[attr-defined]
    kinds = {a.name: str(a.real_type) for a in schema.arguments}
    defaults = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    return _Signature(kinds, defaults, len(schema.returns))


_OWN = {
    "Tensor": "Tensor",
    "Tensor | None": "Optional[Tensor]",
    "float": "float",
    "float | None": "Optional[float]",
    "int": "int",
    "bool": "bool",
    "Sequence[int]": "List[int]",
    "torch.dtype": "ScalarType",
    "torch.device | str": "Device",
}
"""Annotations of Shoal's own operators (dag/ir/random.py, dag/ir/experts.py), as torch would write
them."""

_KINDS: dict[str, tuple[type, ...]] = {
    # torch makes a tensor of a number.
    "Tensor": (TensorSpec, bool, int, float),
    "number": (bool, int, float),
    "float": (bool, int, float),
    "int": (bool, int),
    "bool": (bool,),
    "str": (str,),
    "ScalarType": (Dtype,),
    "MemoryFormat": (MemoryFormat,),
    "Device": (Device,),
    "Layout": (),
}


def _is(kind: str, value: Any) -> bool:
    if kind.startswith("Optional["):
        return value is None or _is(kind[9:-1], value)
    if kind.startswith("List["):
        item = kind[5:-1]
        if isinstance(value, tuple):
            return all(_is(item, v) for v in value)
        return item in ("int", "float") and _is(item, value)  # one number for every dimension
    return isinstance(value, _KINDS[kind])


def _given(op: Operator, specs: Mapping[str, TensorSpec]) -> dict[str, Any]:
    """Arguments by their names in the operator's schema; those left out have their defaults."""
    kinds, defaults, _ = _signature(op.target)
    if len(op.args) > len(kinds):
        raise RuleError(f"it takes {len(kinds)} arguments, the graph gives {len(op.args)}")
    found = dict(defaults)

    def value(arg: Arg) -> Any:
        if isinstance(arg, Ref):
            return specs[arg.value]
        return tuple(value(a) for a in arg) if isinstance(arg, tuple) else arg

    for name, arg in (*zip(kinds, op.args, strict=False), *op.kwargs):
        if name not in kinds:
            raise RuleError(f"it takes no argument {name!r}: expected {', '.join(kinds)}")
        found[name] = value(arg)
        if not _is(kinds[name], found[name]):
            raise RuleError(f"{name} is {found[name]!r}: expected {kinds[name]}")
    if {name for name, _ in op.kwargs} & set(list(kinds)[: len(op.args)]):
        raise RuleError("an argument is given twice")
    return found
