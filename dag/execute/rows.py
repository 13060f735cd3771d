"""A row that an operator was asked for and does not have, where no data alone says so: it is only
known when the operator has failed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..analysis.lookups import Lookups, MissingRow, lookups_of
from ..ir.graph import Graph, GraphError
from ..ir.infer import call
from ..ir.operators import takes_key

__all__ = ["RowError", "lacking"]

_SAYS = ("out of range", "out of bounds", "device-side assert", "index out", "class values must be")


class RowError(ValueError):
    """A row that is not there. missing: which, and of which sample; None: not known."""

    def __init__(self, text: str, missing: MissingRow | None = None) -> None:
        super().__init__(text)
        self.missing = missing


def lacking(
    graph: Graph,
    within: tuple[int, int],
    taken: Mapping[str, Tensor],
    error: Exception,
    key: int = 0,
) -> RowError | None:
    """Find the operator in [start, stop) of a bound graph that failed for a row that is not there,
    by running them one by one on what they took; None: the error is of another kind. On a card,
    where nothing can run any more, it has the error's own words."""
    text = str(error)
    if not isinstance(error, IndexError) and not any(part in text.lower() for part in _SAYS):
        return None
    if any(t.device.type != "cpu" for t in taken.values()):
        return RowError(f"an operator is asked for a row that is not there ({text:.200})")
    values: dict[str, Any] = dict(taken)
    for op in graph.operators[slice(*within)]:
        if any(True for _ in lookups_of(op, graph.spec)):
            here = [v for v in op.reads if v in values]
            found = Lookups(graph, here, {op.name}).look({v: values[v] for v in here}).missing
            if found is not None:
                return RowError(str(found), found)
        try:
            with torch.no_grad():
                made = call(op, values, torch.device("cpu"), key if takes_key(op.target) else 0)
        except (GraphError, IndexError, RuntimeError):
            break
        values |= {v: t for v, t in zip(op.values, made, strict=True) if t is not None}
    return RowError(f"an operator is asked for a row that is not there ({text:.200})")
