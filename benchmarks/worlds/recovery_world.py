"""Worlds in which holders fail and come back, played: part of benchmarks/worlds/recovery.py."""

from __future__ import annotations

import hashlib
import math
import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import torch

from shoal.broker.options import BrokerOptions
from shoal.dag.capture.capture import capture
from shoal.dag.cost.speed import Speeds
from shoal.dag.ir.convert import graph_to_bytes
from shoal.dag.ir.graph import Graph
from shoal.dag.plan.plan import PeerId, Plan, StageSlot, Visit
from shoal.dag.schedule.convert_plan import plan_to_proto
from shoal.examples.gpt import gpt
from shoal.job import Job
from shoal.net.links.outbox import PIECES
from shoal.net.transports.memory import steady
from shoal.peer.data.manifest import Column, Manifest, Shard
from shoal.proto import broker_pb2, common_pb2
from shoal.sim.ghost.device import GhostDevice, Ghosts
from shoal.sim.ghost.hashes import expected
from shoal.sim.virtual.world import PeerSpec, World

__all__ = ["STAGES", "Case", "Found", "graph_of", "played"]

STAGES = 6


@dataclass(frozen=True, kw_only=True)
class Case:
    """One set-up. `fails`: seconds until the next failure of somebody who holds a stage, by chance
    (a mean for each holder) or at fixed intervals."""

    layers: int
    width: int
    length: int
    microbatches: int
    pool: int
    bytes_per_s: float
    latency_s: float
    flops_per_s: float
    recovery: dict[str, object] = field(default_factory=dict)
    mean_s: float = math.inf
    """Between failures of one holder, by chance."""
    every_s: float = math.inf
    """Between failures of some holder."""
    back_s: float = 3600.0
    heartbeat_s: float = 2.0
    rung: str = ""
    """"neighbour" or "neighbour+": both ends are held twice, and nobody keeps snapshots."""
    seed: int = 0


@dataclass(frozen=True)
class Found:
    """What came of a case. Times in seconds of the world's clock; `losses` of holders."""

    steps: int
    seconds: float
    losses: int
    recoveries: tuple[tuple[float, float, float], ...]
    """From the failure: until it was noticed, until all were built, until a new step was done."""
    step_s: tuple[float, ...]
    cuts: int
    """Plans with other stages than the first one's."""

    @property
    def mean_step_s(self) -> float:
        return self.seconds / max(1, self.steps)


