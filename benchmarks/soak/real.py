"""Real processes that train for long while peers come, leave and die (see soak.py)."""

from __future__ import annotations

import math
import os
import random
import signal
import statistics
import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.benchmarks.service.broker_killed import Watched
from shoal.benchmarks.soak.gauge import Gauge, Series, growth
from shoal.benchmarks.table import Figure
from shoal.job import Job
from shoal.sim.processes import LocalCluster, started_by

if TYPE_CHECKING:
    from shoal.client import Client
    from shoal.client.front import SimulationFront
    from shoal.client.prepared import Prepared
    from shoal.proto.broker_pb2 import RunEvent

__all__ = ["Alone", "alone", "job_of", "killed", "leftovers", "real"]

MARK = "SHOAL_SOAK"
STAGES, BATCHES, SIZE = 3, 4, 2
SHORT_STEPS = 400
"""Of each run of `real`."""
TOLERANCE = 1e-3
"""Relative, of losses against the single process. Sums have another order there, and thousands of
steps make rounding grow; the same cut gives the same bits."""
BACK_S = 8.0
"""After how long a peer that was killed is started again."""
FORGET_S = 120.0


def job_of(steps: int, eval_every: int = 0, **train: Any) -> Job:
    """A GPT of two blocks over Shoal's own words, in three stages."""
    return Job.from_table(
        {
            "version": 1,
            "name": "soak",
            "model": {
                "factory": "shoal.examples.gpt:gpt",
                "args": {"layers": 2, "width": 32, "heads": 2, "length": 32, "dropout": 0.0},
            },
            "data": {"kind": "text", "length": 32},
            "train": {
                **{"steps": steps, "batch": BATCHES * SIZE, "microbatch": SIZE, "lr": 1e-3},
                **{"eval_every": eval_every, "eval_batches": 2, "schedule": "constant"},
                **{"warmup": 0},
                **train,
            },
            "plan": {"stages": STAGES, "pipelines": 1, "scheduler": "uniform"},
        }
    )


# ---------------------------------------------------------------- the single process


@dataclass
class Alone:
    """What the plain loop has: losses by step, held-out losses by the step after which."""

    losses: list[float] = field(default_factory=list)
    held_out: dict[int, float] = field(default_factory=dict)


def alone(job: Job, front: SimulationFront) -> Alone:
    """Trains the job in this process."""
    import torch

    from shoal.peer.data.reader import Reader
    from shoal.sim.plain import oracle

    torch.set_num_threads(1)  # as the peers; more wait for each other where cores are taken
    facts, found, train = front.prepared(job), Alone(), job.train
    reader = Reader(facts.manifest, facts.shards.__getitem__, seed=job.seed, microbatches=BATCHES)
    steps = train.steps or 0
    with front.module(job) as module:

        def evaluate(step: int) -> None:
            sums = weights = 0.0
            module.eval()
            with torch.no_grad():
                for m in range(train.eval_batches * BATCHES):
                    out = module(**reader.held_out(m, SIZE))
                    weight = float(out.get("weight", 1.0)) if isinstance(out, Mapping) else 1.0
                    loss = float(out["loss"] if isinstance(out, Mapping) else out)
                    sums, weights = sums + weight * loss, weights + weight
            module.train()
            found.held_out[step] = sums / weights

        def batch(step: int, microbatch: int) -> Mapping[str, torch.Tensor]:
            if train.eval_every and step and not microbatch and step % train.eval_every == 0:
                evaluate(step - 1)  # the step before it has just been applied
            return reader.batch(step, microbatch, SIZE)

        found.losses = oracle.train(module, batch, train, steps=steps, microbatches=BATCHES).losses
        if train.eval_every:
            evaluate(steps - 1)
    return found


def apart(got: Sequence[float], wanted: Sequence[float]) -> float:
    """The largest relative difference; infinite where a number is none or one is missing."""
    if len(got) != len(wanted):
        return math.inf
    each = [abs(a - b) / abs(b) for a, b in zip(got, wanted, strict=True)]
    return max(each, default=0.0) if all(map(math.isfinite, each)) else math.inf


# ---------------------------------------------------------------- processes


