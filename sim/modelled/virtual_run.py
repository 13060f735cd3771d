"""A scenario in the virtual world: from a submitted job to a finished run.

    found = run_virtual(scenario, job, spec, blobs, folder, ghost=False)
    found.losses, found.now, found.digest

Peers are as the file describes them: speeds from their device, memory, operators, place; they come
at `joins`, stay `stays`, and the broker stands where the file says. Faults and churn happen, every
invariant is watched, and nothing but the file and its seed decides what comes out (I6).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ...broker import events as b
from ...broker.candidates import Rule
from ...broker.options import BrokerOptions
from ...job import Job
from ...proto import broker_pb2
from ..faults.churn import absent_at_first, churn_of
from ..faults.faults import Faults
from ..following import lack_of
from ..monitor.monitor import Monitor
from ..scenario.scenario import Scenario
from ..trace import Trace
from ..virtual.choosing import begin_choosing
from ..virtual.clock import Observe, Observed
from ..virtual.spec import PeerDevice, PeerSpec
from ..virtual.wan import Wan
from ..virtual.world import RESTART_S, World

__all__ = ["VirtualRun", "run_virtual", "specs_of", "wan_of"]

CANCEL_S = 60.0
"""How long a run that is over its limit has to end."""


@dataclass(frozen=True, kw_only=True)
class VirtualRun:
    """What a run came to. Times in seconds of the world's clock."""

    run: str
    state: broker_pb2.RunState
    """The last one."""
    events: Sequence[broker_pb2.RunEvent]
    losses: Sequence[float]
    """By step."""
    now: float
    """When the run ended."""
    late: bool
    """Whether it was cancelled at the scenario's limit."""
    digest: str
    """The digest of the trace: the hash of the event log (I6)."""
    checks: int
    """How many records the monitor has checked, without a violation."""
    faults: Faults = field(repr=False)
    """The scenario's, and those of churn."""
    world: World = field(repr=False)
    trace: Trace = field(repr=False)


def run_virtual(
    scenario: Scenario,
    job: Job,
    submitted: broker_pb2.RunSpec,
    blobs: Mapping[str, bytes],
    folder: Path,
    *,
    ghost: bool = False,
    trace: Trace | None = None,
    observe: Observe | None = None,
    broker_options: BrokerOptions | None = None,
    check: bool = True,
    rule: Rule | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> VirtualRun:
    """Runs a job, whose `submitted` and `blobs` a client has prepared, to its end, or to the
    scenario's limit; one that waits for memory that nobody will bring, ends there. Data shards are
    written into `folder`. Without `check`, no invariant is watched, which takes a third of the
    time. `rule`: of who is in a round; `say` hears of cohorts that it does not choose.

    Raises ValueError for a job that the broker refuses and for faults that cannot be, Violation
    when an invariant does not hold, and StalledError when nothing is left to happen.
    """
    trace = Trace() if trace is None else trace
    specs = specs_of(scenario)
    churn = churn_of(scenario.churn, [spec.name for spec in specs], scenario.seed, scenario.folder)
    absent = absent_at_first(churn) if scenario.churn.trace else ()
    settled = not (churn or scenario.faults or any(spec.joins_s > 0 for spec in specs))

    def seen(one: Observed) -> None:
        if settled and isinstance(one.record, b.Publish) and lack_of(one.record.event):
            world.after(0.0, lambda: end(over=False))
        if observe is not None:
            observe(one)

    world = World(
        [spec for spec in specs if spec.name not in absent],
        blobs=blobs,
        folder=folder,
        wan=wan_of(scenario),
        trace=trace,
        device=ghosts() if ghost else None,
        observe=seen,
        broker_options=broker_options,
        seed=scenario.seed,
        log=False,
    )
    monitor = Monitor(world, seed=scenario.seed) if check else None
    faults = Faults(world, scenario.faults, scenario.selected, specs=specs, churn=churn)
    faults.start()
    run = world.submit(submitted)
    if rule is not None:
        begin_choosing(world, b.RunId(run), submitted, rule, say)
    late: list[bool] = []

    def end(over: bool) -> None:
        if not world.broker.alive:
            world.after(RESTART_S, lambda: end(over))
        elif run not in world.broker.ended:
            if over:
                late.append(True)
            world.broker.ask(lambda request: b.RunAsked(request, b.RunId(run), "cancel"))

    limit_s = float(scenario.limit)
    world.after(max(0.0, limit_s - world.now), lambda: end(over=True))
    events = (monitor or world).finish(run, limit_s + CANCEL_S)
    return VirtualRun(
        run=run,
        state=world.broker.ended[run],
        events=events,
        losses=[e.step.outcome.loss for e in events if e.HasField("step")],
        now=world.now,
        late=bool(late),
        digest=trace.digest(),
        checks=monitor.checks if monitor else 0,
        faults=faults,
        world=world,
        trace=trace,
    )


def specs_of(scenario: Scenario) -> tuple[PeerSpec, ...]:
    """The peers of the scenario, in its order."""
    return tuple(
        PeerSpec(
            name=peer.name,
            memory_bytes=int(peer.memory),
            core=peer.ops == "core",
            hardware=peer.hardware.speeds,
            place=peer.place,
            owner=peer.owner,
            up=float(peer.up),
            down=float(peer.down),
            joins_s=float(peer.joins),
            stays_s=None if peer.stays == "" else float(peer.stays),
        )
        for peer in scenario.peers
    )


def wan_of(scenario: Scenario) -> Wan:
    """The scenario's network between its peers and its broker."""
    ends = scenario.wide()
    return Wan(
        ends.network,
        jitter_s=ends.jitter_s if ends.jitter_s.any() else None,
        loss=ends.loss if ends.loss.any() else None,
        burst=ends.burst if ends.burst.any() else None,
        seed=scenario.seed,
    )


def ghosts() -> Callable[[PeerSpec], PeerDevice]:
    """Devices on which every tensor is a hash."""
    from ..ghost.device import Ghosts

    return Ghosts()
