"""With `output.every = "auto"` a run loses half an hour of its steps at most."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from shoal.broker.snapshots.checkpoints import AUTO_S, Checkpoints
from shoal.dag.plan.plan import PeerId, Plan, StageSlot, Visit
from shoal.job.tables import Output
from shoal.proto.broker_pb2 import RunSpec, Saved
from shoal.proto.common_pb2 import BlobRef

HOLDER = PeerId("p0")
PLAN = Plan((StageSlot(0, 1, (HOLDER,)),), ((Visit(0, HOLDER),),), 1)
SPEC = RunSpec(steps=1)


def made(step_s: float, steps: int, first: int, copies_s: float) -> list[int]:
    """The steps of the checkpoints of a run whose holder needs so long to bring one."""
    kept = Checkpoints("auto", 10**6, first)
    came, coming_since = list[int](), 0
    for committed in range(first, steps):
        if kept.coming is not None and (committed - coming_since) * step_s >= copies_s:
            said = Saved(run="r", term=1, step=kept.coming)
            said.blob.CopyFrom(BlobRef(hash="0" * 64, size_bytes=1))
            whole = kept.saved(HOLDER, said)
            assert whole is not None
            kept.add((whole,))
            came.append(whole.step)
        due = kept.due(committed, steps, step_s)
        if due is not None:
            kept.begin("r", 1, due, SPEC, PLAN)
            coming_since = committed
    return came


@given(st.floats(20.0, 4000.0), st.integers(1, 400), st.integers(0, 300), st.floats(0.0, 5000.0))
def test_half_an_hour_of_steps_lies_between_two(
    step_s: float, more: int, first: int, copies_s: float
) -> None:
    steps = first + more
    found = [first, *made(step_s, steps, first, copies_s)]
    most = AUTO_S + copies_s + 3 * step_s
    for a, b in pairwise(found):
        assert AUTO_S <= (b - a) * step_s <= most
    assert (steps - found[-1]) * step_s <= 2 * most


def test_a_short_run_makes_none_and_the_default_keeps_two() -> None:
    assert made(1.0, int(AUTO_S), 0, 0.0) == []
    assert Output().every == "auto"
    assert Output().keep == 2
    assert Checkpoints(0, 2).due(10**6, 10**7, 1.0) is None


def test_one_whose_step_was_missed_is_made_up_for_at_once() -> None:
    kept = Checkpoints("auto", 2)
    due = kept.due(1800, 10**5, 1.0)
    assert due == 1801
    kept.begin("r", 1, due, SPEC, PLAN)
    kept.given_up(late=True)
    assert kept.due(1801, 10**5, 1.0) == 1803


def test_the_time_of_a_step_that_is_not_known_makes_none() -> None:
    assert Checkpoints("auto", 2).due(10**6, 10**7) is None
