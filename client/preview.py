"""What a person sees of a plan before it runs: what it costs, who does what, and why.

The most important first: the predicted step, what it hangs on, warnings and what it is compared
with; then the tables; then the reasons. On a terminal everything is wrapped to its width, in a pipe
each sentence and each row is one line.
"""

from __future__ import annotations

import io
import json
import math
import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..proto.broker_pb2 import Alternative, Plan, PreviewAnswer, Schedule

__all__ = ["as_json", "page", "show"]

MOST_LINKS = 12
"""Links that are shown, the busiest first; `--json` has all."""
MOST_ROUTES = 12
"""Pipelines that are shown."""
MOST_REASONS = 24
"""Reasons that are shown."""
NARROWEST = 40
"""Columns that a terminal has at least; narrower ones break the lines themselves."""
PIPED = 100_000
"""Columns where nothing is to be wrapped."""
LABEL = 12
"""Columns of the words at the left."""
SCHEDULES = {
    Schedule.GPIPE: "gpipe",
    Schedule.ONE_F_ONE_B: "1f1b",
    Schedule.INTERLEAVED: "interleaved",
}


# ---------------------------------------------------------------- for programs


def as_json(answer: PreviewAnswer) -> dict[str, Any]:
    """Every field of the answer with the names of broker.proto, also those that are 0 or empty;
    numbers are numbers (null: not finite), routes are counted, not listed. `plan` or `reason` is
    there, not both."""
    found: dict[str, Any] = _plain(answer)
    for name in ("plan", "reason"):
        if not answer.HasField(name):
            found.pop(name, None)
    if answer.HasField("plan"):
        plan = found["plan"]
        plan["microbatches"] = len(answer.plan.routes)
        plan["pipelines"] = len(_routes(answer.plan))
        plan["schedule"] = SCHEDULES.get(answer.plan.schedule, "")
        plan.pop("routes", None)
        plan.pop("evaluation_routes", None)
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
    plan = answer.plan
    called = {p.peer: p.profile.name or p.peer for p in answer.peers}
    parts: list[Iterable[str]] = [_head(plan, name, columns), _costs(answer, columns)]
    if plan.predicted.alternatives:
        parts.append(_lines(_compared(plan), columns))
    parts.append(_lines(_stages(answer, called), columns))
    if len(_routes(plan)) > 1:
        parts.append(_lines(_pipelines(plan, called), columns))
    parts.append(_lines(_peers(answer, called), columns))
    if plan.predicted.links:
        parts.append(_lines(_links(plan, called), columns))
    if plan.spares:
        parts.append(_spares(plan, called, columns))
    if plan.reasons:
        parts.append(_reasons(plan.reasons, columns))
    return "\n\n".join("\n".join(part) for part in parts)


def _head(plan: Plan, name: str, columns: int) -> Iterator[str]:
    used = len({h for s in plan.stages for h in s.holders})
    routes = len(_routes(plan))
    words = [
        f"{_count(len(plan.stages), 'stage')} on {used} of "
        f"{_count(used + len(plan.spares), 'peer')}",
        f"{_count(len(plan.routes), 'microbatch')} of "
        f"{_count(plan.microbatch_size, 'sample')} a step",
        SCHEDULES.get(plan.schedule, "?"),
    ]
    if routes > 1:
        words.insert(1, _count(routes, "pipeline"))
    if plan.head_parts > 1:
        words.append(f"vocabulary head in {plan.head_parts} blocks")
    return _wrapped(f"{name}: {', '.join(words)}", columns)


def _costs(answer: PreviewAnswer, columns: int) -> Iterator[str]:
    plan = answer.plan
    step = plan.predicted.step_s
    if step:
        rate = len(plan.routes) * plan.microbatch_size / step
        yield from _labelled("predicted", f"{_time(step)} a step, {rate:.3g} samples/s", columns)
    for label, text in zip(("bottleneck", "runner-up"), plan.predicted.bottlenecks, strict=False):
        yield from _labelled(label, text, columns)
    for note in answer.notes:
        yield from _labelled("note", note, columns)


def _compared(plan: Plan) -> Table:
    table = _table("compared with", ">step", ">this plan is", "how")
    step = plan.predicted.step_s
    for other in plan.predicted.alternatives:
        figure, ratio = ("-", "") if not other.step_s else (_time(other.step_s), "")
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
    return f"{_number(times)}x faster" if times > 1 else f"{_number(1 / times)}x slower"


def _stages(answer: PreviewAnswer, called: dict[str, str]) -> Table:
    again = any(s.recompute for s in answer.plan.stages)
    names = ["stage", "operators", "modules", ">FLOPs", ">parameters", "on"]
    table = _table(*names, *(["backward"] if again else []))
    for i, stage in enumerate(answer.plan.stages):
        span = answer.operators[i] if i < len(answer.operators) else None
        row = [
            str(i),
            f"[{stage.start}, {stage.stop})",
            (span.modules or f"{span.first} to {span.last}") if span else "",
            f"{span.share:.1%}" if span else "",
            _bytes(span.parameter_bytes) if span else "",
            " + ".join(called.get(h, h) for h in stage.holders),
        ]
        row += ["recomputes" if stage.recompute else ""] if again else []
        table.add_row(*map(Text, row))
    return table


