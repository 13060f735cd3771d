"""Frozen weights in 8 bits, as a transform of a graph (`frozen_dtype = "int8"` of a job).

A frozen W, a matrix that only linear layers and lookups read or those of experts in one tensor,
becomes an int8 parameter W and, beside it, a float32 parameter `W..scale` (split_weights.py) with a
number for each output:

    linear(x, W, b)         int8_linear(x, W, W..scale, b)
    addmm(b, x, W)          the same; W is (in, out) and `W..scale` (1, out)
    embedding(W, ids)       int8_embedding(W, W..scale, ids), cast where W was no float32
    grouped_mm(x, W, ends)  int8_grouped_mm(x, W, W..scale, ends); W is (experts, in, out), or
                            (experts, out, in) and transposed before

A cast of W by mixed precision goes, and a transpose: an int8 number is exact in bfloat16. Whoever
loads such a graph makes both from the weights that the run begins with, which stay as they are
(ByGraph in `peer/blobs/starting.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..ir.graph import Graph, Operator, Output, Parameter, Ref, TensorSpec
from ..ir.quantized import scale_sizes
from .head import linear_args
from .precision import cast_of
from .split_weights import scale_name, weight_of

__all__ = ["in_int8", "kept_wide"]

_CAST = "aten._to_copy.default"
_ADDMM, _ROWS = "aten.addmm.default", "aten.embedding.default"
_EXPERTS = "shoal.grouped_mm.default"
_PLACES = {"aten.linear.default": 1, _ADDMM: 2, _ROWS: 0, _EXPERTS: 1}
"""By operator that can read a weight in 8 bits: which argument that is."""
_TRANSPOSES = ((-2, -1), (-1, -2), (1, 2), (2, 1))  # of three dimensions


def in_int8(graph: Graph) -> Graph:
    """The graph, bound or not, with all that can be in 8 bits so; names and specs of all other
    values stay. The same object where there is nothing."""
    sides = _sides(graph)
    if not sides:
        return graph
    views = _views(graph)
    gone = {name for name, (value, _) in views.items() if value in sides}
    made: list[Operator] = []
    for op in graph.operators:
        if op.name not in gone:
            made += _read(op, sides, views)
    parameters = tuple(q for p in graph.parameters for q in _in_int8(p, sides))
    return replace(graph, parameters=parameters, operators=tuple(made))


def kept_wide(graph: Graph) -> tuple[str, ...]:
    """Names of the frozen matrices that stay as they are, in a graph or in what `in_int8` made of
    it: something else reads them."""
    return tuple(
        p.name
        for p in graph.parameters
        if not p.trainable and p.spec.is_floating and len(p.spec.shape) > 1
        if weight_of(p.name) == p.name
    )


def _sides(graph: Graph) -> dict[str, int]:
    """By value of each parameter that can be in 8 bits: the dimension of its outputs."""
    frozen = {
        f"param:{p.name}"
        for p in graph.parameters
        if not p.trainable and p.spec.is_floating and len(p.spec.shape) in (2, 3)
    }
    views = _views(graph)
    found: dict[str, set[int]] = {}
    for op in graph.operators:
        place = _PLACES.get(op.target)
        for value in op.reads:
            weight, turned = views.get(value, (value, False))
            if weight not in frozen or op.name in views:
                continue
            fits = place is not None and op.args[place : place + 1] == (Ref(value),)
            fits = fits and op.mentions.count(value) == 1
            fits = fits and not (op.target == _ADDMM and op.kwargs)  # factors of the sum
            fits = fits and not (op.target == _ROWS and weight != value)
            fits = fits and (op.target == _EXPERTS) == (len(graph.spec[weight].shape) == 3)
            fits = fits and (op.target == _EXPERTS or not turned)
            side = op.target == _ADDMM or (op.target == _EXPERTS and not turned)
            found.setdefault(weight, set()).add(int(side) if fits else -1)
    sides = {value: min(of) for value, of in found.items() if len(of) == 1}
    return {
        value: side
        for value, side in sides.items()
        # Of a single output in columns the scales would look like those of rows.
        if side == 0 or (side == 1 and graph.spec[value].sizes[-1] > 1)
    }


def _views(graph: Graph) -> dict[str, tuple[str, bool]]:
    """By the name of a cast of a parameter, or of experts a transpose: that parameter's value, and
    whether it is transposed."""
    found: dict[str, tuple[str, bool]] = {}
    for op in graph.operators:
        if len(op.reads) != 1 or op.name in graph.results:
            continue
        value, turned = found.get(op.reads[0], (op.reads[0], False))
        if not value.startswith("param:"):
            continue
        if op.target == _CAST and [k for k, _ in op.kwargs] == ["dtype"]:
            found[op.name] = value, turned
        elif op.target == "aten.transpose.int" and op.args[1:] in _TRANSPOSES:
            found[op.name] = value, not turned
    return found


def _read(
    op: Operator, sides: Mapping[str, int], views: Mapping[str, tuple[str, bool]]
) -> list[Operator]:
    """An operator, as it reads its weight in 8 bits."""
    place = _PLACES.get(op.target)
    arg = op.args[place] if place is not None and len(op.args) > place else None
    weight = views.get(arg.value, (arg.value, False))[0] if isinstance(arg, Ref) else ""
    if weight not in sides:
        return [op]
    scale = Ref(f"param:{scale_name(weight.removeprefix('param:'))}")
    if op.target == _EXPERTS:
        args = (op.args[0], Ref(weight), scale, *op.args[2:])
        return [replace(op, target="shoal.int8_grouped_mm.default", args=args)]
    if op.target != _ROWS:
        reads = (op.args[1], arg, op.args[0]) if op.target == _ADDMM else linear_args(op)
        x, _, *bias = reads
        args = (x, Ref(weight), scale, *bias)
        return [replace(op, target="shoal.int8_linear.default", args=args, kwargs=())]
    (output,) = op.outputs
    assert output.spec is not None, "a lookup has a result"
    rows = replace(op, target="shoal.int8_embedding.default", kwargs=())
    rows = replace(rows, args=(Ref(weight), scale, op.args[1]))
    if output.spec.dtype == "float32":
        return [rows]
    wide = replace(rows, name=f"{op.name}_rows")
    wide = replace(wide, outputs=(Output(replace(output.spec, dtype="float32")),))
    return [wide, cast_of(op.name, wide.name, output.spec.dtype, output.spec, op.module)]


def _in_int8(parameter: Parameter, sides: Mapping[str, int]) -> tuple[Parameter, ...]:
    """The parameter, or its two halves."""
    side = sides.get(f"param:{parameter.name}")
    if side is None:
        return (parameter,)
    sizes = scale_sizes(parameter.spec.sizes, side)
    return (
        replace(parameter, spec=replace(parameter.spec, dtype="int8")),
        replace(
            parameter,
            name=scale_name(parameter.name),
            spec=TensorSpec(sizes, "float32"),
            tied=tuple(map(scale_name, parameter.tied)),
        ),
    )
