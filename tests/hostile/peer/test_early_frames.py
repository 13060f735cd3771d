"""Frames of attempts that a peer does not know yet: a few of each sender, whatever they are called;
nobody's flood takes another's place."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from shoal.dag.execute.execute import TensorSpecError
from shoal.dag.ir.graph import TensorSpec
from shoal.dag.schedule.flow import Role
from shoal.net.links.frame import Arrived, FrameKey
from shoal.peer.rounds.attempt import EarlyFrames

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
