"""Versions that wait for nobody: what contributions count for, who trains next, and when a version
is made, against plain arithmetic."""

from __future__ import annotations

import random
from decimal import Decimal
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.broker.policies.buffered import BufferedPolicy, discounted
from shoal.broker.policies.round_view import RoundView
from shoal.broker.records.submitted import SubmittedRun
from shoal.dag.rounds.cohorts import WEIGHT_UNIT, cohort_of, places_of, ranges_of
from shoal.job import Job
from shoal.proto.broker_pb2 import RoundWork

CLIENTS, AT_WORK, SEED = 24, 9, 5
ROUND = 20


def sizes(rng: random.Random) -> list[int]:
    return [rng.choice([1, 2, 7, 40, 3000]) for _ in range(CLIENTS)]


def policy_of(sizes: list[int], weight: str = "samples", **options: Any) -> BufferedPolicy:
    partition = {"kind": "iid", "clients": CLIENTS}
    job = Job(
        model="m.py:f",
        seed=SEED,
        train={"rounds": 50, "batch": 2},
        data={"kind": "arrays", "source": "x.npz", "partition": partition},
        sync={
            **{"kind": "federated", "method": "fedbuff", "per_round": AT_WORK, "weight": weight},
            "options": options,
        },
    )
    assert job.rounds is not None
    wish = SimpleNamespace(sync=job.sync, cohorts=job.rounds.cohorts, seed=SEED)
    run = SimpleNamespace(requirements=wish, spec=SimpleNamespace(client_sizes=sizes), id="r")
    return BufferedPolicy(cast(SubmittedRun, run))


def view_of(given: dict[int, RoundWork]) -> RoundView:
    """Round ROUND of replicas with this work, as far as the policy reads it."""
    ledger = SimpleNamespace(given=given, committed=ROUND, total=50, chosen=None)
    ledger.units = lambda n: len(places_of(given[n].cohort))
    rounds = SimpleNamespace(work=ledger, versions=SimpleNamespace(round=ROUND), homes=None)
    replica = SimpleNamespace(term=1, committed=0, round_step_s=1.0, plan=None)
    run = SimpleNamespace(replicas=dict.fromkeys(range(9), replica), of_rounds=rounds, id="r")
    return cast(RoundView, SimpleNamespace(rounds=rounds, run=run))


def works(rng: random.Random, replicas: int, oldest: int, newest: int = 0) -> dict[int, RoundWork]:
    """Some places of some rounds for each; no client twice."""
    found, taken = {}, set[int]()
    for n in range(replicas):
        behind = rng.randint(newest, oldest)
        order = cohort_of(CLIENTS, SEED, ROUND - behind, range(CLIENTS))
        free = [p for p, c in enumerate(order) if c not in taken]
        mine = sorted(rng.sample(free, rng.randint(1, 2)))
        taken |= {order[p] for p in mine}
        found[n] = RoundWork(replica=n, term=1, cohort=ranges_of(mine), behind=behind)
    return found


def clients_of(work: RoundWork) -> list[int]:
    return cohort_of(CLIENTS, SEED, ROUND - work.behind, places_of(work.cohort))


@given(weight=st.integers(1, 10**9), behind=st.integers(0, 10**4))
def test_a_weight_is_discounted_by_the_root_of_versions(weight: int, behind: int) -> None:
    exact = Decimal(weight) * WEIGHT_UNIT / Decimal(1 + behind).sqrt()
    assert abs(discounted(weight, behind) - exact) <= Decimal("0.5001") + exact * Decimal("1e-15")
    assert discounted(weight, behind + 1) <= discounted(weight, behind)
    assert discounted(weight, 0) == weight * WEIGHT_UNIT


@given(seed=st.integers(0, 10**6), weight=st.sampled_from(["samples", "equal"]))
def test_a_mean_by_weight_times_the_scale_is_the_papers_sum(seed: int, weight: str) -> None:
    rng = random.Random(seed)
    samples, given_ = sizes(rng), works(rng, rng.randint(1, 4), rng.choice([0, 3, 30]))
    policy, view = policy_of(samples, weight), view_of(given_)
    members = policy.members(view, [*given_])
    moved = {n: rng.uniform(-1, 1) for n in given_}
    shares = {
        n: sum(samples[c] if weight == "samples" else 1 for c in clients_of(w))
        for n, w in given_.items()
    }
    mean = sum(m.weight * moved[m.replica] for m in members) / sum(m.weight for m in members)
    scale = policy.scale(view, members)
    paper = sum(shares[n] * moved[n] / (1 + w.behind) ** 0.5 for n, w in given_.items()) / sum(
        shares.values()
    )
    assert mean * (scale or 1.0) == pytest.approx(paper, rel=1e-5, abs=1e-6)
    assert [m.behind for m in members] == [w.behind for w in given_.values()]
    if not any(w.behind for w in given_.values()):
        assert scale == 0.0, "as FedAvg, to the bit"
        assert [(m.weight, m.unit) for m in members] == [(shares[n], 0) for n in given_]


@given(seed=st.integers(0, 10**6), most=st.integers(0, 4))
def test_so_many_train_at_a_time_and_none_at_two_peers(seed: int, most: int) -> None:
    rng = random.Random(seed)
    going, fresh = works(rng, rng.randint(0, 3), 3, newest=1), [4, 5]
    for work in going.values():
        work.behind -= 1  # as it was in the round before
    policy = policy_of([3] * CLIENTS, max_staleness=most)
    found = policy.work(view_of({}).run, fresh, 0.0, [*going.values()], lambda peers: None)
    older = {w.replica: w for w in found if w.replica in going}
    assert older.keys() == going.keys()
    for n, work in older.items():
        assert work.behind == going[n].behind + 1
        work.behind -= 1
        assert work == going[n], "and nothing else of it changes"
        work.behind += 1
    counted = [w for w in found if w.behind <= most]
    at_work = [c for w in counted for c in clients_of(w)]
    assert len(at_work) == len({*at_work}) == AT_WORK
    order = cohort_of(CLIENTS, SEED, ROUND, range(CLIENTS))
    busy = {c for w in counted if w.behind for c in clients_of(w)}
    new = sorted(p for w in counted if not w.behind for p in places_of(w.cohort))
    assert [order[p] for p in new] == [c for c in order if c not in busy][: AT_WORK - len(busy)]


@given(seed=st.integers(0, 10**6), buffer=st.integers(1, AT_WORK))
def test_a_version_is_of_a_full_buffer_and_of_two_peers_while_there_are(
    seed: int, buffer: int
) -> None:
    rng = random.Random(seed)
    given_ = works(rng, rng.randint(1, 4), 2)
    policy, view = policy_of([3] * CLIENTS, buffer=buffer), view_of(given_)
    ready = sorted(rng.sample([*given_], rng.randint(0, len(given_))))
    come = sum(len(clients_of(given_[n])) for n in ready)
    two = len(ready) > 1 or (len(ready) == 1 and len(given_) == 1)
    assert policy.is_enough(view.rounds, ready) == (come >= buffer and two)
    assert not policy.too_late([*given_])


@given(st.sets(st.integers(0, 500)))
def test_ranges_are_the_places_again_and_as_few_as_can_be(places: set[int]) -> None:
    found = ranges_of(sorted(places))
    assert places_of(found) == sorted(places)
    assert all(a.first + a.count < b.first for a, b in pairwise(found))