def _pipelines(plan: Plan, called: dict[str, str]) -> Table:
    table = _table("pipeline", ">microbatches", "through")
    routes = _routes(plan)
    for i, (peers, count) in enumerate(list(routes.items())[:MOST_ROUTES]):
        way = " -> ".join(called.get(p, p) for p in peers)
        table.add_row(*map(Text, (str(i), str(count), way)))
    if len(routes) > MOST_ROUTES:
        table.add_row("", "", f"and {len(routes) - MOST_ROUTES} more")
    return table


def _peers(answer: PreviewAnswer, called: dict[str, str]) -> Table:
    plan = answer.plan
    table = _table("peer", "stages", ">compute", ">bubble", ">memory", ">offered")
    offered = {p.peer: p.profile.device_memory_bytes for p in answer.peers}
    for p in plan.predicted.peers:
        held = ", ".join(str(i) for i, s in enumerate(plan.stages) if p.peer in s.holders)
        row = [
            called.get(p.peer, p.peer),
            held,
            _time(p.compute_s),
            f"{p.bubble:.0%}",
            _bytes(p.device_bytes),
            _bytes(offered[p.peer]) if offered.get(p.peer) else "?",
        ]
        table.add_row(*map(Text, row))
    return table


def _links(plan: Plan, called: dict[str, str]) -> Table:
    table = _table("link", ">bytes a step", ">busy")
    step = plan.predicted.step_s
    links = sorted(plan.predicted.links, key=lambda x: -x.busy_s)
    for x in links[:MOST_LINKS]:
        pair = f"{called.get(x.source, x.source)} -> {called.get(x.destination, x.destination)}"
        busy = f"{x.busy_s / step:.0%}" if step else ""
        table.add_row(*map(Text, (pair, _bytes(x.bytes), busy)))
    if len(links) > MOST_LINKS:
        rest = links[MOST_LINKS:]
        table.add_row(f"and {len(rest)} more, less busy", _bytes(sum(x.bytes for x in rest)), "")
    return table


def _spares(plan: Plan, called: dict[str, str], columns: int) -> Iterator[str]:
    """Peers that stay in the pool, those with one reason together."""
    yield "left in the pool"
    alike: dict[str, list[str]] = {}
    for spare in plan.spares:
        alike.setdefault(spare.reason, []).append(called.get(spare.peer, spare.peer))
    for reason, names in alike.items():
        yield from _wrapped(f"  {', '.join(names)}: {reason}", columns, "    ")


def _reasons(reasons: Sequence[str], columns: int) -> Iterator[str]:
    yield "why"
    for reason in reasons[:MOST_REASONS]:
        yield from _wrapped(f"  {reason}", columns, "    ")
    if len(reasons) > MOST_REASONS:
        yield f"  and {len(reasons) - MOST_REASONS} more (--json has all)"


def _routes(plan: Plan) -> Counter[tuple[str, ...]]:
    """Microbatches by the peers that they go through, in order; a peer once for each visit that
    does not follow one of its own."""
    found: Counter[tuple[str, ...]] = Counter()
    for route in plan.routes:
        peers = [v.peer for v in route.visits]
        found[tuple(p for i, p in enumerate(peers) if i == 0 or p != peers[i - 1])] += 1
    return found


# ---------------------------------------------------------------- lines


def _table(*columns: str) -> Table:
    """A table without lines; a column whose name starts with > is of figures."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        figures = column.startswith(">")
        table.add_column(
            column.removeprefix(">"),
            justify="right" if figures else "left",
            overflow="fold",
            no_wrap=figures,
        )
    return table


def _lines(table: Table, columns: int) -> Iterator[str]:
    out = io.StringIO()
    Console(file=out, width=columns, color_system=None, highlight=False).print(table)
    for line in out.getvalue().splitlines():
        yield _safe(line.rstrip())


def _labelled(label: str, text: str, columns: int) -> Iterator[str]:
    return _wrapped(f"{label:<{LABEL}}{text}", columns, " " * LABEL)


def _wrapped(text: str, columns: int, indent: str = "  ") -> Iterator[str]:
    """Lines of at most so many columns, the later ones indented; no word is lost."""
    text = _safe(text)
    if len(text) <= columns:
        yield text
    else:
        yield from textwrap.wrap(
            text, columns, subsequent_indent=indent, break_on_hyphens=False, drop_whitespace=True
        )


def _safe(text: str) -> str:
    """Names come from other people's peers: what is not printable is written as an escape."""
    return "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text)


def _time(seconds: float) -> str:
    if seconds >= 0.1 or seconds == 0:
        return f"{_number(seconds)} s"
    return f"{_number(seconds * 1e3)} ms" if seconds >= 1e-4 else f"{_number(seconds * 1e6)} us"


def _number(x: float) -> str:
    """Three digits, never in powers of ten where people read it."""
    return f"{x:.0f}" if abs(x) >= 999.5 else f"{x:.3g}"


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"


def _count(n: int, what: str) -> str:
    plural = "es" if what.endswith("ch") else "s"
    return f"{n} {what}{'' if n == 1 else plural}"
