"""Runs of several replicas in the virtual world, for the benchmarks beside it.

with Field(job) as field:
    played = field.play(specs, network, limit_s=600.0)
    played.samples_per_s
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from shoal.broker.options import BrokerOptions
from shoal.client.front import SimulationFront
from shoal.dag.cost.network import Network
from shoal.dag.plan.plan import PeerId
from shoal.job import Job
from shoal.proto.broker_pb2 import FAILED, RunEvent
from shoal.sim.virtual.control import BROKER
from shoal.sim.virtual.spec import PeerDevice, PeerSpec
from shoal.sim.virtual.wan import Wan
from shoal.sim.virtual.world import World

__all__ = ["MBIT", "Field", "Played", "lines"]

MBIT = 1e6 / 8
"""Bytes/s."""


def lines(names: Sequence[str], bytes_per_s: Mapping[str, float], latency_s: float) -> Network:
    """Everybody behind a line of its own, as fast up as down; the broker's is as fast as wanted."""
    ends = (*names, BROKER)
    rates = np.array([*(bytes_per_s[name] for name in names), np.inf])
    square = np.full((len(ends), len(ends)), latency_s)
    apart = np.full_like(square, np.inf)
    return Network(tuple(map(PeerId, ends)), square, apart, rates, rates)


@dataclass(frozen=True)
class Played:
    """events: of the run, from its submission to its end or to the limit."""

    events: Sequence[RunEvent]
    batch: int
    """Samples of a step of the run."""
    microbatches: int
    """Of a step of the run."""

    @property
    def rounds(self) -> list[RunEvent]:
        return [e for e in self.events if e.HasField("round_done")]

    @property
    def began_s(self) -> float:
        return next(e.at_s for e in self.events if e.HasField("round_begun"))

    @property
    def samples_per_s(self) -> float:
        """Committed, from the beginning of the first round to the end of the last one; without
        rounds, from the end of the first step to that of the last one."""
        if not self.rounds:
            steps = [e for e in self.events if e.HasField("step")]
            return (len(steps) - 1) * self.batch / (steps[-1].at_s - steps[0].at_s)
        last = self.rounds[-1]
        samples = last.round_done.microbatches * self.batch / self.microbatches
        return samples / (last.at_s - self.began_s)

    @property
    def losses(self) -> list[tuple[int, float]]:
        """(steps, held-out loss) of versions, or behind steps."""
        found: list[Any] = [e.evaluated for e in self.events if e.HasField("evaluated")]
        found += [e.step for e in self.events if e.step.HasField("evaluation")]
        return [(e.step, e.evaluation.loss) for e in found]


class Field:
    """A job, captured once, that is played in one world after the other."""

    def __init__(self, table: Mapping[str, Any]) -> None:
        self.table, self._front = dict(table), SimulationFront()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._front.close()

    def play(
        self,
        specs: Sequence[PeerSpec],
        network: Network,
        *,
        limit_s: float = 1e6,
        device: Callable[[PeerSpec], PeerDevice] | None = None,
        begun: Callable[[World, str], None] = lambda world, run: None,
        options: BrokerOptions | None = None,
        settled_s: float = 0.0,
        **tables: Any,
    ) -> Played:
        """To its end, or for so many seconds behind the beginning of its first round, when `begun`
        is called; `tables` in place of the job's. `settled_s`: how long peers are there before it
        is submitted, and have their links measured. Raises RuntimeError when it failed."""
        table = self.table | {k: self.table.get(k, {}) | v for k, v in tables.items()}
        packed = self._front.pack(job := Job.from_table(table))
        with tempfile.TemporaryDirectory() as folder:
            world = World(
                list(specs),
                blobs=packed.blobs,
                folder=Path(folder),
                wan=Wan(network),
                device=device,
                broker_options=options,
                log=False,
            )
            world.after(settled_s, lambda: None)
            world.until(lambda: world.now >= settled_s, limit_s=settled_s + 1.0)
            run, over = world.submit(packed.spec), world.broker.ended
            world.until(
                lambda: run in over or any(e.HasField("round_begun") for e in world.events(run))
            )
            begun(world, run)
            end = world.now + limit_s
            world.after(limit_s, lambda: None)
            world.until(lambda: run in over or world.now >= end, limit_s=limit_s + 1.0)
            if run in over and over[run].phase == FAILED:
                raise RuntimeError(over[run].reason.text)
            return Played(tuple(world.events(run)), job.train.batch, job.train.microbatches)
