"""What a person sees of a plan before it runs: who does what, what it costs, and why."""

from __future__ import annotations

import sys
from typing import Any

from google.protobuf.json_format import MessageToDict
from rich.console import Console
from rich.table import Table

from ..proto.broker_pb2 import Plan, PreviewAnswer, Schedule

__all__ = ["as_json", "show"]

MOST_LINKS = 12
"""Links that are shown, the busiest first; `--json` has all."""
SCHEDULES = {
    Schedule.GPIPE: "gpipe",
    Schedule.ONE_F_ONE_B: "1f1b",
    Schedule.INTERLEAVED: "interleaved",
}


def as_json(answer: PreviewAnswer) -> dict[str, Any]:
    """Every field of the answer, with the names of broker.proto; routes are counted, not listed."""
    found: dict[str, Any] = MessageToDict(answer, preserving_proto_field_name=True)
    if answer.HasField("plan"):
        plan = found["plan"]
        plan["microbatches"] = len(answer.plan.routes)
        plan["schedule"] = SCHEDULES.get(answer.plan.schedule, "")
        plan.pop("routes", None)
        plan.pop("evaluation_routes", None)
    return found


def show(answer: PreviewAnswer, name: str) -> None:
    """Prints a preview. One without a plan prints nothing: its reason is an error."""
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False, soft_wrap=True)
    plan = answer.plan
    peers = dict.fromkeys(h for s in plan.stages for h in s.holders)
    called = {p.peer: p.profile.name or p.peer for p in answer.peers}
    out = console.print
    head = "" if plan.head_parts < 2 else f", vocabulary head in {plan.head_parts} blocks"
    out(
        f"{name}: {_count(len(plan.stages), 'stage')} on {len(peers)} of "
        f"{_count(len(peers) + len(plan.spares), 'peer')}, "
        f"{_count(len(plan.routes), 'microbatch')} of {plan.microbatch_size}, "
        f"{SCHEDULES.get(plan.schedule, '?')}{head}",
        markup=False,
    )
    step = plan.predicted.step_s
    out(f"predicted   {step:.3g} s/step", markup=False)
    for other in plan.predicted.alternatives:
        figure = f"{other.step_s:.3g} s ({other.step_s / step:.2f}x)" if other.step_s else "-"
        out(f"  against   {other.name}: {figure}: {other.text}", markup=False)
    for i, text in enumerate(plan.predicted.bottlenecks):
        out(f"{'hangs on' if i == 0 else 'then':<11} {text}", markup=False)
    out("")
    out(_stages(answer, called), markup=False)
    out("")
    out(_peers(plan, called), markup=False)
    if plan.predicted.links:
        out("")
        out(_links(plan, called, step), markup=False)
    if plan.spares:
        out("\nin the pool", markup=False)
        for spare in plan.spares:
            out(f"  {called.get(spare.peer, spare.peer)}: {spare.reason}", markup=False)
    if plan.reasons:
        out("\nwhy", markup=False)
        for reason in plan.reasons:
            out(f"  {reason}", markup=False)
    for note in answer.notes:
        out(f"note: {note}", markup=False)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in columns:
        right = column in ("FLOPs", "parameters", "compute", "bubble", "memory", "bytes", "busy")
        table.add_column(column, justify="right" if right else "left", overflow="fold")
    return table


def _stages(answer: PreviewAnswer, called: dict[str, str]) -> Table:
    table = _table("stage", "operators", "modules", "FLOPs", "parameters", "on", "")
    for i, stage in enumerate(answer.plan.stages):
        span = answer.operators[i] if i < len(answer.operators) else None
        table.add_row(
            str(i),
            f"[{stage.start}, {stage.stop})",
            (span.modules or f"{span.first} to {span.last}") if span else "",
            f"{span.share:.1%}" if span else "",
            _bytes(span.parameter_bytes) if span else "",
            " + ".join(called.get(h, h) for h in stage.holders),
            "recomputes" if stage.recompute else "",
        )
    return table


def _peers(plan: Plan, called: dict[str, str]) -> Table:
    table = _table("peer", "compute", "bubble", "memory")
    for p in plan.predicted.peers:
        name = called.get(p.peer, p.peer)
        table.add_row(name, f"{p.compute_s:.3g} s", f"{p.bubble:.0%}", _bytes(p.device_bytes))
    return table


def _links(plan: Plan, called: dict[str, str], step: float) -> Table:
    table = _table("link", "bytes", "busy")
    links = sorted(plan.predicted.links, key=lambda x: -x.busy_s)
    for x in links[:MOST_LINKS]:
        pair = f"{called.get(x.source, x.source)} -> {called.get(x.destination, x.destination)}"
        table.add_row(pair, _bytes(x.bytes), f"{x.busy_s / step:.0%}" if step else "")
    if len(links) > MOST_LINKS:
        table.add_row(f"and {len(links) - MOST_LINKS} more", "", "")
    return table


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"


def _count(n: int, what: str) -> str:
    plural = "es" if what.endswith("ch") else "s"
    return f"{n} {what}{'' if n == 1 else plural}"
