"""Worlds drawn from a seed: unequal peers and links, a plan nobody would write, and faults.

    drawn = draw(seed, graph, microbatches=4, microbatch_size=1, cells=[("flap", "backward"), …])
    played = play(drawn, spec, blobs, folder, device=Ghosts(), losses=expected.losses)

A cell is a kind of fault and the phase in which it happens. What every kind must come to is known
beforehand: those of SURVIVED leave the losses as they are; those of ENDING take a holder away, and
the run ends FAILED with a reason that names it, since nothing can take its place yet. `play` raises
Violation for anything else, and for a fault that does not happen.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..dag.convert import plan_to_proto
from ..dag.cut import cut
from ..dag.graph import Graph
from ..dag.network import Network
from ..dag.plan import PeerId, Plan, StageSlot, Visit
from ..job import Job
from ..proto import broker_pb2
from .control import BROKER
from .faults import Faults
from .monitor import Monitor
from .peer_shell import Device, PeerSpec
from .sentences import Fault, corrupt, flap, join, kill, leave, partition, slow, stop
from .violation import Broken
from .wan import Wan
from .world import World

__all__ = ["CELLS", "ENDING", "PHASES", "SURVIVED", "Drawn", "Played", "draw", "play", "shorter"]

PHASES = ("forward", "backward", "clip", "update")
SURVIVED = (
    *("partition", "slow link", "flapping link", "corrupt message", "stopped for a moment"),
    *("broker away for a moment", "spare leaves", "spare dies", "peer joins"),
)
ENDING = (
    *("holder dies", "holder leaves", "holder's stream cut", "holder stopped"),
    "broker away",
)
CELLS = tuple((kind, phase) for kind in (*SURVIVED, *ENDING) for phase in PHASES)
LEAST_STEPS = 10
"""The last fault happens in step 8 at the latest, and what it does in the next."""


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A world and what happens in it. `faults[i]` is of the kind and phase `cells[i]`."""

    seed: int
    peers: tuple[PeerSpec, ...]
    late: tuple[PeerSpec, ...]
    """Those that only a fault lets come."""
    network: Network
    jitter_s: NDArray[np.float64]
    loss: NDArray[np.float64]
    plan: Plan
    faults: tuple[Fault, ...]
    cells: tuple[tuple[str, str], ...]
    ends: str = ""
    """The peer whose loss ends the run; "": it goes to its end."""


@dataclass(frozen=True)
class Played:
    """What came of it. `checks`: records that the monitor looked at."""

    events: list[broker_pb2.RunEvent]
    log: list[str]
    checks: int
    virtual_s: float


# -------------------------------------------------------------------- drawing


