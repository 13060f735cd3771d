"""Checks of an assignment's graph before anything of it runs: its two forms say the same, and each
operator makes what the graph says."""

from __future__ import annotations

from collections.abc import Sequence

from ...dag.ir.graph import Graph, GraphError, Lowered, Operator
from ...dag.ir.infer import infer_operator
from ...dag.ir.rules.rules import check_graph
from ...dag.transforms.evaluation import evaluation

__all__ = ["check_specs", "checked_core"]


def checked_core(core: Lowered, graph: Graph) -> Lowered:
    """The core form, when it can stand for the bound full graph: the same data and weights, the
    same specs wherever the two share a name, and for each operator its results in its interval."""
    form = core.graph.bind(graph.batch or 0)
    same = (form.inputs, form.parameters, form.buffers, form.loss, form.weight, form.metrics)
    if same != (
        *(graph.inputs, graph.parameters, graph.buffers),
        *(graph.loss, graph.weight, graph.metrics),
    ):
        raise GraphError("the core form has other data, weights or results than the full graph")
    if len(core.start) != len(graph.operators) + 1:
        raise GraphError(
            f"the core form maps {len(core.start) - 1} operators, the graph has "
            f"{len(graph.operators)}"
        )
    read = {v for op in graph.operators for v in op.reads} | set(graph.results)
    for i, op in enumerate(graph.operators):
        for value in read.intersection(op.values):
            at = form.producer.get(value, -1)
            if not core.start[i] <= at < core.start[i + 1]:
                raise GraphError(f"the core form does not make {value} where {op.name} stands")
            if form.spec[value] != graph.spec[value]:
                raise GraphError(
                    f"the core form makes {value} as {form.spec[value]!r}, "
                    f"expected {graph.spec[value]!r}"
                )
    check_graph(form)
    return Lowered(form, core.start)


def check_specs(graph: Graph, within: tuple[int, int]) -> None:
    """Raises GraphError when the operators of an interval do not make what the bound graph says, in
    training or in evaluation: whatever runs afterwards trusts the specs, and kernels with wrong
    shapes can crash the process. Operators of one graph are looked at once."""
    checked = graph.found.setdefault("specs checked", set())
    if within not in checked:
        _check_made(graph, within, graph.operators)
        _check_made(graph, within, evaluation(graph).operators)
        checked.add(within)


def _check_made(graph: Graph, within: tuple[int, int], operators: Sequence[Operator]) -> None:
    """Raises GraphError for operators of the graph, or of its evaluation form, of which those that
    differ are looked at. What nobody reads differs between devices (the saved statistics of a batch
    norm in eval mode)."""
    trained = {f"param:{p.name}" for p in graph.parameters if p.trainable} | graph.grads
    known = {value: (spec, value in trained) for value, spec in graph.spec.items()}
    training = operators is graph.operators
    read = {v for op in operators for v in op.reads} | set(graph.results)
    read |= {b.update.value for b in graph.buffers if b.update}
    for own, op in list(zip(graph.operators, operators, strict=True))[slice(*within)]:
        if not training and (own.target, own.args, own.kwargs) == (op.target, op.args, op.kwargs):
            continue
        for value, (spec, _) in infer_operator(op, known):
            if value in read and spec != graph.spec.get(value):
                raise GraphError(
                    f"{value}: the graph says {graph.spec.get(value)!r}, it is {spec!r}"
                )
