"""What a person sees of a plan before it runs: what it costs, who does what, and why.

The most important first: the predicted step, what it hangs on, warnings and what it is compared
with; then the tables; then the reasons. On a terminal everything is wrapped to its width, in a pipe
each sentence and each row is one line.
"""

from __future__ import annotations

import math
import shutil
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from rich.table import Table
from rich.text import Text

from ...dag.schedule.convert_plan import microbatches_of, routes_of
from ...job.words import WRONG_CHOICE, count_of, some_of
from ...proto.broker_pb2 import Alternative, Plan, PlanReport, PreviewAnswer
from .formation import formation_lines
from .step_chart import step_chart
from .text import labelled, lines, new_table, number, size_text, time_text, wrapped
from .wire import LinkRow, planned, sentence

__all__ = ["as_json", "page", "show"]

MOST_LINKS = 12
"""Links that are shown, the busiest first; `--json` has all."""
MOST_CODECS = 24
"""Rows of codecs that are shown."""
WIDE = 100
"""Columns from which on codecs are a table."""
MOST_ROUTES = 12
"""Pipelines that are shown."""
MOST_HOLDERS = 8
"""Of a stage, that are shown."""
MOST_REASONS = 24
"""Reasons that are shown."""
NARROWEST = 40
"""Columns that a terminal has at least; narrower ones break the lines themselves."""
PIPED = 100_000
"""Columns where nothing is to be wrapped."""


# ---------------------------------------------------------------- for programs


def as_json(answer: PreviewAnswer) -> dict[str, Any]:
    """Every field of the answer with the names of broker.proto, also those that are 0 or empty;
    numbers are numbers (null: not finite), routes are counted, not listed; what the report says
    stands in the plan. `plan` or `reason` is there, not both; `formation` beside a plan, of a job
    whose replicas train apart or may."""
    found: dict[str, Any] = _plain(answer)
    for name in ("plan", "reason", "formation"):
        if not answer.HasField(name):
            found.pop(name, None)
    if answer.HasField("plan"):
        plan = found["plan"]
        plan["microbatches"] = microbatches_of(answer.plan)
        plan["pipelines"] = len(_routes(answer.plan))
        plan.pop("routes", None)
        for name in ("evaluation_routes", "route_of", "evaluation_route_of"):
            plan.pop(name, None)
        for name in ("visits", "evaluations", "full"):
            plan.pop(name, None)
        if answer.plan.HasField("full"):
            full = answer.plan.full
            plan["full"] = {"before": full.before, "since": full.since}
        plan |= found["report"]
    found.pop("report", None)
    return found


def _plain(value: Any) -> Any:
    """A message as dicts, lists and scalars. (The library's own JSON writes int64 as strings.)"""
    if isinstance(value, Message):
        found = MessageToDict(
            value, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )
        for field in value.DESCRIPTOR.fields:
            if field.name not in found:
                continue
            content = getattr(value, field.name)
            if field.message_type is not None and field.message_type.GetOptions().map_entry:
                continue
            if field.is_repeated:
                found[field.name] = [_plain(x) for x in content]
            elif field.enum_type is None and not isinstance(content, bytes):
                found[field.name] = _plain(content)
        return found
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


# ---------------------------------------------------------------- for people


