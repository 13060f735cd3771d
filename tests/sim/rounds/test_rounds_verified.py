"""`--verify` of a run whose replicas train apart: every local step against the plain loop."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from torch import nn

from shoal.job import Job
from shoal.job.gossip import GOSSIP
from shoal.job.rounds import LOCAL
from shoal.proto.broker_pb2 import RunEvent
from shoal.sim.following import Following
from shoal.sim.report import Summary
from shoal.sim.verify import METHODS, verify
from shoal.tests.sim.played_rounds import Rounds, sites


def verified(
    rounds: Rounds, events: list[RunEvent], job: Job | None = None
) -> tuple[Summary, list[str]]:
    """The summary, and what was said."""
    job = job or rounds.lab.job
    prepared = rounds.lab.prepared
    summary = Summary(name="x", world="w", seed=0)
    followed = Following(summary, {})
    for event in events:
        followed.see(event)
    followed.finish(1)

    @contextmanager
    def module(job: Job) -> Iterator[nn.Module]:
        yield copy.deepcopy(rounds.lab.module)

    facts = SimpleNamespace(manifest=prepared.manifest, shards=prepared.shards, random=False)
    said: list[str] = []
    front: Any = SimpleNamespace(module=module)
    verify(job, followed, facts, front, lambda job: [], said.append)  # type: ignore[arg-type]
    return summary, said


def test_every_local_step_is_that_of_the_plain_loop_and_a_wrong_one_is_named(
    rounds: Rounds,
) -> None:
    world, run = rounds.play(sites(1e9, 1e9))
    events = list(world.events(run))
    summary, _ = verified(rounds, events)
    assert (summary.exit, summary.verified_against) == (0, "plain loop of rounds")
    assert summary.max_loss_difference is not None
    assert summary.max_loss_difference < 1e-4
    wrong = next(e for e in events if e.HasField("step") and (e.replica, e.step.step) == (1, 4))
    wrong.step.outcome.loss += 0.5
    summary, _ = verified(rounds, events)
    assert summary.exit == 1
    assert "in round 1 the loss of replica 1 in its step 1 is" in summary.error


def test_replicas_that_planning_decided_on_are_verified(rounds: Rounds) -> None:
    auto: dict[str, Any] = {"sync": {"kind": "auto"}, "plan": {"replicas": "auto"}}
    world, run = rounds.play(sites(2e6, 2e6), **auto)
    job = Job.from_json(rounds.spec(**auto).job)
    assert job.undecided
    summary, _ = verified(rounds, list(world.events(run)), job)
    assert (summary.exit, summary.replicas) == (0, 2)
    assert summary.verified_against == "plain loop of rounds"


def test_where_a_replica_was_left_out_it_says_so(rounds: Rounds) -> None:
    world, run = rounds.play(sites(1e9, 1e9))
    events = list(world.events(run))
    done = next(e.round_done for e in events if e.HasField("round_done"))
    del done.members[1:]
    summary, said = verified(rounds, events)
    assert summary.max_loss_difference is None
    assert said == ["not verified: in round 0 a replica was lost, left out, or came late"]


def test_there_is_a_plain_loop_for_every_method() -> None:
    assert METHODS.keys() == LOCAL.keys() | GOSSIP.keys()
