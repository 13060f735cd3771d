"""Writes the report of a run: the page, its pictures as files, the events, and the summary."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ...dag.cost.network import Network
from ...dag.plan.report import PlanReport
from ...dag.schedule.convert_report import report_to_proto
from ...job.words import counted_in
from ...proto import broker_pb2
from ..trace import Trace
from .measures.measure import Measured, by_stage, measure
from .measures.moments import FAULTS
from .measures.verdict import Verdict, judge
from .page import Section, bullets, compared, page, table, tiles
from .pictures.atlas import atlas, place_of
from .pictures.charts import BarRow, Series, bars, curves, smooth
from .pictures.crowd import crowd, groups_of
from .pictures.heat import heat_map
from .pictures.picture import Picture
from .pictures.timeline import MOST_ROWS, overview, timeline, window
from .rounds import baselines_of, behind_rounds, clients_of, rounds_of
from .summary import Summary, write_json, write_whole
from .tables import comparison, happened
from .text import against
from .words import figure, plain, size

__all__ = ["measured_summary", "write_report"]

TIGHT = 0.2
"""Share of a peer's memory from which on its limit is worth a picture."""


def measured_summary(summary: Summary, trace: Trace, network: Network | None = None) -> Summary:
    """The summary with what only the trace knows; fields that are filled already stay."""
    found = measure(trace, network)
    return _filled(summary, trace, found, behind_rounds(judge(trace, found), summary))


def _filled(summary: Summary, trace: Trace, found: Measured, verdict: Verdict) -> Summary:
    uses = {pair: use for pair, x in found.links.items() if (use := found.use(x)) is not None}
    link, use = summary.busiest_link, summary.busiest_link_use
    if use is None and uses:
        pair = max(uses, key=lambda pair: (uses[pair], pair))
        link, use = " -> ".join(pair), uses[pair]
    beside: defaultdict[str, int] = defaultdict(int)
    for part, total in found.totals.items():
        if part.kind == "send" and part.role in ("snapshot", "probe") and total.size_bytes:
            beside[part.role] += total.size_bytes
    return replace(
        summary,
        bytes_beside=summary.bytes_beside or dict(sorted(beside.items())),
        held_back_by=summary.held_back_by or verdict.short,
        bubble_measured=_first(summary.bubble_measured, found.bubble),
        goodput=_first(summary.goodput, found.goodput),
        busiest_link=link,
        busiest_link_use=use,
        event_log=summary.event_log or (trace.digest() if trace.spans or trace.marks else ""),
        step_seconds=summary.step_seconds or tuple(s.end_s - s.start_s for s in found.steps),
    )


def _first(a: float | None, b: float | None) -> float | None:
    return a if a is not None else b


