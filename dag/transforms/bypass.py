"""A graph without some of its blocks: what a microbatch computes that leaves them out, and the
smaller model that is evaluated beside the whole one."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from ..analysis.skippable import skippable_blocks
from ..ir.graph import Graph, GraphError, Operator

__all__ = ["without_blocks", "without_every_second"]


def without_every_second(graph: Graph) -> tuple[Graph, tuple[str, ...]]:
    """The graph without every second of the blocks that can be left out, from the second on, and
    their names; a step changes none of its running statistics. Raises GraphError where there is
    none."""
    names = tuple(b.name for b in skippable_blocks(graph) if not b.why_not)[1::2]
    if not names:
        raise GraphError("this model has fewer than two blocks that can be left out")
    half = without_blocks(graph, names)
    still = (
        replace(b, update=replace(b.update, factor=0.0)) if b.update else b for b in half.buffers
    )
    return replace(half, buffers=tuple(still)), names


def without_blocks(graph: Graph, names: Collection[str]) -> Graph:
    """The graph without the blocks of these names, their parameters and buffers; what came into
    each goes on in place of what it made. Raises GraphError for a block that is not there, or that
    cannot be left out, with the reason."""
    known = {b.name: b for b in skippable_blocks(graph)}
    instead: dict[str, str] = {}
    gone: set[int] = set()
    for name in names:
        block = known.get(name)
        if block is None:
            raise GraphError(f"no block is named {name}: expected one of {', '.join(known)}")
        if block.why_not:
            raise GraphError(f"block {name} cannot be left out: it {block.why_not}")
        instead[block.made] = block.taken
        gone.update(range(block.start, block.stop))
    for made in instead:
        while instead[made] in instead:
            instead[made] = instead[instead[made]]
    trains = {f"param:{p.name}" for p in graph.parameters if p.trainable}
    operators: list[Operator] = []
    for i, op in enumerate(graph.operators):
        if i in gone:
            continue
        changed = op.renamed(instead)
        above = not trains.isdisjoint(changed.reads)
        outputs = tuple(replace(o, grad=o.grad and above) for o in op.outputs)
        changed = replace(changed, outputs=outputs)
        trains.update(v for v, o in zip(changed.values, outputs, strict=True) if o.grad)
        operators.append(changed)
    read = {v for op in operators for v in op.reads}
    parameters = tuple(p for p in graph.parameters if f"param:{p.name}" in read)
    homes = {op.module for op in operators}
    buffers = tuple(
        b
        for b in graph.buffers
        # Training reads no counter and no running statistic: they go with their module.
        if f"buffer:{b.name}" in read or (b.update and b.name.rpartition(".")[0] in homes)
    )
    kept = {p.name for p in parameters} | {b.name for b in buffers}
    return replace(
        graph,
        operators=tuple(operators),
        parameters=parameters,
        buffers=buffers,
        state=tuple(row for row in graph.state if row[1] in kept),
    )
