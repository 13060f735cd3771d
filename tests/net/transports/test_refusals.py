"""What a transport does with those who break a rule: one clear error, and the rest goes on."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest

from shoal.dag.ir.graph import TensorSpec
from shoal.dag.schedule.flow import Role
from shoal.net.links.frame import FrameHeader, FrameKey
from shoal.net.links.messages import (
    Ack,
    Credit,
    Hello,
    Partial,
    Refusal,
    piece_prefix,
    record,
    seal,
)

ACT = Role.ACTIVATION

HELLO = Hello(source="out", destination="b", generation=1, attempt=1, session="s1")


def header(number=1, size=100, **changes):
    key = FrameKey("run", 1, 0, ACT, number, 1, "x", "out", "b")
    header = FrameHeader(number, key, "raw/1", b"", TensorSpec((size,), "uint8"), size)
    return replace(header, **changes)


def encode(message):
    return b"".join(seal([record(message)]))


def data(number, offset, content):
    return b"".join(seal([piece_prefix(number, offset, len(content)), content]))


def sealed(kind, body):
    return b"".join(seal([struct.pack("<BI", kind, len(body)), body]))


@pytest.fixture
async def two(world):
    """b is linked with a, and expects out; returns (world, a, b, what out said first is heard)."""
    a, b = await world.pair()
    b.transport.expect("out")
    b.transport.allow("out", ACT, 2)
    return world, a, b


WRONG = {
    "corrupted": ([encode(header()), data(1, 0, b"x" * 100)[:-1] + b"y"], "checksum"),
    "truncated": ([encode(header()), data(1, 0, b"x" * 100)[:-7]], "checksum"),
    "short_of_a_checksum": ([b"\x01\x02"], "a message of 2 bytes"),
    "longer_than_its_header": ([encode(header()), data(1, 0, b"x" * 101)], "header says 100"),
    "not_where_it_was": ([encode(header()), data(1, 1, b"x" * 10)], "expected 0"),
    "bytes_of_no_frame": ([data(1, 0, b"x")], "not announced"),
    "a_number_left_out": ([encode(header(2))], "expected 1"),
    "above_its_credit": ([encode(header(n)) for n in (1, 2, 3)], "credit is 2"),
    "too_large": (
        [encode(header(size=2 << 30, spec=TensorSpec((2 << 30,), "uint8")))],
        "at most 1073741824",
    ),
    "larger_than_its_spec": ([encode(header(size_bytes=1 << 20))], "announced for uint8"),
    "absent_with_bytes": ([encode(header(absent=True))], "absent, but has 100"),
    "from_somebody_else": (
        [encode(header(key=header().key._replace(source="a")))],
        "on the link out -> b",
    ),
    "acknowledges_what_was_not_sent": ([encode(Ack(1))], "only 1 to 0"),
    "has_parts_of_what_was_not_sent": ([encode(Partial(1, 5))], "never sent"),
    "a_second_hello": ([encode(HELLO)], "in the middle"),
    "no_protobuf": ([sealed(1, b"\xff" * 9)], "no LinkMessage"),
    "of_no_kind": ([sealed(1, b"")], "no known kind"),
    "short_of_a_record": ([b"".join(seal([b"\x01\x05"]))], "are no record"),
    "shorter_than_it_says": ([b"".join(seal([b"\x01\x05\0\0\0abc"]))], "only 3 came"),
    "of_another_kind": ([sealed(3, b"")], "record kind 3"),
}


@pytest.mark.parametrize("what", WRONG)
async def test_who_breaks_a_rule_is_told_which_and_all_others_go_on(two, what):
    world, a, b = two
    messages, why = WRONG[what]
    outsider = await world.outsider(b)
    outsider.say(encode(HELLO), *messages)
    await world.until(lambda: any(isinstance(m, Refusal) for m in outsider.heard))
    refusal = outsider.heard[-1]
    assert refusal.code == "protocol"
    assert why in refusal.text
    assert [r for r in b.refusals if why in r]
    await world.until(lambda: b.downs("out") == 1)
    key = a.send("b", 1000)
    await world.until(lambda: key in a.acknowledged)
    assert b.ups("a") == 1


@pytest.mark.parametrize(
    ("hello", "code", "why"),
    [
        (replace(HELLO, source="stranger"), "stranger", "does not expect a dial of stranger"),
        (replace(HELLO, destination="c"), "destination", "dials c: this is b"),
        (replace(HELLO, announced=0, knows="", partial=((1, 2), (1, 3))), "protocol", "twice"),
    ],
)
async def test_who_is_not_meant_is_refused_with_the_reason(two, hello, code, why):
    world, _, b = two
    outsider = await world.outsider(b, hello.source)
    outsider.say(encode(hello))
    await world.until(lambda: outsider.heard != [])
    assert outsider.heard[0].code == code
    assert why in outsider.heard[0].text
    assert any(why in r for r in b.refusals)
    await world.until(lambda: outsider.ended)
    assert b.ups("out") == b.ups("stranger") == 0


async def test_nothing_but_a_hello_opens_a_connection(two):
    world, _, b = two
    outsider = await world.outsider(b)
    outsider.say(encode(Credit(ACT, 5)))
    await world.until(lambda: outsider.heard != [])
    assert "a Credit before the hello" in outsider.heard[0].text
    assert b.ups("out") == 0


async def test_a_long_message_before_the_hello_is_not_read(two):
    world, _, b = two
    outsider = await world.outsider(b)
    outsider.say(b"".join(seal([record(Credit(ACT, 5))] * 8000)))
    await world.until(lambda: outsider.heard != [])
    assert "bytes before the hello" in outsider.heard[0].text


async def test_a_stale_dial_does_not_end_a_newer_one(two):
    world, _, b = two
    newer, stale = await world.outsider(b), await world.outsider(b)
    newer.say(encode(replace(HELLO, generation=3)))
    await world.until(lambda: newer.heard != [])
    stale.say(encode(replace(HELLO, generation=2, attempt=9)))
    await world.until(lambda: stale.heard != [])
    assert stale.heard[0].code == "older"
    newer.say(encode(header(1)), data(1, 0, b"x" * 100))
    await world.until(lambda: len(b.arrived) == 1)
    assert not newer.ended


async def test_a_newer_dial_ends_the_older_one_and_goes_on_in_mid_frame(two):
    world, _, b = two
    older, newer = await world.outsider(b), await world.outsider(b)
    older.say(encode(HELLO), encode(header()), data(1, 0, b"a" * 60))
    older.say(encode(header(2, size=0, spec=TensorSpec((0,), "uint8"))))
    await world.until(lambda: len(b.arrived) == 1)
    newer.say(encode(replace(HELLO, attempt=2, knows="1.2")))
    await world.until(lambda: newer.heard != [] and older.ended)
    answer = newer.heard[0]
    assert (answer.announced, answer.partial) == (2, ((1, 60),))
    newer.say(data(1, 60, b"b" * 40))
    await world.until(lambda: len(b.arrived) == 2)
    assert bytes(b.arrived[1].data) == b"a" * 60 + b"b" * 40


async def test_a_frame_of_the_same_key_under_another_number_is_acknowledged_and_dropped(two):
    world, _, b = two
    outsider = await world.outsider(b)
    again = header(2, key=header(1).key)
    outsider.say(encode(HELLO), encode(header(1)), data(1, 0, b"x" * 100))
    outsider.say(encode(again), data(2, 0, b"y" * 100), encode(header(3)), data(3, 0, b"z" * 100))
    await world.until(lambda: Ack(3) in outsider.heard)
    assert [m for m in outsider.heard if isinstance(m, Ack)] == [Ack(1), Ack(2), Ack(3)]
    assert [bytes(x.data[:1]) for x in b.arrived] == [b"x", b"z"]


async def test_a_sender_goes_on_behind_what_the_receiver_has_and_sends_nothing_twice(two):
    world, _, b = two
    content = bytes(range(256)) * 1000
    b.send("out", 256_000)
    b.send("out", 10, microbatch=1)
    first = await world.outsider(b)
    credit = ((ACT, 2),)
    first.say(encode(HELLO), encode(Credit(ACT, 2)))
    await world.until(lambda: len(first.heard) >= 4)  # hello, two credits, the header, …
    session = first.heard[0].session
    first.hang_up()
    await world.until(lambda: b.downs("out") == 1)
    second = await world.outsider(b)
    have = ((1, 200_001),)
    second.say(
        encode(replace(HELLO, attempt=2, knows=session, announced=1, partial=have, credits=credit))
    )
    from_piece = lambda: [m for m in second.heard if hasattr(m, "offset")]  # noqa: E731
    await world.until(lambda: len(from_piece()) == 2)
    rest, small = from_piece()
    assert (rest.number, rest.offset) == (1, 200_001)
    assert bytes(rest.data) == content[200_001:256_000]
    assert (small.number, bytes(small.data)) == (2, bytes(range(10)))


async def test_a_dial_to_the_wrong_peer_is_told_and_tried_again_until_it_is_expected(world):
    a, b = await world.join("a"), await world.join("b")
    await world.dial(a, b)
    await world.until(lambda: len(a.refusals) >= 2)
    assert "b does not expect a dial of a" in a.refusals[0]
    b.transport.expect("a")
    await world.until(lambda: a.ups("b") == 1)
