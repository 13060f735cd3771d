"""The count of noisy sums in the ledger of federated work."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shoal.broker.records.cohort_ledger import CohortLedger
from shoal.job.clients.client_privacy import SPARE_SUMS
from shoal.proto.broker_pb2 import RoundBegun, RoundDone, RoundMember, RoundWork, SampleRange


@given(st.integers(1, 12), st.lists(st.integers(1, 5), max_size=14), st.integers(0, 14))
def test_no_sum_is_forgotten_whenever_the_journal_is_read_again(
    rounds: int, attempts: list[int], again_at: int
) -> None:
    budget = rounds + SPARE_SUMS
    ledger, made = CohortLedger(rounds, budget), 0
    for number, count in enumerate(attempts):
        if ledger.over:
            break
        assert budget - made > SPARE_SUMS, "a round began without sums to spare"
        work = RoundWork(replica=0, cohort=[SampleRange(first=0, count=2)])
        ledger.begin(RoundBegun(round=number, work=[work]))
        for _ in range(count):
            assert not ledger.spent
            ledger.planned()
            made += 1
            if number == again_at:
                kept, ledger = ledger.kept(), CohortLedger(rounds, budget)
                ledger.restore(kept)
        ledger.done(RoundDone(round=number, members=[RoundMember(replica=0)]))
        assert ledger.sums == made
        assert ledger.over == (made >= rounds)


def test_without_a_budget_nothing_is_counted_and_no_round_is_left_out() -> None:
    ledger = CohortLedger(3)
    for _ in range(50):
        ledger.planned()
    assert (ledger.sums, ledger.spent, ledger.over, ledger.total) == (0, False, False, 3)