@cache
def graph_of(layers: int, width: int, length: int) -> Graph:
    with torch.device("meta"):
        module = gpt(layers, width, max(1, width // 32), length, 0.0)
    text = torch.zeros(2, length, dtype=torch.int64, device="meta")
    return capture(module, {"x": text, "y": text}).graph


def plan_of(graph: Graph, layers: int, microbatches: int) -> Plan:
    """Equal numbers of blocks in each stage, one holder each."""
    first: dict[int, int] = {}
    for i, op in enumerate(graph.operators):
        if op.module.startswith("blocks."):
            first.setdefault(int(op.module.split(".")[1]), i)
    starts = [0, *(first[layers * k // STAGES] for k in range(1, STAGES)), len(graph.operators)]
    holders = [PeerId(f"p{k}") for k in range(STAGES)]
    return Plan(
        stages=tuple(StageSlot(starts[k], starts[k + 1], (holders[k],)) for k in range(STAGES)),
        routes=(tuple(Visit(k, p) for k, p in enumerate(holders)),) * microbatches,
        microbatch_size=1,
    )


def ends_twice(graph: Graph, layers: int, microbatches: int, swaps: bool) -> Plan:
    """The same blocks, with the embedding and what stands behind the blocks as stages of their own,
    which the first two and the last two holders have."""
    inner = plan_of(graph, layers, microbatches)
    named = [i for i, op in enumerate(graph.operators) if op.module.startswith("blocks.")]
    bounds = [0, named[0], *(s.start for s in inner.stages[1:]), named[-1] + 1]
    bounds.append(len(graph.operators))
    p = [s.holders[0] for s in inner.stages]
    held = [(p[0], p[1]), *((q,) for q in p), (p[-1], p[-2])]
    slots = [StageSlot(a, b, h) for a, b, h in zip(bounds, bounds[1:], held, strict=False)]
    last = len(slots) - 1
    order = [*range(len(slots))]
    if swaps:
        order[1], order[2], order[last - 2], order[last - 1] = 2, 1, last - 1, last - 2
    routes = (
        tuple(Visit(k, held[k][0]) for k in range(len(slots))),
        tuple(Visit(k, held[k][-1]) for k in order),
    )
    dealt = tuple(routes[m % 2] for m in range(microbatches))
    return Plan(tuple(slots), dealt, microbatch_size=1)


def card(flops_per_s: float) -> Speeds:
    """A device of so many FLOP/s in products; its memory is that of a T4."""
    fast = dict.fromkeys(("product", "convolution", "attention"), flops_per_s)
    return Speeds(**fast, memory=2.5e11, special=1e11, call_s=1e-5)


class Played:
    """A case in a world of its own."""

    def __init__(self, case: Case, folder: Path, steps: int) -> None:
        self.case, self.steps = case, steps
        graph, blobs = graph_of(case.layers, case.width, case.length), dict[str, bytes]()

        def blob(data: bytes) -> common_pb2.BlobRef:
            name = hashlib.sha256(data).hexdigest()
            blobs[name] = data
            return common_pb2.BlobRef(hash=name, size_bytes=len(data))

        n, plan = case.microbatches, plan_of(graph, case.layers, case.microbatches)
        if case.rung:
            plan = ends_twice(graph, case.layers, n, swaps=case.rung == "neighbour+")
        train: dict[str, object] = {
            "steps": steps,
            "batch": n,
            "microbatch": 1,
            "lr": 1e-3,
            "eval_every": 0,
        }
        train |= {"schedule": "constant", "warmup": 0}
        model = {"factory": "shoal.examples.gpt:gpt", "args": {"layers": case.layers}}
        data = {"kind": "text", "length": case.length}
        self.job = Job.from_table(
            {"version": 1, "model": model, "data": data, "train": train, "recovery": case.recovery}
        )
        nothing = Shard("text", 10**6, 10**6, "0" * 64)  # nobody fetches it
        manifest = Manifest(
            "text", (Column("text", "uint8"),), (nothing,), 10**6, 0, length=case.length
        )
        self.spec = broker_pb2.RunSpec(
            version=1,
            name="recovery",
            job=self.job.to_json(),
            graph=blob(graph_to_bytes(graph)),
            data=blob(manifest.to_json().encode()),
            microbatches=n,
            microbatch_size=1,
            steps=steps,
            plan=plan_to_proto(plan),
        )
        names = [f"p{i}" for i in range(STAGES + case.pool)]
        self.specs = {
            name: PeerSpec(name=name, hardware=card(case.flops_per_s), memory_bytes=64 << 30)
            for name in names
        }
        beat = case.heartbeat_s
        self.world = World(
            list(self.specs.values()),
            blobs=blobs,
            folder=folder,
            carry=steady(case.latency_s, case.bytes_per_s),
            control_latency_s=case.latency_s,
            broker_options=BrokerOptions(
                heartbeat_s=beat, lease_s=5 * beat, step_floor_s=1e6, first_step_s=1e6, probe_s=0.0
            ),
            device=_device(),
            log=False,
        )
        self._rng = random.Random(f"failures {case.seed}")
        self._failed_at: list[float] = []

    def play(self, limit_s: float) -> Found:
        """Lets it run for so long, from its first step on, or to its last one."""
        world, case = self.world, self.case
        self.run = run = world.submit(self.spec)
        world.until(lambda: any(e.HasField("step") for e in world.events(run)))
        began, end = world.now, world.now + limit_s
        if case.every_s < math.inf:
            self._again(case.every_s, self._fail_one)
        if case.mean_s < math.inf:
            self._again(self._rng.expovariate(STAGES / case.mean_s), self._fail_by_chance)
        over = world.broker.ended
        world.until(lambda: run in over or world.now >= end, limit_s=limit_s + 1e7)
        events = world.events(run)
        done = [e for e in events if e.HasField("step")]
        if not case.rung:
            bound = graph_of(case.layers, case.width, case.length).bind(1)
            wanted = expected(bound, self.job.seed, len(done), case.microbatches).losses
            assert [e.step.outcome.loss for e in done] == wanted, "not the losses of the plain loop"
        last = done[-1].at_s if run in over else end
        cuts = [[s.stop for s in e.plan.stages] for e in events if e.HasField("plan")]
        assert run not in over or over[run].phase == broker_pb2.DONE, over[run].reason.text
        return Found(
            len(done) - 1,
            last - began,
            len(self._failed_at),
            self._parts(events),
            tuple(e.step.seconds for e in done[1:]),
            sum(cut != cuts[0] for cut in cuts),
        )

    def _again(self, after_s: float, what: Callable[[], None]) -> None:
        self.world.after(after_s, what)

    def _holders(self) -> list[str]:
        replica = self.world.broker.machine.replica(self.run)
        holders = replica.record.peers if replica else ()
        return [p for p in holders if self.world.peers[p].alive]

    def _fail_one(self) -> None:
        self._fail(self._rng.choice(self._holders()))
        self._again(self.case.every_s, self._fail_one)

    def _fail_by_chance(self) -> None:
        """Of all holders together: each fails on its own at the same rate."""
        if here := self._holders():
            self._fail(self._rng.choice(here))
        mean_s = self.case.mean_s / STAGES
        self._again(self._rng.expovariate(1 / mean_s), self._fail_by_chance)

    def _fail(self, name: str) -> None:
        world = self.world
        if self.run in world.broker.ended:
            return
        self._failed_at.append(world.now)
        world.kill(name)
        world.after(self.case.back_s, lambda: world.join(self.specs[name]))

    def _parts(self, events: list[broker_pb2.RunEvent]) -> tuple[tuple[float, float, float], ...]:
        found = []
        for at in self._failed_at:
            later = [e for e in events if e.at_s >= at]
            building = next((e.at_s for e in later if e.state.phase == broker_pb2.BUILDING), None)
            running = next((e.at_s for e in later if e.state.phase == broker_pb2.RUNNING), None)
            step = next(
                (e.at_s for e in later if e.HasField("step") and running and e.at_s > running), None
            )
            if building is not None and running is not None and step is not None:
                found.append((building - at, running - at, step - at))
        return tuple(found)


def _device() -> Callable[[PeerSpec], GhostDevice]:
    """Ghosts whose frames leave in pieces as long as those of real peers: snapshots share links."""
    ghosts = Ghosts()

    def made(spec: PeerSpec) -> GhostDevice:
        device = ghosts(spec)
        device.pieces = PIECES
        return device

    return made


def played(case: Case, steps: int = 10**6, limit_s: float = math.inf) -> Found:
    with tempfile.TemporaryDirectory() as folder:
        return Played(case, Path(folder), steps).play(limit_s)
