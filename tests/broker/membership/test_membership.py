"""Joining, incarnations, leases and the pool, on the machine alone."""

from __future__ import annotations

import pytest

from shoal.broker.events import (
    CloseStream,
    PeerSaid,
    Reject,
    RunSubmitted,
    StreamClosed,
    StreamId,
    StreamOpened,
    Tell,
)
from shoal.broker.machine import BrokerMachine
from shoal.broker.membership.member import PROTOCOL
from shoal.proto.broker_pb2 import (
    RUNNING,
    WAITING,
    Goodbye,
    Heartbeat,
    Hello,
    Holding,
    LinkStatus,
    PeerMessage,
    Ready,
)
from shoal.proto.common_pb2 import Reason
from shoal.proto.graph_pb2 import CORE

from ..conftest import make_spec


def test_a_hello_joins_the_pool_and_is_welcomed(world) -> None:
    out = world.join("a")
    assert world.kinds(out, "a") == ["welcome"]
    assert world.told(out, "a")[0].welcome.broker == "broker-1"
    assert repr(world.machine) == "<Broker 1 peer (1 in pool), 0 runs>"


def test_the_table_shows_pool_and_runs(world) -> None:
    for peer in "abcde":
        world.join(peer)
    world.start("a", "b", "c")  # and d keeps their snapshots
    assert repr(world.machine) == "<Broker 5 peers (1 in pool), 1 run>"


def test_another_protocol_version_is_refused_and_says_what_to_do(world) -> None:
    out = world.join("a", version=1)
    refused = world.told(out, "a")[0].refused
    assert refused.reason.code == "version"
    assert not refused.again
    assert "version 1" in refused.reason.text
    assert "install the same version" in refused.reason.text
    assert world.kinds(out, "a") == ["refused", "close"]


@pytest.mark.parametrize(
    "hello",
    [
        {"peer": ""},
        {"peer": "x" * 200},
        {"peer": "a\x1b[31m"},
        {"boot": ""},
        {"address": "a:1\n"},
        {"flops_per_s": float("nan")},
        {"flops_per_s": -1.0},
        {"operator_set": 0},
    ],
    ids=str,
)
def test_a_hello_with_wrong_fields_is_refused(world, hello) -> None:
    profile = {k: hello.pop(k) for k in list(hello) if k in ("flops_per_s", "operator_set")}
    fields = {"version": PROTOCOL, "peer": "a", "boot": "b", "counter": 1, **hello}
    message = Hello(**fields, profile={"operator_set": 1, **profile})
    world.streams["a"] = StreamId("s")
    world.handle(StreamOpened(StreamId("s")))
    out = world.handle(PeerSaid(StreamId("s"), PeerMessage(hello=message)))
    assert world.told(out, "a")[0].refused.reason.code == "hello"
    assert not world.machine.members.members


def test_a_stream_without_a_hello_is_closed_in_time(world) -> None:
    world.streams["a"] = StreamId("s")
    world.handle(StreamOpened(StreamId("s")))
    assert world.wait(9.9) == []
    assert world.kinds(world.wait(0.2), "a") == ["refused", "close"]


def test_a_message_before_the_hello_ends_that_stream_only(world) -> None:
    world.join("b")
    world.streams["a"] = StreamId("s")
    world.handle(StreamOpened(StreamId("s")))
    out = world.say("a", heartbeat=Heartbeat())
    assert world.kinds(out, "a") == ["refused", "close"]
    assert list(world.machine.members.members) == ["b"]


def test_nonsense_of_a_member_ends_its_membership(world) -> None:
    world.join("a")
    out = world.say("a")  # a message of no kind
    assert world.told(out, "a")[0].refused.reason.code == "protocol"
    assert not world.machine.members.members


def test_a_second_hello_on_a_stream_is_nonsense(world) -> None:
    world.join("a")
    out = world.say("a", hello=Hello(version=3, peer="a", boot="x", counter=9))
    assert "second Hello" in world.told(out, "a")[0].refused.reason.text


def test_a_message_that_is_too_long_is_refused(world) -> None:
    world.join("a")
    out = world.say("a", goodbye=Goodbye(reason=Reason(text="x" * 70_000)))
    assert "expected at most 65536" in world.told(out, "a")[0].refused.reason.text


def test_the_newest_incarnation_wins_and_the_old_one_is_fenced(world) -> None:
    world.join("a", counter=1)
    old = world.streams["a"]
    out = world.join("a", counter=2)
    fence = [i for i in out if isinstance(i, CloseStream)]
    assert [i.stream for i in fence] == [old]
    told_old = [i.message for i in out if isinstance(i, Tell) and i.stream == old]
    assert told_old[0].refused.reason.code == "fenced"
    assert not told_old[0].refused.again
    assert world.kinds(out, "a") == ["welcome"]
    assert world.machine.members.members["a"].counter == 2
    # The old stream's end, when it comes, concerns nobody.
    assert world.handle(StreamClosed(old, "closed by us")) == []


