"""A run on devices alone: no machine, no network, every transfer through the codec."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch

from shoal.dag.capture.capture import capture
from shoal.dag.plan.cut import bare_stages, outline
from shoal.dag.plan.plan import PeerId, Plan, StageSlot, Visit
from shoal.dag.plan.plan_slice import PlanSlice
from shoal.dag.schedule.flow import Role
from shoal.dag.schedule.schedule import listed
from shoal.dag.schedule.slices import PlanSlices
from shoal.dag.transforms.vocabulary import planned_graph
from shoal.job import Train, Training
from shoal.net.links.frame import Arrived, FrameKey
from shoal.peer.compute.device import TorchDevice
from shoal.peer.compute.order import BuildOrder
from shoal.peer.data import Reader
from shoal.peer.data.sources import resolve
from shoal.sim.plain import oracle
from shoal.tests.peer.scripted import machine, member, running  # noqa: F401  # fixtures


def arrived(key, payload):
    """What the other side of a link gets: other memory, the same bytes."""
    data = memoryview(bytearray(b"".join(payload.buffers)))
    return Arrived(
        key, payload.codec, payload.codec_header, payload.spec, data, absent=payload.absent
    )


@dataclass
class World:
    """Devices for a plan, driven in a random order that keeps each peer's list."""

    plan: Plan
    devices: dict[PeerId, TorchDevice]
    built: dict
    rng: random.Random
    outcomes: list = field(default_factory=list)
    evaluations: list = field(default_factory=list)
    frames: list = field(default_factory=list)
    starting: dict = field(default_factory=dict)

    def run(self, steps):
        for step in range(steps):
            for device in self.devices.values():
                device.prefetch(step)
            self._pass(step, {p: b.flow.actions(p) for p, b in self.built.items()})
        return [o.loss for o in self.outcomes]

    def evaluate(self, step):
        self._pass(step, {p: b.flow.evaluation_actions(p) for p, b in self.built.items()})
        return self.evaluations[-1]

    def _pass(self, step, lists):
        at, there = dict.fromkeys(lists, 0), set()
        while any(at[p] < len(lists[p]) for p in lists):
            ready = []
            for peer, actions in lists.items():
                if at[peer] < len(actions):
                    takes = self.built[peer].flow.takes(peer, actions[at[peer]])
                    if all(t in there for t in takes):
                        ready.append(peer)
            assert ready, f"nobody can go on: {at}"
            peer = self.rng.choice(ready)
            there |= self._one(step, peer, lists[peer][at[peer]])
            at[peer] += 1
        for device in self.devices.values():
            assert "Store 0 values" in repr(device), f"left over: {device!r}"

    def _one(self, step, peer, action):
        device, flow = self.devices[peer], self.built[peer].flow
        result = device.compute(step, action)
        if result.outcome:
            self.outcomes.append(result.outcome)
        if result.evaluation:
            self.evaluations.append(result.evaluation)
        for t in flow.takes(peer, action):
            device.release(key_of(step, t))
        gives = flow.gives(peer, action)
        for t in gives:
            if not t.is_local:
                key = key_of(step, t)
                self.frames.append((key, arrived(key, device.payload(key))))
                self.devices[t.destination].accept(self.frames[-1][1])
        return set(gives)

    def weights(self):
        from safetensors.torch import load

        found = {}
        for device in self.devices.values():
            part = load(bytes(device.export()))
            assert not set(part) & set(found), "exported twice"
            found |= part
        found = self.starting | found
        graph = next(iter(self.devices.values()))._now.graph
        return found | {n: found[p.name] for p in graph.parameters for n in p.tied}


def key_of(step, t):
    return FrameKey("r", 1, step, t.role, t.microbatch, t.hop, t.port, t.source, t.destination)


def plan_of(
    operators, cuts, holders, microbatches, size, *, schedule="1f1b", routes=None, held_out=0
):
    """Stages cut before the operators in `cuts`; `holders[k]` are peer names of stage k as one
    string; microbatch m visits holder (m mod count) unless `routes` says otherwise."""
    bounds = [0, *cuts, operators]
    stages = tuple(
        StageSlot(a, b, tuple(PeerId(h) for h in names.split()))
        for a, b, names in zip(bounds[:-1], bounds[1:], holders, strict=True)
    )

    def route(m):
        return tuple(
            Visit(
                k, PeerId(routes[m][k]) if routes and m in routes else s.holders[m % len(s.holders)]
            )
            for k, s in enumerate(stages)
        )

    return Plan(
        stages,
        tuple(route(m) for m in range(microbatches)),
        size,
        schedule,
        evaluation_routes=tuple(route(m) for m in range(held_out)),
    )


