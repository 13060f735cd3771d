"""I7 for the links: any bytes give a record or a FrameError, and the link lives on."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.dag.ir.graph import TensorSpec
from shoal.dag.schedule.flow import Role
from shoal.net.links.frame import (
    FrameError,
    FrameHeader,
    FrameKey,
    Payload,
    header_from_proto,
    header_to_proto,
)
from shoal.net.links.messages import (
    MAX_RECORDS,
    MIN_CHUNK_BYTES,
    Ack,
    Credit,
    Hello,
    Partial,
    Piece,
    Refusal,
    decode,
    piece_prefix,
    record,
    seal,
)
from shoal.net.links.switchboard import Switchboard
from shoal.net.links.transport import FrameArrived, LinkRefused, LinkUp
from shoal.proto import peer_pb2

names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
numbers = st.integers(1, 2**64 - 1)
roles = st.sampled_from(list(Role))
small = st.integers(0, 2**32 - 1)
specs = st.builds(
    TensorSpec,
    st.lists(st.integers(0, 40), max_size=5).map(tuple),
    st.sampled_from(["bool", "bfloat16", "float32", "int64"]),
)
keys = st.builds(FrameKey, names, numbers, numbers, roles, small, small, names, names, names)


@st.composite
def headers(draw):
    spec, absent = draw(specs), draw(st.booleans())
    size = 0 if absent else draw(st.integers(0, spec.size_bytes))
    return FrameHeader(
        draw(numbers), draw(keys), draw(names), draw(st.binary(max_size=50)), spec, size, absent
    )


hellos = st.builds(
    Hello,
    source=names,
    destination=names,
    generation=numbers,
    attempt=numbers,
    session=names,
    knows=names,
    announced=numbers,
    partial=st.dictionaries(numbers, numbers, max_size=4).map(lambda d: tuple(d.items())),
    credits=st.dictionaries(roles, numbers, max_size=4).map(lambda d: tuple(d.items())),
)
controls = st.one_of(
    hellos,
    headers(),
    st.builds(Ack, numbers),
    st.builds(Credit, roles, numbers),
    st.builds(Partial, numbers, numbers),
    st.builds(Refusal, names, names),
)
pieces = st.tuples(numbers, numbers, st.binary(min_size=1, max_size=100))


def whole_piece(parts):
    number, offset, content = parts
    return b"".join(seal([piece_prefix(number, offset, len(content)), content]))


def encode(*messages):
    return b"".join(seal([record(message) for message in messages]))


valid = st.one_of(controls.map(encode), pieces.map(whole_piece))


def sealed(message: bytes) -> bytes:
    """The same message under a right checksum, so that what is behind it is looked at."""
    return b"".join(seal([message[8:]]))


@st.composite
def mutated(draw):
    message = bytearray(draw(valid))
    for _ in range(draw(st.integers(1, 4))):
        if not message:
            break
        at = draw(st.integers(0, len(message) - 1))
        match draw(st.sampled_from(["flip", "cut", "double", "insert"])):
            case "flip":
                message[at] ^= draw(st.integers(1, 255))
            case "cut":
                del message[at : at + draw(st.integers(1, 30))]
            case "double":
                message[at:at] = message[at : at + 20]
            case "insert":
                message[at:at] = draw(st.binary(max_size=20))
    return sealed(bytes(message)) if draw(st.booleans()) else bytes(message)


anything = st.one_of(st.binary(max_size=300), st.binary(max_size=300).map(sealed), mutated(), valid)


@given(controls)
def test_every_message_comes_back_as_it_was(message):
    assert decode(encode(message)) == [message]


@given(st.lists(controls, max_size=5), pieces)
def test_records_of_one_message_come_back_in_their_order(messages, parts):
    number, offset, content = parts
    together = [record(m) for m in messages] + [piece_prefix(number, offset, len(content)), content]
    expected = [*messages, Piece(number, offset, memoryview(content))]
    assert decode(b"".join(seal(together))) == expected


@given(pieces)
def test_every_piece_comes_back_as_it_was(parts):
    number, offset, content = parts
    assert decode(whole_piece(parts)) == [Piece(number, offset, memoryview(content))]


@given(headers())
def test_a_header_survives_the_wire(header):
    assert header_from_proto(header_to_proto(header)) == header


@given(anything)
def test_any_bytes_give_a_record_or_a_frame_error(message):
    with suppress(FrameError):
        decode(message)


@given(st.binary(max_size=200))
def test_any_header_message_gives_a_header_or_a_frame_error(content):
    try:
        message = peer_pb2.FrameHeader.FromString(content)
    except Exception:  # protobuf's own refusal; `decode` has a test of its own for it
        return
    with suppress(FrameError):
        header_from_proto(message)


@given(st.binary(min_size=1, max_size=60), st.integers(0, 2**32 - 1), st.integers(0, 2**40))
def test_a_changed_byte_never_goes_unnoticed(content, number, where):
    message = bytearray(whole_piece((number + 1, 0, content)))
    message[where % len(message)] ^= 1 + where % 255
    with pytest.raises(FrameError, match="checksum"):
        decode(bytes(message))


def board():
    events = []
    made = Switchboard("b", "1", events.append, max_frame_bytes=1 << 16)
    made.expect("a")
    for role in Role:
        made.allow("a", role, 2)
    return made, events


def greeted(made, attempt=1, knows=""):
    connection = made.incoming(lambda: None)
    connection.receive(encode(Hello("a", "b", 1, attempt, "s", knows=knows)), 0.0)
    return connection


def drain(connection):
    while (parts := connection.pull(0.0)) is not None:
        decode(b"".join(parts))


@given(st.lists(anything, max_size=6))
def test_a_connection_refuses_what_is_wrong_and_the_link_takes_the_next_dial(messages):
    made, events = board()
    fresh, up = made.incoming(lambda: None), greeted(made)
    for message in messages:
        fresh.receive(message, 0.0)
        up.receive(message, 0.0)
        drain(fresh)
        drain(up)
    assert not fresh.greeted or fresh.peer == "a"
    assert all(e.why for e in events if isinstance(e, LinkRefused))
    events.clear()
    assert greeted(made, attempt=2**64 - 1).greeted
    assert any(isinstance(e, LinkUp) for e in events)


# Valid messages in any order: the state of a link, not its decoders.
frame_keys = st.builds(
    lambda role, n: FrameKey("r", 1, 0, role, n, 1, "x", "a", "b"), roles, st.integers(0, 3)
)
moves = st.one_of(
    st.builds(
        lambda n, key, size: encode(
            FrameHeader(n, key, "raw/1", b"", TensorSpec((size,), "uint8"), size)
        ),
        st.integers(1, 5),
        frame_keys,
        st.integers(0, 5),
    ),
    st.tuples(st.integers(1, 5), st.integers(0, 5), st.binary(min_size=1, max_size=5)).map(
        whole_piece
    ),
    st.builds(Ack, st.integers(0, 4)).map(encode),
    st.builds(Credit, roles, st.integers(0, 5)).map(encode),
    st.builds(Partial, st.integers(0, 4), st.integers(0, 5)).map(encode),
)


@given(st.lists(st.one_of(moves, st.just(None)), max_size=30))
def test_any_order_of_valid_messages_keeps_the_slots(messages):
    made, events = board()
    attempt, connection = 1, greeted(made)
    made.send(
        "a",
        FrameKey("r", 1, 0, Role.SYNC, 0, 0, "y", "b", "a"),
        Payload("raw/1", b"", TensorSpec((3,), "uint8"), (memoryview(b"abc"),)),
    )
    for message in messages:
        if message is None or connection.over:
            connection.closed("cut")
            attempt += 1
            connection = greeted(made, attempt, knows="1.1")
        else:
            connection.receive(message, 0.0)
        drain(connection)
        arrived = [e.arrived.key for e in events if isinstance(e, FrameArrived)]
        assert len(set(arrived)) == len(arrived)
        for role in Role:
            assert sum(key.role == role for key in arrived) <= 2  # nothing was released


def test_a_message_has_so_many_records_at_most() -> None:
    ack = record(Ack(1))
    assert len(decode(b"".join(seal([ack] * MAX_RECORDS)))) == MAX_RECORDS
    with pytest.raises(FrameError, match="more than 10000 records"):
        decode(b"".join(seal([ack] * (MAX_RECORDS + 1))))
    assert len(ack) * MAX_RECORDS > MIN_CHUNK_BYTES, "as many as a message has before it ends"