def test_an_older_incarnation_is_refused_even_after_the_newer_one_left(world) -> None:
    world.join("a", counter=5)
    world.close("a")
    out = world.join("a", counter=4)
    refused = world.told(out, "a")[0].refused
    assert refused.reason.code == "fenced"
    assert not refused.again


def test_a_start_after_a_crash_joins_again(world) -> None:
    world.join("a", counter=1)
    world.close("a")
    assert world.kinds(world.join("a", counter=2), "a") == ["welcome"]


def test_the_same_incarnation_may_attach_again_and_loses_its_old_stream(world) -> None:
    world.join("a", counter=1)
    old = world.streams["a"]
    out = world.join("a", counter=1)
    assert [i.stream for i in out if isinstance(i, CloseStream)] == [old]
    assert world.kinds(out, "a") == ["welcome"]


def test_two_processes_that_keep_claiming_one_identity_are_both_refused(world) -> None:
    world.join("a", counter=1)
    world.join("b")
    for counter in (2, 3, 4):
        assert world.kinds(world.join("a", counter=counter), "a") == ["welcome"]
    last = world.streams["a"]
    out = world.join("a", counter=5)
    reasons = [i.message.refused.reason for i in out if hasattr(i, "message")]
    assert [r.code for r in reasons] == ["identity", "identity"]
    assert "two live processes keep claiming the identity a" in reasons[0].text
    assert {i.stream for i in out if isinstance(i, CloseStream)} == {last, world.streams["a"]}
    assert list(world.machine.members.members) == ["b"]
    # It stays closed for the window, then one of them may have it.
    assert world.kinds(world.join("a", counter=6), "a") == ["refused", "close"]
    world.wait(61)
    assert world.kinds(world.join("a", counter=7), "a") == ["welcome"]


def test_a_silent_peer_is_lost_when_its_lease_is_over(world) -> None:
    world.join("a")
    world.wait(6)
    world.say("a", heartbeat=Heartbeat())
    world.wait(9.5)
    assert "a" in world.machine.members.members
    out = world.wait(1)
    assert world.told(out, "a")[0].refused.reason.code == "lease"
    assert world.told(out, "a")[0].refused.again
    assert not world.machine.members.members


@pytest.mark.parametrize("lease_s", [4, 30])
def test_the_run_that_a_peer_is_in_may_set_its_lease(world, lease_s) -> None:
    run = world.start("a", recovery={"lease": f"{lease_s}s"})
    world.wait(lease_s - 0.5)
    assert "a" in world.machine.members.members
    out = world.wait(0.5)
    assert f"its lease is {lease_s} s" in world.told(out, "a")[0].refused.reason.text
    assert world.state(run).phase == WAITING


def test_a_peer_that_left_its_run_has_the_lease_of_the_broker_again(world) -> None:
    run = world.start("a", recovery={"lease": "30s"})
    world.cancel(run)
    world.drained("a", run)
    world.wait(9.5)
    assert "a" in world.machine.members.members
    world.wait(0.5)
    assert "a" not in world.machine.members.members


def test_a_lease_that_one_late_heartbeat_ends_is_refused(world) -> None:
    spec = make_spec(recovery={"lease": "3s"})
    reject = world.only(world.handle(RunSubmitted("q", spec)), Reject)
    assert reject.reason == (
        "recovery.lease of the run is 3 s: expected at least 4 s, for the peers of this broker "
        "speak every 2 s"
    )


def test_a_peer_that_left_its_run_is_free_once_it_says_drained(world) -> None:
    run = world.start("a")
    out = world.cancel(run)
    assert world.kinds(out, "a") == ["leave"]
    member = world.machine.members.members["a"]
    assert member.state == "draining"
    world.drained("a", "r-other")
    assert member.state == "draining"
    world.drained("a", run)
    assert member.state == "pool"


def test_a_peer_that_does_not_give_up_its_run_is_closed(make_world) -> None:
    world = make_world(drained_s=5.0)
    run = world.start("a")
    world.wait(1)
    world.say("a", heartbeat=Heartbeat())
    world.cancel(run)
    out = world.wait(5.5)
    assert world.told(out, "a")[0].refused.reason.code == "drain"
    assert f"did not give up run {run}" in world.told(out, "a")[0].refused.reason.text


def test_goodbye_leaves_at_once_and_the_run_waits_for_another(world) -> None:
    run = world.start("a", "b")
    out = world.say("a", goodbye=Goodbye(reason=Reason(code="owner", text="the owner stopped it")))
    assert world.kinds(out, "a") == ["close"]
    assert world.kinds(out, "b") == ["leave"]
    assert world.state(run).phase == WAITING
    assert "said goodbye (the owner stopped it)" in world.state(run).reason.text


def test_a_ready_for_an_unknown_run_has_no_effect(world) -> None:
    world.join("a")
    world.say("a", ready=Ready(run="r-none", term=1))
    assert world.machine.ignored == {"ready": 1}


def test_a_core_peer_is_known_as_one(world) -> None:
    world.join("a", operator_set=CORE)
    assert world.machine.members.members["a"].offer.operator_set == "core"


