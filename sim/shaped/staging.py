"""What real processes need to stand for the peers of a scenario: whether they can, how slow they
must be, and the flags of their `shoal join`; and whether they then had the cores they wanted."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...job import Job
from ...peer.data.reader import Reader
from ...proto import broker_pb2
from ..front import Front
from ..processes import LocalCluster
from ..report import Summary
from ..scenario.scenario import Scenario
from .contention import Snapshot, busy_share, contended, processor, snapshot, waited_s
from .emulation import cpu_seconds, step_work, stretch_of
from .forwarder import Forwarder

__all__ = ["CoreWatch", "check_real", "join_flags", "slowness", "stretches_of"]


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


def stretches_of(scenario: Scenario, job: Job, front: Front) -> dict[str, float]:
    """By peer. Raises SettingsError for a device that is faster than a core of this machine."""
    facts = front.facts(job)
    reader = Reader(
        facts.manifest,
        facts.shards.__getitem__,
        seed=job.seed,
        microbatches=job.train.microbatches,
    )
    size = job.train.microbatch_size
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
    """Those of `shoal join`, by peer."""
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
