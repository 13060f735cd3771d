"""Replicas on devices alone: rounds wired by hand, every frame through the codec."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shoal.dag.plan.action import Action, Kind
from shoal.dag.plan.cut import cut
from shoal.dag.rounds.vector import RunVector
from shoal.dag.rounds.wiring import GIVE, RESULT, VERSION, port_of, wiring
from shoal.dag.schedule.flow import Role
from shoal.job import Training
from shoal.job.rounds import RoundSettings
from shoal.net.links.frame import FrameKey
from shoal.peer.core.rounds.round_exchange import segments_of
from shoal.proto import broker_pb2 as pb
from shoal.tests.peer.compute.test_device import digits
from shoal.tests.peer.conftest import arrived, plan_of

PLAIN = {
    "optimizer": "sgd", "momentum": 0.9, "schedule": "constant", "warmup": 0, "clip": 0.0,
    "weight_decay": 0.0, "lr": 0.05, "steps": 12,
}  # fmt: skip
"""Training that a loop of four lines does."""


class Net(nn.Module):
    """Layers of all sizes, a batch norm, and a parameter that is read at both ends."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 16)
        self.norm = nn.BatchNorm1d(16)
        self.middle = nn.Linear(16, 16)
        self.last = nn.Linear(16, 4)
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x, y):
        h = torch.tanh(self.norm(self.first(x) * self.scale))
        h = torch.tanh(self.middle(h))
        return F.cross_entropy(self.last(h * self.scale), y)


@dataclass
class Replica:
    """A replica of a run: its world, its peers by name `NAME.STAGE`, and how it is cut."""

    name: str
    case: object
    world: object
    vector: RunVector
    stages: tuple
    weight: int = 1

    def holder(self, element):
        """Who has this element of the vector as its own."""
        for stage, slot in zip(self.stages, self.world.plan.stages, strict=True):
            a, b = self.vector.span(stage.start, stage.stop)
            if a <= element < b:
                return slot.holders[0]
        raise AssertionError(element)

    def takers(self, start, stop):
        """Who needs these elements: their holder, and others with copies of tied ones in them."""
        found = {self.holder(start)}
        for entry in self.vector.entries:
            if entry.start < stop and start < entry.stop and entry.value.startswith("param:"):
                for stage, slot in zip(self.stages, self.world.plan.stages, strict=True):
                    if entry.name in stage.trainable:
                        found.add(slot.holders[0])
        return sorted(found)

    @property
    def devices(self):
        return self.world.devices

    def begin(self, round_, first, steps, ranges=(), start=0.0, length=0.0, gathers=False):
        message = pb.RoundStart(
            run=self.name, term=1, round=round_, first_step=first, steps=steps,
            samples=[pb.SampleRange(first=a, count=n) for a, n in ranges],
            start=start, length=length, gathers=gathers,
        )  # fmt: skip
        for device in self.devices.values():
            device.rounds.begin(message)

    def train(self, first, stop):
        for step in range(first, stop):
            for device in self.devices.values():
                device.prefetch(step)
            self.world._pass(step, {p: b.flow.actions(p) for p, b in self.world.built.items()})

    def each(self, kind, round_):
        return {p: d.compute(round_, Action(kind)).round for p, d in self.devices.items()}

    def contribute(self, round_=0):
        return self.each(Kind.CONTRIBUTE, round_)

    def weights(self):
        return self.world.weights()


