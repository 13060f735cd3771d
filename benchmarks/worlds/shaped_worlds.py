"""A scenario in both worlds: the virtual one, and real daemons over shaped paths, each with the
compute of its device; the same job under the same plan."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from shoal.client import Run, connect
from shoal.client.front import SimulationFront
from shoal.client.prepared import Prepared
from shoal.client.uploading import upload
from shoal.job import Job
from shoal.peer.data.reader import Reader
from shoal.proto import broker_pb2
from shoal.sim.modelled.virtual_run import run_virtual
from shoal.sim.processes import ClusterError, LocalCluster
from shoal.sim.scenario.scenario import Scenario
from shoal.sim.shaped.contention import busy_share, contended, processor, snapshot
from shoal.sim.shaped.forwarder import Forwarder
from shoal.sim.shaped.shaping import Shaping
from shoal.sim.shaped.staging import cpu_seconds, step_work, stretch_of

__all__ = ["CASES", "Case", "Outcome", "outcomes"]

WARM_UP = 3
"""Steps at the beginning that are not counted."""
STEPS = 11
MOST_BUSY = 0.7
MOST_DRIFT = 0.25
"""By how much a core's speed may be off in the run. The virtual world is given the speed that cores
had: what is left of the error is the models'."""
LEAST_STEP_S = 0.5
PATIENCE_S = 120.0

JOB = """\
version = 1
name = "fidelity"
[model]
factory = "shoal.examples.gpt:gpt"
args = {{ layers = {layers}, width = {width}, heads = {heads}, length = 64, dropout = 0.0 }}
[data]
length = 64
[train]
steps = {steps}
batch = {batch}
microbatch = {microbatch}
eval_every = 0
[plan]
replan = false
recompute = false
{plan}
"""


@dataclass(frozen=True, slots=True)
class Case:
    """A scenario: (name, place, GFLOP/s at the peak, uplink) of each peer; `links` in TOML.
    `time_scale`: of its real processes, where the machine is too small for them at their pace."""

    name: str
    peers: tuple[tuple[str, str, float, str], ...]
    links: str
    plan: str
    layers: int = 6
    width: int = 160
    batch: int = 16
    microbatch: int = 4
    time_scale: float = 1.0

    def write(self, folder: Path, time_scale: float, slower: float = 1.0) -> Path:
        """`slower`: every device takes so many times as long."""
        folder.mkdir(exist_ok=True)
        heads = self.width // 32
        job = JOB.format(
            layers=self.layers,
            width=self.width,
            heads=heads,
            steps=STEPS,
            batch=self.batch,
            microbatch=self.microbatch,
            plan=self.plan,
        )
        (folder / "job.toml").write_text(job)
        lines = ["version = 1", f'name = "{self.name}"', "seed = 7", 'job = "job.toml"']
        lines.append(f"time_scale = {time_scale * self.time_scale}")
        for name, place, gflops, up in self.peers:
            # Memory in proportion: every class of work is slower by the same factor.
            lines += [
                "[[peers]]",
                f'name = "{name}"',
                f'place = "{place}"',
                f'up = "{up}"',
                f"device = {{ flops = {gflops / slower}e9, "
                f'memory_bandwidth = "{gflops / slower / 5}GB/s", '
                f'overhead = "{500 * slower / gflops}us" }}',
            ]
        path = folder / "scenario.toml"
        path.write_text("\n".join([*lines, self.links]))
        return path


def _link(a: str, b: str, latency: str, bandwidth: str) -> str:
    return (
        f'[[links]]\nfrom = "{a}"\nto = "{b}"\nlatency = "{latency}"\nbandwidth = "{bandwidth}"\n'
    )


def _place(name: str, latency: str, bandwidth: str) -> str:
    return f'[places.{name}]\nlatency = "{latency}"\nbandwidth = "{bandwidth}"\n'


def _stages(count: int, schedule: str, pipelines: int = 1) -> str:
    return (
        f'scheduler = "uniform"\nstages = {count}\npipelines = {pipelines}\nschedule = "{schedule}"'
    )


