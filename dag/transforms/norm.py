"""Buffers that change: the running statistics and counters of batch norms.

A running statistic is not updated while a microbatch runs. The operator gets momentum 1, so that
its "new running" results are exactly the microbatch's statistics, and the buffer's update (an
exponential average with the user's momentum) is applied at the end of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from ..ir.capture_errors import CaptureError
from ..ir.graph import BufferUpdate, Graph, Operator, Ref

__all__ = ["BATCH_NORM", "counter_step", "with_updates"]

BATCH_NORM = "aten._native_batch_norm_legit_functional.default"
"""(x, weight, bias, running_mean, running_var, training, momentum, eps) → (y, mean, 1/std, new
running_mean, new running_var)"""


def counter_step(node: Node, is_own: Callable[[Node], bool]) -> float | None:
    """The increment, if a buffer's new value is `buffer + number` (num_batches_tracked). `is_own`:
    whether a placeholder is that very buffer."""
    if node.op == "call_function" and node.target is torch.ops.aten.add.Tensor:
        buffer, step = node.args[:2]
        times = node.kwargs.get("alpha", 1)
        own = isinstance(buffer, Node) and buffer.op == "placeholder" and is_own(buffer)
        if own and isinstance(step, int | float) and isinstance(times, int | float):
            return float(step * times)
    return None


def with_updates(graph: Graph, new: Mapping[str, Any], places: Mapping[str, str]) -> Graph:
    """The graph with the updates of its buffers. `new`: per mutated buffer its increment (float) or
    the Ref of its new value. Raises CaptureError for a change that is no batch norm's."""
    updates: dict[str, BufferUpdate] = {}
    norms: dict[str, Operator] = {}
    for name, value in new.items():
        if isinstance(value, float):
            updates[name] = BufferUpdate("add", "", value)
            continue
        maker = graph.operators[graph.producer[value.value]] if value != Ref("") else None
        momentum = _momentum(maker, value.value, name)
        if momentum is None or maker is None:
            raise CaptureError(
                f"{places[name]}\n  buffer {name!r} is changed by the forward: only batch norms "
                "(each called once per forward) and counters (buffer += number) may change one; "
                "return the new value as a metric, or make it a function of the inputs (of "
                "spectral_norm, which keeps its vectors so: use weight_norm in its place)"
            )
        updates[name] = BufferUpdate("ema", value.value, momentum)
        norms[maker.name] = maker
    for op in graph.operators:
        for value in op.reads:
            name = value.removeprefix("buffer:")
            if value.startswith("buffer:") and name in updates and op.name not in norms:
                raise CaptureError(
                    f"buffer {name!r} is changed by the forward and read by operator {op.name} "
                    f"in module {op.module!r}: only the batch norm that owns it may read it"
                )
    return replace(
        graph,
        buffers=tuple(replace(b, update=updates.get(b.name)) for b in graph.buffers),
        operators=tuple(
            replace(op, args=(*op.args[:6], 1.0, *op.args[7:])) if op.name in norms else op
            for op in graph.operators
        ),
    )


def _momentum(maker: Operator | None, value: str, buffer: str) -> float | None:
    """Momentum of the batch norm that computes this new value of this buffer, if it is one."""
    if maker is None or maker.target != BATCH_NORM or maker.args[5] is not True:
        return None
    place = {f"{maker.name}.3": 3, f"{maker.name}.4": 4}.get(value)
    if place is None or maker.args[place] != Ref(f"buffer:{buffer}"):
        return None
    momentum = maker.args[6]
    return float(momentum) if isinstance(momentum, (int, float)) else None