def show(answer: PreviewAnswer, name: str) -> None:
    """Prints a preview. One without a plan prints nothing: its reason is an error."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    print(page(answer, name, width))


def page(answer: PreviewAnswer, name: str, width: int | None = None) -> str:
    """The preview of an answer with a plan as text; `width`: columns to wrap to, None: none."""
    columns = PIPED if width is None else max(width, NARROWEST)
    plan, report = answer.plan, answer.report
    called = {p.peer: p.profile.name or p.peer for p in answer.peers}
    parts: list[Iterable[str]] = [_head(answer, name, columns), _costs(answer, columns)]
    if answer.HasField("formation"):
        parts.insert(0, _formation(answer, name, called, columns))
    if report.predicted.alternatives:
        parts.append(lines(_compared(report), columns))
    parts.append(lines(_stages(answer, called), columns))
    if len(_routes(plan)) > 1:
        parts.append(lines(_pipelines(plan, called), columns))
    parts.append(lines(_peers(answer, called), columns))
    if chart := list(step_chart(answer.step, called, columns)):
        parts.append(chart)
    if report.predicted.links:
        parts.append(lines(_links(report, called), columns))
    if rows := planned(report, called):
        parts.append(_codecs(rows, columns))
    if report.spares:
        parts.append(_spares(report, called, columns))
    if report.reasons:
        parts.append(_reasons(report.reasons, columns))
    return "\n\n".join("\n".join(part) for part in parts)


def _head(answer: PreviewAnswer, name: str, columns: int) -> Iterator[str]:
    plan = answer.plan
    used = len({h for s in plan.stages for h in s.holders})
    routes = len(_routes(plan))
    beside = "one replica with equal weights, " if answer.HasField("formation") else ""
    words = [
        f"{beside}{count_of(len(plan.stages), 'stage')} on {used} of "
        f"{count_of(used + len(answer.report.spares), 'peer')}",
        f"{count_of(microbatches_of(plan), 'microbatch')} of "
        f"{count_of(plan.microbatch_size, 'sample')} a step",
        plan.schedule,
    ]
    if routes > 1:
        words.insert(1, count_of(routes, "pipeline"))
    if plan.head_parts > 1:
        words.append(f"vocabulary head in {plan.head_parts} blocks")
    yield from wrapped(f"{name}: {', '.join(words)}", columns)
    for note in answer.notes:
        if WRONG_CHOICE in note:
            yield from wrapped(f"  {note}", columns, "    ")


def _formation(
    answer: PreviewAnswer, name: str, called: dict[str, str], columns: int
) -> Iterator[str]:
    """Say which peers are in which replica; what follows it is the plan of all with equal
    weights."""
    yield from wrapped(f"{name}: {count_of(len(answer.formation.replicas), 'replica')}", columns)
    for line in formation_lines(answer.formation, called):
        yield from wrapped(f"  {line}", columns, "    ")


def _costs(answer: PreviewAnswer, columns: int) -> Iterator[str]:
    plan, predicted = answer.plan, answer.report.predicted
    step = predicted.step_s
    if step:
        rate = microbatches_of(plan) * plan.microbatch_size / step
        yield from labelled("predicted", f"{time_text(step)} a step, {rate:.3g} samples/s", columns)
    for label, text in zip(("bottleneck", "runner-up"), predicted.bottlenecks, strict=False):
        yield from labelled(label, text, columns)
    for note in answer.notes:
        if WRONG_CHOICE not in note:  # which stands on top
            yield from labelled("note", note, columns)


def _compared(report: PlanReport) -> Table:
    table = new_table("compared with", ">step", ">this plan is", "how")
    step = report.predicted.step_s
    for other in report.predicted.alternatives:
        figure, ratio = ("-", "") if not other.step_s else (time_text(other.step_s), "")
        if other.step_s and step:
            ratio = _ratio(other.step_s / step)
        table.add_row(*map(Text, (other.name, figure, ratio, _how(other))))
    return table


def _how(other: Alternative) -> str:
    """The text of an alternative, unless it says the figure only."""
    repeats = bool(other.step_s) and other.text.startswith(f"{other.step_s:.4g} s")
    return "" if repeats else other.text


def _ratio(times: float) -> str:
    if abs(times - 1) < 0.005:
        return "as fast"
    return f"{number(times)}x faster" if times > 1 else f"{number(1 / times)}x slower"


def _stages(answer: PreviewAnswer, called: dict[str, str]) -> Table:
    again = any(s.recompute for s in answer.plan.stages)
    names = ["stage", "operators", "modules", ">FLOPs", ">parameters", "on"]
    table = new_table(*names, *(["backward"] if again else []))
    for i, stage in enumerate(answer.plan.stages):
        span = answer.operators[i] if i < len(answer.operators) else None
        row = [
            str(i),
            f"[{stage.start}, {stage.stop})",
            (span.modules or f"{span.first} to {span.last}") if span else "",
            f"{span.share:.1%}" if span else "",
            size_text(span.parameter_bytes) if span else "",
            some_of([called.get(h, h) for h in stage.holders], MOST_HOLDERS, " + "),
        ]
        row += ["recomputes" if stage.recompute else ""] if again else []
        table.add_row(*map(Text, row))
    return table


def _pipelines(plan: Plan, called: dict[str, str]) -> Table:
    table = new_table("pipeline", ">microbatches", "through")
    routes = _routes(plan)
    for i, (peers, microbatches) in enumerate(list(routes.items())[:MOST_ROUTES]):
        way = " -> ".join(called.get(p, p) for p in peers)
        table.add_row(*map(Text, (str(i), str(microbatches), way)))
    if len(routes) > MOST_ROUTES:
        table.add_row("", "", f"and {len(routes) - MOST_ROUTES} more")
    return table


def _peers(answer: PreviewAnswer, called: dict[str, str]) -> Table:
    plan = answer.plan
    table = new_table("peer", "stages", ">compute", ">bubble", ">memory", ">offered")
    offered = {p.peer: p.profile.device_memory_bytes for p in answer.peers}
    for p in answer.report.predicted.peers:
        held = ", ".join(str(i) for i, s in enumerate(plan.stages) if p.peer in s.holders)
        row = [
            called.get(p.peer, p.peer),
            held,
            time_text(p.compute_s),
            f"{p.bubble:.0%}",
            size_text(p.device_bytes),
            size_text(offered[p.peer]) if offered.get(p.peer) else "?",
        ]
        table.add_row(*map(Text, row))
    return table


def _links(report: PlanReport, called: dict[str, str]) -> Table:
    table = new_table("link", ">bytes a step", ">busy")
    step = report.predicted.step_s
    links = sorted(report.predicted.links, key=lambda x: -x.busy_s)
    for x in links[:MOST_LINKS]:
        pair = f"{called.get(x.source, x.source)} -> {called.get(x.destination, x.destination)}"
        busy = f"{x.busy_s / step:.0%}" if step else ""
        table.add_row(*map(Text, (pair, size_text(x.bytes), busy)))
    if len(links) > MOST_LINKS:
        rest = links[MOST_LINKS:]
        table.add_row(f"and {len(rest)} more, less busy", size_text(sum(x.bytes for x in rest)), "")
    return table


def _codecs(rows: Sequence[LinkRow], columns: int) -> Iterator[str]:
    """What compression is expected to do, by link and role; as sentences where a table is too
    wide."""
    shown = rows[:MOST_CODECS]
    if columns < WIDE:
        yield "codecs, in a step"
        for row in shown:
            yield from wrapped(f"  {sentence(row)}", columns, "    ")
    else:
        table = new_table(
            "link", "role", "codec", ">bytes", ">dense", ">saves", ">encoding", ">error"
        )
        for row in shown:
            cells = (f"{row.source} -> {row.destination}", row.role.replace("_", " "), row.codec)
            sizes = (size_text(row.bytes), size_text(row.dense_bytes))
            times = (time_text(row.saved_s), time_text(row.encode_s))
            table.add_row(*map(Text, (*cells, *sizes, *times, f"{row.error:.2g}")))
        yield from lines(table, columns)
    if len(rows) > len(shown):
        yield f"and {len(rows) - len(shown)} more (--json has all)"


def _spares(report: PlanReport, called: dict[str, str], columns: int) -> Iterator[str]:
    """Peers that stay in the pool, those with one reason together."""
    yield "left in the pool"
    alike: dict[str, list[str]] = {}
    for spare in report.spares:
        alike.setdefault(spare.reason, []).append(called.get(spare.peer, spare.peer))
    for reason, names in alike.items():
        yield from wrapped(f"  {', '.join(names)}: {reason}", columns, "    ")


def _reasons(reasons: Sequence[str], columns: int) -> Iterator[str]:
    yield "why"
    for reason in reasons[:MOST_REASONS]:
        yield from wrapped(f"  {reason}", columns, "    ")
    if len(reasons) > MOST_REASONS:
        yield f"  and {len(reasons) - MOST_REASONS} more (--json has all)"


def _routes(plan: Plan) -> Counter[tuple[str, ...]]:
    """Microbatches by the peers that they go through, in order; a peer once for each visit that
    does not follow one of its own."""
    found: Counter[tuple[str, ...]] = Counter()
    for route in routes_of(plan):
        peers = [v.peer for v in route.visits]
        found[tuple(p for i, p in enumerate(peers) if i == 0 or p != peers[i - 1])] += 1
    return found
