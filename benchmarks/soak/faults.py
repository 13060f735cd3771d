"""Short runs of real processes, each with one to three faults (see soak.py).

The daemons of a cluster are used for many runs, since starting them takes longest: what was killed
is started again, what was cut is mended, and the next run begins when everybody is back. Each
cluster has five peers with identities and mutual TLS, on links of 2 ms through the forwarding
process, and a run holds three of them.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from shoal.benchmarks.service.broker_killed import Watched
from shoal.benchmarks.soak.real import TOLERANCE, alone, apart, job_of, wait_for
from shoal.benchmarks.table import Figure
from shoal.sim.faults.faults import Faults
from shoal.sim.processes import LocalCluster
from shoal.sim.scenario.sentences import Fault, broker_restart, cut_off, kill, sentence, stop
from shoal.sim.shaped.forwarder import Forwarder
from shoal.sim.shaped.shaping import Shaping
from shoal.sim.shaped.surface import Surface
from shoal.sim.virtual.spec import PeerSpec
from shoal.sim.virtual.world import World

if TYPE_CHECKING:
    from shoal.client import Client
    from shoal.client.prepared import Prepared

__all__ = ["Outcome", "chaos", "draw"]

STEPS = 16
PEERS = ("p1", "p2", "p3", "p4", "p5")
LATENCY_S, BANDWIDTH = 0.002, 12.5e6
STRETCH = 8.0
BACK_S = 1.0
"""After how long a peer that was killed is started again."""
LIMIT_S = 300.0
"""A run that has not ended by then hangs (I9)."""
FRESH = 25
"""Runs of one cluster."""
KINDS = ("kill", "kill", "stop", "stop long", "cut", "cut", "cut broker", "broker dies")
"""Drawn from; killing and cutting more often."""


@dataclass(frozen=True)
class Outcome:
    """What came of one run. `fired`: kinds of the faults that happened. `problems`: none when every
    step was done once, with the plain loop's loss."""

    seed: int
    faults: tuple[str, ...]
    fired: tuple[str, ...]
    apart: float
    equal: bool
    """Losses and weights are those of an undisturbed run, to the bit."""
    terms: int
    seconds: float
    problems: tuple[str, ...]


def draw(seed: int, holders: Sequence[str]) -> list[tuple[str, Fault]]:
    """One to three faults, by kind; `holders`: who has a stage, in their order."""
    rng = random.Random(f"soak {seed}")
    found = []
    for _ in range(rng.randint(1, 3)):
        kind, step = rng.choice(KINDS), rng.randint(1, STEPS - 4)
        who, other = rng.sample(list(holders), 2)
        fault = {
            "kill": kill(who, at_step=step),
            "stop": stop(who, for_s=rng.uniform(0.3, 5.0), at_step=step),
            # Longer than the lease: it is lost, and comes to life in a run that went on.
            "stop long": stop(who, for_s=14.0, at_step=step),
            "cut": cut_off(
                who, other, for_s=rng.uniform(0.3, 8.0), both=rng.random() < 0.7, at_step=step
            ),
            "cut broker": cut_off(who, "broker", for_s=rng.uniform(0.3, 13.0), at_step=step),
            "broker dies": broker_restart(at_step=step),
        }[kind]
        found.append((kind, fault))
    return found


