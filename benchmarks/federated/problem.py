"""One federated problem, for Shoal, for a bare loop and for other frameworks alike.

A perceptron of 2,410 parameters (64, 32, 10) on scikit-learn's digits. A client has 16 of them, by
a mix of classes of Dirichlet(0.1), drawn with replacement from the digits that are not held out;
360 are. In a round a client makes 5 passes over its samples in batches of 8, by SGD at 0.1.

    with Problem(clients=1000, per_round=100, rounds=50) as problem:
        played = problem.play(MEAN, evaluate=False)     # the virtual world of four peers
        problem.write(file)                             # the same for whoever else takes it on

Who has what, cohorts, the order of samples and the starting weights are Shoal's own; others get
them as arrays: `Problem.work` says what they have.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from safetensors.torch import load
from torch import Tensor

from shoal.broker.events import Event, Publish
from shoal.client.front import PackedJob, SimulationFront
from shoal.dag.rounds.cohorts import cohort_of
from shoal.job import Job
from shoal.peer.data.partition import Partition, partition_of
from shoal.peer.data.reader import Reader
from shoal.peer.federated.batches import Participant, batches
from shoal.proto.broker_pb2 import DONE, RunEvent
from shoal.sim.virtual.clock import Observed
from shoal.sim.virtual.world import PeerSpec, World

__all__ = ["MEAN", "Method", "Played", "Problem"]

DIGITS = """
import sys, numpy
from sklearn.datasets import load_digits
found = load_digits()
numpy.savez(sys.argv[1], images=found.images, labels=found.target)
"""
"""Run by itself: scikit-learn imports pandas where that is there, 100 MiB that no round is for."""
ROOT = Path(__file__).resolve().parents[2]
SAMPLES, PASSES, BATCH, RATE, HELD_OUT, PEERS = 16, 5, 8, 0.1, 360, 4

Arrays = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class Method:
    """A method as [sync] has it, with what else it has there."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    sync: Mapping[str, Any] = field(default_factory=dict)


MEAN = Method("fedavg")


@dataclass(frozen=True)
class Played:
    """A run in the virtual world. accuracies: by round, of the version after it, where it was
    evaluated. round_cpu, round_s: CPU seconds of the process and wall seconds of each round behind
    the first. broker_cpu: of these, in the broker's machine and its shell. first_at: by
    `time.perf_counter`, the end of the first round."""

    weights: Mapping[str, Tensor]
    accuracies: Mapping[int, float]
    round_cpu: list[float]
    round_s: list[float]
    broker_cpu: float
    first_at: float


