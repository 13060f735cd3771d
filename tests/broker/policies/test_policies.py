"""Every policy, asked the same questions about rounds of scripted peers: its answers are whole, and
asking changes nothing."""

from __future__ import annotations

import copy
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.broker.policies.disputes import Disputes
from shoal.broker.policies.policies import POLICIES, policy_of
from shoal.broker.policies.policy import RoundPolicy
from shoal.broker.policies.round_view import LACKS, RoundView
from shoal.job.sync import METHODS
from shoal.proto.broker_pb2 import RoundPlanned, RunEvent
from shoal.tests.hostile.scripted_rounds import ScriptedRounds

REPLICAS = 5
MEMBER = st.sets(st.integers(0, REPLICAS - 1), min_size=1)
KINDS = pytest.mark.parametrize("kind", POLICIES)


def asked(kind: str, seed: int) -> tuple[RoundPolicy, RoundView]:
    """The policy of a run of five replicas, and a round of it that is under way: in half of all
    cases some of its members are in an attempt, and say what they lack."""
    rng = random.Random(seed)
    game = ScriptedRounds(REPLICAS, {}, kind=kind)
    game.play(rng.randint(0, 1))
    run = game.world.machine.runs[game.run]
    view = RoundView(run.record, game.world.machine.members, lambda peers, now: None, Disputes())
    for _ in range(rng.randint(0, 3)):
        view.disputes.accuse(rng.randrange(REPLICAS), rng.randrange(REPLICAS), 3)
    for words in view.lacks.values():
        for _ in range(rng.randint(0, 3)):
            words[rng.randrange(REPLICAS)].add(rng.randrange(REPLICAS))
    view.troubled = {n for n in range(REPLICAS) if rng.random() < 0.2}
    policy, versions = policy_of(run.submitted), view.rounds.versions
    if rng.random() < 0.5:
        ready = sorted(rng.sample(range(REPLICAS), rng.randint(1, REPLICAS)))
        found = view.attempt = policy.attempt(view, ready, range(REPLICAS), 0.0)
        at = {"round": versions.round, "attempt": versions.attempt + 1}
        planned = RoundPlanned(**at, members=found.members, joiners=found.joiners)
        run.record.publish(RunEvent(round_planned=planned), 0, 0.0)
    return policy, view


def known(view: RoundView) -> object:
    """All that a policy may read and must leave as it is."""
    rounds = view.rounds.kept().SerializeToString(deterministic=True)
    return rounds, copy.deepcopy((view.lacks, view.troubled, vars(view.disputes)))


def test_every_kind_of_rounds_has_a_policy() -> None:
    assert POLICIES.keys() == METHODS.keys() - {"allreduce", "auto"}


@KINDS
@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 999), ready=MEMBER, gate=MEMBER)
def test_an_attempt_has_each_member_in_one_group_and_is_a_function(
    kind: str, seed: int, ready: set[int], gate: set[int]
) -> None:
    policy, view = asked(kind, seed)
    before = known(view)
    found = policy.attempt(view, sorted(ready), sorted(gate), 0.0)
    assert policy.attempt(view, sorted(ready), sorted(gate), 0.0) == found
    assert known(view) == before
    members = [m.replica for m in found.members]
    assert members
    assert set(members) <= ready
    assert len({*members, *found.joiners}) == len(members) + len(found.joiners)
    assert set(found.joiners) <= gate
    begun = Counter(n for group in found.groups for n in (*group.weights, *group.joiners))
    assert all(begun[n] + (n in found.kept) == 1 for n in (*members, *found.joiners))
    assert found.sources.keys() <= set(found.joiners)
    assert set(found.sources.values()) <= set(members)


@KINDS
@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 999), waiting=MEMBER)
def test_who_is_to_blame_is_in_the_round_and_a_function(
    kind: str, seed: int, waiting: set[int]
) -> None:
    policy, view = asked(kind, seed)
    before, inside = known(view), set(view.rounds.versions.inside)
    about = sorted(waiting & inside)
    found = policy.late(view, about)
    assert policy.late(view, about) == found
    assert known(view) == before
    assert set(found.out) <= inside
    assert all(by in inside for by, _ in found.disputes)


@KINDS
@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 999))
def test_all_are_enough_and_whoever_made_the_same_is_agreed(kind: str, seed: int) -> None:
    policy, view = asked(kind, seed)
    assert policy.is_enough(view.rounds, [*view.rounds.work.given])
    hashes: dict[int, int | None] = dict.fromkeys(view.rounds.versions.inside, 7)
    agreed = policy.agreed(view, hashes)
    assert (agreed is None) == (not hashes)
    if agreed is not None:
        assert set(agreed[1]) == set(hashes)


def test_a_round_waits_for_the_steps_of_a_pipeline_that_trains_clients() -> None:
    policy, view = asked("federated", 4)
    least, steps = policy.lasts_s(view.run, view.rounds), 10**6
    number, work = next(iter(view.rounds.work.given.items()))
    work.steps, view.run.replicas[number].formed_s = steps, 0.25
    found = policy.lasts_s(view.run, view.rounds)
    assert found == pytest.approx(2 * steps * 0.25 + 30.0)
    assert found > least


@pytest.mark.parametrize("what", LACKS)
def test_who_lacks_something_is_asked_before_who_lacks_what_is_made_of_it(what: str) -> None:
    """Else an honest adder would be blamed for a gatherer that gives no sum."""
    policy, view = asked("local", 0)
    for lacks in view.lacks.values():
        lacks.clear()
    for made in LACKS[LACKS.index(what) :]:
        view.lacks[made][2].add(3)
        view.lacks[made][0].add(3)
    view.lacks[what].clear()
    view.lacks[what][0].add(1)
    view.disputes = Disputes()
    blame = policy.late(view, [0, 2])
    assert blame.disputes == [(0, 1)]
