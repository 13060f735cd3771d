"""A rule of the submitter's own for who is in a round, in the simulated world: rounds are of the
clients that it chose, whatever happens in between, and versions are those of a plain loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from shoal.broker.candidates import Candidates, Rule, chosen_by
from shoal.broker.events import CohortAsked, Publish, Reject, RunId
from shoal.broker.records.run import RunRecord
from shoal.broker.round_rows import RoundRows
from shoal.dag.rounds.cohorts import cohort_of
from shoal.job import Job
from shoal.job.clients.client_compression import CompressionOptions
from shoal.job.clients.client_options import ClientPrivacy
from shoal.peer.core.events import BeginRound
from shoal.proto.broker_pb2 import DONE, Cohort
from shoal.sim.plain.client_loops import FederatedResult, train_cohorts
from shoal.sim.plain.plain_cohorts import (
    aggregate_of,
    committed_cohorts,
    local_training,
    method_of,
)
from shoal.sim.virtual.choosing import begin_choosing
from shoal.sim.virtual.clock import Observed
from shoal.tests.sim.clients.test_federated_world import exported, job_of, world_of
from shoal.tests.sim.clients.test_hosts_world import Hosts
from shoal.tests.sim.clients.test_scaffold_world import scaffold

CLIENTS, PER_ROUND = 12, 5


def selected(job: Job, **sync: Any) -> Job:
    found = replace(job.sync, select="rules.py:own", **sync)
    return replace(job, name=f"{job.name} selected {sorted(sync)}", sync=found)


def by_hand(seen: Candidates) -> list[int]:
    """Clients that the round's number would hardly choose, in no order; fewer from round to
    round."""
    return [(7 * seen.round + 5 * i) % seen.clients for i in range(seen.per_round - seen.round % 3)]


def worst(seen: Candidates) -> list[int]:
    """Power of choice (Cho et al. 2020, 2010.01243), of all clients: those of the largest loss, as
    far as it is known, those of which nothing is known first."""
    loss = np.where(np.isnan(seen.loss), np.inf, seen.loss)
    return np.lexsort((np.arange(seen.clients), -loss))[: seen.per_round].tolist()


@dataclass
class Played:
    """One run whose clients a rule chooses. chosen: by round, what it returned. seen: what it was
    told. said: what was wrong."""

    lab: Any
    world: Any
    rule: Rule = by_hand
    spec: Any = None
    run: str = ""
    chosen: dict[int, list[int]] = field(default_factory=dict)
    seen: dict[int, Candidates] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)

    def begin(self) -> Played:
        spec = self.spec or self.lab.spec
        self.run = self.world.submit(spec)
        begin_choosing(self.world, RunId(self.run), spec, self.own, self.said.append)
        return self

    def own(self, seen: Candidates) -> Sequence[int]:
        self.seen[seen.round] = seen
        found = self.rule(seen)
        self.chosen[seen.round] = [*found]
        return found

    @property
    def by(self) -> list[str]:
        """By round, who has chosen its clients, as people are told."""
        rows = RoundRows()
        for event in self.world.events(self.run):
            rows.see(event)
        return [row.chosen_by for row in rows.rows]

    def clients(self) -> list[set[int]]:
        """Of each committed round, who is in its version."""
        events = self.world.events(self.run)
        return [
            {w.client for w in made}
            for made in committed_cohorts(events, self.lab.job, self.lab.reader())
        ]

    def usual(self, number: int) -> set[int]:
        """Whose turn it is in a round by its number."""
        return {*cohort_of(CLIENTS, self.lab.job.seed, number, range(PER_ROUND))}

    def wanted(self) -> list[set[int]]:
        """Of each round, whom the rule chose, or else whose turn it is."""
        rounds = self.lab.job.train.steps
        return [{*self.chosen[n]} if n in self.chosen else self.usual(n) for n in range(rounds)]

    def assert_expected(self) -> FederatedResult:
        """It is done, and its weights are those of a plain loop over what it committed."""
        events, job, reader = self.world.events(self.run), self.lab.job, self.lab.reader()
        assert events[-1].state.phase == DONE, events[-1].state.reason.text
        made = train_cohorts(
            self.lab.module,
            committed_cohorts(events, job, reader),
            lambda at: reader.samples(np.array(at)),
            method_of(job, events),
            **local_training(job),
            aggregate=aggregate_of(job, events),
        )
        for name, tensor in exported(self.world, self.run).items():
            wanted = made.shared[name].float()
            torch.testing.assert_close(tensor, wanted, rtol=1e-4, atol=1e-6)
        return made


def compressed(folder: Path) -> Job:
    options = CompressionOptions(least_ratio=0.3)
    return selected(job_of(folder, "fedavg"), compression="topk", compression_options=options)


JOBS: dict[str, Callable[[Path], Job]] = {
    "fedavgm": lambda folder: selected(job_of(folder, "fedavgm")),
    "fednova": lambda folder: selected(job_of(folder, "fednova")),
    "topk": compressed,
    "scaffold": lambda folder: selected(scaffold(folder, 4)),
    "median": lambda folder: selected(job_of(folder, "fedavg"), aggregate="median", weight="equal"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_rounds_are_of_the_clients_that_the_rule_chose(
    laboratory: Callable[[Job], Any], tmp_path: Path, name: str
) -> None:
    lab = laboratory(JOBS[name](tmp_path))
    played = Played(lab, world_of(lab)).begin()
    played.world.finish(played.run)
    played.assert_expected()
    assert not played.said
    assert played.by == ["run", "rule", "rule", "rule"], "none is chosen before the first begins"
    assert played.clients() == played.wanted()
    assert played.wanted()[1] != played.usual(1)


def test_a_rule_sees_what_a_plain_loop_comes_to(
    laboratory: Callable[[Job], Any], tmp_path: Path
) -> None:
    lab = laboratory(selected(job_of(tmp_path, "fedavg", 6)))
    played = Played(lab, world_of(lab), worst).begin()
    played.world.finish(played.run)
    made = played.assert_expected()
    assert played.clients() == played.wanted()
    for number, seen in played.seen.items():
        asked, last = np.zeros(CLIENTS, int), np.full(CLIENTS, -1)
        loss = np.full(CLIENTS, np.nan)
        for n in range(number):  # the round before has begun, and nobody knows what it comes to
            asked[[*made.losses[n]]] += 1
            for client, steps in made.losses[n].items() if n < number - 1 else ():
                last[client], loss[client] = n, np.mean(steps)
        np.testing.assert_array_equal(seen.asked, asked)
        np.testing.assert_array_equal(seen.last, last)
        np.testing.assert_allclose(seen.loss, loss, rtol=1e-4)
        known = last >= 0
        assert (np.isfinite(seen.seconds) == known).all()
        assert ((seen.bytes > 0) == known).all()
        assert seen.reachable.all()
        assert seen.sizes.tolist() == [*lab.spec.client_sizes]
        assert (seen.per_round, seen.least, seen.most) == (PER_ROUND, 1, PER_ROUND)
    assert not np.isnan(played.seen[5].loss).any(), "all were asked by then"
    with pytest.raises(ValueError, match="read-only"):
        played.seen[2].loss[0] = 0.0


NONSENSE: dict[int, tuple[Any, str]] = {
    1: ([1, 1, 2], "round 1 has a client twice: expected each once"),
    2: ([1, 12, 13], "round 2 has clients 12, 13, and there are 12: expected numbers from 0 to 11"),
    3: ([*range(6)], "round 3 has 6 clients: expected 1 to 5"),
    4: ([], "round 4 has 0 clients: expected 1 to 5"),
    5: ([-1], "round 5: the rule raised ValueError: the rule returned client -1"),
    6: ([0.5], "round 6: the rule raised TypeError: the rule returned array([0.5])"),
    7: (ZeroDivisionError("oh"), "round 7: the rule raised ZeroDivisionError: oh"),
}


def test_what_is_no_cohort_is_refused_and_the_run_chooses(
    laboratory: Callable[[Job], Any], tmp_path: Path
) -> None:
    def rule(seen: Candidates) -> Sequence[int]:
        found, _ = NONSENSE.get(seen.round, (by_hand(seen), ""))
        if isinstance(found, Exception):
            raise found
        return found

    lab = laboratory(selected(job_of(tmp_path, "fedavg", 9)))
    played = Played(lab, world_of(lab), rule).begin()
    played.world.finish(played.run)
    played.assert_expected()
    assert played.by == [*["run"] * 8, "rule"]
    played.chosen = {8: played.chosen[8]}
    assert played.clients() == played.wanted()
    assert len(played.said) == len(NONSENSE)
    for said, (_, why) in zip(played.said, NONSENSE.values(), strict=True):
        assert why in said


@pytest.mark.slow
def test_who_comes_too_late_early_or_again_is_refused(
    laboratory: Callable[[Job], Any], tmp_path: Path
) -> None:
    lab, answers = laboratory(selected(job_of(tmp_path, "fedavg"))), list[Any]()
    played = Played(lab, world_of(lab)).begin()

    def ask(number: int, *clients: int) -> None:
        cohort = Cohort(round=number, clients=clients)
        ask = played.world.broker.ask
        answers.append(ask(lambda request: CohortAsked(request, RunId(played.run), cohort)))

    def rule(seen: Candidates) -> list[int]:
        if seen.round == 2:
            for number, *clients in ((1, 3), (3, 3), (2, 3, 4), (2, 4, 3), (2, 5)):
                played.world.after(0.0, lambda n=number, c=tuple(clients): ask(n, *c))
            raise ValueError("asks by itself")
        return by_hand(seen)

    played.rule = rule
    played.world.finish(played.run)
    played.assert_expected()
    why = [a.reason if isinstance(a, Reject) else "" for a in answers]
    assert why == [
        "round 1 has begun: expected the clients of round 2",
        "round 3 is not the next one: expected the clients of round 2",
        "",
        "",
        "round 2 has its clients already: others were chosen before",
    ]
    assert played.clients()[2] == {3, 4}
    ask(4, 1)
    assert "begins no round any more" in answers[-1].reason
    kinds = [e.WhichOneof("kind") for e in played.world.events(played.run)]
    assert kinds.count("chosen") == 3, "what is said again is not written down again"


@pytest.mark.slow
def test_a_run_without_a_rule_takes_no_cohort(
    laboratory: Callable[[Job], Any], tmp_path: Path
) -> None:
    lab = laboratory(job_of(tmp_path, "fedavg", 2))
    world = world_of(lab)
    run = world.submit(lab.spec)
    cohort = Cohort(round=0, clients=[1])
    refused = world.broker.ask(lambda request: CohortAsked(request, RunId(run), cohort))
    assert "expected one that was submitted with sync.select" in refused.reason
    with pytest.raises(ValueError, match="submitted without a rule"):
        begin_choosing(world, RunId(run), lab.spec, by_hand, print)
    world.finish(run)
    rows = RoundRows()
    for event in world.events(run):
        rows.see(event)
    assert not any("chosen_by" in row.table() for row in rows.rows)


def test_a_broker_that_is_started_again_has_what_was_chosen(
    laboratory: Callable[[Job], Any], tmp_path: Path
) -> None:
    """Behind each choice, before the round that it is of; and from a journal written anew."""
    lab = laboratory(selected(job_of(tmp_path, "fedavgm")))
    played = Played(lab, world_of(lab))
    checks, restarts = played.world.observe, list[int]()

    def restart(number: int) -> None:
        record = played.world.broker.machine.decided.runs[played.run]
        again = RunRecord(record.run, [])
        again.restore(record.kept())
        assert again.rounds.work.chosen == record.rounds.work.chosen
        assert again.rounds.work.chosen.clients == played.chosen[number]
        restarts.append(number)
        played.world.restart_broker(1.0)

    def observe(seen: Observed) -> None:
        checks(seen)
        if isinstance(seen.record, Publish) and seen.record.event.HasField("chosen"):
            number = seen.record.event.chosen.round
            played.world.after(0.0, lambda: restart(number))

    played.world.observe = observe
    played.begin()
    played.world.finish(played.run)
    played.assert_expected()
    assert restarts == [1, 2, 3]
    assert played.clients() == played.wanted()
    assert played.by == ["run", "rule", "rule", "rule"]


@pytest.mark.slow
def test_while_the_rule_is_away_the_run_chooses(
    laboratory: Callable[[Job], Any], tmp_path: Path
) -> None:
    """The broker, too, is away when it answers: it begins no round meanwhile."""
    lab = laboratory(selected(job_of(tmp_path, "fedavg")))
    played = Played(lab, world_of(lab))

    def rule(seen: Candidates) -> list[int]:
        if seen.round == 2:
            played.world.restart_broker(1.0)
        return by_hand(seen)

    played.rule = rule
    played.begin()
    played.world.finish(played.run)
    played.assert_expected()
    assert played.said == ["round 2: the broker's process is gone"]
    played.chosen.pop(2)
    assert played.by == ["run", "rule", "run", "rule"]
    assert played.clients() == played.wanted()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedavgm", "topk"])
def test_nobody_is_in_the_place_of_clients_of_a_lost_peer(
    laboratory: Callable[[Job], Any], tmp_path: Path, name: str
) -> None:
    """Others train them, whose losses a rule then sees as well; or they are missing, where a client
    sends a part of what it moved."""
    lab = laboratory(JOBS[name](tmp_path))
    played = Played(lab, world_of(lab))
    checks = played.world.observe

    def observe(seen: Observed) -> None:
        checks(seen)
        begun = isinstance(seen.record, BeginRound) and seen.record.start.round == 1
        if begun and seen.who == "p1":
            played.world.after(0.0, lambda: played.world.kill("p1"))

    played.world.observe = observe
    played.begin()
    played.world.finish(played.run)
    made = played.assert_expected()
    inside, wanted = played.clients(), played.wanted()
    assert all(some <= all_ for some, all_ in zip(inside, wanted, strict=True))
    assert inside[1] < wanted[1] if name == "topk" else inside[1] == wanted[1]
    assert inside[3] == wanted[3]
    known = played.seen[3].loss[sorted(inside[1])]  # round 1 is over, and round 2 has begun
    told = [np.mean(made.losses[1][client]) for client in sorted(inside[1])]
    np.testing.assert_allclose(known, told, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("hidden", ["privacy", "secure"])
def test_where_clients_are_hidden_a_rule_is_told_nothing_of_them(
    laboratory: Callable[[Job], Any],
    tmp_path: Path,
    hidden: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from shoal.client import submission

    monkeypatch.setattr(submission, "with_noise", lambda job: job)
    privacy = ClientPrivacy(clip=0.4, epsilon=8.0, delta=1e-5, noise=0.2)
    sync: dict[str, Any] = {"secure": True} if hidden == "secure" else {"privacy": privacy}
    lab = laboratory(selected(job_of(tmp_path, "fedavg"), weight="equal", **sync))
    played = Played(lab, world_of(lab)).begin()
    played.world.finish(played.run)
    played.assert_expected()
    least = 3 if hidden == "secure" else 1
    for seen in played.seen.values():
        assert np.isnan(seen.loss).all()
        assert np.isnan(seen.seconds).all()
        assert seen.least == least
    assert played.clients() == played.wanted()


def test_of_hosts_those_that_are_there_and_the_run_chooses_where_none_is(
    laboratory: Callable[[Job], Any], tmp_path: Path
) -> None:
    hosts = Hosts.of(laboratory(selected(job_of(tmp_path, "fedavgm"))), tmp_path)
    world, reachable = hosts.world(), list[list[bool]]()

    def rule(seen: Candidates) -> list[int]:
        reachable.append(seen.reachable.tolist())
        return [1] if seen.round == 3 else [0, 1]

    played = Played(hosts.lab, world, rule, hosts.spec)
    checks = world.observe

    def observe(seen: Observed) -> None:
        checks(seen)
        begun = isinstance(seen.record, BeginRound) and seen.record.start.round == 1
        if begun and seen.who == "h1":
            world.after(0.0, lambda: world.kill("h1"))

    world.observe = observe
    played.begin()
    world.finish(played.run)
    done = hosts.assert_expected(world, played.run)
    assert not played.said
    assert played.by == ["run", "rule", "rule", "run"], "of the last, nobody is there"
    client_of = [r.client for e in world.events(played.run) for r in e.formed.replicas]
    inside = [{client_of[m.replica] for m in d.members} for d in done]
    assert inside[1] == inside[2] == {0}
    assert 1 not in inside[3]
    assert reachable[0] == [True, True, True]
    assert reachable[-1] == [True, False, True]


def test_a_rule_may_return_its_clients_in_whatever_has_them() -> None:
    seen: Any = SimpleNamespace(round=3)
    for returned in ([4, 1], {4, 1}, (n for n in (4, 1)), np.array([4, 1]), {4: "a", 1: "b"}):
        assert sorted(chosen_by(lambda _, found=returned: found, seen).clients) == [1, 4]
