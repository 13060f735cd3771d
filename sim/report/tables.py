"""What the plan expected beside what the trace has, and what happened."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ...proto import broker_pb2
from ..trace import Mark
from .measure import Measured
from .moments import notable
from .summary import Summary
from .words import percent, plain, seconds, size, start

__all__ = ["Row", "comparison", "happened"]

MOST_EACH = 12
"""Rows of peers, and of links: those that are furthest off."""
MOST_MARKS = 60
MOST_TEXT = 120


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. `error`: predicted over measured, less one; None where that says nothing."""

    what: str
    predicted: str
    measured: str
    error: float | None = None


def comparison(
    s: Summary, found: Measured, plan: broker_pb2.Plan | None, names: Mapping[str, str]
) -> list[Row]:
    """Everything that was both predicted and measured. `names`: of peers, by the plan's ids."""
    rows: list[Row] = []
    step_s = s.step_s or found.step_s
    if s.predicted_step_s and step_s:
        rows.append(_row("time of a step", s.predicted_step_s, step_s, seconds))
    bubble = s.bubble_measured if s.bubble_measured is not None else found.bubble
    if s.predicted_step_s and bubble is not None:
        rows.append(Row("bubble, mean over peers", percent(s.bubble), percent(bubble)))
    if plan is None:
        return rows
    rows += _worst(_peers(found, plan, names))
    rows += _worst(_memory(s))
    rows += _worst(_links(found, plan, names))
    return rows


def _row(what: str, predicted: float, measured: float, text: object) -> Row:
    assert callable(text)
    error = predicted / measured - 1 if measured else None
    return Row(what, text(predicted), text(measured), error)


def _worst(rows: Iterator[Row]) -> list[Row]:
    ranked = sorted(rows, key=lambda r: (-abs(r.error or 0.0), r.what))
    return sorted(ranked[:MOST_EACH], key=lambda r: r.what)


def _peers(found: Measured, plan: broker_pb2.Plan, names: Mapping[str, str]) -> Iterator[Row]:
    steps = len(found.typical)
    for p in plan.predicted.peers:
        name = names.get(p.peer, p.peer)
        if steps and name in found.peers and p.compute_s:
            took_s = found.peers[name].compute_s / steps
            yield _row(f"{plain(name)} computes, a step", p.compute_s, took_s, seconds)


def _memory(s: Summary) -> Iterator[Row]:
    for m in s.memory:
        if m.get("predicted_bytes") and m.get("peak_bytes"):
            what = f"{plain(m['peer'])}, peak memory"
            yield _row(what, m["predicted_bytes"], m["peak_bytes"], size)


def _links(found: Measured, plan: broker_pb2.Plan, names: Mapping[str, str]) -> Iterator[Row]:
    steps = len(found.typical)
    for p in plan.predicted.links:
        pair = names.get(p.source, p.source), names.get(p.destination, p.destination)
        if steps and pair in found.links and p.bytes:
            sent = found.links[pair].size_bytes / steps
            yield _row(f"{plain(pair[0])} → {plain(pair[1])}, a step", p.bytes, sent, size)


def happened(marks: Sequence[Mark]) -> list[tuple[str, str, str, str]]:
    """Time, what, who, and the text of each notable mark; at most MOST_MARKS."""
    ranked = notable(marks)
    rows = [
        (seconds(m.at_s), plain(m.what), plain(m.who), start(plain(m.text), MOST_TEXT))
        for m in ranked[:MOST_MARKS]
    ]
    if len(ranked) > MOST_MARKS:
        rows.append(("", f"and {len(ranked) - MOST_MARKS} more", "", "see events.jsonl"))
    return rows
