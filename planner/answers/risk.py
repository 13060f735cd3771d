"""What a loss would cost under a plan: the steps that are done again, for the preview.

Copies of snapshots have what the step leaves of a holder's uplink. With u the seconds that the
slowest copy takes, a set is whole u after it was taken, and with `snapshot_every = "auto"` the next
one is taken u after that (`broker/snapshots/cadence.py`), at least PAUSE_S: a loss at any moment
goes back by u + (u + pause) / 2 on the average, and by 2 u + pause at most.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from ...dag.execute.neighbour import LEARNED, rebuild
from ...dag.ir.graph import Graph
from ...dag.plan.cut import cut
from ...dag.plan.plan import PeerId, Plan
from ...dag.plan.report import PlanWithReport, Prediction
from ...dag.plan.routes import swaps
from ...dag.transforms.vocabulary import planned_graph
from ...job.tables import Recovery
from ..base.interface import PlanRequest
from ..replicas.copies import PAUSE_S

__all__ = ["work_at_risk"]


def work_at_risk(
    request: PlanRequest, graph: Graph, planned: PlanWithReport, recovery: Recovery
) -> list[str]:
    """Sentences for people; none where the plan predicts no step time or knows no links."""
    plan, names = planned.plan, {o.peer: str(o) for o in request.offers}
    form = planned_graph(graph.bind(plan.microbatch_size), plan)
    found = _repeats(request, form, planned, recovery, names)
    return found + (_not_made(form, plan, names) if recovery.rebuilds else [])


def _not_made(form: Graph, plan: Plan, names: Mapping[PeerId, str]) -> list[str]:
    """Name the holders of what the neighbour rung cannot make anew; a holder whose stages others
    hold, too, has nothing of the kind."""
    found = []
    stages = cut(form, [(s.start, s.stop) for s in plan.stages])
    for peer in plan.peers:
        alive = [k for k, s in enumerate(plan.stages) if any(h != peer for h in s.holders)]
        pairs = swaps(plan, LEARNED)
        why_not = rebuild(form, stages, plan.stages_of(peer), alive, swapped=pairs).why_not
        if why_not:
            found.append(
                f"work at risk: the part of {names.get(peer, peer)} cannot be made anew from its "
                f"neighbours: {why_not}"
            )
    return found


def _repeats(
    request: PlanRequest,
    form: Graph,
    planned: PlanWithReport,
    recovery: Recovery,
    names: Mapping[PeerId, str],
) -> list[str]:
    predicted = planned.report.predicted
    step_s = predicted.step_s
    if "snapshot" not in recovery.ladder:
        text = "no recovery: the first loss ends the run (recovery.ladder)"
        return [] if recovery.ladder else [text]
    slowest = _slowest_copy(request, form, planned.plan, predicted)
    if not step_s or slowest is None:
        return []
    peer, size, copy_s = slowest
    pause_s = max(PAUSE_S, copy_s)
    if recovery.snapshot_every != "auto":
        pause_s = max(0.0, recovery.snapshot_every * step_s - copy_s)
    mean, most = copy_s + (copy_s + pause_s) / 2, 2 * copy_s + pause_s
    return [
        f"work at risk: a loss repeats about {_steps(mean, step_s)}, at most "
        f"{_steps(most, step_s)}; the slowest copy of a snapshot is that of "
        f"{names.get(peer, peer)}, {size / 1e6:.3g} MB in {copy_s:.3g} s"
    ]


def _steps(seconds: float, step_s: float) -> str:
    count = math.ceil(seconds / step_s) if math.isfinite(seconds) else "all"
    return f"{count} step{'' if count == 1 else 's'} ({seconds:.3g} s)"


def _slowest_copy(
    request: PlanRequest, form: Graph, plan: Plan, predicted: Prediction
) -> tuple[PeerId, int, float] | None:
    """(holder, bytes, seconds)."""
    network = request.links
    if network is None or len(network.peers) < 2:
        return None
    place = {peer: i for i, peer in enumerate(network.peers)}
    state_bytes = request.options.standing_bytes
    sizes = {
        f"param:{p.name}": p.spec.size_bytes + state_bytes * p.spec.elements
        for p in form.parameters
        if p.trainable  # what is frozen is in no snapshot
    }
    found = []
    for peer in plan.peers:
        at = place[peer]
        stages = [plan.stages[k] for k in plan.stages_of(peer)]
        size = sum(
            sizes.get(value, 0)
            for s in stages
            for value in dict.fromkeys(
                v for op in form.operators[s.start : s.stop] for v in op.reads
            )
        )
        link = max(float(network.bandwidth[at, j]) for j in place.values() if j != at)
        rate = min(link, float(network.up[at]))
        sent = sum(x.bytes for x in predicted.links if x.source == peer)
        left = rate - sent / predicted.step_s if predicted.step_s else rate
        found.append((peer, size, size / left if left > 0 else math.inf))
    return max(found, key=lambda copy: copy[2])