def test_streams_are_bounded(make_world) -> None:
    world = make_world(most_streams=2)
    world.join("a")
    world.join("b")
    out = world.join("c")
    assert world.told(out, "c")[0].refused.reason.code == "full"
    assert world.told(out, "c")[0].refused.again


def test_who_attaches_again_and_still_holds_a_run_is_free_once_it_has_left_that(world) -> None:
    run = world.start("a", "b")
    world.close("a")
    assert world.state(run).phase == WAITING
    out = world.join("a", holding=Holding(run=run, term=1, step=2))
    assert world.kinds(out, "a") == ["welcome", "leave"]
    leave = world.told(out, "a")[1].leave
    assert (leave.run, leave.term, leave.reason.code) == (run, 1, "lost")
    assert leave.goes_on, "its snapshots stay"
    assert [m.id for m in world.machine.members.pool] == []
    world.drained("b", run)
    world.drained("a", run)
    assert [m.id for m in world.machine.members.pool] == ["b", "a"]
    assert world.state(run).reason.code == "planning"


def test_a_run_that_only_an_earlier_start_of_the_broker_knew_is_left_too(world) -> None:
    out = world.join("a", holding=Holding(run="r-old", term=3, step=2))
    assert world.told(out, "a")[1].leave.term == 3
    world.drained("a", "r-other")
    assert not world.machine.members.pool
    world.drained("a", "r-old")
    assert len(world.machine.members.pool) == 1


def test_runs_of_two_starts_of_one_broker_have_different_ids(make_world) -> None:
    first, second = make_world(), make_world()
    second.machine = BrokerMachine("broker-1", boot="2")
    assert first.submit()[0] != second.submit()[0]


# ---------------------------------------------------------------- a stream that breaks


def _back(world, peer: str, run: str, **keys) -> list:
    return world.join(peer, holding=Holding(run=run, term=1, step=0), **keys)


def test_a_holder_whose_stream_breaks_goes_on_when_it_attaches_again(world) -> None:
    run = world.start("a", "b")
    world.break_stream("a")
    assert world.state(run).phase == RUNNING
    world.report("b", run, 0)
    world.wait(5.0)
    out = _back(world, "a", run)
    assert world.kinds(out, "a")[:2] == ["welcome", "start"]
    assert world.told(out, "a")[0].welcome.resumed.run == run
    world.report("a", run, 0)
    assert (world.state(run).term, world.state(run).step) == (1, 1)


def test_it_goes_on_too_when_the_old_stream_was_not_seen_to_break(world) -> None:
    run = world.start("a", "b")
    out = _back(world, "a", run)
    assert "welcome" in world.kinds(out, "a")
    assert (world.state(run).term, world.state(run).phase) == (1, RUNNING)


@pytest.mark.parametrize("recovery", [{}, {"lease": "10s"}, {"lease": "5s"}])
def test_a_holder_that_does_not_come_back_within_its_lease_is_lost(world, recovery) -> None:
    run = world.start("a", "b", recovery=recovery)
    lease_s = 5 if recovery.get("lease") == "5s" else 10
    world.break_stream("a")
    world.wait(lease_s - 0.1)
    world.say("b", heartbeat={})
    assert world.state(run).phase == RUNNING
    world.wait(0.2)
    assert world.state(run).phase == WAITING
    assert f"did not come back within a lease of {lease_s} s" in world.state(run).reason.text


@pytest.mark.parametrize("first", ["stream", "neighbour"])
def test_a_holder_is_lost_at_once_when_a_neighbour_does_not_hear_it_either(world, first) -> None:
    run = world.start("a", "b")
    said = [
        lambda: world.break_stream("a"),
        lambda: world.say("b", link_status=LinkStatus(run=run, term=1, peer="a")),
    ]
    for say in said if first == "stream" else said[::-1]:
        assert world.state(run).phase == RUNNING
        say()
    assert world.state(run).phase == WAITING


def test_a_neighbours_word_that_it_took_back_does_not_count(world) -> None:
    run = world.start("a", "b")
    world.say("b", link_status=LinkStatus(run=run, term=1, peer="a"))
    world.say("b", link_status=LinkStatus(run=run, term=1, peer="a", up=True))
    world.break_stream("a")
    assert world.state(run).phase == RUNNING
    world.say("b", link_status=LinkStatus(run=run, term=0, peer="a"))  # of an older term
    assert world.state(run).phase == RUNNING


@pytest.mark.parametrize("keys", [{"counter": 2}, {"boot": "another"}])
def test_another_process_does_not_go_on_with_the_run(world, keys) -> None:
    run = world.start("a", "b")
    world.break_stream("a")
    world.join("a", **keys)
    assert world.state(run).term == 2
    assert "it came back without the run" in world.state(run).reason.text


def test_while_one_is_away_another_loss_takes_both(world) -> None:
    world.join("c")
    run = world.start("a", "b")  # and c keeps copies
    world.break_stream("a")
    world.close("b")
    assert world.state(run).phase == WAITING
    _back(world, "a", run)
    assert world.machine.members.members["a"].state == "draining"
