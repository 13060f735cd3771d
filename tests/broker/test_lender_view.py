"""What a peer sees of a network: all of its own, and of others nothing but who is there."""

from __future__ import annotations

from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.broker.events import Answer, DescribeAsked, RequestId
from shoal.broker.lender_view import for_lender
from shoal.proto.broker_pb2 import Description, PeerShare

SECRET = "secret"
OPEN = {
    "peer": ("peer", "profile", "address", "run", "silent_s", "membership", "closed"),
    "profile": ("name", "place", "device", "device_memory_bytes"),
}
"""Fields of another peer that may be told."""


def filled(message: Message, word: str, depth: int = 6) -> Message:
    """The message with something in every field: texts are `word`, numbers 1."""
    if not depth:
        return message
    for field in message.DESCRIPTOR.fields:
        many = field.is_repeated
        held: Any = getattr(message, field.name)
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            if field.message_type.GetOptions().map_entry:
                continue
            filled(held.add() if many else held, word, depth - 1)
            if not many:
                held.SetInParent()
            continue
        text = field.type == FieldDescriptor.TYPE_STRING
        value: Any = word if text else b"x" if field.type == FieldDescriptor.TYPE_BYTES else 1
        if field.type == FieldDescriptor.TYPE_ENUM:
            value = field.enum_type.values[-1].number
        if many:
            held.append(value)
        else:
            setattr(message, field.name, value)
    return message


def network() -> Description:
    """Two peers that each work for a run, with every field filled; the other's texts are SECRET."""
    found = Description(broker="b")
    for peer, run in (("me", "mine"), ("other", "theirs")):
        word = "own" if peer == "me" else SECRET
        state = found.peers.add()
        filled(state, word)
        state.peer, state.run = peer, run
        standing = found.runs.add()
        filled(standing, word)
        standing.run = run
    for source, destination in (("me", "other"), ("other", "me"), ("other", "third")):
        found.links.add(source=source, destination=destination, bytes_per_s=1.0)
    return found


def test_of_another_peer_only_who_it_is_and_of_another_run_nothing() -> None:
    seen = for_lender(network(), "me", [])
    assert seen.peers[0] == network().peers[0], "its own state is whole"
    other = seen.peers[1]
    assert {f.name for f, _ in other.ListFields()} <= set(OPEN["peer"]) - {"run"}
    assert other.address == "not told"
    assert {f.name for f, _ in other.profile.ListFields()} == set(OPEN["profile"])
    assert [r.run for r in seen.runs] == ["mine"]
    assert [(k.source, k.destination) for k in seen.links] == [("me", "other"), ("other", "me")]


def test_why_a_run_stands_so_is_told_by_its_code_alone() -> None:
    [run] = for_lender(network(), "me", []).runs
    assert run.reason.code == "own"
    assert not run.reason.text
    assert not any(r.reason.text for r in run.replicas)


@settings(max_examples=40)
@given(st.sets(st.sampled_from(["mine", "theirs", "gone"])))
def test_runs_that_it_has_worked_for_stay_seen(worked: set[str]) -> None:
    shares = [PeerShare(peer="me", run=run, samples=3) for run in sorted(worked)]
    seen = for_lender(network(), "me", shares)
    assert [r.run for r in seen.runs] == [r for r in ("mine", "theirs") if r in worked | {"mine"}]
    assert list(seen.shares) == shares
    assert seen.peers[1].run == ("theirs" if "theirs" in worked else "")


def test_the_machine_tells_a_peer_its_part_and_people_all(make_world: Any) -> None:
    world = make_world()
    run = world.start("a", recovery={"warm_spares": 0})
    world.join("b")
    world.report("a", run, 0)

    def asked(peer: str) -> Description:
        event = DescribeAsked(RequestId("q"), peer)
        found: Description = world.only(world.handle(event), Answer).message
        return found

    everything, a, b = asked(""), asked("a"), asked("b")
    assert [r.run for r in everything.runs] == [r.run for r in a.runs] == [run]
    assert not b.runs
    assert not everything.shares
    assert not b.shares
    [share] = a.shares
    assert (share.peer, share.run, share.samples) == ("a", run, 4), "two microbatches of two"
