"""Replicas that train apart and meet in rounds, in the simulated world: through broker and peers,
against plain loops in torch that are fed with what was committed."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from safetensors.torch import load
from torch import Tensor

from shoal.broker import events as b
from shoal.job import Job
from shoal.proto.broker_pb2 import DONE, RunEvent, RunSpec
from shoal.sim import round_methods, round_oracle
from shoal.sim.monitor.monitor import Monitor
from shoal.sim.round_log import committed_rounds
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
        **{"steps": 8, "batch": 12, "microbatch": 2, "lr": 1e-2},
        **{"eval_every": 3, "eval_batches": 1},
    },
}
METHODS = {"diloco": round_methods.DiLoCo(0.7, 0.9), "average": round_methods.Average()}


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
        return spec

    def play(
        self, peers: Sequence[PeerSpec], deaths: Mapping[int, str] | None = None, **tables: Any
    ) -> tuple[World, str]:
        """deaths: by number of the record of the world, who dies there."""
        world = self.lab.world(list(peers), log=False)
        monitor = Monitor(world)
        world.until(lambda: len(world.broker.machine.members.pool) == len(peers))
        run = world.submit(self.spec(**tables))
        also, self.records = world.observe, 0

        def observe(seen: Observed) -> None:
            also(seen)
            self.records += 1
            name = (deaths or {}).get(self.records)
            if name and world.peers[name].alive and run not in world.broker.ended:
                world.kill(name)

        world.observe = observe
        monitor.finish(run, 3600.0)
        return world, run

    def expected(
        self, events: Sequence[RunEvent], method: round_oracle.Method
    ) -> dict[str, Tensor]:
        """The version that a plain loop comes to, of the rounds that were committed."""
        train, reader = self.lab.job.train, self.lab.reader()
        size, count = train.microbatch_size, train.microbatches

        def batches(samples: Sequence[int]) -> dict[str, Tensor]:
            numbers = [s // size for s in samples[::size]]
            each = [reader.batch(g // count, g % count, size) for g in numbers]
            return {name: torch.cat([e[name] for e in each]) for name in each[0]}

        rounds = committed_rounds(events, microbatches=count, microbatch_size=size)
        module = copy.deepcopy(self.lab.module)
        round_oracle.train(module, rounds, batches, train, method, steps=train.steps or 0)
        return method.shared

    def assert_expected(self, world: World, run: str, method: str = "diloco") -> None:
        assert world.broker.ended[run].phase == DONE, world.broker.ended[run].reason.text
        events = world.events(run)
        [weights] = [e.weights for e in events if e.HasField("weights")]
        got: dict[str, Tensor] = {}
        for file in weights.files:
            got |= load(world.blobs[file.blob.hash])
        wanted = self.expected(events, METHODS[method])
        for name, tensor in wanted.items():
            assert torch.allclose(got[name], tensor, rtol=1e-3, atol=2e-5), name


@pytest.fixture(scope="module")
def rounds(laboratory: Any) -> Rounds:
    return Rounds(laboratory)


def sites(*flops: float) -> list[PeerSpec]:
    """A peer in each of so many places."""
    return [PeerSpec(name=f"p{i}", place=f"s{i}", flops_per_s=f) for i, f in enumerate(flops)]


@pytest.mark.parametrize("method", METHODS)
def test_the_version_is_that_of_a_plain_loop(rounds: Rounds, method: str) -> None:
    world, run = rounds.play(sites(1e9, 1e9, 1e9), sync={"method": method}, plan={"replicas": 3})
    rounds.assert_expected(world, run, method)


def test_who_is_faster_makes_more_steps_of_a_round(rounds: Rounds) -> None:
    world, run = rounds.play(sites(2e7, 6e7))
    begun = [e.round_begun for e in world.events(run) if e.HasField("round_begun")]
    steps = {w.replica: w.steps for w in begun[1].work}
    assert steps[1] >= 2 * steps[0]
    assert sum(steps.values()) == 6  # three of the run's, in two halves
    rounds.assert_expected(world, run)


def test_a_pipeline_of_weak_peers_stands_beside_a_strong_one(rounds: Rounds) -> None:
    """One replica is cut into two stages, the other is whole: their versions have one hash."""
    weak = [PeerSpec(name=f"p{i}", place="home", memory_bytes=200_000) for i in range(2)]
    strong = PeerSpec(name="q", place="rack", memory_bytes=1 << 30)
    world, run = rounds.play([*weak, strong])
    replicas = world.broker.machine.runs[b.RunId(run)].record.replicas
    assert [len(r.plan.stages) for r in replicas if r.plan] == [2, 1]
    rounds.assert_expected(world, run)


def test_evaluations_are_of_versions(rounds: Rounds) -> None:
    world, run = rounds.play(sites(1e9, 1e9))
    found = [e.evaluated for e in world.events(run) if e.HasField("evaluated")]
    assert [e.step for e in found] == [3, 6, 8]
    losses = [e.evaluation.loss for e in found]
    assert losses == sorted(losses, reverse=True)


def outcome(world: World, run: str) -> str:
    """What happened, in short."""
    done = [e.round_done for e in world.events(run) if e.HasField("round_done")]
    return "; ".join(f"{d.round}: {[m.replica for m in d.members]} + {len(d.joined)}" for d in done)


@pytest.mark.parametrize("part", range(4))
def test_a_member_dies_at_any_moment_of_a_round(rounds: Rounds, part: int) -> None:
    """A spare takes its place, be it within the round or by the version of the others."""
    peers = sites(1e9, 1e9, 1e9, 1e9)
    rounds.play(peers, plan={"replicas": 3})
    every = max(1, rounds.records // 40)
    for at in range(every * part // 4 + 1, rounds.records, every):
        name = f"p{at % 3}"
        world, run = rounds.play(peers, {at: name}, plan={"replicas": 3})
        end = world.broker.ended[run]
        assert end.phase == DONE, f"{name} at record {at}: {end.reason.text}"
