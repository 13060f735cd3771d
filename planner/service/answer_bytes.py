"""What a planning process makes of a request: bytes to bytes. It imports torch."""

from __future__ import annotations

from ...proto.planning_pb2 import PlanningAsked
from ..answers import forming
from ..answers.planning import answer, consider
from ..answers.preview import preview_bytes
from ..requests.asked import ConsiderPlan, FormReplicas, MakePlan
from .wire import Asked, Told, answer_to_bytes, ask_from_proto

__all__ = ["answer_bytes"]


def answer_bytes(data: bytes) -> bytes:
    """The answer to a request. Raises MemoryError."""
    message = PlanningAsked.FromString(data)
    ask, graph = ask_from_proto(message), message.graph
    del message
    return answer_to_bytes(_answer(ask, graph))


def _answer(ask: Asked, graph: bytes) -> Told:
    match ask:
        case MakePlan():
            return answer(ask, graph)
        case FormReplicas():
            return forming.answer(ask, graph)
        case ConsiderPlan():
            return consider(ask, graph)
        case _:
            return preview_bytes(ask, graph)
