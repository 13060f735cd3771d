"""What the owner offers of the device's memory, against what an assignment will take.

Whoever wrote a plan, the peer estimates its own stages before it builds any, by the formula that
the broker judges plans with (`dag/cost/memory.py`) and from the same things: the plan, and the
graph in its full form. So the broker's own plans are refused by no rounding. Only another torch on
the peer could count temporaries or saved tensors otherwise: STOP_AT leaves room for that.
"""

from __future__ import annotations

from ...dag.cost.cost import cost
from ...dag.cost.memory import MemoryModel, live_moments
from ...dag.ir.graph import Graph
from ...dag.schedule.flow import Flow
from ...job.words import size_text
from ..core.assignment import STOP_AT
from .order import BuildOrder

__all__ = ["OfferError", "check_memory"]


class OfferError(ValueError):
    """An assignment takes more memory than the owner offers; the text has both numbers."""


def check_memory(order: BuildOrder, graph: Graph, flow: Flow) -> None:
    """Raises OfferError before anything is built. `graph` and `flow` are the order's, bound."""
    if not order.memory_bytes:
        return
    plan, held = order.plan, order.plan.stages_of(order.peer)
    moments = live_moments(flow.actions(order.peer), held, [s.has_backward for s in flow.stages])
    state_bytes = order.training.train.state_bytes
    most = MemoryModel(graph, cost(graph)).peer_bytes(plan, held, moments, state_bytes)
    if most > STOP_AT * order.memory_bytes:
        raise OfferError(
            f"the stages of {order.peer} take about {size_text(most)} on the device, this peer "
            f"offers {size_text(order.memory_bytes)}: give it fewer operators, smaller "
            "microbatches, or recompute; or let its owner offer more memory"
        )
