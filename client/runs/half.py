"""The model of a run whose microbatches leave stages out, without every second block that they may:
its held-out loss at the end, beside that of the whole model.

The broker's peers compute it, as in `evaluate.py`: in a run of one step at a learning rate of 0,
whose graph lacks the blocks. So the module itself, its data and its size do not matter here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...dag.ir.convert import graph_to_bytes, lowered_to_bytes
from ...dag.ir.graph import Graph
from ...dag.transforms.bypass import without_every_second
from ...dag.transforms.lower_sizes import lower_for_sizes
from ...job.words import some_of
from ...proto.broker_pb2 import Evaluation, Plan, RunEvent, RunSpec, Weights
from ...proto.common_pb2 import BlobRef
from ..uploading import transfer
from .broker_calls import BrokerCalls
from .evaluate import evaluation_spec, graph_of, one_evaluation

__all__ = ["HalfModel", "evaluated_half", "half_spec", "last_evaluation", "leaves_out"]

PATIENCE_S = 600.0
"""How long its run may wait for peers, and take."""


@dataclass(frozen=True, slots=True)
class HalfModel:
    """left_out: names of the blocks. loss: held-out, of the model without them. whole: of the model
    with them, over the same samples."""

    left_out: tuple[str, ...]
    loss: float
    whole: float

    def __str__(self) -> str:
        worse = f" ({self.loss / self.whole - 1:+.1%})" if self.whole else ""
        return (
            f"without {some_of(self.left_out, 8)} held-out {self.loss:.4f}, with them "
            f"{self.whole:.4f}{worse}"
        )


def leaves_out(plan: Plan) -> bool:
    """Whether microbatches leave stages out under a plan."""
    return any(len(route.visits) < len(plan.stages) for route in plan.routes)


def last_evaluation(events: Sequence[RunEvent]) -> Evaluation | None:
    """The last one of a run in which microbatches left stages out; None without such a plan, or
    without an evaluation."""
    if not any(e.HasField("plan") and leaves_out(e.plan) for e in events):
        return None
    made = (e.step for e in events if e.HasField("step"))
    return next((s.evaluation for s in reversed([*made]) if s.HasField("evaluation")), None)


def half_spec(
    before: RunSpec, weights: Weights, graph: Graph, store: Callable[[bytes], BlobRef]
) -> tuple[RunSpec, tuple[str, ...]]:
    """The run that evaluates half the model of a run with these weights, and the blocks that it
    lacks. `graph`: its full form. Raises GraphError, RecordError."""
    half, names = without_every_second(graph)
    spec = evaluation_spec(before, weights, plan={})
    spec.graph.CopyFrom(store(graph_to_bytes(half)))
    if before.HasField("core_graph"):
        sizes = dict.fromkeys((before.microbatch_size, *before.microbatch_sizes))
        core = lower_for_sizes(half, tuple(sizes))
        spec.core_graph.CopyFrom(store(lowered_to_bytes(core)))
    return spec, names


def evaluated_half(client: BrokerCalls, run: str, weights: Weights, whole: float) -> HalfModel:
    """Evaluate half the model of a run that has ended. Raises GraphError, RecordError, RunFailed
    where no peers were free for PATIENCE_S, Refused."""
    before = client.recall(run).spec
    with client.translated():
        spec, names = half_spec(
            before,
            weights,
            graph_of(client.access, before),
            lambda data: transfer(client.access, lambda blobs: blobs.store(data)),
        )
    found = client.submit_spec(spec)
    timer = threading.Timer(PATIENCE_S, lambda: client.cancel(found))
    timer.daemon = True
    timer.start()
    try:
        return HalfModel(names, one_evaluation(client, found, run).loss, whole)
    finally:
        timer.cancel()
