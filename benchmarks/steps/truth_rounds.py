"""Predicted against allocated bytes of peers whose replicas meet in rounds: part of
benchmarks/steps/truth.py.

As in truth_memory.py, with several replicas in one process: two rounds of one step each, exchanged
by the segments that the broker would plan, every frame through its codec. What codecs write is
in memory of torch as well.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from shoal.benchmarks.steps.truth_memory import (
    ModelRun,
    Outcome,
    World,
    models,
    peaks_of,
    received,
)
from shoal.broker.policies.segments import Replicated, segments, sliced
from shoal.dag.plan.action import Action, Kind
from shoal.dag.plan.plan import PeerId
from shoal.dag.rounds.vector import RunVector
from shoal.dag.rounds.wiring import GIVE, RESULT, RoundWiring, port_of, wiring
from shoal.dag.schedule.flow import Role
from shoal.dag.schedule.slices import PlanSlices
from shoal.job import Training
from shoal.job.rounds import RoundSettings
from shoal.net.links.frame import FrameKey
from shoal.peer.compute.device import TorchDevice
from shoal.peer.compute.order import BuildOrder
from shoal.planner.answers.planning import outlined
from shoal.planner.cost.candidate import Candidate, StageShare, to_plan
from shoal.planner.cost.cost_model import CostModel
from shoal.proto.broker_pb2 import RoundPlan, RoundStart, SampleRange

__all__ = ["outcomes"]

CASES: Mapping[str, dict[str, Any]] = {
    "average": {"method": "average"},
    "diloco": {"method": "diloco", "codec": "int8:block=128"},
    "diloco, overlap": {
        **{"method": "diloco", "codec": "int8:block=128"},
        "options": {"overlap": 1},
    },
    "sparse-loco": {
        "method": "sparse-loco",
        "options": {"density": 0.04, "result_density": 0.04, "decay": 1.0},
    },
    "streaming-diloco": {"method": "streaming-diloco"},
}
"""By label, of the settings of rounds."""
REPLICAS, ROUNDS = (2, 4), 3


def outcomes(say: Callable[[str], None] = lambda line: None) -> list[Outcome]:
    """Every peer of every case."""
    found: list[Outcome] = []
    torch.set_num_threads(1)
    for model in models():
        if model.name not in ("gpt-384", "llama-256"):
            continue
        with tempfile.TemporaryDirectory() as folder:
            run = ModelRun(model, Path(folder))
            for label, fields in CASES.items():
                for count in REPLICAS:
                    for outcome in _measured(run, label, fields, count):
                        found.append(outcome)
                        say(str(outcome))
    return found


def _measured(run: ModelRun, label: str, fields: dict[str, Any], count: int) -> list[Outcome]:
    """The first replica holds the model whole, the others are cut in two."""
    rounds = RoundSettings(replicas=count, **fields)
    options = run.request.options
    options = replace(
        options, round_bytes=rounds.stepping_bytes, exchange_bytes=rounds.exchange_bytes
    )
    judge = CostModel(replace(run.request, options=options))
    vector = RunVector.of(run.graph, rounds.fragments)
    worlds, predicted = [], dict[PeerId, int]()
    size, n = run.model.microbatch, run.operators
    microbatches = max(1, run.train.microbatches // count)
    for number in range(count):
        bounds = [0, n] if not number else [0, n // 2, n]
        parts = tuple(StageShare(k, a, b, False) for k, (a, b) in enumerate(pairwise(bounds)))
        candidate = Candidate((parts,), (microbatches,), "1f1b")
        peers = [PeerId(f"{number}.{k}") for k in range(len(parts))]
        sizes = judge.device_bytes(candidate)
        predicted |= {peer: sizes[k] for k, peer in enumerate(peers)}
        plan = outlined(run.request.graph, to_plan(candidate, peers, size))
        slices = PlanSlices(plan)
        order = BuildOrder(
            run="r",
            term=1,
            peer=peers[0],
            slice=slices.of(peers[0]),
            graph=run.captured.graph,
            weights=run.captured.tensors,
            manifest=run.manifest,
            training=Training(seed=0, train=run.train, rounds=rounds),
            shard=run.paths.__getitem__,
        )
        worlds.append(World(slices, order))
    replicas = _Replicas(worlds, vector, rounds, microbatches)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        for world in worlds:
            world.build()
        for number in range(ROUNDS):
            replicas.meet(number)
    peaks = peaks_of(seen)
    name = f"{run.model.name} {label}, {count} replicas"
    return [Outcome(f"{name}: {p} {peaks[p][1]}", predicted[p], peaks[p][0]) for p in predicted]


@dataclass(frozen=True)
class _Replicas:
    """Round k is of step k; with overlap step k + 1 is made before the version of it lands."""

    worlds: Sequence[World]
    vector: RunVector
    rounds: RoundSettings
    microbatches: int
    """Of a replica's step."""

    def meet(self, number: int) -> None:
        devices = {p: d for w in self.worlds for p, d in w.devices.items()}
        ahead = int(self.rounds.stepping_bytes > self.rounds.kept_bytes)
        late = int(ahead and number > 0)
        fragment = number % self.rounds.fragments + 1 if self.rounds.fragments > 1 else 0
        for k, world in enumerate(self.worlds):
            start = RoundStart(
                run="r",
                term=1,
                round=number,
                first_step=number,
                steps=1,
                samples=[self._samples(number, k)],
                length=1.0,
                ahead=ahead,
                ahead_samples=[self._samples(number + 1, k)] * ahead,
                late=late,
                fragment=fragment,
            )
            for device in world.devices.values():
                device.rounds.begin(start)
            if not late:
                world.step(number)
            for peer, device in world.devices.items():
                if late:
                    _do(device, peer, Kind.LAND, number)
                _do(device, peer, Kind.CONTRIBUTE, number)
        planned = segments([Replicated(w.plan, 1) for w in self.worlds], finer=8 if fragment else 1)
        mine = sliced(planned)
        wired = {p: wiring(self.vector, planned, p, fragment) for p in devices}
        for peer, device in devices.items():
            plan = RoundPlan(
                run="r",
                term=1,
                round=number,
                attempt=1,
                weight=len(self.worlds),
                members=len(self.worlds),
                exponent=10,
                segments=mine[peer],
                fragment=fragment,
            )
            device.rounds.join(plan, wired[peer])
            _do(device, peer, Kind.EXCHANGE, number)
        for hop in (GIVE, RESULT):
            _send(devices, wired, hop, number)
        for peer, device in devices.items():
            _do(device, peer, Kind.APPLY, number)
        for world in self.worlds if ahead else ():
            world.step(number + 1)

    def _samples(self, step: int, replica: int) -> SampleRange:
        first = (step * len(self.worlds) + replica) * self.microbatches
        return SampleRange(first=first, count=self.microbatches)


def _do(device: TorchDevice, peer: PeerId, kind: Kind, number: int) -> None:
    with record_function(f"peer {peer} {kind.name.lower()}"):
        found = device.compute(number, Action(kind)).round
    assert found is not None, f"{kind} is of a round"
    assert not found.code, found.why


def _send(
    devices: Mapping[PeerId, TorchDevice],
    wired: Mapping[PeerId, RoundWiring],
    hop: int,
    number: int,
) -> None:
    for peer, device in devices.items():
        for part, to in [f[1:3] for f in wired[peer].goes if f[0] == hop]:
            key = FrameKey("r", 1, number, Role.ROUND, 0, hop, port_of(part), peer, to)
            with record_function(f"peer {peer} gives"):
                payload = device.payload(key)
            with record_function(f"peer {to} takes"):
                devices[to].accept(received(key, payload))
            del payload
