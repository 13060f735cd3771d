"""What the preview says of the work at risk, against the snapshots of a simulated run."""

from __future__ import annotations

import math

import pytest

from shoal.broker.snapshots.cadence import SnapshotSchedule
from shoal.dag.analysis.blocks import blocks
from shoal.dag.capture.capture import capture
from shoal.dag.cost.network import uniform
from shoal.dag.plan.plan import PeerId, Plan, StageSlot, Visit
from shoal.dag.plan.report import PlanReport, PlanWithReport, Prediction
from shoal.examples.gpt import gpt
from shoal.job.tables import Recovery
from shoal.planner.answers.risk import work_at_risk
from shoal.planner.base.interface import PeerOffer, PlanRequest

PEERS = (PeerId("a"), PeerId("b"))


@pytest.fixture(scope="module")
def asked():
    import torch

    tokens = torch.zeros((2, 8), dtype=torch.int64)
    graph = capture(gpt(layers=1, width=8, heads=1, length=8), {"x": tokens, "y": tokens}).graph
    n = len(graph.operators)
    slots = (StageSlot(0, n // 2, PEERS[:1]), StageSlot(n // 2, n, PEERS[1:]))
    route = (Visit(0, PEERS[0]), Visit(1, PEERS[1]))
    plan = PlanWithReport(Plan(slots, (route,), 2), PlanReport(Prediction(step_s=0.1)))
    request = PlanRequest(
        graph.bind(2), tuple(PeerOffer(p) for p in PEERS), 1, 2, links=uniform(PEERS, 0.01, 1e4)
    )
    size = sum(math.prod(p.spec.shape) * 4 for p in graph.parameters)
    return graph, request, plan, size


@pytest.mark.parametrize("every", ["auto", 40])
def test_it_is_what_the_cadence_gives(asked, every) -> None:
    """The oracle plays the cadence with the seconds that the sentence says."""
    graph, request, plan, size = asked
    [text] = work_at_risk(request, graph, plan, Recovery(snapshot_every=every))
    copy_s = float(text.rpartition(" in ")[2].removesuffix(" s"))
    assert copy_s <= 3 * size / 1e4, "not more than the whole model"
    cadence = SnapshotSchedule(0 if every == "auto" else every, 0)
    whole, under_way, back = 0.0, None, []
    for step in range(1, 4000):
        now = step * 0.1
        if under_way is not None and now >= under_way + copy_s:
            cadence.copied(now)
            whole, under_way = under_way, None
        if under_way is None and cadence.pending == step:
            under_way = now
            cadence.taken(step, now)
        if cadence.pending is None and (due := cadence.due(step, 10**9, now)) is not None:
            cadence.ordered(due)
        back.append(now - whole)
    settled = back[len(back) // 2 :]
    said = [float(part.partition(" s)")[0]) for part in text.split("(")[1:]]
    assert said[0] == pytest.approx(sum(settled) / len(settled), rel=0.15, abs=0.2)
    assert said[1] == pytest.approx(max(settled), rel=0.15, abs=0.3)


def test_without_snapshots_it_says_what_a_loss_does(asked) -> None:
    graph, request, plan, _ = asked
    assert work_at_risk(request, graph, plan, Recovery(ladder=("checkpoint",))) == []
    [text] = work_at_risk(request, graph, plan, Recovery(ladder=()))
    assert "the first loss ends the run" in text


def test_what_the_neighbour_rung_cannot_make_is_named(asked) -> None:
    """One block in two stages: nothing is like it. Six blocks in three: only the ends have what
    nobody else has."""
    import torch

    graph, request, plan, _ = asked
    texts = work_at_risk(request, graph, plan, Recovery(ladder=("neighbour",)))
    assert len(texts) == 2
    assert "the part of a cannot be made anew from its neighbours: nobody else holds" in texts[0]
    tokens = torch.zeros((2, 8), dtype=torch.int64)
    graph = capture(gpt(layers=6, width=8, heads=1, length=8), {"x": tokens, "y": tokens}).graph
    first = {b.name: b.start for b in blocks(graph)}
    at = [0, first["blocks.2"], first["blocks.4"], len(graph.operators)]
    peers = [PeerId(p) for p in "abc"]
    slots = tuple(StageSlot(at[k], at[k + 1], (peers[k],)) for k in range(3))
    route = tuple(Visit(k, p) for k, p in enumerate(peers))
    plan = PlanWithReport(Plan(slots, (route,), 2))
    offers = tuple(PeerOffer(p) for p in peers)
    request = PlanRequest(graph.bind(2), offers, 1, 2, links=uniform(peers, 0.01, 1e4))
    texts = work_at_risk(request, graph, plan, Recovery(ladder=("neighbour",)))
    assert [text.split()[6] for text in texts] == ["a", "c"]
    assert "positions.weight" in texts[0]
    assert "norm.weight" in texts[1]