CAPTURED = {}
"""A capture takes seconds, a run of a tiny model does not."""


@dataclass
class Case:
    """A model with data and training, and its plain loop."""

    module: torch.nn.Module
    manifest: object
    paths: dict
    train: Train
    dtype: str = "fp32"
    seed: int = 5

    def __post_init__(self):
        read = self.reader().batch(0, 0, 2)
        # Models of tests are seeded by themselves, so equal text means equal weights.
        known = (
            self.dtype,
            type(self.module).__name__,
            repr(self.module),
            *(t.shape for t in read.values()),
        )
        if known not in CAPTURED:
            CAPTURED[known] = capture(copy.deepcopy(self.module), read, dtype=self.dtype)
        self.captured = CAPTURED[known]
        self.operators = len(self.captured.graph.operators)

    def reader(self):
        return Reader(
            self.manifest, self.paths.__getitem__, seed=self.seed,
            microbatches=self.train.microbatches,
        )  # fmt: skip

    def plan(self, cuts, holders, **options):
        if isinstance(cuts, int):
            cuts = [self.operators * i // cuts for i in range(1, cuts)]
        t = self.train
        return plan_of(self.operators, cuts, holders, t.microbatches, t.microbatch_size, **options)

    def plain(self):
        """The plain loop over all steps of the job, for its schedule counts them."""
        module = copy.deepcopy(self.module).train()
        read, size = self.reader(), self.train.microbatch_size
        seen = oracle.train(
            module, lambda s, m: read.batch(s, m, size), self.train,
            steps=self.train.steps, microbatches=self.train.microbatches,
            fp16=self.dtype == "fp16",
        )  # fmt: skip
        return seen, module

    def world(self, plan, *, device="cpu", seed=0, of=None, **changes):
        """`changes` of the order of every peer, `of[peer]` of one's."""
        devices, built = {}, {}
        for peer in plan.peers:
            order = BuildOrder(
                **{
                    "run": "r", "term": 1, "peer": peer,
                    "slice": slice_of(self.captured.graph, plan, peer),
                    "graph": self.captured.graph, "weights": self.captured.tensors,
                    "manifest": self.manifest,
                    "training": Training(
                        seed=self.seed, train=self.train, scales_loss=self.dtype == "fp16"
                    ),
                    "shard": self.paths.__getitem__, **changes,
                }
            )  # fmt: skip
            devices[peer] = TorchDevice(device)
            built[peer] = devices[peer].build(order)
        tied = {p.name: (p.name, *p.tied) for p in self.captured.graph.parameters}
        lasting = {b.name for b in self.captured.graph.buffers if not b.persistent}
        starting = {
            name: t
            for first, t in self.captured.tensors.items()
            for name in tied.get(first, (first,))
            if first not in lasting
        }
        return World(plan, devices, built, random.Random(seed), starting=starting)


def slice_of(graph, plan, peer):
    """What the broker tells a peer of a plan; a plan that is none for the graph as it is."""
    bounds = [(s.start, s.stop) for s in plan.stages]
    try:
        form = planned_graph(graph, plan)
        whole = replace(plan, outline=outline(form.bind(plan.microbatch_size), bounds))
        return PlanSlices(listed(whole, bare_stages(whole))).of(peer)
    except ValueError:
        return PlanSlice(peer, plan, (), (), (), 0)


@pytest.fixture
def make_case(tmp_path):
    """make_case(module, x=array, y=array, **train) or make_case(module, length=n, **train)."""

    def make(module, *, x=None, y=None, length=0, dtype="fp32", **train):
        train = {"steps": 6, "batch": 8, "microbatch": 2, "warmup": 1, "lr": 0.01, **train}
        if length:
            (tmp_path / "t.txt").write_bytes(bytes((i * i // 7 + i) % 250 for i in range(4000)))
            manifest, paths = resolve(
                tmp_path / "b", source=str(tmp_path / "t.txt"), length=length, holdout=0.1
            )
        else:
            np.savez(tmp_path / "d.npz", x=x, y=y)
            manifest, paths = resolve(
                tmp_path / "b", kind="arrays", source=str(tmp_path / "d.npz"), holdout=0.1
            )
        return Case(module, manifest, paths, Train(**train), dtype)

    return make


@pytest.fixture
def roles():
    return Role
