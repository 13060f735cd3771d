"""Reports of plans, to the wire and back. The only place where their messages are read or written.

A bad message raises PlanError and nothing else.
"""

from __future__ import annotations

import math
from typing import NoReturn

from google.protobuf.message import Message

from ...proto import broker_pb2
from ..ir.convert import MAX_TEXT, name_of
from ..plan.plan import PlanError
from ..plan.report import (
    Alternative,
    CodecUse,
    LinkPrediction,
    PeerPrediction,
    PlanReport,
    Prediction,
    Spare,
)
from .filled import filled, taken
from .flow import Role

__all__ = ["report_from_proto", "report_to_proto"]

_ROLES = frozenset(role.value for role in Role)


def _refuse(what: str) -> NoReturn:
    raise PlanError(f"plan report message: {what}")


def report_to_proto(report: PlanReport) -> broker_pb2.PlanReport:
    predicted = filled(
        broker_pb2.Prediction,
        report.predicted,
        peers=[filled(broker_pb2.PeerPrediction, p) for p in report.predicted.peers],
        links=[
            filled(
                broker_pb2.LinkPrediction,
                x,
                codecs=[filled(broker_pb2.CodecUse, use) for use in x.codecs],
            )
            for x in report.predicted.links
        ],
        alternatives=[filled(broker_pb2.Alternative, a) for a in report.predicted.alternatives],
    )
    spares = [filled(broker_pb2.Spare, s) for s in report.spares]
    return filled(broker_pb2.PlanReport, report, predicted=predicted, spares=spares)


def report_from_proto(message: broker_pb2.PlanReport) -> PlanReport:
    """Raises PlanError for texts that are too long, and for numbers that are none."""
    _check(message)
    told = message.predicted
    predicted = taken(
        Prediction,
        told,
        peers=tuple(taken(PeerPrediction, p) for p in told.peers),
        links=tuple(
            taken(LinkPrediction, x, codecs=tuple(taken(CodecUse, use) for use in x.codecs))
            for x in told.links
        ),
        alternatives=tuple(taken(Alternative, a) for a in told.alternatives),
    )
    spares = tuple(taken(Spare, s) for s in message.spares)
    return taken(PlanReport, message, predicted=predicted, spares=spares)


def _check(message: Message) -> None:
    """Raises PlanError for a text or a number that none of our reports has, at any depth."""
    for field in message.DESCRIPTOR.fields:
        found = getattr(message, field.name)
        for value in found if field.is_repeated else [found]:
            if isinstance(value, Message):
                _check(value)
            elif isinstance(value, float) and not (math.isfinite(value) and value >= 0):
                what = "error" if field.name == "error" else "time"
                _refuse(f"a predicted {what} is {value}: expected a finite number of at least 0")
            elif field.name in ("peer", "source", "destination"):
                name_of(value, "a peer id", _refuse)
            elif field.name == "codec":
                name_of(value, "a codec", _refuse)
            elif field.name == "role" and value not in _ROLES:
                _refuse(f"a codec is used for role {value[:60]!r}, which is unknown")
            elif isinstance(value, str) and len(value) > MAX_TEXT:
                _refuse(f"a reason has {len(value)} characters: expected at most {MAX_TEXT}")
