"""Frames of attempts that a peer does not know yet: a few of each sender, whatever they are called;
nobody's flood takes another's place."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.dag.execute.execute import TensorSpecError
from shoal.dag.ir.graph import TensorSpec
from shoal.dag.rounds.vector import PIECE, Entry, RunVector
from shoal.dag.rounds.wiring import GIVE, RESULT, VERSION, port_of
from shoal.dag.schedule.flow import Role
from shoal.job.rounds import RoundSettings
from shoal.net.links.frame import Arrived, FrameKey, Payload
from shoal.net.links.transport import FrameArrived, LinkRefused, LinkUp
from shoal.peer.rounds.methods.round_strategies import STRATEGIES
from shoal.peer.rounds.round_frames import EarlyFrames, most_of_any
from shoal.tests.broker.service.door.test_relay import network

EACH = 8
FRAME = st.tuples(st.sampled_from("abc"), st.integers(0, 3), st.integers(0, 2), st.integers(0, 40))


def frame(source: str, round_: int, attempt: int, hop: int) -> Arrived:
    key = FrameKey("r", attempt, round_, Role.ROUND, 0, hop, "0-4", source, "me")
    return Arrived(key, "none", b"", TensorSpec((4,), "fp32"), memoryview(bytearray(16)))


@given(st.lists(FRAME | st.tuples(st.just("take"), st.integers(0, 3), st.integers(0, 2))))
def test_each_sender_has_eight_places_and_an_attempt_gets_its_own(
    events: list[tuple[str, int, int, int] | tuple[str, int, int]],
) -> None:
    early, model = EarlyFrames(), dict[FrameKey, Arrived]()
    for event in events:
        if len(event) == 3:
            _, round_, attempt = event
            number = round_, attempt
            wanted = {k for k in model if (k.step, k.term) == number}
            assert {a.key for a in early.take(number)} == wanted
            model = {k: a for k, a in model.items() if (k.step, k.term) > number}
            continue
        came = frame(*event)
        mine = Counter(k.source for k in model)[came.key.source]
        try:
            early.keep(came)
        except TensorSpecError:
            assert mine == EACH
            assert came.key not in model
        else:
            assert mine < EACH or came.key in model
            model[came.key] = came
        assert max(Counter(k.source for k in model).values()) <= EACH


def test_a_flood_of_one_leaves_the_places_of_others() -> None:
    early, refused = EarlyFrames(), 0
    for hop in range(1000):
        try:
            early.keep(frame("evil", 10**9, hop, hop))
        except TensorSpecError:
            refused += 1
    assert refused == 1000 - EACH
    for hop in range(EACH):
        early.keep(frame("honest", 4, 1, hop))
    assert len(early.take((4, 1))) == EACH


@pytest.mark.parametrize("method", STRATEGIES)
def test_no_flood_of_one_takes_more_than_eight_versions_of_memory(method: str) -> None:
    """Eight frames, of whatever hop, of a part of the largest size, with its shared state."""
    spec = TensorSpec((3 * PIECE,), "fp32")
    vector = RunVector([Entry("param:p", spec, 0, 0)])
    settings = RoundSettings(method=method, replicas=64)
    strategy = STRATEGIES[method].of(settings)
    codings = strategy.codings(settings, vector)
    rows = max(2, 1 + len(strategy.slots))
    for hop in (GIVE, RESULT, VERSION):
        key = FrameKey("r", 9, 99, Role.ROUND, 0, hop, port_of((0, PIECE)), "evil", "me")
        most = most_of_any(key, vector, codings)
        assert 0 < EACH * most <= (EACH * rows + 1) * 4 * PIECE, hop
        for start, stop in ((0, 0), (0, PIECE + 1), (3 * PIECE - 1, 3 * PIECE + 1)):
            odd = FrameKey("r", 9, 99, Role.ROUND, 0, hop, port_of((start, stop)), "evil", "me")
            assert most_of_any(odd, vector, codings) == 0


async def test_a_member_that_ignores_its_credit_gains_no_place_by_coming_again() -> None:
    """Over a real link, to a peer that releases nothing, since it knows no such attempt."""
    slots = 4
    async with network("a", "b") as (broker, (a, b)):
        b.transport.expect("a")
        b.transport.allow("a", Role.ROUND, slots)
        number = 0
        for life in range(1, 4):
            a.events.clear()
            a.transport.dial("b", broker.address, life)
            await a.heard(LinkUp)
            a.transport.board._links["b"]._outbox.credit(Role.ROUND, 1 << 30)
            for _ in range(2 * slots):
                number += 1
                key = FrameKey("r", 1, 10**9, Role.ROUND, 0, number, "0-4", "a", "b")
                data = (memoryview(bytearray(1 << 16)),)
                spec = TensorSpec((1 << 14,), "float32")
                a.transport.send("b", key, Payload("raw/1", b"", spec, data))
            await a.heard(LinkRefused)
            a.transport.hang_up("b")
        assert sum(isinstance(e, FrameArrived) for e in b.events) <= slots
        assert any("credit is" in e.why for e in a.events if isinstance(e, LinkRefused))
