"""What the plan expected beside what the trace has, and what happened."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ...proto import broker_pb2
from ..trace import Mark
from .measures.measure import Measured
from .measures.moments import notable
from .summary import Summary
from .words import percent, plain, seconds, size, start

__all__ = ["Row", "comparison", "happened"]

MOST_EACH = 12
"""Rows of peers, and of links: those that are furthest off."""
MOST_MARKS = 60
MOST_TEXT = 120
MOST_NAMES = 4
LEAST_SHARE = 0.001
"""Links that were to carry less, beside the one that carries most, say nothing."""
WORTH = 0.01
"""A prediction that is off by less than this share of what a step takes is not called wrong."""
WORTH_BYTES = 1024
"""Nor one that is off by fewer bytes."""


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. `error`: predicted over measured, less one; None where that says nothing."""

    what: str
    predicted: str
    measured: str
    error: float | None = None


def comparison(
    s: Summary, found: Measured, report: broker_pb2.PlanReport | None, names: Mapping[str, str]
) -> list[Row]:
    """Everything that was both predicted and measured. `names`: of peers, by the plan's ids."""
    rows: list[Row] = []
    step_s = s.step_s or found.step_s
    if s.predicted_step_s and step_s:
        rows.append(_row("time of a step", s.predicted_step_s, step_s, seconds))
    bubble = s.bubble_measured if s.bubble_measured is not None else found.bubble
    if s.predicted_step_s and bubble is not None:
        rows.append(Row("bubble, mean over peers", percent(s.bubble), percent(bubble)))
    if report is None:
        return rows
    rows += _worst(_peers(found, report, names, WORTH * step_s))
    rows += _worst(_memory(s))
    rows += _worst(_links(found, report, names))
    return rows


def _row(
    what: str, predicted: float, measured: float, text: Callable[[float], str], worth: float = 0.0
) -> Row:
    """`worth`: a difference of less says nothing."""
    says = measured and abs(predicted - measured) >= worth
    error = predicted / measured - 1 if says else None
    return Row(what, text(predicted), text(measured), error)


def _worst(rows: Iterator[Row]) -> list[Row]:
    ranked = sorted(rows, key=lambda r: (-abs(r.error or 0.0), r.what))
    return sorted(ranked[:MOST_EACH], key=lambda r: r.what)


def _peers(
    found: Measured, report: broker_pb2.PlanReport, names: Mapping[str, str], worth_s: float
) -> Iterator[Row]:
    for p in report.predicted.peers:
        name = names.get(p.peer, p.peer)
        if name in found.peers and p.compute_s and (took_s := found.peers[name].step_s):
            yield _row(f"{plain(name)} computes, a step", p.compute_s, took_s, seconds, worth_s)


def _memory(s: Summary) -> Iterator[Row]:
    for m in s.memory:
        if m.get("predicted_bytes") and m.get("peak_bytes"):
            what = f"{plain(m['peer'])}, peak memory"
            yield _row(what, m["predicted_bytes"], m["peak_bytes"], size)


def _links(
    found: Measured, report: broker_pb2.PlanReport, names: Mapping[str, str]
) -> Iterator[Row]:
    most = max((p.bytes for p in report.predicted.links), default=0)
    worth = max(WORTH * most, WORTH_BYTES)
    for p in report.predicted.links:
        pair = names.get(p.source, p.source), names.get(p.destination, p.destination)
        if pair in found.links and p.bytes > LEAST_SHARE * most:
            sent = found.links[pair].step_bytes
            yield _row(f"{plain(pair[0])} → {plain(pair[1])}, a step", p.bytes, sent, size, worth)


def happened(marks: Sequence[Mark]) -> list[tuple[str, str, str, str]]:
    """Time, what, who, and the text of what is notable; what happened to several at the same
    moment, as when two regions part, is one row. At most MOST_MARKS."""
    together: defaultdict[tuple[float, str], list[Mark]] = defaultdict(list)
    for mark in notable(marks):
        together[mark.at_s, mark.what].append(mark)
    rows = [
        (seconds(at_s), plain(what), _listed(m.who for m in same), _listed(m.text for m in same))
        for (at_s, what), same in list(together.items())[:MOST_MARKS]
    ]
    if len(together) > MOST_MARKS:
        rows.append(("", f"and {len(together) - MOST_MARKS} more", "", "see events.jsonl"))
    return rows


def _listed(words: Iterable[str]) -> str:
    """Each once; the first few of many."""
    found = list(dict.fromkeys(plain(w) for w in words if w))
    more = f" and {len(found) - MOST_NAMES} more" if len(found) > MOST_NAMES else ""
    return start(", ".join(found[:MOST_NAMES]), MOST_TEXT) + more