@dataclass
class Exchange:
    """One attempt, driven in a random order."""

    replicas: list
    joiners: list = field(default_factory=list)
    round: int = 0
    attempt: int = 1
    exponent: int = 10
    weights: tuple = ()
    seed: int = 0
    change: object = None
    """change(key, frame): what comes in place of a frame; None: it is lost."""

    def __post_init__(self):
        self.devices = {p: d for r in self.everybody for p, d in r.devices.items()}
        self.weights = self.weights or (1,) * len(self.replicas)
        self.rng = random.Random(self.seed)
        self.frames, self.refused = {}, {}
        self.segments = [self._segment(a, b) for a, b in pairwise(self._borders())]

    @property
    def everybody(self):
        return [*self.replicas, *self.joiners]

    def _borders(self):
        """Where the stages of anybody begin, the beginning of every entry that some others tie, and
        one in the middle of a large entry."""
        vector = self.everybody[0].vector
        found = {0, vector.elements}
        for replica in self.everybody:
            found |= {vector.span(s.start, s.stop)[0] for s in replica.stages}
            found |= {
                at
                for e in vector.entries
                for at in (e.start, e.stop)
                if len(replica.takers(e.start, e.stop)) > 1
            }
        return sorted(found)

    def _segment(self, start, stop):
        makers = [r.holder(start) for r in self.replicas]
        message = pb.RoundSegment(
            start=start, stop=stop, aggregator=makers[len(self.replicas) and start % len(makers)],
            takers=[p for r in self.replicas for p in r.takers(start, stop)],
        )  # fmt: skip
        for maker, weight in zip(makers, self.weights, strict=True):
            message.givers.add(peer=maker, weight=weight)
        for joiner in self.joiners:
            for peer in joiner.takers(start, stop):
                message.versions.add(source=makers[0], destination=peer)
        return message

    def plan(self, peer):
        mine = []
        for s in self.segments:
            named = {s.aggregator, *(g.peer for g in s.givers), *s.takers}
            named |= {n for v in s.versions for n in (v.source, v.destination)}
            mine += [s] if peer in named else []
        return pb.RoundPlan(
            run=peer.partition(".")[0], term=1, round=self.round, attempt=self.attempt,
            weight=sum(self.weights), exponent=self.exponent, segments=mine,
            members=len(self.replicas),
        )  # fmt: skip

    def key(self, hop, part, source, destination):
        port = port_of(part)
        return FrameKey(
            "r", self.attempt, self.round, Role.ROUND, 0, hop, port, source, destination
        )

    def send(self, wanted):
        """Sends frames in a random order."""
        self.rng.shuffle(wanted)
        for hop, part, source, destination in wanted:
            if source == destination:
                continue
            key = self.key(hop, part, source, destination)
            frame = arrived(key, self.devices[source].payload(key))
            most = self.devices[destination].most_bytes(key)
            assert most is not None
            assert frame.data.nbytes <= most
            self.frames[key] = bytes(frame.data)
            frame = self.change(key, frame) if self.change else frame
            if frame is None:
                continue
            try:
                self.devices[destination].accept(frame)
            except ValueError as error:
                self.refused[key] = error

    def parts(self, segment):
        return self.everybody[0].vector.parts(segment.start, segment.stop)

    def join(self):
        for peer, device in self.devices.items():
            plan, vector = self.plan(peer), device.rounds.vector
            device.rounds.join(plan, wiring(vector, segments_of(plan), peer, plan.fragment))

    def begin(self):
        """Everybody joins, and adds its own: results of that by peer."""
        self.join()
        return self._compute(Kind.EXCHANGE, self.replicas)

    def give(self):
        each = [(s, p) for s in self.segments for p in self.parts(s)]
        self.send([(GIVE, p, g.peer, s.aggregator) for s, p in each for g in s.givers])
        self.send([(RESULT, p, s.aggregator, taker) for s, p in each for taker in s.takers])

    def apply(self):
        """Hashes of the replicas, members first."""
        found = self._compute(Kind.APPLY, self.replicas)
        each = [(s, p) for s in self.segments for p in self.parts(s)]
        self.send([(VERSION, p, v.source, v.destination) for s, p in each for v in s.versions])
        found |= self._compute(Kind.APPLY, self.joiners)
        codes = {p: r for p, r in found.items() if r.code}
        assert not codes, codes
        return [sum(h for p in r.devices for h in found[p].hashes) % 2**64 for r in self.everybody]

    def run(self):
        failed = {p: r for p, r in self.begin().items() if r.code}
        assert not failed, failed
        self.give()
        assert not self.refused, self.refused
        return self.apply()

    def _compute(self, kind, replicas):
        each = [(p, d) for r in replicas for p, d in r.devices.items()]
        return {p: d.compute(self.round, Action(kind)).round for p, d in each}


@pytest.fixture
def replica():
    """replica(case, name, cuts, **RoundSettings)."""

    def make(case, name, cuts=1, *, method="average", batch=0, resumed=(), of=2, **settings):
        rounds = RoundSettings(method=method, replicas=of, **settings)
        size = case.train.microbatch_size
        bounds = (
            [case.operators * i // cuts for i in range(1, cuts)] if isinstance(cuts, int) else cuts
        )
        holders = [f"{name}.{k}" for k in range(len(bounds) + 1)]
        plan = plan_of(case.operators, bounds, holders, case.train.batch // of // size, size)
        training = Training(seed=case.seed, train=case.train, rounds=rounds)
        world = case.world(plan, training=training, resumed=resumed)
        graph = case.captured.graph.bind(size)
        stages = cut(graph, [(s.start, s.stop) for s in plan.stages])
        return Replica(name, case, world, RunVector.of(graph), stages)

    return make


def hand_out(number, round_, steps, of=2, microbatches=4):
    """Where the samples of a replica begin, and how many there are, in microbatches."""
    mine = steps * microbatches
    return [(round_ * of * mine + number * mine, mine)]


def train(replicas, round_, steps, *, gathers=False):
    for i, replica in enumerate(replicas):
        samples = hand_out(i, round_, steps, len(replicas))
        replica.begin(round_, round_ * steps, steps, samples, gathers=gathers)
        replica.train(round_ * steps, (round_ + 1) * steps)
        assert not any(r.code for r in replica.contribute(round_).values())


def same(a, b, but=()):
    assert a.keys() == b.keys()
    return [n for n in a if not torch.equal(a[n], b[n]) and n not in but] == []


COUNTER = "norm.num_batches_tracked"


def trained(case, replica, names="abc", cuts=(1, 2, 3), **settings):
    settings = {"method": "diloco", **settings}
    replicas = [
        replica(case, n, c, of=len(names), **settings) for n, c in zip(names, cuts, strict=True)
    ]
    train(replicas, 0, 1)
    return replicas


def case_of_three(make_case, **train):
    return make_case(Net(), **digits(), **{**PLAIN, "batch": 24, **train})