def draw(
    seed: int,
    graph: Graph,
    *,
    microbatches: int,
    microbatch_size: int,
    cells: Sequence[tuple[str, str]],
) -> Drawn:
    """`graph`: full, for any microbatch size. The cells happen one after the other, in steps 1 to
    8; at most one of ENDING, which must be the last."""
    rng = random.Random(f"world {seed}")
    holders = [f"p{i}" for i in range(rng.randint(3, 5))]
    spares, late = ["spare-0"], ["late-0"]
    names = [*holders, *spares]
    rng.shuffle(names)
    specs = {n: PeerSpec(name=n, flops_per_s=10 ** rng.uniform(8.5, 10.5)) for n in names + late}
    plan = _plan(rng, holders, graph, microbatches, microbatch_size)
    faults: list[Fault] = []
    ends = ""
    for i, (kind, phase) in enumerate(cells):
        first = 1 + 8 * i // len(cells)
        step = rng.randint(first, max(first, 8 * (i + 1) // len(cells)))
        who = rng.choice(sorted({v.peer for route in plan.routes for v in route}))
        hub = plan.stages[-1].holders[0]
        other = hub if who != hub else rng.choice([p for p in plan.peers if p != hub])
        faults.append(_FAULTS[kind](rng, who, other, {"at_step": step, "phase": phase}))
        if kind in ENDING:
            assert i + 1 == len(cells), f"{kind} ends the run, and {cells[i + 1 :]} come after it"
            ends = who
    network, jitter_s, loss = _network(rng, [*names, *late, BROKER])
    return Drawn(
        seed=seed,
        peers=tuple(specs[n] for n in names),
        late=tuple(specs[n] for n in late),
        network=network,
        jitter_s=jitter_s,
        loss=loss,
        plan=plan,
        faults=tuple(faults),
        cells=tuple(cells),
        ends=ends,
    )


Make = Callable[[random.Random, str, str, dict[str, object]], Fault]
"""(generator, a holder, another one that exchanges frames with it, when) -> the fault."""

_FAULTS: Mapping[str, Make] = {
    "partition": lambda rng, a, b, when: partition(a, b, for_s=rng.uniform(0.5, 12), **when),
    "slow link": lambda rng, a, b, when: slow(
        a, b, factor=rng.uniform(2, 50), for_s=rng.uniform(1, 9), **when
    ),
    "flapping link": lambda rng, a, b, when: flap(a, b, for_s=rng.uniform(1, 9), **when),
    "corrupt message": lambda rng, a, b, when: corrupt(a, b, **when),
    # Shorter than the lease of 10 s less two heartbeats of 2 s.
    "stopped for a moment": lambda rng, a, b, when: stop(a, for_s=rng.uniform(0.5, 5), **when),
    "broker away for a moment": lambda rng, a, b, when: partition(
        a, BROKER, for_s=rng.uniform(0.5, 5), **when
    ),
    "spare leaves": lambda rng, a, b, when: leave("spare-0", **when),
    "spare dies": lambda rng, a, b, when: kill("spare-0", **when),
    "peer joins": lambda rng, a, b, when: join("late-0", **when),
    "holder dies": lambda rng, a, b, when: kill(a, **when),
    "holder leaves": lambda rng, a, b, when: leave(a, **when),
    "holder's stream cut": lambda rng, a, b, when: flap(a, BROKER, for_s=1.0, **when),
    "holder stopped": lambda rng, a, b, when: stop(a, for_s=30.0, **when),
    "broker away": lambda rng, a, b, when: partition(a, BROKER, for_s=30.0, **when),
}


def _plan(
    rng: random.Random, holders: Sequence[str], graph: Graph, microbatches: int, size: int
) -> Plan:
    """Two or three stages that all train, cut anywhere; one or two holders each; every microbatch
    on a route of its own."""
    bound, operators = graph.bind(size), len(graph.operators)
    while True:
        stages = rng.randint(2, 3)
        bounds = [0, *sorted(rng.sample(range(1, operators), stages - 1)), operators]
        parts = list(pairwise(bounds))
        if all(stage.has_backward for stage in cut(bound, parts)):
            break
    names = [PeerId(name) for name in rng.sample(holders, len(holders))]
    held = [[name] for name in names[:stages]]
    for name in names[stages:]:
        held[rng.randrange(stages)].append(name)
    return Plan(
        stages=tuple(StageSlot(a, b, tuple(h)) for (a, b), h in zip(parts, held, strict=True)),
        routes=tuple(
            tuple(Visit(i, rng.choice(h)) for i, h in enumerate(held)) for _ in range(microbatches)
        ),
        microbatch_size=size,
        schedule=rng.choice(("gpipe", "1f1b")),
    )


def _network(
    rng: random.Random, names: Sequence[str]
) -> tuple[Network, NDArray[np.float64], NDArray[np.float64]]:
    """Links of 1 to 100 ms and 0.3 to 30 MB/s, some with jitter or loss."""
    n = len(names)

    def each(draw: Callable[[], float]) -> NDArray[np.float64]:
        found = np.array([[draw() for _ in range(n)] for _ in range(n)])
        np.fill_diagonal(found, 0.0)
        return found

    latency = each(lambda: 10 ** rng.uniform(-3, -1))
    network = Network(
        peers=tuple(PeerId(name) for name in names),
        latency_s=latency,
        bandwidth=each(lambda: 10 ** rng.uniform(5.5, 7.5)) + np.diag([np.inf] * n),
        up=np.array([10 ** rng.uniform(6, 8) for _ in names]),
        down=np.array([10 ** rng.uniform(6, 8) for _ in names]),
    )
    jitter = latency * each(lambda: rng.choice((0.0, 0.0, 0.3)))
    return network, jitter, each(lambda: rng.choice((0.0, 0.0, 0.02)))


# -------------------------------------------------------------------- playing


def shorter(spec: broker_pb2.RunSpec, steps: int) -> broker_pb2.RunSpec:
    """The same run with so many steps."""
    found = broker_pb2.RunSpec()
    found.CopyFrom(spec)
    job = Job.from_json(spec.job)
    found.job, found.steps = replace(job, train=replace(job.train, steps=steps)).to_json(), steps
    return found


def play(
    drawn: Drawn,
    spec: broker_pb2.RunSpec,
    blobs: Mapping[str, bytes],
    folder: Path,
    *,
    device: Callable[[PeerSpec], Device] | None = None,
    losses: Sequence[float] = (),
    tolerance: float = 0.0,
    log: bool = False,
) -> Played:
    """Lets it happen. `losses` of the plain loop, by step, which the run's must equal to a relative
    `tolerance`. Raises Violation."""
    wan = Wan(drawn.network, jitter_s=drawn.jitter_s, loss=drawn.loss, seed=drawn.seed)
    world = World(
        drawn.peers,
        blobs=blobs,
        folder=folder,
        wan=wan,
        device=device,
        seed=drawn.seed,
        log=log,
    )
    monitor = Monitor(world, seed=drawn.seed, losses=losses, tolerance=tolerance)
    faults = Faults(world, drawn.faults, specs=drawn.late)
    faults.start()
    planned = broker_pb2.RunSpec()
    planned.CopyFrom(spec)
    planned.plan.CopyFrom(plan_to_proto(drawn.plan))
    run = world.submit(planned)
    events = monitor.finish(run)
    last = events[-1].state
    wrong = "; ".join(faults.missed())
    if drawn.ends and (last.phase != broker_pb2.FAILED or drawn.ends not in last.reason.text):
        wrong = wrong or f"expected FAILED because of {drawn.ends}, and it is {_said(last)}"
    if not drawn.ends and last.phase != broker_pb2.DONE:
        wrong = wrong or f"nothing that ends a run happened, and it is {_said(last)}"
    if wrong:
        raise monitor.violation(Broken("I9", wrong))
    members = world.broker.machine.members
    monitor.until(lambda: len(members.pool) == len(members.members))
    return Played(events, world.log, monitor.checks, world.now)


def _said(state: broker_pb2.RunState) -> str:
    return f"{broker_pb2.Phase.Name(state.phase)}: {state.reason.text}"
