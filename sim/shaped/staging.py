"""What real processes need to stand for the peers of a scenario: whether they can, how slow they
must be, and the flags of their `shoal join`; and whether they then had the cores they wanted."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch
from torch import nn

from ...client.front import SimulationFront
from ...dag.cost.cost import cost
from ...dag.cost.pace import UPDATE_CALLS, IntervalWork
from ...dag.cost.speed import Speeds, Work
from ...dag.ir.graph import Graph
from ...job import Job, Train
from ...proto import broker_pb2
from ..plain import oracle
from ..processes import LocalCluster
from ..report import Summary
from ..scenario.scenario import Scenario
from ..verify import one_thread
from .contention import Snapshot, busy_share, contended, processor, snapshot, waited_s
from .forwarder import Forwarder

__all__ = [
    "CoreWatch",
    "check_real",
    "cpu_seconds",
    "join_flags",
    "slowness",
    "step_work",
    "stretch_of",
    "stretches_of",
]


def check_real(scenario: Scenario) -> None:
    """Raises SettingsError for what real processes cannot do, and for a peer that has more memory
    than this machine."""
    has = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for peer in scenario.peers:
        if peer.memory > has:
            raise scenario.wrong(
                f"peers[{peer.entry}].memory",
                f"is {peer.memory}, more than the {has}B of this machine, on which {peer.name} "
                "would be a real process: expected less, or --virtual or --ghost",
            )
    for i, fault in enumerate(scenario.faults):
        if fault.phase != "any":
            raise scenario.wrong(
                f"faults[{i}].phase",
                f'is "{fault.phase}": what lies within a step of real processes is not seen; '
                "expected none, or --virtual or --ghost",
            )


def stretches_of(scenario: Scenario, job: Job, front: SimulationFront) -> dict[str, float]:
    """By peer. Raises SettingsError for a device that is faster than a core of this machine."""
    facts = front.prepared(job)
    reader, size = facts.reader(job.train.microbatches), job.train.microbatch_size
    with front.module(job) as module:
        here_s = cpu_seconds(module, lambda step, m: reader.batch(step, m, size), job.train)
    work, found = step_work(facts.graph, job.train), dict[str, float]()
    for peer in scenario.peers:
        try:
            found[peer.name] = stretch_of(peer.hardware.speeds, work, here_s, scenario.time_scale)
        except ValueError as error:
            raise scenario.wrong(
                f"peers[{peer.entry}].device", f"of {peer.name}: {error}; or --virtual or --ghost"
            ) from None
    return found


def slowness(stretches: Mapping[str, float]) -> str:
    low, high = min(stretches.values()), max(stretches.values())
    return f"{low:.1f} to {high:.1f} times as slow as a core of this machine"


def join_flags(
    scenario: Scenario, stretches: Mapping[str, float], paths: Forwarder, folder: Path
) -> dict[str, list[str]]:
    """Return the flags of `shoal join`, by peer."""
    found = {}
    for peer in scenario.peers:
        via = paths.write_via(peer.name, folder / f"{peer.name}.via.json")
        found[peer.name] = [
            *("--port", str(paths.port(peer.name)), "--via", str(via)),
            *("--stretch", f"{stretches[peer.name]:.6f}", "--place", peer.place),
            *("--memory", f"{int(peer.memory)}B", "--ops", peer.ops),
            *("--trace", str(folder / f"{peer.name}.trace.jsonl")),
            *(("--owner", peer.owner) if peer.owner else ()),
            *(("--public", "none") if peer.nat == "outbound" else ()),
        ]
    return found


@dataclass(frozen=True)
class _Moment:
    at_s: float
    waited: Snapshot
    ticks: tuple[int, int]


class CoreWatch:
    """Whether the processes had the cores that they wanted, from the first committed step to the
    last."""

    def __init__(self, cluster: LocalCluster, names: Sequence[str]) -> None:
        self._cluster, self._names = cluster, names
        self._moments: list[_Moment] = []

    def see(self, event: broker_pb2.RunEvent) -> None:
        if event.HasField("step"):
            pids = {n: self._cluster.processes[n].pid for n in self._names}
            pids = {n: pid for n, pid in pids.items() if self._cluster.runs(n)}
            now = _Moment(time.monotonic(), snapshot(pids), processor())
            self._moments = [*self._moments[:1], now]

    def fill(self, summary: Summary) -> None:
        if len(self._moments) < 2:
            return
        first, last = self._moments
        seconds = last.at_s - first.at_s
        summary.timing_reason = contended(first.waited, last.waited, seconds)
        summary.timing_valid = not summary.timing_reason
        waited = sum(waited_s(first.waited, last.waited).values())
        busy = busy_share(first.ticks, last.ticks)
        summary.oversubscribed = busy + waited / (seconds * summary.cores)


# How a core of this machine stands for the device of a scenario: it is stretched.
#
#     stretch = seconds of a step on the device, by the cost model / CPU seconds of the step here
#
# The step is one of the job that is to run, measured as the plain loop on one thread; so whatever
# the cost model gets wrong of this machine is not in it, and one number does for a device whose
# classes of work are not slower in the same proportion: by the job's own mixture of them.

STEPS = 3
"""Steps that are measured, after one that is not."""


def step_work(graph: Graph, train: Train) -> Work:
    """The work of a step of a job on a device that does all of it, in microbatches: forward,
    backward, adding gradients up, the norm and the update (dag/cost/pace.py has the same terms)."""
    bound = graph.bind(train.microbatch_size)
    count, slots = train.microbatches, max(1, train.optimizer_slots)
    forward, backward = IntervalWork(cost(bound)).work(0, len(bound.operators))
    parameters = [p.spec for p in bound.parameters if p.trainable]
    trained = 4 * sum(spec.elements for spec in parameters)
    passes = 3 * (count - 1) + 1 + 5 + 2 * slots
    rest = Work(memory=passes * trained, calls=UPDATE_CALLS * len(parameters))
    return (forward + backward).times(count) + rest


def cpu_seconds(
    module: nn.Module,
    batches: oracle.Batches,
    train: Train,
    *,
    clock: Callable[[], float] = time.thread_time,
) -> float:
    """The median CPU time of a step here, in one thread; it trains the module. `clock`: seconds of
    the calling thread."""
    ends: list[float] = []

    def timed(step: int, microbatch: int) -> dict[str, torch.Tensor]:
        if microbatch == 0:
            ends.append(clock())
        return dict(batches(step, microbatch))

    with one_thread():
        oracle.train(module, timed, train, steps=STEPS + 1, microbatches=train.microbatches)
    ends.append(clock())
    return median(b - a for a, b in pairwise(ends[1:]))


def stretch_of(device: Speeds, work: Work, here_s: float, time_scale: float = 1.0) -> float:
    """How many times its CPU time a step must take here to take as long as on the device. Raises
    ValueError for a device that is faster than a core of this machine."""
    wanted = device.seconds(work)
    stretch = time_scale * wanted / here_s
    if stretch < 1:
        least = here_s / wanted
        raise ValueError(
            f"a step takes {wanted:.3g} s on the device and {here_s:.3g} s of a core here: "
            f"expected a slower device, or a time_scale of at least {least:.3g}"
        )
    return stretch
