"""What is recommended of replicas that meet in rounds, beside one plan with equal weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shoal.broker.events import FormReplicas, RunId
from shoal.dag.cost.network import uniform
from shoal.dag.plan.plan import PeerId, Plan
from shoal.dag.plan.report import PlanReport, PlanWithReport, Prediction
from shoal.job.rounds import RoundSettings
from shoal.planner.answers.forming import contribution_bytes, formed
from shoal.planner.base.interface import NoPlan, PeerOffer
from shoal.tests.broker.conftest import make_plan, make_spec
from shoal.tests.planner.answers.test_planning import make_graph


def ask(link: float = 1e6, peers: int = 2, memory: int = 1 << 20, **job: Any) -> FormReplicas:
    """Peers of one speed that are all linked as fast, for a graph with nine weights."""
    names = [PeerId(f"p{i}") for i in range(peers)]
    offers = tuple(PeerOffer(p, device_memory_bytes=memory, flops_per_s=10.0) for p in names)
    spec = make_spec(microbatches=4, **job)
    return FormReplicas(RunId("r"), 1, spec, offers, uniform(names, 0.01, link))


def one(step_s: float) -> PlanWithReport:
    plan: Plan = make_plan("p0", microbatches=4)
    return PlanWithReport(plan, PlanReport(predicted=Prediction(step_s)))


AUTO = {"sync": {"kind": "auto"}}


def test_replicas_are_recommended_where_they_train_clearly_more() -> None:
    slow = formed(ask(**AUTO), make_graph(), one(1e6))
    assert slow.formation.kind == "local"
    assert len(slow.plans) == len(slow.formation.replicas) == 2
    assert [m.plan.peers for m in slow.plans] == [("p0",), ("p1",)]
    assert all(len(m.plan.routes) == 2 for m in slow.plans)
    fast = formed(ask(**AUTO), make_graph(), one(1e-6))
    assert (fast.formation.kind, fast.plans) == ("allreduce", ())
    assert fast.formation.reasons[0].startswith("one replica with equal weights")
    assert "2 replicas that meet in rounds would train" in fast.formation.reasons[0]


def test_where_another_way_is_faster_that_is_said() -> None:
    """Of a job that asks for replicas, and gets them."""
    local = {"sync": {"kind": "local", "every": 1}, "plan": {"replicas": 2}}
    found = formed(ask(link=1e-3, **local), make_graph(), None)
    assert found.formation.kind == "local"
    assert len(found.plans) == 2
    [said] = [r for r in found.formation.reasons if "the wrong choice" in r]
    assert "best single peer" in said
    good = formed(ask(link=1e9, **local), make_graph(), None)
    assert not any("wrong choice" in r for r in good.formation.reasons)


def test_a_count_that_no_memory_allows_is_one_clear_error() -> None:
    local = {"sync": {"kind": "local"}, "plan": {"replicas": 4}}
    with pytest.raises(NoPlan, match=r"4 replicas hold the model 4 times.* short by"):
        formed(ask(peers=4, memory=100, **local), make_graph(), None)


def test_what_rounds_keep_is_stated_and_of_all_parts_together_the_whole() -> None:
    found = formed(ask(**AUTO), make_graph(), one(1e6))
    kept = sum(p.kept_bytes for p in found.formation.peers)
    # Two replicas: the version and an outer momentum in fp32; what is given, what comes back, the
    # next version with its momentum, and the sum of a half.
    assert kept == 2 * (8 + 4 + 4 + 8 + 4) * 9


@pytest.mark.parametrize(("overlap", "hidden"), [(0, 0.0), (5, 0.5), ("auto", 1.0)])
def test_what_overlap_hides_counts_for_replicas(overlap: int | str, hidden: float) -> None:
    sync = {"kind": "local", "every": 10, "options": {"overlap": overlap}}
    asked = ask(link=1e-3, sync=sync, plan={"replicas": 2})
    told = formed(asked, make_graph(), None).formation
    assert told.exchange_s > told.local_s > 0
    assert told.exposed_s == pytest.approx(told.exchange_s - hidden * told.local_s)


def test_rounds_are_on_the_host_where_all_devices_have_memory_of_their_own() -> None:
    job = {"sync": {"kind": "local"}, "plan": {"replicas": 2}}
    asked = ask(memory=400, **job)
    with pytest.raises(NoPlan, match="short by"):
        formed(asked, make_graph(), None)
    cards = tuple(replace(o, accelerator=True) for o in asked.peers)
    assert len(formed(replace(asked, peers=cards), make_graph(), None).plans) == 2
    with pytest.raises(NoPlan, match="short by"):  # one of them has not
        formed(replace(asked, peers=(cards[0], asked.peers[1])), make_graph(), None)


BOTH_WAYS = {"density": 0.25, "bits": 32, "result_density": 0.5}


@pytest.mark.parametrize(
    ("settings", "size"),
    [
        (RoundSettings(method="diloco"), 4.0),
        (RoundSettings(method="average", codec="bf16"), 2.0),
        (RoundSettings(method="fedavg", codec="int8", results="bf16"), 1.5),
        (RoundSettings(method="sparse-loco", options={"density": 0.25, "bits": 32}), 4.0),
        (RoundSettings(method="sparse-loco", options=BOTH_WAYS), 1.7),
    ],
)
def test_a_contribution_is_as_long_as_its_codec_says(settings: RoundSettings, size: float) -> None:
    assert contribution_bytes(settings, 4) == pytest.approx(size, rel=0.4)
