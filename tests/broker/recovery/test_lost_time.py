from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shoal.broker.records.work_ledger import shortened
from shoal.proto.broker_pb2 import RoundWork, SampleRange


def numbers(work: RoundWork) -> list[int]:
    return [g for s in work.samples for g in range(s.first, s.first + s.count)]


@given(
    steps=st.integers(1, 12),
    each=st.integers(1, 4),
    least=st.integers(0, 12),
    late=st.floats(-5.0, 30.0),
    step=st.floats(0.1, 5.0),
    waiting=st.integers(0, 9),
    cut=st.integers(0, 48),
)
def test_what_it_makes_costs_all_together_the_least_and_its_samples_are_the_first(
    steps: int, each: int, least: int, late: float, step: float, waiting: int, cut: int
) -> None:
    count, least = steps * each, min(least, steps)
    first = min(cut, count)
    ranges = [SampleRange(first=100, count=first), SampleRange(first=7, count=count - first)]
    work = RoundWork(replica=2, term=3, first_step=5, steps=steps, samples=ranges)
    found = shortened(work, least, late, step, waiting)

    def cost(makes: int) -> float:
        left_out = (steps - makes) * step
        return left_out + waiting * max(0.0, late - left_out)

    assert max(1, least) <= found.steps <= steps
    assert cost(found.steps) <= min(map(cost, range(max(1, least), steps + 1))) + 1e-6
    assert numbers(found) == numbers(work)[: found.steps * each]
    assert (found.planned or found.steps) == steps
    again = shortened(found, least, late, step, waiting)
    assert (again.planned or again.steps) == steps


def test_clients_are_trained_to_their_end() -> None:
    cohort = [SampleRange(first=3, count=2)]
    work = RoundWork(replica=2, term=3, first_step=5, steps=9, cohort=cohort)
    assert shortened(work, 1, 1e6, 0.1, 4) == work
