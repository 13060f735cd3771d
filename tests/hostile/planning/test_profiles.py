"""Whatever one peer says of itself, the runs of others are planned: its numbers are bounded at the
door, and an offer that no plan can be made with is left out, by name."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.broker.events import MakePlan, PlanFailed, PlanReady, RunId
from shoal.broker.machine import BrokerMachine
from shoal.broker.membership.bounds import (
    LEAST_CAP,
    MOST_BYTES,
    MOST_CAP,
    MOST_CORES,
    MOST_MEMORY_BYTES,
    MOST_S,
    sound_report,
)
from shoal.broker.options import BrokerOptions
from shoal.dag.ir.convert import graph_to_bytes
from shoal.dag.plan.plan import PeerId
from shoal.dag.plan.report import PlanWithReport
from shoal.planner.answers.bad_plan import bad_plan
from shoal.planner.answers.leaving_out import MOST_TRIES
from shoal.planner.answers.planning import answer
from shoal.planner.base.interface import NoPlan, PeerOffer, PlanRequest
from shoal.planner.schedulers.schedulers import plan as by_name
from shoal.proto.broker_pb2 import LinkReport, Profile, Speeds, StageTime, StepReport
from shoal.tests.broker.conftest import World, make_plan, make_spec
from shoal.tests.planner.answers.test_planning import make_graph, offers

WHOLE = st.sampled_from([0, 1, 2**31, 2**53, 2**63, 2**64 - 1]) | st.integers(0, 2**64 - 1)
SHORT = st.sampled_from([0, 1, 2**31, 2**32 - 1]) | st.integers(0, 2**32 - 1)
REAL = st.sampled_from(
    [0.0, -1.0, math.nan, math.inf, -math.inf, 1e-308, 5e-324, 1e308, 1e13]
) | st.floats(allow_nan=True)


def numbers(message: Any) -> st.SearchStrategy[dict[str, Any]]:
    """For every number of a message, anything that its type can be."""
    kinds = {
        FieldDescriptor.TYPE_UINT64: WHOLE,
        FieldDescriptor.TYPE_UINT32: SHORT,
        FieldDescriptor.TYPE_DOUBLE: REAL,
    }
    found = {f.name: kinds[f.type] for f in message.DESCRIPTOR.fields if f.type in kinds}
    return st.fixed_dictionaries(found)


def world(probe_s: float = 5.0) -> World:
    return World(BrokerMachine("broker-1", BrokerOptions(probe_s=probe_s)))


def honest(world: World, *names: str) -> None:
    speeds = Speeds(product_flops_per_s=1e10, memory_bytes_per_s=1e9)
    for name in names:
        world.join(name, speeds=speeds, host=f"home of {name}", cores=2, threads=2)


def reports(world: World, peer: str, told: dict[str, Any], other: str) -> None:
    world.say(peer, link=LinkReport(**{**told, "peer": other, "probe": 0}))


@settings(max_examples=20)
@given(
    profile=numbers(Profile),
    speeds=numbers(Speeds),
    link=numbers(LinkReport),
    host=st.sampled_from(["", "home of a"]),
    first=st.booleans(),
)
def test_no_profile_keeps_others_from_being_planned(
    profile: dict[str, Any],
    speeds: dict[str, Any],
    link: dict[str, Any],
    host: str,
    first: bool,
) -> None:
    found = world()
    if not first:
        honest(found, "a", "b")
    found.join("x", **{**profile, "speeds": Speeds(**speeds), "host": host})
    if first:
        honest(found, "a", "b")
    here = found.machine.members.members
    if PeerId("x") in here:  # else it was refused at the door
        told = here[PeerId("x")].profile
        assert max(told.device_memory_bytes, told.host_memory_bytes) <= MOST_MEMORY_BYTES
        assert told.cores <= MOST_CORES
        for cap in (told.up_bytes_per_s, told.down_bytes_per_s):
            assert cap == 0 or LEAST_CAP <= cap <= MOST_CAP
        reports(found, "x", link, "a")
    _, out = found.submit(make_spec(plan={"stages": 2}))
    out += found.wait(10.0)  # links that nobody measures are not waited for
    asks = [i for i in out if isinstance(i, MakePlan)]
    assert asks, found.machine
    ready = answer(asks[-1], graph_to_bytes(make_graph()))
    assert isinstance(ready, PlanReady), ready
    assert not bad_plan(PlanWithReport(ready.plan, ready.report), ready.pairs)
    assert math.isfinite(ready.report.predicted.step_s)


@settings(max_examples=10)
@given(report=numbers(StepReport), stage=numbers(StageTime), again=st.integers(1, 8))
def test_no_report_of_a_step_makes_a_peer_one_that_cannot_be_planned_with(
    report: dict[str, Any], stage: dict[str, Any], again: int
) -> None:
    found = world(probe_s=0.0)
    honest(found, "a", "b")
    run = found.start("a", "b", steps=50)
    for step in range(again):
        told = {**report, "run": run, "term": 1, "step": step}
        found.say("a", step=StepReport(**told, stages=[StageTime(**{**stage, "stage": 0})]))
        found.report("b", run, step)
    assert found.machine.replica(run).record.committed == again
    assert all(math.isfinite(m.offer.pace.product) for m in found.machine.members.members.values())
    spec = make_spec(plan={"scheduler": "op-fence"})
    peers = tuple(m.offer for m in found.machine.members.members.values())
    ask = MakePlan(RunId("r"), 1, spec, peers)
    assert isinstance(answer(ask, graph_to_bytes(make_graph())), PlanReady)


@given(report=numbers(StepReport), stage=numbers(StageTime))
def test_what_a_step_took_is_bounded(report: dict[str, Any], stage: dict[str, Any]) -> None:
    told = StepReport(**report, stages=[StageTime(**stage)])
    sound_report(told)
    (part,) = told.stages
    for seconds in (told.compute_s, told.update_s, part.forward_s, part.backward_s):
        assert 0 <= seconds <= MOST_S
    assert max(told.sent_bytes, told.again_bytes) <= MOST_BYTES
    assert told.peak_bytes <= MOST_MEMORY_BYTES


# ---------------------------------------------------------------- the second line


def allergic(*bad: str, together: bool = False) -> Any:
    """A planner with a bug: it fails on the memory that these peers state."""
    calls = []

    def planner(request: PlanRequest) -> PlanWithReport:
        calls.append(request)
        ill = [o.name for o in request.offers if o.name in bad and o.host == "odd"]
        if ill and (not together or len(ill) == len(bad)):
            raise ZeroDivisionError("1e-308 of it")
        return by_name(request)

    planner.calls = calls  # type: ignore[attr-defined]
    return planner


def asked(*names: str) -> MakePlan:
    peers: tuple[PeerOffer, ...] = tuple(replace(o, host="odd") for o in offers(*names))
    return MakePlan(RunId("r"), 1, make_spec(plan={"scheduler": "uniform"}), peers)


@pytest.mark.parametrize("bad", [("p0",), ("p1",), ("p1", "p6"), ("p7",)])
def test_who_no_plan_can_be_made_with_is_left_out_by_name(bad: tuple[str, ...]) -> None:
    planner = allergic(*bad)
    names = [f"p{i}" for i in range(8)]
    ready = answer(asked(*names), graph_to_bytes(make_graph()), planner)
    assert isinstance(ready, PlanReady), ready
    assert not set(ready.plan.peers) & {f"id-{b}" for b in bad}
    why = {s.peer: s.reason for s in ready.report.spares}
    for name in bad:
        assert "ZeroDivisionError: 1e-308 of it" in why[PeerId(f"id-{name}")]
    assert "left out, as no plan can be made with them" in ready.report.reasons[-1]
    assert len(planner.calls) <= MOST_TRIES


def test_of_two_that_fail_only_together_the_one_that_joined_last_is_left_out() -> None:
    planner = allergic("p1", "p6", together=True)
    ready = answer(asked(*(f"p{i}" for i in range(8))), graph_to_bytes(make_graph()), planner)
    assert isinstance(ready, PlanReady), ready
    assert [s.peer for s in ready.report.spares if "ZeroDivision" in s.reason] == ["id-p6"]


def test_a_bug_that_the_run_itself_meets_is_its_own() -> None:
    def planner(request: PlanRequest) -> PlanWithReport:
        raise ZeroDivisionError("whoever is there")

    failed = answer(asked("p0", "p1"), graph_to_bytes(make_graph()), planner)
    assert isinstance(failed, PlanFailed)
    assert failed.code == "internal"
    assert "ZeroDivisionError: whoever is there" in failed.reason


def test_where_nobody_is_left_the_run_waits_and_says_who_was_left_out() -> None:
    def planner(request: PlanRequest) -> PlanWithReport:
        if any(o.host == "odd" for o in request.offers):
            raise ZeroDivisionError("1e-308 of it")
        if not request.offers:
            raise NoPlan("1 peer is needed, 0 are on offer", "peers")
        return by_name(request)

    failed = answer(asked("p0"), graph_to_bytes(make_graph()), planner)
    assert isinstance(failed, PlanFailed)
    assert failed.code == "peers"
    assert "left out, as no plan can be made with them: p0" in failed.reason


def test_a_plan_of_more_than_the_wire_can_say_is_no_reason_to_end_a_run(  # as memory of 2^64 - 1
) -> None:
    def planner(request: PlanRequest) -> PlanWithReport:
        made = by_name(request)
        odd = any(o.name == "p1" and o.host == "odd" for o in request.offers)
        if not odd:
            return made._replace(plan=replace(made.plan, microbatch_size=2))
        predicted = replace(made.report.predicted, step_s=math.inf)
        plan = replace(made.plan, microbatch_size=2**70)
        return PlanWithReport(plan, replace(made.report, predicted=predicted))

    ready = answer(asked("p0", "p1", "p2"), graph_to_bytes(make_graph()), planner)
    assert isinstance(ready, PlanReady), ready
    assert make_plan("id-p0").peers[0] in ready.plan.peers
    assert "id-p1" not in ready.plan.peers
