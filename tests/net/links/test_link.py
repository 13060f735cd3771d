"""The halves of a link, call by call: numbers, turns, pieces, bounds."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.dag.ir.graph import TensorSpec
from shoal.dag.schedule.flow import Role
from shoal.net.links.buffers import Buffers
from shoal.net.links.frame import FrameError, FrameHeader, FrameKey, Payload
from shoal.net.links.link import Link
from shoal.net.links.messages import (
    MIN_CHUNK_BYTES,
    Ack,
    Credit,
    Hello,
    Piece,
    decode,
)
from shoal.net.links.patience import LEAST_BYTES
from shoal.net.links.transport import (
    GROWS_S,
    FrameAcknowledged,
    FrameArrived,
    FrameGrows,
    LinkError,
)

ACT, GRAD, SYNC, SNAP = Role.ACTIVATION, Role.ACTIVATION_GRAD, Role.SYNC, Role.SNAPSHOT


def link(me="a", peer="b", session="s", limit=1 << 30):
    return Link(me, peer, session, Buffers().take, limit)


def key(role, n=0, source="a", destination="b"):
    return FrameKey("r", 1, 0, role, n, 1, "x", source, destination)


def payload(size):
    content = memoryview(bytes(size)) if size else None
    spec = TensorSpec((size,), "uint8")
    return Payload("raw/1", b"", spec, (content,) if content else ())


def connect(a, b, attempt=1):
    """Both greet, the way a dial of a does; returns the events of each."""
    first = a.hello(1, attempt)
    at_b = b.greet(first)
    at_a = a.greet(b.hello(1, attempt))
    return at_a, at_b


def messages(link, now=0.0):
    """All that a link hands out, decoded."""
    found = []
    while (parts := link.pull(now)) is not None:
        found += decode(b"".join(parts))
    return found


def run(a, b):
    """Carries messages until both are silent; returns the events of each."""
    at_a, at_b = [], []
    while a.ready or b.ready:
        for message in messages(a):
            at_b += b.receive(message, 0.0)
        for message in messages(b):
            at_a += a.receive(message, 0.0)
    return at_a, at_b


@pytest.fixture
def pair():
    a, b = link(), link("b", "a", "t")
    for role in Role:
        b.allow(role, 50)
    connect(a, b)
    run(a, b)
    return a, b


def test_a_link_says_nothing_while_it_is_down():
    a = link()
    a.send(key(ACT), payload(10))
    assert not a.ready
    assert a.pull(0.0) is None


def test_pieces_of_urgent_roles_take_turns_and_a_snapshot_waits(pair):
    a, _ = pair
    a.send(key(SNAP), payload(2 * LEAST_BYTES))
    for role in (SYNC, ACT, GRAD):
        a.send(key(role), payload(2 * MIN_CHUNK_BYTES))
    numbers, order = {}, []
    for message in messages(a):
        if isinstance(message, FrameHeader):
            numbers[message.number] = message.key.role
        elif isinstance(message, Piece):
            order.append(numbers[message.number])
    assert set(order[:3]) == set(order[3:6]) == {SYNC, ACT, GRAD}
    assert order[6:] == [SNAP, SNAP]


def test_an_urgent_frame_waits_for_no_more_than_the_piece_that_is_out(pair):
    a, _ = pair
    a.send(key(SNAP), payload(1 << 20))
    a.pull(0.0)
    a.pull(0.0)
    a.send(key(ACT), payload(10))
    header, content = decode(b"".join(a.pull(0.0)))[:2]
    assert header.key.role == ACT
    assert (content.number, content.data.nbytes) == (header.number, 10)


def test_nothing_waits_in_the_message_of_a_piece_of_a_round(pair):
    a, b, role = *pair, Role.ROUND
    for other in Role:
        a.allow(other, 50)
    run(a, b)
    b.send(key(ACT, source="b", destination="a"), payload(10))
    for message in messages(b):
        a.receive(message, 0.0)  # its acknowledgement waits to be said
    a.send(key(role), payload(1 << 20))
    first = decode(b"".join(a.pull(0.0)))
    assert Ack(1) in first
    assert not any(isinstance(m, FrameHeader | Piece) for m in first)
    a.send(key(ACT), payload(10))
    urgent = decode(b"".join(a.pull(0.0)))
    assert [m.key.role for m in urgent if isinstance(m, FrameHeader)] == [ACT]
    assert role in {m.key.role for m in messages(a) if isinstance(m, FrameHeader)}


def test_a_snapshot_gets_every_sixteenth_piece_of_a_busy_link(pair):
    a, b = pair
    a.send(key(SNAP), payload(10 * MIN_CHUNK_BYTES // 4))
    a.send(key(ACT), payload(200 * MIN_CHUNK_BYTES))
    snapshot = None
    turns, i = [], 0
    while (parts := a.pull(0.0)) is not None:
        for message in decode(b"".join(parts)):
            if isinstance(message, FrameHeader) and message.key.role == SNAP:
                snapshot = message.number
            elif isinstance(message, Piece) and message.number == snapshot:
                turns.append(i)
            i += 1
            b.receive(message, 0.0)
        for answer in messages(b):
            a.receive(answer, 0.0)
    assert len(turns) == 10
    assert {b - a for a, b in itertools.pairwise(turns)} == {16}


def test_a_piece_grows_to_fifty_milliseconds_of_the_link_and_no_further(pair):
    a, _ = pair
    a.send(key(ACT), payload(128 << 20))

    def piece_at(now):
        return decode(b"".join(a.pull(now)))[-1].data.nbytes

    now, sizes, speed = 0.0, [], 10e6  # bytes per second
    for _ in range(60):
        sizes.append(piece_at(now))
        now += sizes[-1] / speed
    assert sizes[0] == MIN_CHUNK_BYTES
    assert sizes[-1] == pytest.approx(0.05 * speed, rel=0.05)
    for _ in range(20):
        size = piece_at(now)
        now += size / 1e12
    assert size == 2 << 20


def test_after_idling_the_first_piece_does_not_take_the_link_for_slow(pair):
    a, b = pair
    a.send(key(ACT), payload(MIN_CHUNK_BYTES))
    run(a, b)
    a.send(key(ACT, 1), payload(1 << 20))
    sizes = [m.data.nbytes for m in messages(a, now=1e6) if isinstance(m, Piece)]
    assert sizes == [MIN_CHUNK_BYTES] * 16


def test_a_lost_header_is_announced_again_under_its_number(pair):
    a, b = pair
    a.send(key(ACT), payload(10))
    a.send(key(GRAD), payload(10))
    lost = messages(a)
    a.broke()
    b.broke()
    connect(a, b, 2)
    again = [m for m in messages(a) if not isinstance(m, Credit)]
    assert sorted(m.number for m in again) == sorted(m.number for m in lost) == [1, 1, 2, 2]
    events = [e for m in again for e in b.receive(m, 0.0)]
    assert [e.arrived.key.role for e in events] in ([ACT, GRAD], [GRAD, ACT])


def test_what_arrived_before_the_break_is_acknowledged_by_the_hello(pair):
    a, b = pair
    a.send(key(ACT), payload(100))
    for message in messages(a):
        b.receive(message, 0.0)
    a.broke()
    b.broke()
    at_a, _ = connect(a, b, 2)
    assert at_a == [FrameAcknowledged("b", key(ACT))]
    assert not [m for m in messages(a) if not isinstance(m, Credit)]


def test_bytes_that_were_on_their_way_are_sent_again_and_no_others(pair):
    a, b = pair
    size = 4 * MIN_CHUNK_BYTES
    a.send(key(ACT), payload(size))
    sent = messages(a)
    for message in sent[:3]:  # the header and two pieces
        b.receive(message, 0.0)
    a.broke()
    b.broke()
    assert a.again_bytes == 0
    connect(a, b, 2)
    assert a.again_bytes == 2 * MIN_CHUNK_BYTES
    rest = [m for m in messages(a) if isinstance(m, Piece)]
    assert [m.offset for m in rest] == [2 * MIN_CHUNK_BYTES, 3 * MIN_CHUNK_BYTES]


def test_a_receiver_that_forgot_the_link_gets_all_that_is_unacknowledged_anew(pair):
    a, b = pair
    for n in range(3):
        a.send(key(ACT, n), payload(10))
    first = messages(a)
    for message in first[:2]:
        b.receive(message, 0.0)
    a.receive(Ack(1), 0.0)
    a.broke()
    b = link("b", "a", "another")
    b.allow(ACT, 5)
    connect(a, b, 2)
    _, at_b = run(a, b)
    assert [e.arrived.key.microbatch for e in at_b] == [1, 2]


def test_a_sender_that_forgot_the_link_begins_at_one_with_the_slots_that_are_free(pair):
    a, b = pair
    b.allow(ACT, 2)
    a.send(key(ACT, 0), payload(10))
    a.send(key(GRAD, 0), payload(1000))
    for message in messages(a):
        b.receive(message, 0.0)
    a, old = link(session="another"), a
    b.broke()
    for n in range(60):
        a.send(key(SYNC, n), payload(1))
    connect(a, b, 2)
    _, at_b = run(a, b)
    assert len([e for e in at_b if isinstance(e, FrameArrived)]) == 50
    assert old is not a


@pytest.mark.parametrize(
    "changes",
    [
        {"announced": 9},
        {"announced": 0},
        {"announced": 2, "partial": ((1, 3),)},
        {"announced": 2, "partial": ((2, 10),)},
        {"announced": 1, "partial": ((2, 5),)},
    ],
    ids=["more_than_sent", "less_than_acknowledged", "acknowledged", "whole", "unannounced"],
)
def test_a_hello_that_claims_what_cannot_be_is_refused(pair, changes):
    a, b = pair
    a.send(key(ACT, 0), payload(10))
    a.send(key(ACT, 1), payload(10))
    messages(a)
    a.receive(Ack(1), 0.0)
    a.broke()
    hello = b.hello(1, 2)
    fields = {"announced": 2, "partial": (), **changes}
    with pytest.raises(FrameError, match="the other side"):
        a.greet(Hello("b", "a", 1, 2, hello.session, knows="s", **fields))


def test_fewer_slots_take_nothing_back_and_more_come_at_once(pair):
    a, b = pair
    b.allow(ACT, 1)
    for n in range(60):
        a.send(key(ACT, n), payload(1))
    _, at_b = run(a, b)
    assert len(at_b) == 50  # what was granted before
    for n in range(49):
        b.release(key(ACT, n))
    assert not run(a, b)[1]
    b.release(key(ACT, 49))
    assert len(run(a, b)[1]) == 1


def test_one_who_announces_duplicates_and_never_reads_is_refused_in_the_end(pair):
    _, b = pair
    frame = key(ACT)
    header = FrameHeader(1, frame, "raw/1", b"", TensorSpec((0,), "uint8"), 0)
    for n in range(1, 65537):
        b.receive(replace(header, number=n), 0.0)
    with pytest.raises(FrameError, match="unread"):
        b.receive(replace(header, number=65537), 0.0)


def test_a_queue_that_nobody_empties_ends_in_an_error(pair):
    a, _ = pair
    for n in range(65536):
        a.send(key(ACT, n), payload(0))
    with pytest.raises(LinkError, match="wait for b already"):
        a.send(key(ACT, 65536), payload(0))


def test_keys_of_long_ago_are_forgotten_so_that_memory_stays(pair):
    a, b = pair
    for n in range(10_000):
        a.send(key(ACT, n), payload(0))
        run(a, b)
        b.release(key(ACT, n))
    assert len(a._outbox._past) == len(b._inbox._past) == 4096
    assert repr(a) == "<Link a - b up, <Outbox 0 frames, 0 announced>, <Inbox 0 held, 0 partial>>"


def test_a_frame_for_which_there_is_no_memory_is_refused():
    def none_left(size):
        raise MemoryError

    a, b = link(), Link("b", "a", "t", none_left, 1 << 30)
    b.allow(ACT, 1)
    connect(a, b)
    a.send(key(ACT), payload(10))
    header = next(m for m in messages(a) if isinstance(m, FrameHeader))
    with pytest.raises(FrameError, match="no memory"):
        b.receive(header, 0.0)


def test_a_credit_waits_for_company_while_half_of_the_slots_are_free():
    a, b = link(), link("b", "a", "t")
    b.allow(ACT, 4)
    connect(a, b)
    run(a, b)
    for n in range(3):
        a.send(key(ACT, n), payload(10))
        run(a, b)
        b.release(key(ACT, n))
        assert not b.ready, "of four slots at least three may be used"
    a.send(key(ACT, 3), payload(10))
    for message in messages(a):
        b.receive(message, 0.0)
    assert sorted(map(str, messages(b))) == sorted(map(str, [Credit(ACT, 7), Ack(4)]))


def test_a_credit_goes_by_itself_when_few_slots_are_left():
    a, b = link(), link("b", "a", "t")
    b.allow(ACT, 4)
    connect(a, b)
    run(a, b)
    for n in range(3):
        a.send(key(ACT, n), payload(10))
    run(a, b)
    b.release(key(ACT, 0))
    b.release(key(ACT, 1))
    assert messages(b) == [Credit(ACT, 6)]


def test_a_credit_goes_when_a_long_frame_begins():
    a, b = link(), link("b", "a", "t")
    b.allow(ACT, 4)
    connect(a, b)
    run(a, b)
    a.send(key(ACT), payload(10))
    run(a, b)
    b.release(key(ACT))
    a.send(key(ACT, 1), payload(9 * MIN_CHUNK_BYTES))
    b.receive(messages(a)[0], 0.0)
    assert messages(b) == [Credit(ACT, 5)]


@settings(max_examples=60, deadline=None)
@given(
    slots=st.integers(1, 5),
    acts=st.lists(st.sampled_from(["send", "carry", "release", "break"]), max_size=60),
)
def test_no_credit_is_lost_that_a_sender_needs(slots, acts):
    """Whatever happened before: once all that came is released, the next frame comes."""
    a, b = link(), link("b", "a", "t")
    b.allow(ACT, slots)
    connect(a, b)
    sent = arrived = released = attempt = 0

    def carry():
        nonlocal arrived
        arrived += sum(isinstance(e, FrameArrived) for e in run(a, b)[1])

    def release():
        nonlocal released
        if released < arrived:
            b.release(key(ACT, released))
            released += 1

    for act in acts:
        if act == "send":
            a.send(key(ACT, sent), payload(10))
            sent += 1
        elif act == "carry":
            carry()
        elif act == "release":
            release()
        else:
            attempt += 1
            a.broke()
            b.broke()
            connect(a, b, attempt + 1)
    a.send(key(ACT, sent), payload(10))
    sent += 1
    while released < sent:
        before = released
        carry()
        release()
        assert released > before, f"{arrived} of {sent} came"


@pytest.mark.parametrize("role", [Role.ROUND, ACT])
def test_of_a_rounds_frame_that_takes_long_it_is_said_that_it_grows(pair, role) -> None:
    """Every `GROWS_S`, between its first piece and its last one, and of no other frame."""
    a, b = pair
    a.send(key(role), payload(4 * MIN_CHUNK_BYTES))
    heard, now = [], 0.0
    while (parts := a.pull(now)) is not None:
        for message in decode(b"".join(parts)):
            heard.append([type(event) for event in b.receive(message, now)])
            now += 0.6 * GROWS_S
        for message in messages(b):
            a.receive(message, now)
    assert len(heard) > 3
    grows = [i for i, events in enumerate(heard) if events == [FrameGrows]]
    wanted = range(2, len(heard) - 1, 2) if role is Role.ROUND else ()
    assert grows == [*wanted]
    assert heard[-1] == [FrameArrived]


def test_of_rounds_only_a_window_is_on_its_way_and_what_is_urgent_goes_at_once(pair) -> None:
    a, b = pair
    for n in range(4):
        a.send(key(Role.ROUND, n), payload(1 << 20))
    out = messages(a)
    assert sum(m.data.nbytes for m in out if isinstance(m, Piece)) <= 64 * 1024
    a.send(key(ACT), payload(1000))
    urgent = messages(a)
    assert b.receive(out[0], 0.0) == []
    b.receive(out[1], 0.0)
    for message in (*out[2:], *urgent):
        events = b.receive(message, 0.0)
    assert [e.arrived.key.role for e in events] == [ACT]
    _, at_a = run(b, a)
    assert sum(isinstance(event, FrameAcknowledged) for event in at_a) == 4 + 1