class Cluster:
    """Daemons for many runs."""

    def __init__(self, folder: Path, open_now: ExitStack) -> None:
        import shoal

        self.folder = folder
        self.gone_at: dict[str, float] = {}
        self.cluster = open_now.enter_context(
            LocalCluster(peers=[], folder=folder / "cluster", secure=True)
        )
        names, count = (*PEERS, "broker"), len(PEERS) + 1
        shaping = Shaping(
            names=names,
            latency_s=((LATENCY_S,) * count,) * count,
            bandwidth=((BANDWIDTH,) * count,) * count,
            up=(BANDWIDTH,) * count,
            down=(BANDWIDTH,) * count,
        )
        self.paths = open_now.enter_context(Forwarder(shaping, {"broker": self.cluster.address}))
        open_now.callback(self.cluster.stop)  # before the paths, over which they say goodbye
        self.flags = {
            name: [
                *("--port", str(self.paths.port(name)), "--stretch", f"{STRETCH:g}"),
                *("--via", str(self.paths.write_via(name, folder / f"{name}.via.json"))),
            ]
            for name in PEERS
        }
        for name in PEERS:
            self.cluster.join(name, self.flags[name])
        self.client: Client = open_now.enter_context(shoal.connect(self.cluster.address))
        self.specs = {name: PeerSpec(name=name) for name in PEERS}
        self.surface = open_now.enter_context(
            Surface(self.cluster, self.paths, self.flags, self.specs, lambda mark: None)
        )
        wait_for(self.client, len(PEERS))

    def run(self, prepared: Prepared, seed: int | None) -> tuple[Watched, Faults | None, list[str]]:
        """Trains, with the faults of a seed; None: undisturbed."""
        surface, faults, kinds = self.surface, None, list[str]()
        surface.observe = None
        watched = Watched(self.client.submit_prepared(prepared, self.folder), STEPS)
        watched.start()
        seen, end = 0, time.monotonic() + LIMIT_S
        while watched.is_alive():
            watched.join(0.02)
            events = watched.events
            if seed is not None and faults is None:
                plans = [e.plan for e in events if e.HasField("plan")]
                if plans:
                    names = self.client.names()
                    holders = [names.get(p, p) for s in plans[0].stages for p in s.holders]
                    drawn = draw(seed, holders)
                    kinds = [kind for kind, _ in drawn]
                    faults = Faults(
                        cast(World, surface), [f for _, f in drawn], specs=self.specs.values()
                    )
                    faults.start()
            while faults is not None and seen < len(events):
                surface.see(events[seen])
                seen += 1
            self.revive()
            self.cluster.check()
            if time.monotonic() > end:
                said = "; ".join(e.state.reason.text for e in events if e.HasField("state"))
                self.client.cancel(events[-1].state.run or self.client.describe().runs[-1].run)
                raise TimeoutError(f"not done within {LIMIT_S:g} s: {said}")
        return watched, faults, kinds

    def revive(self) -> None:
        """Peers that were killed come back a little later."""
        for name in PEERS:
            if not self.cluster.runs(name):
                gone_at = self.gone_at.setdefault(name, time.monotonic())
                if time.monotonic() > gone_at + BACK_S:
                    del self.gone_at[name]
                    self.cluster.join(name, self.flags[name])

    def settle(self) -> None:
        """Until what a run's faults did is undone, and everybody is in the pool."""
        end = time.monotonic() + 120.0
        while time.monotonic() < end:
            self.revive()
            if not self.surface.pending and not self.gone_at:
                break
            time.sleep(0.1)
        wait_for(self.client, len(PEERS))


def _play(seeds: Sequence[int], folder: Path) -> Iterator[Outcome]:
    from shoal.client.front import SimulationFront
    from shoal.client.submission import prepare

    job, front = job_of(STEPS), SimulationFront()
    wanted = alone(job, front).losses
    front.close()
    left = list(seeds)
    with prepare(job) as prepared:
        while left:
            with ExitStack() as open_now:
                part = folder / f"from-{left[0]}"
                cluster = Cluster(part, open_now)
                calm, _, _ = cluster.run(prepared, None)
                for _ in range(min(FRESH, len(left))):
                    seed = left.pop(0)
                    found = _one(cluster, prepared, seed, wanted, calm)
                    yield found
                    if found.problems:
                        break  # with daemons that nothing is wrong with
                    cluster.settle()