@dataclass
class Problem:
    """`samples`: of each client."""

    clients: int
    per_round: int
    rounds: int
    seed: int = 0
    samples: int = SAMPLES
    passes: int = PASSES

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory(prefix="shoal-federated-")
        self._front = SimulationFront()
        self.file = Path(self._folder.name) / "digits.npz"
        """x (samples, 1, 8, 8) and y; the last ones are held out."""
        np.savez(self.file, **self._data())  # type: ignore[arg-type]
        return self

    def __exit__(self, *_: object) -> None:
        self._front.close()
        self._folder.cleanup()

    def _data(self) -> Arrays:
        """Digits that are trained on, as often as they are drawn, then those that are held out."""
        own = Path(self._folder.name) / "scikit-learn.npz"
        subprocess.run([sys.executable, "-c", DIGITS, str(own)], check=True)
        with np.load(own) as found:
            images, labels = found["images"], found["labels"]
        order = np.random.default_rng(1234).permutation(len(labels))
        x = (images[order] / 16.0).astype(np.float32)[:, None]
        y = labels[order].astype(np.int64)
        rng = np.random.default_rng(self.seed)
        drawn = rng.integers(HELD_OUT, len(y), self.clients * self.samples)
        at = np.concatenate([drawn, np.arange(HELD_OUT)])
        return {"x": x[at], "y": y[at]}

    def job(self, method: Method, *, evaluate: bool) -> Job:
        """The job of a method. evaluate: each version, by all that is held out."""
        total = self.clients * self.samples + HELD_OUT
        return Job.from_table(
            {
                **{"version": 1, "name": f"digits {method.name}", "seed": self.seed},
                "model": {"factory": str(ROOT / "examples/federated_digits.py") + ":perceptron"},
                "data": {
                    **{"kind": "arrays", "source": str(self.file)},
                    "holdout": (HELD_OUT + 0.5) / total,
                    "partition": {
                        **{"kind": "dirichlet", "convention": "per-client", "alpha": 0.1},
                        **{"clients": self.clients, "seed": self.seed},
                    },
                },
                "sync": {
                    **{"kind": "federated", "method": method.name, "per_round": self.per_round},
                    **{"local": {"passes": self.passes}, "options": dict(method.options)},
                    **method.sync,
                },
                "plan": {"replicas": PEERS, "scheduler": "uniform"},
                "train": {
                    **{"steps": self.rounds, "batch": BATCH, "lr": RATE, "optimizer": "sgd"},
                    **{"momentum": 0.0, "schedule": "constant", "warmup": 0, "clip": 0.0},
                    **{"weight_decay": 0.0, "eval_every": int(evaluate)},
                    "eval_batches": HELD_OUT // BATCH,
                },
            }
        )

    def play(
        self,
        method: Method,
        *,
        evaluate: bool,
        ended: Callable[[int], None] = lambda count: None,
    ) -> Played:
        """Run it in one process: the machines of a broker and four peers, and real tensors. `ended`
        is called with the number of rounds that there have been. Raises RuntimeError where it
        fails, or where a peer is left out of a round."""
        packed = self._front.pack(self.job(method, evaluate=evaluate))
        with tempfile.TemporaryDirectory() as folder:
            peers = [PeerSpec(name=f"p{i}", place=f"s{i}") for i in range(PEERS)]
            world = World(peers, blobs=packed.blobs, folder=Path(folder), log=False)
            clock = _Clock(world, ended)
            run = world.submit(packed.spec)
            events = world.finish(run)
            if events[-1].state.phase != DONE:
                raise RuntimeError(events[-1].state.reason.text)
            done = [e.round_done for e in events if e.HasField("round_done")]
            begun = [len(e.round_begun.work) for e in events if e.HasField("round_begun")]
            if len(done) != self.rounds or begun != [len(d.members) for d in done]:
                raise RuntimeError(
                    f"{len(done)} rounds: expected {self.rounds} of all peers that had clients"
                )
            return Played(
                weights=_exported(world, events),
                accuracies=_accuracies(events),
                round_cpu=clock.round_cpu,
                round_s=clock.round_s,
                broker_cpu=clock.broker_cpu,
                first_at=clock.first_at,
            )

    # ------------------------------------------------------------ for others

    @cached_property
    def packed(self) -> PackedJob:
        return self._front.pack(self.job(MEAN, evaluate=False))

    @cached_property
    def reader(self) -> Reader:
        facts = self.packed.facts
        return Reader(facts.manifest, facts.shards.__getitem__, seed=self.seed, microbatches=1)

    @cached_property
    def partition(self) -> Partition:
        settings = self.job(MEAN, evaluate=False).data.partition
        assert settings is not None
        return partition_of(settings, "y", self.reader)

    def own(self) -> npt.NDArray[np.int64]:
        """(clients, samples): numbers of the samples of each."""
        return np.stack([self.partition.train(n) for n in range(self.clients)])

    def start(self) -> dict[str, Tensor]:
        """Weights that training begins with, by name."""
        with self._front.module(self.job(MEAN, evaluate=False)) as module:
            return {n: p.detach().clone() for n, p in module.named_parameters()}

    def work(self) -> Iterator[tuple[list[int], npt.NDArray[np.int64]]]:
        """By round: the cohort, and the samples of each of its clients' steps, (per_round, steps,
        batch)."""
        for count in range(self.rounds):
            cohort = cohort_of(self.clients, self.seed, count, range(self.per_round))
            some = [Participant(n, self.partition.train(n)) for n in cohort]
            plans = batches(some, seed=self.seed, round_=count, batch=BATCH, passes=self.passes)
            yield cohort, np.array(plans)

    def write(self, file: Path) -> None:
        """Write it for a process that has no Shoal: x (samples, 64), y, held-out xt and yt, own
        (clients, samples), cohorts (rounds, per_round), steps (rounds, per_round, steps, batch) and
        the starting weights, start0 and so on, in the order of the module's parameters."""
        data = np.load(self.file)
        x, y, count = data["x"].reshape(-1, 64), data["y"], self.clients * self.samples
        cohorts, steps = zip(*self.work(), strict=True)
        np.savez(
            file,
            **{"x": x[:count], "y": y[:count], "xt": x[count:], "yt": y[count:]},
            own=self.own(),
            cohorts=np.array(cohorts),
            steps=np.array(steps, np.int32),
            **{f"start{i}": w.numpy() for i, w in enumerate(self.start().values())},  # type: ignore[arg-type]
        )


class _Clock:
    """CPU and wall seconds of each round behind the first, without what `ended` does between them,
    and of these the broker's share."""

    def __init__(self, world: World, ended: Callable[[int], None]) -> None:
        self.round_cpu, self.round_s, self.broker_cpu = list[float](), list[float](), 0.0
        self.first_at = 0.0
        self._world, self._ended, self._began, self._own = world, ended, (0.0, 0.0), 0.0
        self._handle, self._depth, self._broker = world.broker.handle, 0, 0.0
        world.broker.handle = self._handled  # type: ignore[method-assign]
        world.observe = self._observe

    def _handled(self, event: Event) -> None:
        before, own = time.process_time(), self._own
        self._depth += 1
        self._handle(event)
        self._depth -= 1
        if self.first_at and not self._depth:
            self._broker += time.process_time() - before - (self._own - own)

    def _observe(self, seen: Observed) -> None:
        record = seen.record
        if not isinstance(record, Publish) or not record.event.HasField("round_done"):
            return
        cpu, wall = time.process_time(), time.perf_counter()
        if self.first_at:
            self.round_cpu.append(cpu - self._began[0])
            self.round_s.append(wall - self._began[1])
        self.first_at, self.broker_cpu = self.first_at or wall, self._broker
        self._ended(len(self.round_cpu) + 1)
        self._began = time.process_time(), time.perf_counter()
        self._own += self._began[0] - cpu


def _exported(world: World, events: list[RunEvent]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in [e.weights for e in events if e.HasField("weights")][-1].files:
        found |= load(world.blobs[file.blob.hash])
    return found


def _accuracies(events: list[RunEvent]) -> dict[int, float]:
    return {
        e.evaluated.step: metric.value
        for e in events
        if e.HasField("evaluated")
        for metric in e.evaluated.evaluation.metrics
        if metric.name == "accuracy"
    }
