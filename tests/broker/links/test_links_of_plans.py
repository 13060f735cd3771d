"""Plans wait for the links that they need, and get them as they were measured."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np

from shoal.broker.events import FormReplicas, MakePlan, PlanReady, ReplicasFormed
from shoal.broker.links.probed import PROBE_BYTES
from shoal.dag.plan.outline import Outline, StageOutline
from shoal.proto.broker_pb2 import Availability, Formation, FormedReplica
from shoal.proto.common_pb2 import Reason
from shoal.tests.broker.conftest import make_plan, make_spec

from .conftest import TRUE_LATENCY_S, TRUE_RATE, failed, pairs_of, probe, serve


def formation(ask, *peers):
    """Each of them is a replica."""
    told = Formation(kind="local", replicas=[FormedReplica(peers=[p]) for p in peers])
    whole = Outline(
        (StageOutline(0, trainable=True, makes_loss=True, has_backward=True, elements=1),)
    )
    plans = (replace(make_plan(p, microbatches=1), outline=whole) for p in peers)
    made = tuple(PlanReady(ask.replica, ask.version, plan) for plan in plans)
    return ReplicasFormed(ask.replica, ask.version, told, made)


def test_a_plan_waits_for_the_links_and_gets_them_as_they_were_measured(world):
    out = [*world.join("a", place="x"), *world.join("b", place="y", up_bytes_per_s=1e6)]
    run, asked = world.submit(world.spec(plan={"stages": 2}))
    assert not [i for i in asked if isinstance(i, MakePlan)]
    assert "measured" in world.state(run).reason.text
    ask = world.only(serve(world, out), MakePlan)
    network = ask.network
    assert network.peers == ("a", "b")
    assert network.latency_s[0, 1] == TRUE_LATENCY_S
    assert network.bandwidth[1, 0] == TRUE_RATE
    assert network.up.tolist() == [np.inf, 1e6]
    assert network.measured.all()


def test_a_plan_waits_no_longer_than_it_must(world):
    world.join("a")
    world.join("b")
    world.wait(2.0)
    run, _ = world.submit(world.spec(plan={"stages": 2}))
    out = world.wait(2.9)
    assert not [i for i in out if isinstance(i, MakePlan)]
    ask = world.only(world.wait(0.2), MakePlan)
    assert ask.replica == run
    assert not ask.network.measured[0, 1]
    assert np.isfinite(ask.network.bandwidth[0, 1])


def test_peers_that_keep_joining_do_not_hold_a_plan_up_for_ever(world):
    world.join("a")
    run, _ = world.submit(world.spec(plan={"stages": 1}))
    asked = []
    for i in range(10):
        out = world.join(f"p{i}")
        out += world.wait(1.0)
        for peer in list(world.streams):
            world.say(peer, heartbeat={})
        asked += [i for i in out if isinstance(i, MakePlan)]
    assert asked or world.state(run).reason.code == "planning"


def test_a_plan_over_pairs_that_nobody_measured_has_them_measured_first_and_once(world):
    for i in range(12):
        serve(world, world.join(f"p{i}"))
    probing = world.machine.probing
    names = list(world.machine.members.members)
    missing = [
        (a, b)
        for a in names
        for b in names
        if a < b and not probing.links.is_measured(a, b, world.now)
    ]
    assert missing
    a, b = missing[0]
    run, out = world.submit(world.spec(plan={"stages": 2}))
    ask = world.only(out, MakePlan)
    at = ask.network.peers.index(a), ask.network.peers.index(b)
    assert not ask.network.measured[at]
    out = world.handle(PlanReady(run, ask.version, world.plan(a, b)))
    assert set(pairs_of(out, world)) == {frozenset((a, b))}
    again = world.only(serve(world, out), MakePlan)
    assert again.network.measured[at]
    out = world.handle(PlanReady(run, again.version, world.plan(a, b)))
    assert world.machine.replica(run).record.active


def test_a_plan_is_not_refused_when_its_pairs_cannot_be_measured(world):
    for i in range(12):
        serve(world, world.join(f"p{i}"))
    probing = world.machine.probing
    names = list(world.machine.members.members)
    a, b = next(
        (a, b)
        for a in names
        for b in names
        if a < b and not probing.links.is_measured(a, b, world.now)
    )
    run, out = world.submit(world.spec(plan={"stages": 2}))
    ask = world.only(out, MakePlan)
    out = world.handle(PlanReady(run, ask.version, world.plan(a, b)))
    again = world.only(serve(world, out, failed), MakePlan)
    world.handle(PlanReady(run, again.version, world.plan(a, b)))
    assert world.machine.replica(run).record.active


def test_one_peer_waits_for_no_links(make_world):
    """Though one of its own is being measured: with a peer that then rests."""
    world = make_world(probe_s=5.0)
    world.join("a")
    world.join("b")
    resting = Reason(code="paused", text="its owner has paused it")
    world.say("b", availability=Availability(closed=resting))
    assert not world.machine.probing.settled(["a"])
    run, out = world.submit(world.spec())
    world.only(out, MakePlan)
    assert "links" not in world.state(run).reason.text


def test_replicas_of_saps_measure_the_links_that_it_chooses_among_and_those_of_noloco_do_not(
    make_world,
):
    for method, measured in (("saps-outer", True), ("noloco", False)):
        world = make_world(probe_s=5.0)
        names = [f"p{i:02}" for i in range(12)]
        for name in names:
            serve(world, world.join(name))
        job = {"sync": {"kind": "gossip", "method": method}, "plan": {"replicas": 12}}
        run, out = world.submit(make_spec(microbatches=12, **job))
        ask = world.only(out, FormReplicas)
        assert not ask.network.measured.all()
        out = world.handle(formation(ask, *names))
        told = pairs_of(out, world)
        assert len(told) == len(set(told)) * 2, "nobody is in two at once"
        if measured:
            again = world.only(serve(world, out), FormReplicas)
            assert again.network.measured.all()
            assert again.network.peers == ask.network.peers
            out = world.handle(formation(again, *names))
        assert not told or measured
        assert all(r.record.active for r in world.machine.runs[run].replicas)


def test_a_pair_whose_peers_may_send_no_more_probes_is_not_waited_for(make_world):
    world = make_world(probe_s=5.0, probe_bytes=5 * PROBE_BYTES)
    for i in range(12):
        serve(world, world.join(f"p{i}"), lambda n, p: probe(n, p, size_bytes=PROBE_BYTES))
    probing, members = world.machine.probing, world.machine.members.members
    unmeasured = probing.unmeasured(list(itertools.combinations(members, 2)), world.now)
    assert unmeasured
    probing.wanted(unmeasured, world.now, turns=12)
    assert not probing.settled(members)
    serve(
        world,
        probing.advance(world.machine.members, world.now),
        lambda n, p: probe(n, p, size_bytes=PROBE_BYTES),
    )
    assert probing.settled(members)
    assert probing.unmeasured(unmeasured, world.now)
