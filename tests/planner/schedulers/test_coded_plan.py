"""Plans with codecs: never longer than without where the planner chooses, and placed for them."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from shoal.dag.cost.network import uniform
from shoal.dag.plan.plan import PeerId
from shoal.planner.base.interface import (
    CODED_ROLES,
    CodecOptions,
    NoPlan,
    PeerOffer,
    PlannerOptions,
    PlanRequest,
)
from shoal.planner.codecs.codec_table import CLASSES, read, table
from shoal.planner.cost.cost_model import CostModel
from shoal.planner.schedulers.auto import auto
from shoal.planner.schedulers.coded import UNCOMPRESSED, relaxed
from shoal.planner.schedulers.schedulers import plan
from shoal.tests.planner.cases import random_case, random_graph


def asking(request: PlanRequest, text: str, **changed: object) -> PlanRequest:
    codecs = CodecOptions(activation=text, activation_grad=text, sync=text, **changed)
    return replace(request, options=replace(request.options, codecs=codecs))


@pytest.mark.parametrize("seed", [0, 4])
def test_auto_is_never_longer_than_without_codecs(seed: int) -> None:
    request = random_case(seed, operators=6, peers=4, held=False)
    try:
        dense = plan(request)
    except NoPlan:
        with pytest.raises(NoPlan):
            plan(asking(request, "auto", error_budget=0.2))
        return
    assert dense == auto(request)
    found = plan(asking(request, "auto", error_budget=0.2))
    found.plan.validate(len(request.costs))
    assert found.report.predicted.step_s <= dense.report.predicted.step_s
    errors = [use.error for link in found.report.predicted.links for use in link.codecs]
    assert all(error <= 0.2 for error in errors)
    names = [a.name for a in found.report.predicted.alternatives]
    assert (UNCOMPRESSED in names) == bool(found.plan.codecs)


def test_compressed_links_bring_peers_in_that_were_too_far_away() -> None:
    """Over this link another peer pays only when next to nothing is sent."""
    graph, costs = random_graph(random.Random(0), 8)
    names = (PeerId("p0"), PeerId("p1"))
    offers = tuple(PeerOffer(p, device_memory_bytes=2**34, flops_per_s=1e9) for p in names)
    request = PlanRequest(
        graph,
        offers,
        8,
        1,
        links=uniform(names, 0.0, 1e3),
        known_costs=costs,
        options=PlannerOptions(pipelines=1),
    )
    dense = plan(request)
    assert len(dense.plan.peers) == 1
    found = plan(asking(request, "topk:ratio=100"))
    assert len(found.plan.peers) == 2
    assert found.report.predicted.step_s < dense.report.predicted.step_s
    assert "placed for links that are compressed" in found.report.reasons[0]
    assert found.report.spares == ()


def test_links_are_as_fast_as_codecs_make_them() -> None:
    request = random_case(4, operators=6, peers=4, held=False)
    now = request.network

    def then(text: str, **changed: object):
        return relaxed(CostModel(asking(request, text, **changed)))

    off = ~np.eye(len(now), dtype=bool)
    assert then("none") is None
    assert then("auto") is None or (then("auto").bandwidth[off] >= now.bandwidth[off]).all()
    by_text = then("int8").bandwidth[off] / now.bandwidth[off]
    assert by_text == pytest.approx(4.0, rel=0.05)
    for text in ("auto", "adatopk"):
        found = then(text, error_budget=0.2).bandwidth[off] / now.bandwidth[off]
        assert (found >= 1).all()
        order = np.argsort(now.bandwidth[off])
        assert found[order[0]] >= found[order[-1]]


# ---------------------------------------------------------------- the table


def plain_table() -> dict:
    return {
        role: {k: [rung._asdict() for rung in table()[role][k]] for k in CLASSES}
        for role in CODED_ROLES
    }


def test_the_table_comes_back_as_it_is_written() -> None:
    assert read(plain_table()) == table()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop("sync"), "the table has"),
        (lambda t: t["sync"].pop("slow"), "sync has"),
        (lambda t: t["sync"]["slow"].append({"codec": "int8"}), "sync on slow links has"),
        (lambda t: t["sync"]["slow"].append({"codec": "zip", "error": 9.0}), "names no codec"),
        (lambda t: t["sync"]["slow"].append({"codec": "bf16", "error": -1.0}), "has error -1"),
        (lambda t: t["sync"]["slow"].insert(0, {"codec": "bf16", "error": 9}), "stands before"),
    ],
)
def test_a_table_that_breaks_a_rule_says_which(change, said) -> None:
    broken = plain_table()
    change(broken)
    with pytest.raises(ValueError, match=said):
        read(broken)
