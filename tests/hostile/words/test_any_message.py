"""Any message of any member in any state of its run: the machine answers, and never raises."""

from __future__ import annotations

import random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.broker.events import PeerSaid
from shoal.proto.broker_pb2 import PeerMessage
from shoal.tests.hostile.scripted_rounds import ScriptedRounds

NUMBERS = (0, 1, 2, 5, 2**31 - 1, 2**32 - 1, 2**63 - 1, 2**64 - 1)
FLOATS = (0.0, 1.0, -1.0, 1e-308, 1.7e308, float("inf"), float("nan"))
DEEP = 3


def any_message(
    rng: random.Random, kind: type[Message], known: dict[str, Any], deep: int = 0
) -> Any:
    """One with any of its fields, of which those in `known` are likely to fit."""
    found = kind()
    for field in found.DESCRIPTOR.fields:
        if field.containing_oneof is not None or rng.random() < 0.4:
            continue
        repeated = field.is_repeated
        if field.message_type is not None:
            if deep >= DEEP or field.message_type.GetOptions().map_entry:
                continue
            inner = field.message_type._concrete_class
            for _ in range(rng.randint(0, 3) if repeated else 1):
                value = any_message(rng, inner, known, deep + 1)
                if repeated:
                    getattr(found, field.name).append(value)
                else:
                    getattr(found, field.name).CopyFrom(value)
            continue
        values = [any_value(rng, field, known) for _ in range(rng.randint(0, 3) if repeated else 1)]
        if repeated:
            getattr(found, field.name).extend(values)
        else:
            setattr(found, field.name, values[0])
    return found


def any_value(rng: random.Random, field: FieldDescriptor, known: dict[str, Any]) -> Any:
    if field.name in known and rng.random() < 0.7:
        return known[field.name]
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_STRING:
            text = rng.choice(
                ("", "p0", "p1", "r-1", "late", "overflow", "graph", "\x1b[2J", "x" * 300)
            )
            return text if field.type == FieldDescriptor.TYPE_STRING else text.encode()
        case FieldDescriptor.CPPTYPE_DOUBLE | FieldDescriptor.CPPTYPE_FLOAT:
            return rng.choice(FLOATS)
        case FieldDescriptor.CPPTYPE_BOOL:
            return rng.random() < 0.5
        case FieldDescriptor.CPPTYPE_ENUM:
            return rng.choice([v.number for v in field.enum_type.values])
        case FieldDescriptor.CPPTYPE_UINT32:
            return rng.choice(NUMBERS) % 2**32
        case FieldDescriptor.CPPTYPE_INT32:
            return rng.choice(NUMBERS) % 2**31
        case FieldDescriptor.CPPTYPE_INT64:
            return rng.choice(NUMBERS) % 2**63
    return rng.choice(NUMBERS)


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_whatever_a_member_says_the_machine_does_not_raise(seed: int) -> None:
    rng = random.Random(seed)
    game = ScriptedRounds(3, {}, steps=rng.choice((6, 4000)))
    game.play(rng.randint(0, 3), 60.0)
    kinds = PeerMessage.DESCRIPTOR.fields
    for _ in range(60):
        members, peer = game.world.machine.members.members, rng.choice(sorted(game.members))
        if peer not in members:  # it was turned out, or said goodbye
            game.settle(game.world.join(peer))
        if peer not in members:
            continue
        member, record = game.members[peer], game.world.machine.runs[game.run].record
        at = record.rounds.versions
        known = {"run": member.run, "term": member.term, "step": member.step, "peer": peer}
        known |= {"round": at.round, "attempt": rng.choice((0, at.attempt))}
        field = rng.choice(kinds)
        body = any_message(rng, field.message_type._concrete_class, known)
        said = PeerMessage(**{field.name: body})
        game.settle(game.world.handle(PeerSaid(members[peer].stream, said)))
        if rng.random() < 0.2:
            game.settle(game.world.wait(rng.choice((0.1, 5.0, 700.0))))
