"""Reports of plans, to the wire and back. The only place where their messages are read or written.

A bad message raises PlanError and nothing else.
"""

from __future__ import annotations

import math
from typing import NoReturn

from ...proto import broker_pb2
from ..ir.convert import MAX_TEXT, name_of
from ..plan.plan import PeerId, PlanError
from ..plan.report import (
    Alternative,
    CodecUse,
    LinkPrediction,
    PeerPrediction,
    PlanReport,
    Prediction,
    Spare,
)
from .filled import filled
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
    predicted = message.predicted
    return PlanReport(
        predicted=Prediction(
            _seconds(predicted.step_s),
            tuple(
                PeerPrediction(
                    _peer(p.peer),
                    _seconds(p.compute_s),
                    p.device_bytes,
                    p.host_bytes,
                    _seconds(p.bubble),
                    _seconds(p.learned),
                )
                for p in predicted.peers
            ),
            tuple(
                LinkPrediction(
                    _peer(x.source),
                    _peer(x.destination),
                    x.bytes,
                    _seconds(x.busy_s),
                    tuple(map(_use_from_proto, x.codecs)),
                )
                for x in predicted.links
            ),
            tuple(map(_text, predicted.bottlenecks)),
            tuple(
                Alternative(_text(a.name), _seconds(a.step_s), _text(a.text))
                for a in predicted.alternatives
            ),
            _seconds(predicted.full_step_s),
        ),
        reasons=tuple(map(_text, message.reasons)),
        spares=tuple(Spare(_peer(s.peer), _text(s.reason)) for s in message.spares),
    )


def _use_from_proto(message: broker_pb2.CodecUse) -> CodecUse:
    if message.role not in _ROLES:
        _refuse(f"a codec is used for role {message.role[:60]!r}, which is unknown")
    return CodecUse(
        message.role,
        name_of(message.codec, "a codec", _refuse),
        message.bytes,
        message.dense_bytes,
        _seconds(message.saved_s),
        _seconds(message.encode_s),
        _seconds(message.error, "error"),
    )


def _peer(text: str) -> PeerId:
    return PeerId(name_of(text, "a peer id", _refuse))


def _text(text: str) -> str:
    if len(text) > MAX_TEXT:
        _refuse(f"a reason has {len(text)} characters: expected at most {MAX_TEXT}")
    return text


def _seconds(value: float, what: str = "time") -> float:
    if not (math.isfinite(value) and value >= 0):
        _refuse(f"a predicted {what} is {value}: expected a finite number of at least 0")
    return value
