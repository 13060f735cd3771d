"""Runs of several replicas that were played in a world, and the plain loop that they are compared
with."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from safetensors.torch import load
from torch import Tensor

from shoal.broker.events import Persist
from shoal.job import Job
from shoal.job.gossip import GOSSIP
from shoal.peer.core.events import BeginRound
from shoal.peer.data.reader import Reader
from shoal.proto.broker_pb2 import DONE, RunEvent, RunSpec
from shoal.sim import round_methods, round_oracle
from shoal.sim.monitor.monitor import Monitor
from shoal.sim.round_log import committed_rounds
from shoal.sim.verify import saps_mask
from shoal.sim.virtual.clock import Observed
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
METHODS: dict[str, Callable[[], round_oracle.PlainMethod]] = {
    "diloco": lambda: round_methods.DiLoCo(0.7, 0.9),
    "average": round_methods.Average,
    "streaming-diloco": lambda: round_methods.Streaming(0.4, 0.9),
    "sparse-loco": lambda: round_methods.SparseLoCo(0.7, 0.75, round_methods.sparse_wire(0.25, 64)),
    "sparse-loco both ways": lambda: round_methods.SparseLoCo(
        1.0, 1.0, round_methods.sparse_wire(0.25, 64), round_methods.sparse_wire(0.125, 64)
    ),
    "saps": lambda: round_methods.Saps(saps_mask(0, 0.25)),
    "random-pairs": round_methods.Saps,
    "ring": round_methods.Saps,
    "noloco": round_methods.NoLoCo,
    "saps-outer": round_methods.NoLoCo,
}
LOCAL = tuple(m for m in METHODS if m not in GOSSIP)
TIES = {"sparse-loco": 0.002, "sparse-loco both ways": 0.002}
"""Of methods that choose numbers, the share of them whose turn it may be in another round: of two
that are equal but for rounding, either is the larger."""


def sync_of(method: str) -> dict[str, Any]:
    """For [sync]."""
    kind = "gossip" if method in GOSSIP else "local"
    return {"kind": kind, "method": method.split()[0], "options": OPTIONS.get(method, {})}


class Rounds:
    """Plays a job of rounds, again and again with other tables."""

    def __init__(self, laboratory: Any) -> None:
        self.lab = laboratory(Job.from_table(JOB))

    def spec(self, **tables: Any) -> RunSpec:
        """Tables in place of the job's; they must not change the model."""
        spec = RunSpec()
        spec.CopyFrom(self.lab.spec)
        job = json.loads(spec.job)
        job = Job.from_table(job | {k: job[k] | t for k, t in tables.items()})
        spec.job, spec.steps = job.to_json(), job.train.steps or 0
        spec.microbatches = job.train.microbatches
        self.train, self.seed = job.train, job.seed
        return spec

    def start(
        self,
        peers: Sequence[PeerSpec],
        deaths: Mapping[int, str] | None = None,
        also: Callable[[World, Observed], None] = lambda world, seen: None,
        device: Any = None,
        wan: Any = None,
        **tables: Any,
    ) -> tuple[World, str]:
        """The world in which it was submitted. deaths: by number of the record of the world, who
        dies there; `also` sees each, too."""
        world = self.lab.world(list(peers), log=False, device=device, wan=wan)
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

    def expected(
        self, events: Sequence[RunEvent], method: round_oracle.PlainMethod, *, gossip: bool = False
    ) -> dict[str, Tensor]:
        """The version that a plain loop comes to, of the rounds that were committed."""
        train, of = self.train, self.lab.prepared
        size, count = train.microbatch_size, train.microbatches
        reader = Reader(of.manifest, of.shards.__getitem__, seed=self.seed, microbatches=count)

        def batches(samples: Sequence[int]) -> dict[str, Tensor]:
            numbers = [s // size for s in samples[::size]]
            each = [reader.batch(g // count, g % count, size) for g in numbers]
            return {name: torch.cat([e[name] for e in each]) for name in each[0]}

        rounds = committed_rounds(events, microbatches=count, microbatch_size=size, gossip=gossip)
        module = copy.deepcopy(self.lab.module)
        round_oracle.train(module, rounds, batches, train, method, steps=train.steps or 0)
        return method.shared

    def assert_expected(
        self,
        world: World,
        run: str,
        method: str | round_oracle.PlainMethod = "diloco",
        *,
        overlaps: bool = False,
        what: object = "",
    ) -> None:
        """By the plain loop of a method, or of that which METHODS has; `overlaps`: beside steps;
        `what` was done to it, for a message."""
        end = world.broker.ended[run]
        assert end.phase == DONE, f"{what}: {end.reason.text}"
        events = world.events(run)
        [weights] = [e.weights for e in events if e.HasField("weights")]
        got: dict[str, Tensor] = {}
        for file in weights.files:
            got |= load(world.blobs[file.blob.hash])
        plain = METHODS[method]() if isinstance(method, str) else method
        wanted = self.expected(
            events,
            round_methods.Overlapped(plain) if overlaps else plain,
            gossip=method in GOSSIP,
        )
        for name, tensor in wanted.items():
            apart = ~torch.isclose(got[name], tensor, rtol=1e-3, atol=2e-5)
            ties = TIES.get(method, 0.0) if isinstance(method, str) else 0.0
            assert int(apart.sum()) <= ties * tensor.numel(), f"{what}: {name}"


def assert_same_versions(
    events: Sequence[RunEvent], wanted: Sequence[RunEvent], what: object
) -> None:
    """Bit for bit, where replicas were given the same steps: an outage is in what those took."""
    if _divided(events) == _divided(wanted):
        assert _hashes(events) == _hashes(wanted), what


def _divided(events: Sequence[RunEvent]) -> list[list[int]]:
    """Steps of each replica, by round."""
    return [[w.steps for w in e.round_begun.work] for e in events if e.HasField("round_begun")]


def _hashes(events: Sequence[RunEvent]) -> list[int]:
    return [e.round_done.hash for e in events if e.HasField("round_done")]


def sites(*flops: float) -> list[PeerSpec]:
    """A peer in each of so many places."""
    return [PeerSpec(name=f"p{i}", place=f"s{i}", flops_per_s=f) for i, f in enumerate(flops)]


def outcome(world: World, run: str) -> str:
    """What happened, in short."""
    done = [e.round_done for e in world.events(run) if e.HasField("round_done")]
    return "; ".join(f"{d.round}: {[m.replica for m in d.members]} + {len(d.joined)}" for d in done)
