"""A scenario as real processes of this machine: the daemons over shaped links, with stretched
compute, and what goes wrong done by signals. What is measured is what it took here."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, cast

from ...client.front import SimulationFront
from ...job import Codec, Job
from ...job.plan_options import PlanOptions
from ...job.tables import Recovery
from ...planner.schedulers.alternatives import ALONE
from ...planner.schedulers.coded import UNCOMPRESSED
from ...proto import broker_pb2
from ..cluster import (
    beside,
    evaluate_half,
    exported,
    shortened,
    train,
    verify_beside,
    wait_for_peers,
)
from ..faults.churn import absent_at_first, churn_of
from ..faults.faults import Faults
from ..live import LiveView
from ..modelled.virtual_run import specs_of
from ..options import Setting, SimOptions
from ..processes import ClusterError, LocalCluster
from ..report import Summary
from ..trace import Mark, Span, Trace, TraceError
from ..verify import add_baselines
from ..virtual.world import World
from .forwarder import Forwarder
from .shaping import Shaping
from .staging import CoreWatch, check_real, join_flags, slowness, stretches_of
from .surface import Surface

__all__ = ["compared_jobs", "gather", "run_shaped"]

# One trace from what several processes of this host wrote (`shoal join --trace FILE`).

_FIELDS = frozenset(f.name for f in fields(Span))


def gather(files: Iterable[Path], origin_s: float, *, run: str = "") -> Trace:
    """The spans of `files` (written as peer/shell/spans.py says) in order of time, with times
    counted from `origin_s` of `time.time()`, and peers under their names instead of their ids.

    `run`: only what was done for it and its replicas; empty: everything. What ended before the
    origin is left out, and so is the last line of a file that a killed process left unfinished.
    Raises TraceError, with
    file and line, for any other line that is no span.
    """
    found: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    for path in files:
        own = ""
        for where, record in _records(path):
            if "name" in record:
                own = names[record["peer"]] = record["name"]
            elif not run or record.get("run", "").partition(".")[0] == run:
                found.append({**record, "peer": own, "where": where})
    trace = Trace()
    spans = (_span(record, origin_s, names) for record in found)
    kept = (span for span in spans if span.end_s >= 0)
    for span in sorted(kept, key=lambda s: (s.start_s, s.end_s, s.peer, s.kind, s.to)):
        trace.add(span)
    return trace


def _records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines[:-1], 1):  # behind the last newline stands what was cut off
        where = f"{path}:{number}"
        try:
            record = json.loads(line)
        except ValueError as error:
            raise TraceError(f"{where}: {error}") from None
        if not isinstance(record, dict) or not {"name", "kind"} & record.keys():
            raise TraceError(f"{where}: expected a span or who writes, got {record!r}")
        yield where, record


def _span(record: dict[str, Any], origin_s: float, names: dict[str, str]) -> Span:
    try:
        own = {name: value for name, value in record.items() if name in _FIELDS}
        own["start_s"] -= origin_s
        own["end_s"] -= origin_s
        own["to"] = names.get(own.get("to", ""), own.get("to", ""))
        return Span(**own)
    except (KeyError, TypeError) as error:
        raise TraceError(f"{record['where']}: {error!r} is missing or wrong") from None


COMPARED_STEPS = 4
"""Steps of each run that the main one is compared with; the first does not count."""


def run_shaped(
    setting: Setting,
    options: SimOptions,
    front: SimulationFront,
    folder: Path,
    summary: Summary,
    shown: LiveView,
) -> tuple[Trace, broker_pb2.PlanReport | None]:
    """Runs it and fills the summary; returns what happened, and the last plan's report. Raises
    ValueError for what cannot be done to real processes, ClusterError for one that ended by itself,
    ConnectionError when the broker is gone."""
    scenario, job, begun_s = setting.scenario, setting.job, time.time()
    assert scenario is not None, "a shaped world without a scenario"
    check_real(scenario)
    churn = churn_of(
        scenario.churn, [p.name for p in scenario.peers], scenario.seed, scenario.folder
    )
    absent = absent_at_first(churn) if scenario.churn.trace else ()
    shown.say(f"capturing {job.name}")
    stretches = stretches_of(scenario, job, front)
    marks: list[Mark] = []

    def tell(mark: Mark) -> None:
        marks.append(mark)
        shown.mark(mark)

    with ExitStack() as running:
        shown.say(f"starting a broker and {setting.peers} peers, {slowness(stretches)}")
        # Only who has an identity can be reached by the relay.
        secure = options.secure or any(p.nat == "outbound" for p in scenario.peers)
        cluster = running.enter_context(LocalCluster(peers=[], folder=folder, secure=secure))
        paths = running.enter_context(
            Forwarder(Shaping.of_scenario(scenario), {"broker": cluster.address})
        )
        running.callback(cluster.stop)  # before the paths, over which they say goodbye
        flags = join_flags(scenario, stretches, paths, folder)
        first = [p.name for p in scenario.peers if not p.joins and p.name not in absent]
        for name in first:
            cluster.join(name, flags[name])
        names = wait_for_peers(cluster, front, len(first))
        specs = {spec.name: spec for spec in specs_of(scenario)}
        surface = running.enter_context(Surface(cluster, paths, flags, specs, tell))
        faults = Faults(
            cast(World, surface),
            scenario.faults,
            scenario.selected,
            specs=specs.values(),
            churn=churn,
        )
        faults.start()
        for peer in scenario.peers:
            if peer.joins:
                surface.after(peer.joins, lambda spec=specs[peer.name]: surface.join(spec))  # type: ignore[misc]
            if peer.stays != "":
                end_s = peer.joins + peer.stays
                surface.after(end_s, lambda name=peer.name: surface.leave(name))  # type: ignore[misc]
        watch = CoreWatch(cluster, first)

        def see(event: broker_pb2.RunEvent) -> None:
            surface.see(event)
            watch.see(event)
            if surface.error:
                raise ClusterError(f"a fault could not be done: {surface.error}")

        began_s = time.time()
        limits = {peer.name: int(peer.memory) for peer in scenario.peers}
        parts = cluster, front, job, folder, summary, shown, names
        settled = not (scenario.faults or faults.churned or any(p.joins for p in scenario.peers))
        trained = train(*parts, float(scenario.limit), see, limits, complete=settled)
        summary.price = scenario.price((time.time() - began_s) / scenario.time_scale)
        watch.fill(summary)
        trace = gather(sorted(folder.glob("*.trace.jsonl")), began_s, run=trained.handle.id)
        for mark in marks:
            trace.add(replace(mark, at_s=max(0.0, mark.at_s)))
        faults.fill(summary)
        if not summary.exit:
            evaluate_half(trained, shown)
        if not summary.exit and options.keep is not None:
            summary.weights = str(exported(trained.handle, job, folder))
        if not summary.exit and options.compare:
            for name, other in compared_jobs(job, summary):
                if time.time() > begun_s + options.compare_s:
                    break  # it stays as predicted
                shown.say(f"for comparison: {name}, {COMPARED_STEPS} steps")
                found = beside(cluster, front, other, folder / "beside", names)
                summary.against_measured[name] = found.summary.step_s
        followed, expected = trained.followed, scenario.expect.max_loss_difference
        if not summary.exit and options.baselines is not None:
            add_baselines(job, followed, trained.facts, front, options.baselines, shown.say)
        if not summary.exit and (options.verify or expected is not None):
            these = cluster, front, job, folder, trained, names, shown, running
            verify_beside(*these, expected)
    return trace, followed.report


def compared_jobs(job: Job, summary: Summary) -> Iterator[tuple[str, Job]]:
    """What the main run is compared with, by the names that the plan has for it."""
    short = shortened(job, COMPARED_STEPS)
    dense = replace(short, codec=Codec())
    # What the job says of schedules and ladders may not be with other planners.
    plain = replace(dense, recovery=Recovery())
    own = PlanOptions(recompute=job.plan.recompute, replicas=job.plan.replicas)
    if summary.against.get(ALONE):  # 0: no peer can
        yield ALONE, replace(plain, plan=replace(own, stages=1, pipelines=1))
    yield "uniform", replace(plain, plan=replace(own, scheduler="uniform"))
    if summary.codecs:
        yield UNCOMPRESSED, dense
