"""Noise that each peer adds before what it gives is masked, in the simulated world: against a plain
loop that adds the same shares, of those who were in each round, whoever is lost."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.broker.policies import segments
from shoal.broker.rounds.secure_sums import SecureSums
from shoal.dag.rounds.noise import VectorNoise
from shoal.dag.rounds.vector import Span
from shoal.job import Job
from shoal.job.clients.client_privacy import ClientPrivacy
from shoal.proto.broker_pb2 import FAILED, RunSpec
from shoal.tests.sim.clients.moments import broker_again
from shoal.tests.sim.clients.test_federated_world import METHODS, job_of, world_of
from shoal.tests.sim.clients.test_private_world import CLIP, assert_expected
from shoal.tests.sim.rounds.test_secure_world import PHASES

ROUNDS, NUMBERS = 2, 83
"""Of each run; numbers of the model."""


@pytest.fixture(autouse=True)
def several_adders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small vectors are divided among all who may add up."""
    monkeypatch.setattr(segments, "UNDIVIDED", 10)


@pytest.fixture(scope="module")
def captured(laboratory: Callable[[Job], Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    return laboratory(job_of(tmp_path_factory.mktemp("shares"), "fedavg", ROUNDS))


def in_shares(captured: Any, peers: int, fewest: int, method: str = "fedavg") -> Any:
    """The same job with noise in shares, which it says itself, so that no accountant is asked."""
    lab, job = copy.copy(captured), captured.job
    privacy = ClientPrivacy(
        clip=CLIP, epsilon=8.0, delta=1e-5, noise=0.2, where="distributed", fewest=fewest
    )
    hides = {"weight": "equal", "privacy": privacy, "secure": True, "per_round": 6}
    options, _ = METHODS[method]
    sync = replace(job.sync, method=method, options=options, **hides)
    lab.job = replace(job, sync=sync, plan=replace(job.plan, replicas=peers))
    lab.spec = RunSpec()
    lab.spec.CopyFrom(captured.spec)
    lab.spec.job = lab.job.to_json()
    return lab


def loses(lab: Any, peers: int, lost: set[str], phase: str) -> tuple[Any, str]:
    """Play a run in which peers are lost in a phase of a round."""
    world, seen_by = world_of(lab, peers), set[str]()
    world.until(lambda: len(world.broker.machine.members.pool) == peers)
    run, checks = world.submit(lab.spec), world.observe

    def observe(seen: Any) -> None:
        checks(seen)
        if seen.who in lost and world.peers[seen.who].alive and PHASES[phase](seen.record):
            seen_by.add(seen.who)
            world.kill(seen.who)

    world.observe = observe
    world.finish(run)
    assert seen_by == lost, "they were in this phase"
    return world, run


class Shares:
    """Shares that were drawn, by round and attempt, and whose they are."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.drawn: dict[tuple[int, int], dict[str, list[Tensor]]] = {}
        whole = VectorNoise.of_giver

        def of_giver(
            noise: VectorNoise, giver: str, part: Span, round_: int, attempt: int, bits: int
        ) -> Tensor:
            found = whole(noise, giver, part, round_, attempt, bits)
            self.drawn.setdefault((round_, attempt), {}).setdefault(giver, []).append(found)
            return found

        monkeypatch.setattr(VectorNoise, "of_giver", of_giver)

    def whole(self, round_: int, attempt: int, giver: int) -> Tensor:
        return torch.cat(self.drawn[round_, attempt][str(giver)])


@pytest.mark.parametrize(
    ("method", "peers"), [("fedadam", 3), pytest.param("fedprox", 4, marks=pytest.mark.slow)]
)
def test_the_version_has_the_shares_of_all_that_are_in_it(
    captured: Any, method: str, peers: int
) -> None:
    lab = in_shares(captured, peers, 3, method)
    world = world_of(lab, peers)
    run = world.submit(lab.spec)
    world.finish(run)
    done = assert_expected(lab, world, run)
    assert [len(d.members) for d in done] == [peers] * ROUNDS
    assert [d.sums for d in done] == [1, 2]
    assert all(d.drift == d.clients_moved == 0.0 for d in done), "what clients moved is not told"


@pytest.mark.parametrize(
    "phase",
    ["it gives", *(pytest.param(p, marks=pytest.mark.slow) for p in ("it holds", "it revealed"))],
)
def test_whoever_is_lost_the_shares_of_those_in_the_round_are_there_and_no_others(
    captured: Any, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    lab, shares = in_shares(captured, 5, 4), Shares(monkeypatch)
    world, run = loses(lab, 5, {"p1"}, phase)
    done = assert_expected(lab, world, run)
    assert len(done[0].members) == (5 if phase == "it revealed" else 4)
    for d in done:
        givers = [m.replica for m in d.members]
        whole = [shares.whole(d.round, d.attempt, n) for n in givers]
        assert {len(share) for share in whole} == {NUMBERS}, "each has one share of each number"
        assert len({tuple(share.tolist()) for share in whole}) == len(givers)
    assert done[-1].sums == len(shares.drawn), "an attempt was not counted"
    attempts = [at for at in shares.drawn if at[0] == done[0].round]
    assert (len(attempts) > 1) == (phase != "it revealed")
    for giver in {*shares.drawn[attempts[0]]} if attempts[1:] else ():
        first = {n for piece in shares.drawn[attempts[0]][giver] for n in piece.tolist()}
        again = shares.drawn[attempts[-1]].get(giver, [])
        assert not first & {n for piece in again for n in piece.tolist()}, "noise came again"


def test_a_run_ends_rather_than_have_too_few_shares(captured: Any) -> None:
    lab = in_shares(captured, 4, 4)
    world, run = loses(lab, 4, {"p1"}, "it joins")
    last = world.events(run)[-1].state
    assert (last.phase, last.reason.code) == (FAILED, "secure")
    assert "3 peers are left" in last.reason.text
    assert "fewest = 4" in last.reason.text


def test_a_peer_gives_nothing_to_a_sum_of_fewer(
    captured: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if the broker plans one."""
    monkeypatch.setattr(SecureSums, "why_few", lambda *_: "")
    lab, shares = in_shares(captured, 4, 4), Shares(monkeypatch)
    world, run = loses(lab, 4, {"p1"}, "it trains")
    events = world.events(run)
    assert events[-1].state.phase == FAILED
    assert any(len(e.round_planned.members) == 3 for e in events), "the broker planned none"
    assert not shares.drawn


@pytest.mark.slow
def test_a_broker_that_is_started_again_counts_every_attempt(
    captured: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = in_shares(captured, 3, 3)

    def play(deadly: int) -> tuple[Any, str, int, Shares]:
        with monkeypatch.context() as patch:
            shares, world = Shares(patch), world_of(lab)
            run, written = broker_again(world, lab.spec, deadly)
        return world, run, written, shares

    _, _, records, _ = play(0)
    again = 0
    for deadly in range(1, records, 3):
        world, run, _, shares = play(deadly)
        done = assert_expected(lab, world, run)
        assert done[-1].sums >= len(shares.drawn), "an attempt was not counted"
        again += len(shares.drawn) > len(done)
    assert again, "no attempt was ever made again"