def write_report(
    folder: Path,
    summary: Summary,
    trace: Trace,
    report: PlanReport | broker_pb2.PlanReport | None = None,
    network: Network | None = None,
    *,
    names: Mapping[str, str] | None = None,
) -> None:
    """Writes report.html, summary.json, events.jsonl and a PNG of each picture into `folder`, which
    is made. What was not measured has no section, and without a trace there are no events.
    `network`: what links can carry, by names of peers. `report`: of the plan. `names`: of peers, by
    the ids that it has. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    proto = report_to_proto(report) if isinstance(report, PlanReport) else report
    found = measure(trace, network)
    verdict = behind_rounds(judge(trace, found), summary)
    summary = _filled(summary, trace, found, verdict)
    pictures: dict[str, Picture] = {}
    sections = [
        *_time(summary, trace, found, verdict, pictures),
        *_learning(summary, found, trace, pictures),
        *rounds_of(summary, pictures),
        *clients_of(summary, pictures),
        *baselines_of(summary),
        *_wire(summary, trace, found, verdict, pictures),
        *_memory(summary, proto, names or {}, verdict, pictures),
        *_words(summary, trace, found, proto, names or {}),
    ]
    text = page(summary, verdict.text, tiles(summary, found), sections)
    write_whole(text, folder / "report.html")
    for name, picture in pictures.items():
        picture.png(folder / f"{name}.png")
    if trace.spans or trace.marks:
        trace.write(folder / "events.jsonl")
    write_json(summary, folder / "summary.json")


def _time(
    s: Summary,
    trace: Trace,
    found: Measured,
    verdict: Verdict,
    pictures: dict[str, Picture],
) -> list[Section]:
    shown = window(found)
    holders = {n: p for n, p in found.peers.items() if p.stages or p.compute_s or p.recover_s}
    order = by_stage(holders or found.peers)
    made = []
    if shown:
        if len(order) <= MOST_ROWS:
            picture = timeline(trace, found, verdict, order, shown)
            what = "Behind a name stands its stage. Grey: the peer waits. Below each row: it sends."
        else:
            groups = groups_of(found, place_of(s.places))
            picture = crowd(trace, found, verdict, groups, shown)
            what = "The height of a band is all its peers."
        pictures["timeline"] = picture
        steps = f"steps {shown[0].number} to {shown[-1].number}"
        steps = f"step {shown[0].number}" if len(shown) == 1 else steps
        idle = len(found.peers) - len(order)
        what += f" Without a row: {idle} peers that hold no stage." if idle > 1 else ""
        of = f" Shares are of steps {found.typical[0].number} to {found.typical[-1].number}."
        title = f"Timeline of {steps}"
        made.append(Section(title, picture.svg(), wide=True, note=what + of))
    if trace.spans:
        pictures["overview"] = overview(trace, found, order, shown)
        left = f" The last {trace.spans_left_out} spans were not kept." if trace.beyond else ""
        note = f"The frame is the timeline above; the darker, the more a peer computes.{left}"
        made.append(Section("The whole run", pictures["overview"].svg(), wide=True, note=note))
    return made


def _learning(
    s: Summary, found: Measured, trace: Trace, pictures: dict[str, Picture]
) -> list[Section]:
    made = []
    at = [
        step.number
        for m in trace.marks
        if m.what in FAULTS
        for step in found.steps
        if step.start_s <= m.at_s < step.end_s
    ]
    if s.losses:
        points = list(enumerate(s.losses))
        series = [Series(name="loss", points=points, colour="forward", faint=len(points) > 40)]
        if len(points) > 40:
            mean = list(enumerate(smooth(s.losses)))
            series.append(Series(name="mean around", points=mean, colour="forward"))
        if s.evaluations:
            held = [(float(step), loss) for step, loss in s.evaluations]
            series.append(Series(name="held-out", points=held, colour="backward", dots=True))
        pictures["loss"] = curves("loss by step", series, marks=at)
        made.append(Section("Loss, nats", pictures["loss"].svg()))
    if s.step_seconds and not s.rounds:  # each replica has steps of its own
        tokens = s.tokens_per_s * s.step_s
        numbers = [step.number for step in found.steps]
        if len(numbers) != len(s.step_seconds):
            numbers = list(range(len(s.step_seconds)))
        if tokens:
            points = [(n, tokens / t) for n, t in zip(numbers, s.step_seconds, strict=True) if t]
            what = counted_in(s.job)
            title, name = f"{what.capitalize()} per second", f"{what}/s of each step"
        else:
            points = list(zip(numbers, s.step_seconds, strict=True))
            title, name = "Seconds per step", "seconds"
        line = Series(name=name, points=points, colour="update")
        pictures["speed"] = curves(title, [line], marks=at, from_zero=True, text=figure)
        made.append(Section(title, pictures["speed"].svg()))
    return made


def _wire(
    s: Summary,
    trace: Trace,
    found: Measured,
    verdict: Verdict,
    pictures: dict[str, Picture],
) -> list[Section]:
    made = []
    places = place_of(s.places)
    heat = heat_map(found, verdict, by_stage(found.peers), places)
    if heat is not None:
        pictures["links"] = heat
        known = any(link.rate for link in found.links.values())
        note = "Used over available" if known else "Bytes"
        note += ", in the typical steps; the hint of a cell has its figures."
        made.append(Section("Links", heat.svg(), note=note))
    chart = atlas(found, verdict, s.places)
    if chart is not None:
        pictures["map"] = chart
        note = "As wide as what crossed, coloured by the busiest link between the two places."
        made.append(Section("Places", chart.svg(), note=note))
    sums: defaultdict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
    for part, total in found.totals.items():
        if part.kind == "send":
            both = sums[part.role or "frames", part.codec]
            both[0] += total.size_bytes
            both[1] += total.dense_bytes
    rows = []
    for (role, codec), (sent, dense) in sorted(sums.items(), key=lambda x: -x[1][0]):
        saved = f" · {dense / sent:.3g}x smaller" if dense > sent > 0 else ""
        name = f"{role.replace('_', ' ')} · {codec}" if codec else role.replace("_", " ")
        limit = dense if dense > sent else 0
        rows.append(BarRow(name=name, parts=[("sent", sent)], limit=limit, text=size(sent) + saved))
    if rows:
        pictures["bytes"] = bars(
            "bytes by role and codec", rows, {"sent": "forward"}, limit="dense"
        )
        note = (
            "The outline is what the same tensors take dense." if any(r.limit for r in rows) else ""
        )
        made.append(Section("Bytes by role and codec", pictures["bytes"].svg(), note=note))
    return made


def _memory(
    s: Summary,
    report: broker_pb2.PlanReport | None,
    names: Mapping[str, str],
    verdict: Verdict,
    pictures: dict[str, Picture],
) -> list[Section]:
    rows: list[BarRow] = []
    title = "Memory of each peer, at its peak"
    tight = any(m.get("peak_bytes", 0) > TIGHT * m.get("limit_bytes", 0) for m in s.memory)
    outline = "limit" if tight else "predicted"  # far from the limits all bars would be slivers
    for m in s.memory:
        peak, limit = m.get("peak_bytes", 0), m.get("limit_bytes", 0)
        expected = m.get("predicted_bytes", 0)
        value, part = (peak, "measured") if peak else (expected, "predicted")
        if value:
            text = size(value) + (f" of {size(limit)}" if limit else "")
            marked, around = verdict.on == m["peer"], limit if tight else expected
            rows.append(
                BarRow(
                    name=m["peer"], parts=[(part, value)], limit=around, text=text, marked=marked
                )
            )
    if not rows and report is not None:
        for p in report.predicted.peers:
            parts = [("device, predicted", p.device_bytes), ("host, predicted", p.host_bytes)]
            if total := p.device_bytes + p.host_bytes:
                name = names.get(p.peer, p.peer)
                shown = [part for part in parts if part[1]]
                rows.append(BarRow(name=name, parts=shown, text=size(total)))
    if not rows:
        return []
    rows.sort(key=lambda r: (-sum(v for _, v in r.parts) / (r.limit or 1), r.name))
    pictures["memory"] = bars(title, rows, limit=outline)
    return [Section(title, pictures["memory"].svg())]


def _words(
    s: Summary,
    trace: Trace,
    found: Measured,
    report: broker_pb2.PlanReport | None,
    names: Mapping[str, str],
) -> list[Section]:
    made = []
    if rows := comparison(s, found, report, names):
        made.append(Section("Predicted and measured", compared(rows)))
    if (report is not None and report.reasons) or s.spares:
        reasons: Sequence[str] = report.reasons if report is not None else ()
        spare = [f"in pool: {text}" for text in s.spares[:20]]
        made.append(Section("Why this plan", bullets([*reasons, *spare])))
    if s.against or s.against_measured:
        made.append(Section("Against", _against(s)))
    if rows_ := happened(trace.marks):
        made.append(Section("What happened", table(("at", "what", "who", ""), rows_, (0,))))
    return made


def _against(s: Summary) -> str:
    rows = [(plain(name), ratio, mark) for name, ratio, mark in against(s)]
    time = "time for a batch" if s.rounds else "step time"
    return table(("", f"its {time} over this run's", ""), rows, (1,))