class Crowd:
    """A cluster whose peers come and go. `steady` ones are left alone."""

    def __init__(self, cluster: LocalCluster, names: Sequence[str], flags: Sequence[str]) -> None:
        self.cluster, self.names, self.flags = cluster, tuple(names), list(flags)
        self.back_at: dict[str, float] = {}
        """Peers that are away: when to start them again."""
        self.done: Counter[str] = Counter()

    def join_all(self) -> None:
        for name in self.names:
            self.cluster.join(name, self.flags)

    def here(self) -> list[str]:
        return [n for n in self.names if n not in self.back_at and self.cluster.runs(n)]

    def end(self, name: str, sign: signal.Signals, away_s: float) -> None:
        self.cluster.send(name, sign)
        self.back_at[name] = time.monotonic() + away_s
        self.done["kill" if sign == signal.SIGKILL else "leave"] += 1

    def come_back(self) -> None:
        """Starts those again whose time has come, and that have ended."""
        for name, at in list(self.back_at.items()):
            if time.monotonic() >= at and not self.cluster.runs(name):
                del self.back_at[name]
                self.cluster.join(name, self.flags)
                self.done["join"] += 1

    def pids(self) -> dict[str, list[int]]:
        """Broker, supervisors and workers, by what they are."""
        found: dict[str, list[int]] = {}
        for name, process in list(self.cluster.processes.items()):
            if process.poll() is None:
                found[name] = [process.pid]
                if name != "broker":
                    found[f"{name}'s worker"] = started_by(process.pid)
        return found


