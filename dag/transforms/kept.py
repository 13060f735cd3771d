"""What parameters are kept in between their uses (`frozen_dtype`, `trained_dtype` of a job).

Under mixed precision the products read bfloat16 whatever a weight is kept in, so one that is kept
in bfloat16 needs no cast there. Everything else goes on in what the module was written for: norms
and reductions get their casts from `precision.py`, an embedding's rows are cast behind it, and what
is left reads a cast of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..ir.graph import Arg, Graph, Operator, Output, Ref, map_arg
from .precision import HIGHER, LOWER, cast_of

__all__ = ["AS_MADE", "KeptDtypes"]

_ROWS = "aten.embedding.default"


@dataclass(frozen=True, slots=True)
class KeptDtypes:
    """Dtypes of float32 parameters, frozen and trained; "": as they are."""

    frozen: str = ""
    trained: str = ""

    def applied(self, graph: Graph) -> Graph:
        """The graph before `mixed`, unbound as before; the numbers of its operators change."""
        changed = {
            f"param:{p.name}": dtype
            for p in graph.parameters
            if (dtype := self.trained if p.trainable else self.frozen) and p.spec.dtype == "float32"
        }
        if not changed:
            return graph
        made: list[Operator] = []
        for op in graph.operators:
            made += _read(op, changed, graph)
        parameters = tuple(
            replace(p, spec=replace(p.spec, dtype=changed.get(f"param:{p.name}", p.spec.dtype)))
            for p in graph.parameters
        )
        return replace(graph, parameters=parameters, operators=tuple(made))


AS_MADE = KeptDtypes()


def _read(op: Operator, changed: dict[str, str], graph: Graph) -> list[Operator]:
    """An operator, with the casts that it needs for parameters which are kept in another dtype."""
    mine = [value for value in op.reads if value in changed]
    if not mine or op.target in LOWER | HIGHER:
        return [op]
    if op.target == _ROWS:
        (output,) = op.outputs
        assert output.spec is not None, "an embedding has a result"
        rows = Output(replace(output.spec, dtype=changed[mine[0]]), output.grad)
        name = f"{op.name}_kept"
        back = replace(
            cast_of(op.name, name, "float32", output.spec, op.module), outputs=op.outputs
        )
        return [replace(op, name=name, outputs=(rows,)), back]
    casts = {
        value: cast_of(f"{op.name}_kept{i}", value, "float32", graph.spec[value], op.module)
        for i, value in enumerate(mine)
    }

    def change(arg: Arg) -> Arg:
        return Ref(casts[arg.value].name) if isinstance(arg, Ref) and arg.value in casts else arg

    reads = replace(
        op,
        args=tuple(map_arg(a, change) for a in op.args),
        kwargs=tuple((k, map_arg(a, change)) for k, a in op.kwargs),
    )
    return [*casts.values(), reads]