CASES = (
    Case(
        "2 peers in one city",
        (("a", "x", 20.0, "1Gbit"), ("b", "x", 14.0, "1Gbit")),
        _place("x", "3ms", "200Mbit"),
        _stages(2, "1f1b"),
    ),
    Case(
        "3 peers on three continents",
        (("a", "x", 16.0, "1Gbit"), ("b", "y", 16.0, "1Gbit"), ("c", "z", 12.0, "1Gbit")),
        _link("x", "y", "40ms", "50Mbit")
        + _link("y", "z", "90ms", "50Mbit")
        + _link("x", "z", "120ms", "50Mbit"),
        _stages(3, "gpipe"),
    ),
    Case(
        "4 peers, two pipelines, two regions",
        tuple((n, p, 12.0, "100Mbit") for n, p in zip("abcd", "xxyy", strict=True)),
        _place("x", "2ms", "200Mbit") + _place("y", "2ms", "200Mbit")
        + _link("x", "y", "45ms", "100Mbit"),
        _stages(2, "1f1b", pipelines=2),
        time_scale=2.0,  # four that compute at once, on two cores
    ),
    Case(
        "5 homes behind slow uplinks",
        (
            ("a", "x", 12.0, "20Mbit"),
            ("b", "x", 8.0, "10Mbit"),
            ("c", "x", 10.0, "10Mbit"),
            ("d", "x", 6.0, "20Mbit"),
            ("e", "x", 9.0, "10Mbit"),
        ),
        _place("x", "12ms", "100Mbit"),
        _stages(5, "1f1b"),
        layers=5,
    ),
    Case(
        "6 unequal peers, two regions",
        tuple(
            (n, p, g, "100Mbit")
            for n, p, g in zip("abcdef", "xxxyyy", (10.0, 7.0, 8.0, 6.0, 9.0, 7.0), strict=True)
        ),
        _place("x", "4ms", "200Mbit") + _place("y", "5ms", "200Mbit")
        + _link("x", "y", "45ms", "40Mbit"),
        _stages(6, "1f1b"),
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Pace:
    """Medians over a run: seconds of a step, and seconds that its peers computed, summed."""

    step_s: float
    compute_s: float

    @classmethod
    def of(cls, events: Sequence[broker_pb2.RunEvent], time_scale: float = 1.0) -> Pace:
        steps = [e.step for e in events if e.HasField("step")][WARM_UP:]
        return cls(
            statistics.median(s.seconds for s in steps) / time_scale,
            statistics.median(s.compute_s for s in steps) / time_scale,
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """A case in both worlds, without the time scale. `drift`: how many times as long as it was
    thought to need a core computed in the real run; its speed is not the same in every minute.
    `why_not`: why it is no measurement; empty: it is one."""

    case: str
    virtual: Pace
    real: Pace
    drift: float
    busy: float
    why_not: str

    @property
    def error(self) -> float:
        return abs(self.virtual.step_s / self.real.step_s - 1)

    def __str__(self) -> str:
        step, computing = self.virtual.step_s, self.virtual.compute_s
        return (
            f"{self.case:36s} virtual {step:6.3f} s, real {self.real.step_s:6.3f} s "
            f"({step / self.real.step_s - 1:+.1%}); computing {computing:6.3f}, "
            f"{self.real.compute_s:6.3f} s; a core took {self.drift:.2f} times what it did before; "
            f"cores {self.busy:.0%} busy"
            + (f"  NOT A MEASUREMENT ({self.why_not})" if self.why_not else "")
        )


def outcomes(
    wanted: Sequence[str], again: int, tensors: bool, time_scale: float
) -> Iterator[Outcome]:
    """Of each case its last try."""
    for case in CASES:
        if wanted and not any(w in case.name for w in wanted):
            continue
        with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
            front = SimulationFront()
            stack.callback(front.close)
            scenario = Scenario.from_toml(case.write(Path(name), time_scale))
            job = scenario.adjusted(Job.from_toml(scenario.job_path))
            virtual, plan = _virtual(scenario, job, front, tensors)
            prepared = front.prepared(job)  # captured already
            stretches = _stretches(scenario, prepared, front)
            for _ in range(again + 1):
                found = _real(case, scenario, prepared, stretches, plan, virtual, Path(name))
                slower = case.write(Path(name) / "slower", time_scale, found.drift)
                as_it_was, same = _virtual(Scenario.from_toml(slower), job, front, tensors)
                assert same.stages == plan.stages, "a plan that hangs on how fast cores are"
                found = replace(found, virtual=as_it_was)
                print(found, flush=True)
                if not found.why_not:
                    break
                # Of a core's speed, what the run itself shows is the best measurement there is.
                stretches = {p: s / found.drift for p, s in stretches.items()}
            yield found


def _virtual(
    scenario: Scenario, job: Job, front: SimulationFront, tensors: bool
) -> tuple[Pace, broker_pb2.Plan]:
    """Its pace, and the plan by which it ran; its peers go by their names."""
    packed = front.pack(job)
    with tempfile.TemporaryDirectory() as folder:
        ran = run_virtual(scenario, job, packed.spec, packed.blobs, Path(folder), ghost=not tensors)
    (plan,) = [e.plan for e in ran.events if e.HasField("plan")]
    plan.ClearField("keepers")  # the real broker adds its own
    return Pace.of(ran.events), plan


def _real(
    case: Case,
    scenario: Scenario,
    prepared: Prepared,
    stretches: Mapping[str, float],
    plan: broker_pb2.Plan,
    virtual: Pace,
    folder: Path,
) -> Outcome:
    shaping = Shaping.of_scenario(scenario)
    with (
        LocalCluster(peers=[], threads=1) as cluster,
        Forwarder(shaping, {"broker": cluster.address}) as paths,
        connect(cluster.address) as client,
    ):
        for peer in scenario.peers:
            via = paths.write_via(peer.name, folder / f"{peer.name}.json")
            flags = ["--port", str(paths.port(peer.name)), "--via", str(via)]
            cluster.join(peer.name, [*flags, "--stretch", f"{stretches[peer.name]:.6f}"])
        end = time.monotonic() + PATIENCE_S
        while len(client.describe().peers) < len(scenario.peers):
            cluster.check()
            if time.monotonic() > end:
                raise ClusterError(f"{case.name}: not all peers joined in {PATIENCE_S:.0f} s")
            time.sleep(0.1)
        spec = upload(client.access, prepared)
        spec.plan.CopyFrom(plan)
        events: list[broker_pb2.RunEvent] = []
        watched = {p.name: cluster.processes[p.name].pid for p in scenario.peers}
        began, before, ticks = time.monotonic(), snapshot(watched), processor()
        run = client._runs.Submit(spec, timeout=30.0).run  # no client writes plans by hand
        for event in Run(client, run, folder).watch():
            events.append(event)
            cluster.check()
            if event.HasField("step") and event.step.step == WARM_UP - 1:
                began, before, ticks = time.monotonic(), snapshot(watched), processor()
            elif event.HasField("step") and event.step.step == STEPS - 1:
                why = contended(before, snapshot(watched), time.monotonic() - began)
                busy = busy_share(ticks, processor())
        cluster.stop()  # while its peers can say goodbye over the paths
        state = [e.state for e in events if e.HasField("state")][-1]
        if state.phase != broker_pb2.DONE:
            raise ClusterError(f"{case.name}: {state.reason.text}")
    real = Pace.of(events, scenario.time_scale)
    if not why and busy > MOST_BUSY:
        why = f"cores were busy {busy:.0%} of the time: at most {MOST_BUSY:.0%} of it"
    if not why and real.step_s * scenario.time_scale < LEAST_STEP_S:
        why = f"a step takes {real.step_s:.2f} s: at least {LEAST_STEP_S} s"
    drift = real.compute_s / virtual.compute_s
    if not why and abs(drift - 1) > MOST_DRIFT:
        why = f"a core took {drift:.2f} times as long as when its speed was measured"
    return Outcome(case.name, virtual, real, drift, busy, why)


def _stretches(scenario: Scenario, prepared: Prepared, front: SimulationFront) -> dict[str, float]:
    """By peer, from the speed of a core now."""
    train, shard = prepared.job.train, prepared.shards.__getitem__
    reader = Reader(
        prepared.manifest, shard, seed=prepared.job.seed, microbatches=train.microbatches
    )
    with front.module(prepared.job) as module:
        here_s = cpu_seconds(
            module, lambda step, m: reader.batch(step, m, train.microbatch_size), train
        )
    work, scale = step_work(prepared.graph, train), scenario.time_scale
    found = {p.name: stretch_of(p.hardware.speeds, work, here_s, scale) for p in scenario.peers}
    print(f"    {here_s:.3f} s of a core; " + ", ".join(f"{n} x{s:.2f}" for n, s in found.items()))
    return found