def _one(
    cluster: Cluster, prepared: Prepared, seed: int, wanted: Sequence[float], calm: Watched
) -> Outcome:
    began = time.monotonic()
    problems: list[str] = []
    watched, faults, kinds = None, None, list[str]()
    try:
        watched, faults, kinds = cluster.run(prepared, seed)
    except Exception as error:
        problems.append(repr(error))
    fired = faults.fired if faults is not None else ()
    seconds = time.monotonic() - began
    far, equal, terms = 0.0, False, 0
    if watched is not None:
        problems += watched.problems(None)
        far = apart([loss for _, loss in watched.losses], wanted)
        equal = (watched.losses, watched.weights) == (calm.losses, calm.weights)
        terms = max((e.state.term for e in watched.events if e.HasField("state")), default=0)
        if far > TOLERANCE:
            problems.append(f"losses differ from the single process's by {far:.2g}")
    if cluster.surface.error:
        problems.append(f"a fault could not be done: {cluster.surface.error}")
    for name in ("broker", *PEERS):
        log = cluster.cluster.log(name, 10**6)
        if "Traceback" in log:
            at = log.index("Traceback")
            problems.append(f"{name}'s log: {log[max(0, at - 300) : at + 2500]}")
    return Outcome(
        seed,
        tuple(sentence(f.fault) for f in fired),
        tuple(k for k, f in zip(kinds, fired, strict=False) if f.at_s is not None),
        far,
        equal,
        terms,
        seconds,
        tuple(problems),
    )


def _worker(seeds: Sequence[int], folder: str, found: multiprocessing.Queue[Outcome | str]) -> None:
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    try:
        for outcome in _play(seeds, Path(folder)):
            found.put(outcome)
    except BaseException as error:
        found.put(f"{type(error).__name__}: {error}")
        raise


def chaos(runs: int, first: int, jobs: int, folder: Path) -> list[Figure]:
    """All of them, in so many clusters at once."""
    context = multiprocessing.get_context("spawn")
    found: multiprocessing.Queue[Outcome | str] = context.Queue()
    seeds, jobs = list(range(first, first + runs)), min(jobs, runs)
    workers = [
        context.Process(target=_worker, args=(seeds[k::jobs], str(folder / f"job-{k}"), found))
        for k in range(jobs)
    ]
    for worker in workers:
        worker.start()
    outcomes: list[Outcome] = []
    problems: list[str] = []
    kinds: Counter[str] = Counter()
    while len(outcomes) + len(problems) < runs and (
        any(w.is_alive() for w in workers) or not found.empty()
    ):
        try:
            one = found.get(timeout=1.0)
        except queue.Empty:
            continue
        if isinstance(one, str):
            problems.append(one)
            print(f"PROBLEM: {one}", flush=True)
            continue
        outcomes.append(one)
        kinds.update(one.fired)
        how = "to the bit" if one.equal else f"{one.apart:.1e} apart"
        print(
            f"seed {one.seed}: {'; '.join(one.faults)} -> {how}, {one.terms} terms, "
            f"{one.seconds:.0f} s ({len(one.fired)} of {len(one.faults)} happened)",
            flush=True,
        )
        for problem in one.problems:
            print(f"PROBLEM of seed {one.seed}: {problem}", flush=True)
    for worker in workers:
        worker.join()
    bad = len(problems) + sum(bool(one.problems) for one in outcomes)
    return [
        Figure("chaos_runs", len(outcomes), "runs", "higher"),
        Figure("chaos_faults", sum(kinds.values()), "faults that happened", "higher"),
        *(
            Figure(f"chaos_{kind.replace(' ', '_')}", n, "times", "higher")
            for kind, n in sorted(kinds.items())
        ),
        Figure("chaos_new_plans", sum(max(0, o.terms - 1) for o in outcomes), "terms", "higher"),
        Figure("chaos_equal_to_the_bit", sum(o.equal for o in outcomes), "runs", "higher"),
        Figure(
            "chaos_max_loss_difference",
            max((o.apart for o in outcomes), default=0.0),
            "relative",
            "lower",
        ),
        Figure("problems", bad, "runs", "lower"),
    ]
