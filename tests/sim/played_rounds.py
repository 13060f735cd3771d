"""Runs of several replicas that were played in a world, and the plain loop that they are compared
with."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from math import isclose
from typing import Any

import torch
from safetensors.torch import load
from torch import Tensor

from shoal.broker.events import Persist, RunId
from shoal.broker.records.version_ledger import pairs_of
from shoal.broker.round_rows import RoundRows
from shoal.job import Job
from shoal.job.rounds import GOSSIP
from shoal.peer.core.events import BeginRound
from shoal.peer.data.reader import Reader
from shoal.proto.broker_pb2 import DONE, LieProved, RoundDone, RunEvent, RunSpec
from shoal.sim.ghost.round_hashes import expected_gossip, expected_rounds
from shoal.sim.monitor.monitor import Monitor
from shoal.sim.plain.plain_rounds import beside, train_rounds
from shoal.sim.plain.round_log import committed_rounds
from shoal.sim.virtual.clock import Observed
from shoal.sim.virtual.orders import Orders
from shoal.sim.virtual.world import PeerSpec, World

JOB: dict[str, Any] = {
    "version": 1,
    "name": "rounds",
    "model": {
        "factory": "shoal.examples.gpt:gpt",
        "args": {"layers": 2, "width": 8, "heads": 1, "length": 8, "dropout": 0.0},
    },
    "data": {"kind": "text", "length": 8},
    "plan": {"replicas": 2},
    "sync": {"kind": "local", "every": 3},
    "train": {
        **{"steps": 8, "batch": 12, "microbatch": 2, "lr": 0.05, "optimizer": "sgd"},
        **{"eval_every": 3, "eval_batches": 1},
    },
}
OPTIONS = {
    "sparse-loco": {"density": 0.25, "chunk": 64, "decay": 0.75, "lr": 0.7},
    "sparse-loco both ways": {"density": 0.25, "chunk": 64, "decay": 1.0, "result_density": 0.125},
    "saps": {"keep": 0.25, "recent": 2},
    "streaming-diloco": {"bits": 32},
}
"""Of methods that are not played with those that they have by themselves; what follows a method's
name tells its rows apart."""
LOCAL = ("diloco", "average", "streaming-diloco", "sparse-loco", "sparse-loco both ways")
TIES = {"sparse-loco": 0.002}
"""Of methods that choose numbers, the share of them whose turn it may be in another round: of two
that are equal but for rounding, either is the larger."""


def sync_of(method: str) -> dict[str, Any]:
    """For [sync]."""
    kind = "gossip" if method in GOSSIP else "local"
    return {"kind": kind, "method": method.split()[0], "options": OPTIONS.get(method, {})}


class Rounds:
    """Plays a job of rounds, again and again with other tables."""

    def __init__(self, laboratory: Any, job: Mapping[str, Any] = JOB) -> None:
        self.lab = laboratory(Job.from_table(dict(job)))
        self.orders = Orders()

    def spec(self, **tables: Any) -> RunSpec:
        """Tables in place of the job's; they must not change the model."""
        spec = RunSpec()
        spec.CopyFrom(self.lab.spec)
        job = json.loads(spec.job)
        job = Job.from_table(job | {k: job[k] | t for k, t in tables.items()})
        spec.job, spec.steps = job.to_json(), job.train.steps or 0
        spec.microbatches = job.train.microbatches
        self.job = job
        return spec

    def start(
        self,
        peers: Sequence[PeerSpec],
        deaths: Mapping[int, str] | None = None,
        also: Callable[[World, Observed], None] = lambda world, seen: None,
        device: Any = None,
        wan: Any = None,
        signs: bool = False,
        seed: int = 0,
        **tables: Any,
    ) -> tuple[World, str]:
        """The world in which it was submitted. deaths: by number of the record of the world, who
        dies there; `also` sees each, too."""
        options: dict[str, Any] = {"device": device, "wan": wan, "signs": signs, "seed": seed}
        world = self.lab.world(list(peers), log=False, **options)
        world.orders = self.orders
        self.monitor = Monitor(world)
        world.until(lambda: len(world.broker.machine.members.pool) == len(peers))
        run = world.submit(self.spec(**tables))
        checks, self.records, self.begun, self.written = world.observe, 0, 0, 0

        def observe(seen: Observed) -> None:
            checks(seen)
            if run in world.broker.ended:
                return
            self.records += 1
            self.written += isinstance(seen.record, Persist)
            if not self.begun and isinstance(seen.record, BeginRound):
                self.begun = self.records
            also(world, seen)
            name = (deaths or {}).get(self.records)
            if name and world.peers[name].alive:
                world.kill(name)

        world.observe = observe
        return world, run

    def moment(self, share: float) -> int:
        """Number of a record of what was played last, behind so much of its rounds."""
        return self.begun + int((self.records - self.begun) * share)

    def moments(self, count: int, part: int, parts: int) -> range:
        """About so many records of its rounds, as far from each other; `part`: those of one of
        `parts` tests, which have other ones each."""
        every = max(1, (self.records - self.begun) // count)
        return range(self.begun + every * part // parts, self.records, every)

    def two_deaths(self, count: int, replicas: int) -> list[dict[int, str]]:
        """So many times two of its records at which somebody dies."""
        first, length = self.begun, self.records - self.begun
        return [
            {
                first + length * i // count: f"p{i % replicas}",
                first + length * (i * 7 % count) // count + 1: f"p{(i + 1) % replicas}",
            }
            for i in range(count)
        ]

    def broker_dies(self, number: int) -> Callable[[World, Observed], None]:
        """It does behind so many records of its journal, and is away for a second."""

        def die(world: World, seen: Observed) -> None:
            if isinstance(seen.record, Persist) and self.written == number:
                world.restart_broker(1.0)

        return die

    def play(self, peers: Sequence[PeerSpec], *args: Any, **tables: Any) -> tuple[World, str]:
        """As `start`; to the end."""
        world, run = self.start(peers, *args, **tables)
        self.monitor.finish(run, 3600.0)
        return world, run

    def assert_versions(self, world: World, run: str) -> None:
        """The versions that ghosts committed are those of the plain loop of hashes."""
        events, job, count = world.events(run), self.job, self.job.train.microbatches
        gossip, rounds = job.sync.kind == "gossip", job.training.rounds
        assert rounds is not None
        graph, clips = self.lab.graph.bind(job.train.microbatch_size), job.train.clip > 0
        log = committed_rounds(events, microbatches=count, microbatch_size=1, gossip=gossip)
        if gossip:
            wanted = expected_gossip(graph, job.seed, log, count, clips=clips)
        else:
            parts = rounds.fragments
            wanted = expected_rounds(graph, job.seed, log, count, fragments=parts, clips=clips)
        made = [e.round_done.hash for e in events if e.HasField("round_done")]
        assert made == wanted.versions

    def expected(self, world: World, run: str) -> tuple[Any, dict[str, Tensor]]:
        """What a plain loop comes to that is fed with what was committed, and what was exported."""
        events, of = world.events(run), self.lab.prepared
        spec = world.broker.machine.runs[RunId(run)].submitted.spec
        job = Job.from_json(spec.job)
        count = job.train.microbatches
        wanted = train_rounds(
            copy.deepcopy(self.lab.module),
            job,
            events,
            Reader(of.manifest, of.shards.__getitem__, seed=job.seed, microbatches=count),
            microbatches=count,
            microbatch_size=job.train.microbatch_size,
            steps=spec.steps,
        )
        got: dict[str, Tensor] = {}
        [weights] = [e.weights for e in events if e.HasField("weights")]
        for file in weights.files:
            got |= load(world.blobs[file.blob.hash])
        return wanted, got

    def assert_steps(self, world: World, run: str, wanted: Any, what: object = "") -> None:
        """Every local step is that of the plain loop."""
        events, rows = world.events(run), RoundRows()
        for event in events:
            rows.see(event)
        train = self.job.train
        size, count = train.microbatch_size, train.microbatches
        log = committed_rounds(events, microbatches=count, microbatch_size=size)
        for row in rows.rows:
            for m in (m for m in row.members if m.replica not in log[row.round].gone):
                assert len(m.losses) == m.steps, f"{what}: {m.replica} has steps without losses"
        for n, k, j, loss, other in beside(rows.rows, wanted):
            assert isclose(loss, other, rel_tol=1e-3), f"{what}: step {j} of {k} in round {n}"

    def assert_expected(self, world: World, run: str, *, what: object = "") -> None:
        """Every local step and the version are those of the plain loop that is fed with what was
        committed; `what` was done to it, for a message."""
        end = world.broker.ended[run]
        assert end.phase == DONE, f"{what}: {end.reason.text}"
        wanted, got = self.expected(world, run)
        self.assert_steps(world, run, wanted, what)
        for name, tensor in wanted.shared.items():
            apart = ~torch.isclose(got[name], tensor, rtol=1e-3, atol=2e-5)
            ties = TIES.get(self.job.sync.chosen, 0.0)
            assert int(apart.sum()) <= ties * tensor.numel(), f"{what}: {name}"


def assert_same_versions(
    events: Sequence[RunEvent], wanted: Sequence[RunEvent], what: object
) -> None:
    """Bit for bit, where replicas were given the same steps and met in the same pairs: an outage is
    in what steps took, and in what links were measured to carry."""
    if _divided(events) == _divided(wanted) and _met(events) == _met(wanted):
        assert _hashes(events) == _hashes(wanted), what


def _divided(events: Sequence[RunEvent]) -> list[list[int]]:
    """Steps of each replica, by round."""
    return [[w.steps for w in e.round_begun.work] for e in events if e.HasField("round_begun")]


def _met(events: Sequence[RunEvent]) -> list[tuple[tuple[int, int], ...]]:
    """Pairs of gossip, by round."""
    return [pairs_of(e.round_done.members) for e in events if e.HasField("round_done")]


def _hashes(events: Sequence[RunEvent]) -> list[int]:
    return [e.round_done.hash for e in events if e.HasField("round_done")]


def sites(*flops: float) -> list[PeerSpec]:
    """A peer in each of so many places."""
    return [PeerSpec(name=f"p{i}", place=f"s{i}", flops_per_s=f) for i, f in enumerate(flops)]


def outcome(world: World, run: str) -> str:
    """What happened, in short."""
    done = [e.round_done for e in world.events(run) if e.HasField("round_done")]
    return "; ".join(f"{d.round}: {[m.replica for m in d.members]} + {len(d.joined)}" for d in done)


def done_of(world: World, run: str) -> list[RoundDone]:
    """Return the events of committed rounds, in order."""
    return [e.round_done for e in world.events(run) if e.HasField("round_done")]


def inside_of(world: World, run: str) -> list[list[int]]:
    """Return the replicas in each committed version, in order."""
    return [[m.replica for m in d.members] for d in done_of(world, run)]


def lies_of(world: World, run: str) -> list[LieProved]:
    """Return the events of lies that are proved, in order."""
    return [e.lie for e in world.events(run) if e.HasField("lie")]
