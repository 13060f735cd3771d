"""Hosts in a round: by whose line who adds up how much and sends how much, against the lines that
each was given by its id."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from shoal.broker.policies.disputes import Disputes
from shoal.broker.policies.hosts import HostsPolicy
from shoal.broker.policies.round_view import RoundView
from shoal.broker.policies.uploads import Update
from shoal.broker.records.host_lines import HostLines
from shoal.broker.records.run import RunRecord
from shoal.broker.records.submitted import SubmittedRun
from shoal.dag.cost.network import Network
from shoal.dag.plan.plan import PeerId
from shoal.dag.rounds.cohorts import cohort_of
from shoal.job import Job
from shoal.proto.broker_pb2 import HostLine, RoundDone, RoundReport, RoundWork, SampleRange

HOSTS, ELEMENTS, SEED, RATIO = 5, 4000, 3, 0.05
UP = {f"p{n}": 1e4 * (n + 1) for n in range(HOSTS)}
LATENCY_S = 0.02


def links(peers: Sequence[PeerId], now: float = 0.0) -> Network:
    n = len(peers)
    up, pairs = np.array([UP[p] for p in peers]), np.full((n, n), 1e6)
    return Network(tuple(peers), np.full((n, n), LATENCY_S), pairs, up, np.full(n, np.inf))


class Hosts:
    """A round of hosts, whose replicas have plans but for `without`."""

    def __init__(self, without: Sequence[int] = ()) -> None:
        job = Job(
            model="m.py:f",
            seed=SEED,
            train={"rounds": 9, "batch": 2},
            data={
                **{"where": "peer", "kind": "arrays", "source": "x"},
                "partition": {"kind": "by-peer", "clients": HOSTS},
            },
            sync={
                **{"kind": "federated", "method": "fedavg", "per_round": HOSTS},
                **{"compression": "bcrs", "compression_options": {"least_ratio": RATIO}},
            },
        )
        assert job.rounds is not None
        cohorts = job.rounds.cohorts
        wish = SimpleNamespace(sync=job.sync, cohorts=cohorts, seed=SEED, goes_whole=False)
        spec = SimpleNamespace(client_sizes=[8] * HOSTS, update_elements=ELEMENTS)
        run = SimpleNamespace(requirements=wish, spec=spec, id="r")
        self.policy, self.lines = HostsPolicy(cast(SubmittedRun, run)), HostLines()
        work = SimpleNamespace(given={}, committed=0, total=9, chosen=None)
        versions = SimpleNamespace(round=0, liars=set(), inside=[])
        rounds = SimpleNamespace(work=work, versions=versions, homes=None, lines=self.lines)
        replicas = [self._replica(n, n not in without) for n in range(HOSTS)]
        self.run = cast(RunRecord, SimpleNamespace(replicas=replicas, of_rounds=rounds, id="r"))
        self.view = RoundView(self.run, cast(Any, None), links, Disputes())
        order = cohort_of(HOSTS, SEED, 0, range(HOSTS))
        for place, client in enumerate(order):
            work.given[client] = RoundWork(
                replica=client, cohort=[SampleRange(first=place, count=1)], kept=[200], weights=[1]
            )

    @staticmethod
    def _replica(number: int, is_planned: bool) -> Any:
        stage = SimpleNamespace(holders=(f"p{number}",), elements=ELEMENTS)
        outline = SimpleNamespace(stages=[stage], tied=())
        plan = SimpleNamespace(stages=[stage], outline=outline, microbatch_size=1)
        return SimpleNamespace(
            **{"number": number, "client": number, "term": 1, "committed": 0},
            **{"peers": (f"p{number}",), "plan": plan if is_planned else None},
        )

    def kept(self) -> dict[int, int]:
        """By host, how many numbers it is to send."""
        work = self.policy.work(self.run, range(HOSTS), 0.0, (), links)
        return {w.replica: w.kept[0] for w in work}

    def shown(self, seconds: dict[int, float], took_s: float = 1e3, sent: int = 10**9) -> Any:
        """What uploads that took so long have shown, by host."""
        for n, upload_s in seconds.items():
            report = RoundReport(upload_s=upload_s, upload_bytes=sent)
            self.view.made[n] = {PeerId(f"p{n}"): report}
        found = self.policy.lines(self.view, sorted(seconds), took_s, 0.0)
        return {line.replica: line for line in found}


def test_a_host_that_is_planned_anew_has_no_line_and_others_keep_their_own() -> None:
    hosts = Hosts(without=[1])
    attempt = hosts.policy.attempt(hosts.view, range(HOSTS), (), 0.0)
    [group] = attempt.groups
    assert group.lines == {n: UP[f"p{n}"] for n in range(HOSTS) if n != 1}
    assert len({*hosts.kept().values()}) == 1, "nobody knows by what line one of them sends"
    assert len({*Hosts().kept().values()}) == HOSTS


def test_lines_and_numbers_are_by_what_uploads_have_shown() -> None:
    hosts, update = Hosts(), Update(ELEMENTS)
    whole = int(update.bytes(np.array([200]))[0])
    there_s = 2 * LATENCY_S
    found = hosts.shown({n: there_s + whole / 5e3 for n in range(HOSTS)})
    assert {n: line.update_bytes_per_s for n, line in found.items()} == {
        n: pytest.approx(5e3) for n in range(HOSTS)
    }
    hosts.lines.done(RoundDone(lines=found.values()))
    [group] = hosts.policy.attempt(hosts.view, range(HOSTS), (), 0.0).groups
    assert group.lines == {n: pytest.approx(5e3) for n in range(HOSTS)}
    assert group.together
    assert len({*hosts.kept().values()}) == 1, "all lines are alike"


def test_what_a_host_says_of_its_upload_is_held_to_what_the_broker_has_seen() -> None:
    hosts, update = Hosts(), Update(ELEMENTS)
    whole = int(update.bytes(np.array([200]))[0])
    seconds = {0: 1e9, 1: 0.0, 2: 0.05, 3: 20.0}
    found = hosts.shown(seconds, took_s=50.0)
    assert found.keys() == {0, 3}, "1 tells nothing, and 2 took no longer than its latency"
    assert found[0].update_bytes_per_s == pytest.approx(whole / (50.0 - 2 * LATENCY_S))
    for line in found.values():
        assert line.bytes_per_s == line.update_bytes_per_s, "it has sent no more than its update"
    assert not hosts.shown(seconds, sent=0), "nothing went"


def test_a_lie_about_an_upload_does_what_the_same_lie_of_a_probe_does() -> None:
    def said(peers: Sequence[PeerId], now: float = 0.0) -> Network:
        found = links(peers, now)
        found.up[peers.index(PeerId("p4"))] = found.bandwidth[peers.index(PeerId("p4"))] = rate
        return found

    for rate in (1.0, 1e12):
        hosts, others = Hosts(), range(HOSTS - 1)
        work = hosts.policy.work(hosts.run, range(HOSTS), 0.0, (), said)
        probed = {w.replica: w.kept[0] for w in work}
        lie = HostLine(replica=4, term=1, bytes_per_s=rate, update_bytes_per_s=rate)
        lie.latency_s = LATENCY_S
        hosts.lines.done(RoundDone(lines=[lie]))
        uploaded = hosts.kept()
        assert [uploaded[n] for n in others] == [probed[n] for n in others]
