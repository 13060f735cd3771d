"""Ghosts of several replicas: what they make in rounds is what a plain loop makes of the rounds
that were committed, whatever is lost."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from shoal.broker import events as b
from shoal.job import Job
from shoal.peer.core.snapshots import SnapshotStore
from shoal.proto.broker_pb2 import DONE, RoundDone, RoundPlan, RunEvent
from shoal.sim.ghost import device
from shoal.sim.ghost.device import Ghosts
from shoal.sim.ghost.hashes import Words
from shoal.sim.ghost.round_hashes import ExpectedRounds, expected_gossip, expected_rounds
from shoal.sim.ghost.rounds import HashAlgebra, HashSum
from shoal.sim.monitor.monitor import Monitor
from shoal.sim.plain.round_log import committed_rounds
from shoal.sim.virtual import peer_shell
from shoal.sim.virtual.clock import Observed
from shoal.sim.virtual.world import PeerSpec, World
from shoal.tests.sim.played import read_export

HALF = 560
"""Kilobytes of a peer: too few for the whole model, enough for half of it."""
THREE = ((HALF, HALF), (420, 300), (HALF, HALF))
"""Of each peer, by place: two of them are a replica, and one is cut elsewhere than the others."""


def job(
    replicas: int,
    codec: str = "none",
    method: str = "diloco",
    *,
    gossip: str = "",
    every: int = 3,
    **options: int,
) -> Job:
    sync = {"kind": "gossip", "method": gossip} if gossip else {"kind": "local", "method": method}
    return Job.from_table(
        {
            "version": 1,
            "name": f"ghost-rounds-{replicas}-{codec}-{gossip or method}",
            "model": {
                "factory": "shoal.examples.gpt:gpt",
                "args": {"layers": 2, "width": 16, "heads": 2, "length": 16, "dropout": 0.0},
            },
            "data": {"kind": "text", "length": 16, "holdout": 0.0},
            "plan": {"replicas": replicas, "stages": 2, "pipelines": 1, "replan": not gossip},
            "sync": sync | {"every": every, "options": options},
            "codec": {"sync": codec},
            "train": {"steps": 9, "batch": 4 * replicas, "microbatch": 2, "lr": 1e-2},
        }
    )


class Played:
    """A world whose run has begun; `memory`: of the peers in each place, in kilobytes."""

    def __init__(
        self, lab: Any, memory: Sequence[Sequence[int]], *, ghosts: bool = True, **more: Any
    ) -> None:
        peers = [
            PeerSpec(name=f"p{i}{k}", place=f"s{i}", memory_bytes=kb * 1000, **more)
            for i, there in enumerate(memory)
            for k, kb in enumerate(there)
        ]
        self.lab = lab
        self.world: World = lab.world(peers, device=Ghosts() if ghosts else None, log=False)
        self.records, self._dies = 0, dict[int, str]()
        self.world.observe = self._observe
        self.monitor = Monitor(self.world)
        self.world.until(lambda: len(self.world.broker.machine.members.pool) == len(peers))
        self.run = self.world.submit(lab.spec)

    def kill(self, name: str, at: int) -> None:
        """When so many records were seen."""
        self._dies[at] = name

    def _observe(self, _: Observed) -> None:
        self.records += 1
        if (name := self._dies.get(self.records)) is not None:
            self.world.after(0.0, lambda: self.world.kill(name))

    def finish(self) -> list[RunEvent]:
        events = self.monitor.finish(self.run, 3600.0)
        end = self.world.broker.ended[self.run]
        assert end.phase == DONE, end.reason.text
        return events

    @property
    def replicas(self) -> Sequence[Any]:
        return self.world.broker.machine.runs[b.RunId(self.run)].record.replicas

    def expected(self, events: Sequence[RunEvent]) -> ExpectedRounds:
        train = self.lab.job.train
        rounds = committed_rounds(events, microbatches=train.microbatches, microbatch_size=1)
        graph = self.lab.graph.bind(train.microbatch_size)
        fragments = self.lab.job.training.rounds.fragments
        return expected_rounds(
            graph, self.lab.job.seed, rounds, train.microbatches, fragments=fragments
        )

    def found(self, events: Sequence[RunEvent]) -> ExpectedRounds:
        [files] = [e.weights.files for e in events if e.HasField("weights")]
        weights = read_export(self.world.blobs[f.blob.hash] for f in files)
        return ExpectedRounds([d.hash for d in done(events)], weights)


def done(events: Sequence[RunEvent]) -> list[RoundDone]:
    return [e.round_done for e in events if e.HasField("round_done")]


def test_versions_are_those_of_a_plain_loop_whatever_the_cuts(laboratory: Any) -> None:
    played = Played(laboratory(job(3)), THREE)
    events = played.finish()
    cuts = {tuple(s.start for s in r.plan.stages) for r in played.replicas}
    assert len(cuts) == 2
    assert [len(d.members) for d in done(events)] == [3, 3, 3]
    assert played.found(events) == played.expected(events)


def test_steps_that_go_on_beside_the_exchange_are_those_of_a_plain_loop(laboratory: Any) -> None:
    played = Played(laboratory(job(3, overlap=2)), THREE)
    events = played.finish()
    assert [len(d.members) for d in done(events)] == [3, 3, 3]
    assert played.found(events) == played.expected(events)


@pytest.mark.parametrize("overlap", [0, 1])
def test_fragments_are_those_of_a_plain_loop(laboratory: Any, overlap: int) -> None:
    """The last round is one of the whole model."""
    options = {"every": 4, "fragments": 2, "overlap": overlap}
    played = Played(laboratory(job(3, method="streaming-diloco", **options)), THREE)
    events = played.finish()
    assert played.found(events) == played.expected(events)
    rounds = committed_rounds(events, microbatches=6, microbatch_size=1)
    assert [r.fragment for r in rounds] == [1, 2, 1, 2, 0]


def test_ten_replicas_are_formed_at_once(laboratory: Any) -> None:
    """The world has the plans of all of them when the first peer builds."""
    played = Played(laboratory(job(10)), ((HALF, HALF),) * 10)
    events = played.finish()
    assert [len(d.members) for d in done(events)] == [10, 10, 10]
    assert played.found(events) == played.expected(events)


@pytest.mark.parametrize(
    ("codec", "method"), [("none", "diloco"), ("int8", "diloco"), ("none", "sparse-loco")]
)
def test_rounds_take_the_bytes_and_the_time_of_real_tensors(
    laboratory: Any, codec: str, method: str
) -> None:
    lab = laboratory(job(2, codec, method))
    real, ghost = (done(Played(lab, THREE[::2], ghosts=g).finish()) for g in (False, True))
    assert [d.sent_bytes for d in ghost] == [d.sent_bytes for d in real]
    # A snapshot's names and headers have no weight here, and in each round of a fifth of a second
    # there are two snapshots.
    assert [d.seconds for d in ghost] == pytest.approx([d.seconds for d in real], rel=5e-3)


def test_buffers_are_in_versions(laboratory: Any) -> None:
    table = json.loads(job(2).to_json()) | {"name": "ghost-buffers"}
    normed = table | {"model": {"factory": "shoal.tests.sim.rounds.normed:net"}}
    played = Played(laboratory(Job.from_table(normed)), THREE[::2])
    events = played.finish()
    assert played.found(events) == played.expected(events)


@pytest.mark.parametrize("method", ["saps", pytest.param("ring", marks=pytest.mark.slow)])
def test_pairs_come_to_what_a_plain_loop_does(laboratory: Any, method: str) -> None:
    """With the bytes of real tensors: of saps those of a mask."""
    lab = laboratory(job(3, gossip=method))
    played = Played(lab, THREE)
    events = played.finish()
    train, graph = lab.job.train, lab.graph.bind(lab.job.train.microbatch_size)
    rounds = committed_rounds(
        events, microbatches=train.microbatches, microbatch_size=1, gossip=True
    )
    assert [len(r.groups) for r in rounds] == [2, 2, 1]
    assert played.found(events) == expected_gossip(graph, lab.job.seed, rounds, train.microbatches)
    real = done(Played(lab, THREE, ghosts=False).finish())
    assert [d.sent_bytes for d in done(events)] == [d.sent_bytes for d in real]


def left_out(words: Words) -> Words:
    return np.zeros_like(words)


def counted_twice(words: Words) -> Words:
    return words * np.uint64(2)


def of_another_piece(words: Words) -> Words:
    return words[::-1]


@pytest.mark.parametrize("mistake", [left_out, counted_twice, of_another_piece])
def test_a_mistake_in_a_sum_changes_the_version(
    laboratory: Any, monkeypatch: pytest.MonkeyPatch, mistake: Callable[[Words], Words]
) -> None:
    """Once, in the first contribution of several pieces that anybody adds up in the second round;
    all apply what is made of it."""
    begin, add, sums, wrong = HashAlgebra.sum, HashSum.add, list[HashSum](), list[HashSum]()

    def second(algebra: HashAlgebra, part: Any, plan: RoundPlan) -> HashSum:
        found = begin(algebra, part, plan)
        sums.extend([found] * (plan.round == 1))
        return found

    def meddled(total: HashSum, values: Any, weight: int) -> None:
        if total in sums and len(values) > 1 and not wrong:
            wrong.append(total)
            values = mistake(values)
        add(total, values, weight)

    played = Played(laboratory(job(3)), THREE)
    monkeypatch.setattr(HashAlgebra, "sum", second)
    monkeypatch.setattr(HashSum, "add", meddled)
    events = played.finish()
    found, wanted = played.found(events), played.expected(events)
    assert wrong
    assert found.versions[0] == wanted.versions[0]
    assert not set(found.versions[1:]) & set(wanted.versions[1:])


@pytest.mark.usefixtures("plans_once")
def test_a_version_counts_what_was_committed_whoever_dies(laboratory: Any) -> None:
    """At moments all over the run, with somebody in the pool who may take the part."""
    lab, memory = laboratory(job(3)), [THREE[0], THREE[1], (*THREE[2], HALF)]
    quiet = Played(lab, memory)
    quiet.finish()
    held, moments = [p for r in quiet.replicas for p in r.plan.peers if p[1] != "1"], 5
    for i in range(1, moments):
        played = Played(lab, memory)
        played.kill(held[i % len(held)], quiet.records * i // moments)
        events = played.finish()
        assert played.found(events) == played.expected(events), i


def test_a_snapshot_has_parts_as_large_as_one_may_be(
    laboratory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a link that takes no larger ones never carries it."""
    sent = list[int]()
    put = SnapshotStore.put

    def seen(self: SnapshotStore, snapshot: Any, parts: Sequence[memoryview]) -> None:
        sent.append(len(parts))
        put(self, snapshot, parts)

    monkeypatch.setattr(SnapshotStore, "put", seen)
    for room in (device, peer_shell):
        monkeypatch.setattr(room, "PART_BYTES", 50_000)
    memory = [THREE[0], (*THREE[2], HALF)]
    quiet = Played(laboratory(job(2)), memory)
    quiet.finish()
    assert max(sent) > 2
    played = Played(laboratory(job(2)), memory)
    held = quiet.replicas[1].plan.peers
    played.kill(held[0], quiet.records // 2)
    events = played.finish()
    assert played.found(events) == played.expected(events)


@pytest.mark.slow
def test_forty_peers_in_five_replicas(laboratory: Any) -> None:
    lab = laboratory(job(5))
    played = Played(lab, [[HALF] * 8] * 5)
    played.kill("p30", 4000)
    events = played.finish()
    assert played.found(events) == played.expected(events)