def leftovers(mark: str) -> list[str]:
    """Command lines of processes whose environment has the mark; ours is left out."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            ours = folder.name.isdigit() and int(folder.name) != os.getpid()
            if ours and f"{MARK}={mark}".encode() in (folder / "environ").read_bytes():
                command = (folder / "cmdline").read_bytes()
                found.append(command.replace(b"\0", b" ").decode())
        except OSError:
            pass  # no process of ours, or gone by now
    return found


def marked() -> str:
    """A mark that every process started from now on carries."""
    os.environ[MARK] = mark = uuid.uuid4().hex
    return mark


def wait_for(client: Client, count: int, patience_s: float = 120.0) -> None:
    end = time.monotonic() + patience_s
    while len(client.names()) < count:
        if time.monotonic() > end:
            raise SystemExit(f"{len(client.names())} of {count} peers joined")
        time.sleep(0.2)


# ---------------------------------------------------------------- parts


def real(minutes: float, seed: int, folder: Path, stretch: float, warmup: float) -> list[Figure]:
    """Runs one after the other while peers join, leave in good order and die."""
    import shoal
    from shoal.client.front import SimulationFront
    from shoal.client.submission import prepare

    rng, mark, job = random.Random(seed), marked(), job_of(SHORT_STEPS)
    names = [f"steady-{i}" for i in (1, 2)] + [f"guest-{i}" for i in (1, 2, 3, 4)]
    flags, problems, equal, runs = ["--stretch", f"{stretch:g}"], list[str](), 0, 0
    front = SimulationFront()
    wanted = alone(job, front).losses
    front.close()
    worst = 0.0
    with (
        LocalCluster(peers=[], folder=folder / "cluster", secure=True) as cluster,
        shoal.connect(cluster.address) as client,
        prepare(job) as prepared,
    ):
        crowd = Crowd(cluster, names, flags)
        crowd.join_all()
        wait_for(client, len(names))
        disks = {"broker": folder / "cluster" / "broker", "steady-1": folder / "cluster/steady-1"}
        with Gauge(crowd.pids, disks=disks) as gauge:
            end, next_at = time.monotonic() + 60 * minutes, time.monotonic() + 20.0
            calm: Watched | None = None
            while time.monotonic() < end and not problems:
                watched = _submit(client, prepared, folder, SHORT_STEPS)
                while watched.is_alive():
                    watched.join(0.5)
                    crowd.come_back()
                    cluster.check()
                    if calm is None or time.monotonic() < next_at:
                        continue  # the first run is left alone
                    next_at = time.monotonic() + rng.uniform(15.0, 35.0)
                    guests = [n for n in crowd.here() if n.startswith("guest")]
                    if len(crowd.back_at) < 2 and guests:
                        sign = rng.choice((signal.SIGKILL, signal.SIGTERM))
                        crowd.end(rng.choice(guests), sign, rng.uniform(3.0, 15.0))
                runs += 1
                problems += [f"run {runs}: {p}" for p in watched.problems(None)]
                losses = [loss for _, loss in watched.losses]
                worst = max(worst, apart(losses, wanted))
                equal += calm is None or (watched.losses, watched.weights) == (
                    calm.losses,
                    calm.weights,
                )
                calm = calm or watched
                print(f"run {runs} ended; {dict(crowd.done)}; {gauge.line()}", flush=True)
        logs = _complaints(cluster, ["broker", *names])
        if logs:
            problems += logs
    if left := leftovers(mark):
        problems.append(f"processes are left: {left}")
    if worst > TOLERANCE:
        problems.append(f"losses differ from the single process's by {worst:.2g}")
    figures = [
        Figure("real_minutes", minutes, "min", "higher"),
        Figure("real_runs", runs, "runs", "higher"),
        *(Figure(f"real_{k}s", n, "times", "higher") for k, n in sorted(crowd.done.items())),
        Figure("real_runs_equal_to_the_bit", equal, f"of {runs} runs", "higher"),
        Figure("real_max_loss_difference", worst, "relative", "lower"),
        *_held(gauge, "real", ["broker", "steady-1", "steady-2"], 60 * warmup),
        Figure("real_processes_left", len(left), "processes", "lower"),
    ]
    return _or_problems(figures, problems)


def killed(
    minutes: float,
    every_s: float,
    seed: int,
    folder: Path,
    stretch: float,
    warmup: float,
    steps: int = 0,
) -> list[Figure]:
    """One run of `steps` (0: as many as `minutes` should take), whose holders are killed."""
    import shoal
    from shoal.client.front import SimulationFront
    from shoal.client.submission import prepare

    rng, mark, calm_s = random.Random(seed), marked(), min(60.0, 10 * minutes)
    names = ["anchor", *(f"peer-{i}" for i in range(1, 6))]
    problems: list[str] = []
    waited: list[float] = []  # of each kill: until there was a pool again
    with (
        LocalCluster(peers=[], folder=folder / "cluster", secure=True) as cluster,
        shoal.connect(cluster.address) as client,
    ):
        crowd = Crowd(cluster, names, ["--stretch", f"{stretch:g}"])
        crowd.join_all()
        wait_for(client, len(names))
        with prepare(job_of(40)) as prepared:  # how long a step takes here
            trial = _submit(client, prepared, folder, 40)
            trial.join()
            problems += trial.problems(None)
        step_s = statistics.median(e.step.seconds for e in trial.events if e.HasField("step"))
        steps = steps or int(60 * minutes / step_s * 0.8) + 1
        job = job_of(steps, eval_every=max(1, steps // 10))
        print(f"a step takes {step_s:.3f} s: {steps} steps", flush=True)
        disks = {"broker": folder / "cluster" / "broker", "anchor": folder / "cluster/anchor"}
        with prepare(job) as prepared, Gauge(crowd.pids, disks=disks) as gauge:
            watched = _submit(client, prepared, folder, steps)
            watched.progress(300.0)
            began = time.monotonic()
            next_at, told_at = began + calm_s, began
            while watched.is_alive():
                watched.join(0.2)
                crowd.come_back()
                cluster.check()
                now = time.monotonic()
                if next_at <= now < began + 60 * minutes and watched.phase() == "running":
                    here = {*crowd.here()} & {*client.names().values()}
                    holders = [n for n in _holders(client, watched.events) if n in here]
                    victims = [n for n in holders if n != "anchor"]
                    if victims and len(here) > STAGES:  # somebody can take its part
                        waited.append(now - next_at)
                        next_at = now + every_s
                        crowd.end(rng.choice(victims), signal.SIGKILL, BACK_S)
                if now - told_at > 60.0:
                    told_at = now
                    print(
                        f"{(now - began) / 60:.0f} min: {len(watched.losses)} steps, "
                        f"{crowd.done['kill']} kills; {gauge.line()}",
                        flush=True,
                    )
            lasted_s = time.monotonic() - began
        problems += [*watched.problems(None), *_complaints(cluster, ["broker", *names])]
    if left := leftovers(mark):
        problems.append(f"processes are left: {left}")
    front = SimulationFront()
    wanted = alone(job, front)
    front.close()
    done = [e for e in watched.events if e.HasField("step")]
    held = {e.step.step: e.step.evaluation.loss for e in done if e.step.HasField("evaluation")}
    losses_apart = apart([e.step.outcome.loss for e in done], wanted.losses)
    held_apart = apart([*held.values()], [*wanted.held_out.values()])
    if [*held] != [*wanted.held_out]:
        problems.append(f"evaluated after {[*held]}, expected {[*wanted.held_out]}")
    if max(losses_apart, held_apart) > TOLERANCE:
        problems.append(f"losses differ by {losses_apart:.2g}, held-out ones by {held_apart:.2g}")
    calm, under = _stretches(done, calm_s)
    again = Counter(e.state.reason.code for e in watched.events if e.HasField("state"))
    print("the run's states by their reason:", dict(again))
    stalls = sorted(e.step.seconds for e in done)[-crowd.done["kill"] :]
    figures = [
        Figure("killed_minutes", lasted_s / 60, "min", "higher"),
        Figure("killed_every", every_s, "s", "lower"),
        Figure("killed_kills", crowd.done["kill"], "kills", "higher"),
        Figure("killed_kills_late", statistics.mean(waited or [0.0]), "s, for a pool", "lower"),
        Figure("killed_steps", len(done), f"of {steps} steps", "higher"),
        Figure("killed_max_loss_difference", losses_apart, "relative", "lower"),
        Figure("killed_max_held_out_difference", held_apart, "relative", "lower"),
        Figure("killed_step_seconds_calm", calm, "s", "lower"),
        Figure("killed_goodput", calm / under, "share", "higher"),
        Figure("killed_longest_stall_median", statistics.median(stalls), "s", "lower"),
        *_held(gauge, "killed", ["broker", "anchor"], 60 * warmup),
        *_ages(gauge, [n for n in names if n != "anchor"]),
        Figure("killed_processes_left", len(left), "processes", "lower"),
    ]
    return _or_problems(figures, problems)


def _submit(client: Client, prepared: Prepared, folder: Path, steps: int) -> Watched:
    found = Watched(client.submit_prepared(prepared, folder), steps)
    found.start()
    return found


def _holders(client: Client, events: Sequence[RunEvent]) -> list[str]:
    """Names of those that the newest plan gives a stage to."""
    plans = [e.plan for e in events if e.HasField("plan")]
    names = client.names()
    held = [peer for stage in plans[-1].stages for peer in stage.holders] if plans else []
    return [names.get(peer, peer) for peer in held]


def _stretches(done: Sequence[RunEvent], calm_s: float) -> tuple[float, float]:
    """Seconds per step of the first `calm_s`, and of what came after."""
    begin = done[0].at_s
    first = [e for e in done if e.at_s <= begin + calm_s]
    if len(first) < 2 or len(first) == len(done):
        return math.nan, math.nan
    middle, end = first[-1], done[-1]
    calm = (middle.at_s - begin) / (len(first) - 1)
    return calm, (end.at_s - middle.at_s) / (len(done) - len(first))


def _held(gauge: Gauge, part: str, roles: Sequence[str], warmup_s: float) -> list[Figure]:
    """What the longest-lived processes of some roles hold, and how it grew."""
    found: list[Figure] = []
    workers = [f"{role}'s worker" for role in roles if role != "broker"]
    for role in (*roles, *workers):
        series = gauge.longest(role)
        name = f"{part}_{role.replace(' ', '_').replace(chr(39) + 's', '')}".replace("-", "_")
        found += _of(series, name, warmup_s)
    for disk, sizes in gauge.disk.items():
        late = [(t, n) for t, n in sizes if t >= sizes[0][0] + warmup_s]
        grown = growth([t for t, _ in late], [n for _, n in late])
        name = f"{part}_{disk}_disk".replace("-", "_")
        found.append(Figure(f"{name}_growth", grown, "share", "lower"))
        found.append(Figure(name, sizes[-1][1] / 1e6, "MB", "lower"))
    return found


def _of(series: Series, name: str, warmup_s: float) -> list[Figure]:
    rss, fds, threads = (series.of(what, warmup_s) for what in ("rss", "descriptors", "threads"))
    if not rss:
        return []
    print(
        f"{name}: {series.lasted_s / 60:.1f} min, {rss[0] / 1e6:.1f} -> {rss[-1] / 1e6:.1f} MB, "
        f"{fds[0]:.0f} -> {fds[-1]:.0f} descriptors (at most {max(fds):.0f}), "
        f"{threads[0]:.0f} -> {threads[-1]:.0f} threads"
    )
    return [
        Figure(f"{name}_rss_growth", series.growth("rss", warmup_s), "share", "lower"),
        Figure(f"{name}_anonymous_growth", series.growth("anonymous", warmup_s), "share", "lower"),
        Figure(f"{name}_rss", rss[-1] / 1e6, "MB", "lower"),
        Figure(f"{name}_descriptors_growth", fds[-1] - fds[0], "descriptors", "lower"),
        Figure(f"{name}_threads_growth", threads[-1] - threads[0], "threads", "lower"),
    ]


def _ages(gauge: Gauge, names: Sequence[str]) -> list[Figure]:
    """Workers that were started again: whether a later one needs more than an earlier one."""
    found = sorted(pair for n in names for pair in gauge.at_age(f"{n}'s worker", 30.0))
    grown = growth([t for t, _ in found], [rss for _, rss in found])
    return [Figure("killed_restarted_worker_rss_growth", grown, "share", "lower")]


def _complaints(cluster: LocalCluster, names: Sequence[str]) -> list[str]:
    """Tracebacks in logs, with what is around them."""
    found = []
    for name in names:
        log = cluster.log(name, 10**6)
        if "Traceback" in log:
            at = log.index("Traceback")
            found.append(f"{name}'s log: {log[max(0, at - 500) : at + 3000]}")
    return found


def _or_problems(figures: list[Figure], problems: Sequence[str]) -> list[Figure]:
    for problem in problems:
        print(f"PROBLEM: {problem}", flush=True)
    return [*figures, Figure("problems", len(problems), "problems", "lower")]
