"""Operators that change nothing are taken out of a fresh graph."""

from __future__ import annotations

from dataclasses import replace

from ..ir.graph import Graph, MemoryFormat, Operator, Ref

__all__ = ["simplify"]

_END = 2**63 - 1


def _only_reshaped(graph: Graph) -> frozenset[str]:
    """Values that nothing but reshapes read. A reshape copies where it must, so a copy to
    contiguous memory before it says nothing (and depends on which attention kernel was traced)."""
    return frozenset(
        value
        for value, readers in graph.readers.items()
        if value not in graph.results
        and all(graph.operators[i].target == "aten.reshape.default" for i in readers)
    )


def _same_as(op: Operator, graph: Graph, only_reshaped: frozenset[str]) -> str | None:
    """The value that an operator only repeats, if it does.

    Copies count: no operator of a graph changes a tensor in place, so nothing can tell them apart.
    """
    first = op.args[0] if op.args else None
    if op.target == "aten.cat.default" and isinstance(first, tuple):
        # A cache that starts empty is concatenated with a tensor of shape [0].
        full = [a for a in first if isinstance(a, Ref) and graph.spec[a.value].shape != (0,)]
        return full[0].value if len(full) == 1 else None
    if not isinstance(first, Ref) or first.value.startswith("in:"):
        return None
    copies = op.target in (
        "aten.clone.default",
        "aten.alias.default",
        "aten.lift_fresh_copy.default",
    )
    whole = op.target == "aten.slice.Tensor" and op.args[2:] in ((0, _END), (None, None), (0, None))
    reshape = op.target == "aten.reshape.default" and graph.spec[first.value] == op.outputs[0].spec
    contiguous = (
        copies
        and op.kwargs == (("memory_format", MemoryFormat("contiguous_format")),)
        and op.name in only_reshaped
    )
    if contiguous or (copies and not op.kwargs) or (whole and not op.kwargs) or reshape:
        return first.value
    return None


def simplify(graph: Graph) -> Graph:
    """The graph without operators that only repeat a value, and without what nobody reads."""
    names: dict[str, str] = {}
    kept: list[Operator] = []
    only_reshaped = _only_reshaped(graph)
    for op in graph.operators:
        op = op.renamed(names)
        same = _same_as(op, graph, only_reshaped)
        # A result must stay a value of its own, made by an operator.
        if same is not None and (op.name not in graph.results or same in graph.producer):
            names[op.name] = same
        else:
            kept.append(op)
    return _without_dead(replace(graph.giving(names), operators=tuple(kept)))


def _without_dead(graph: Graph) -> Graph:
    needed = set(graph.results)
    kept: list[Operator] = []
    for op in reversed(graph.operators):
        if any(v in needed for v in op.values):
            needed |= set(op.reads)
            kept.append(op)
    return replace(
        graph,
        operators=tuple(reversed(kept)),
        buffers=tuple(b for b in graph.buffers if b.persistent or f"buffer:{b.name}" in needed),
    )
