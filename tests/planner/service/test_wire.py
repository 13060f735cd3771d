"""Requests to planning processes, and what comes back, are what they were."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest

from shoal.broker.events import (
    ConsiderPlan,
    FormReplicas,
    MakePlan,
    PlanConsidered,
    PlanFailed,
    PlanReady,
    ReplicasFormed,
    RunId,
)
from shoal.dag.cost.network import uniform
from shoal.dag.cost.speed import Speeds
from shoal.dag.plan.plan import PeerId
from shoal.planner.base.interface import PeerOffer
from shoal.planner.service.wire import (
    answer_from_bytes,
    answer_to_bytes,
    ask_from_proto,
    ask_to_bytes,
)
from shoal.proto.broker_pb2 import Formation, FormedReplica
from shoal.proto.planning_pb2 import PlanningAsked
from shoal.tests.broker.conftest import make_plan, make_spec

SPEEDS = Speeds(
    **{f.name: 2.0 + i for i, f in enumerate(fields(Speeds)) if f.name != "busy"}, busy=0.5
)
OFFER = PeerOffer(
    *(PeerId("a"), "name", "place", 3, 4, 5.0, "core", False, SPEEDS, 1.5, "host", 2.5, 7),
    accelerator=True,
    manifests=(("ab", ("x", "y")), ("cd", ())),
    blended=frozenset(["ab"]),
)


def test_a_request_comes_over_with_every_field_of_an_offer() -> None:
    usual = PeerOffer(PeerId("b"))
    same = [f.name for f in fields(PeerOffer) if getattr(OFFER, f.name) == getattr(usual, f.name)]
    assert not same, f"give OFFER other values of {same} than the defaults"
    links = uniform([PeerId("a"), PeerId("b")], 0.01, 5e6)
    links = replace(links, measured=np.array([[True, False], [True, True]]))
    ask = MakePlan(RunId("r"), 0, make_spec(), (OFFER, usual), links, make_plan("a"))
    got = ask_from_proto(PlanningAsked.FromString(ask_to_bytes(ask, b"graph")))
    assert isinstance(got, MakePlan)
    assert replace(got, network=None) == replace(ask, network=None)
    assert got.network is not None
    for name in ("latency_s", "bandwidth", "up", "down", "measured"):
        assert np.array_equal(getattr(got.network, name), getattr(links, name)), name


def test_answers_come_over_and_what_is_none_is_refused() -> None:
    make = MakePlan(RunId("r"), 7, make_spec(), ())
    plan, pairs = make_plan("a", "b"), ((PeerId("a"), PeerId("b")),)
    for told in (
        PlanReady(RunId("r"), 7, plan, pairs, ("x",)),
        PlanFailed(RunId("r"), 7, "why", "memory", 12),
    ):
        assert answer_from_bytes(make, answer_to_bytes(told)) == told
    form = FormReplicas(RunId("r"), 7, make_spec(), (OFFER,))
    got = ask_from_proto(PlanningAsked.FromString(ask_to_bytes(form, b"graph")))
    assert got == replace(form, version=0)
    formation = Formation(kind="local", replicas=[FormedReplica(peers=["a", "b"])], every=3)
    ready = PlanReady(RunId("r"), 7, plan, pairs)
    for formed in (
        ReplicasFormed(RunId("r"), 7, formation, (ready, ready)),
        PlanFailed(RunId("r"), 7, "why", "memory", 12),
    ):
        assert answer_from_bytes(form, answer_to_bytes(formed)) == formed
    look = ConsiderPlan(RunId("r"), 8, make_spec(), plan, ())
    for seen in (
        PlanConsidered(RunId("r"), 8, 1.0, 0.5, 3.0, plan, pairs),
        PlanConsidered(RunId("r"), 8, 1.0),
    ):
        assert answer_from_bytes(look, answer_to_bytes(seen)) == seen
    for wrong in (b"", b"\xff\xff", answer_to_bytes(seen)):
        with pytest.raises(ValueError, match="answer"):
            answer_from_bytes(make, wrong)
