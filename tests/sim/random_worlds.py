"""Worlds drawn from a seed: unequal peers and links, a plan nobody would write, and faults.

    drawn = draw(seed, graph, microbatches=4, microbatch_size=1, cells=[("flap", "backward"), …])
    played = play(drawn, spec, blobs, folder, device=Ghosts(), losses=expected.losses)

A cell is a kind of fault and the phase in which it happens. What every kind must come to is known
beforehand: the run ends with all its steps, and the losses are as they would have been. Those of
LOSING take a holder away, and another peer takes its part. `play` raises Violation for anything
else, and for a fault that does not happen.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal.dag.cost.network import Network
from shoal.dag.exchange.collectives import SUMS
from shoal.dag.ir.graph import Graph
from shoal.dag.plan.cut import cut
from shoal.dag.plan.full_steps import FullSteps
from shoal.dag.plan.plan import PeerId, Plan, Route, StageExchange, StageSlot, Visit
from shoal.dag.schedule.convert_plan import plan_to_proto
from shoal.planner.skipping.layouts import row_of_blocks
from shoal.proto import broker_pb2
from shoal.sim.faults.faults import Faults
from shoal.sim.modelled.modelled import shorter
from shoal.sim.monitor.monitor import Monitor
from shoal.sim.monitor.violation import Broken, Violation, shortest
from shoal.sim.scenario.sentences import (
    Fault,
    broker_restart,
    corrupt,
    cut_off,
    flap,
    join,
    kill,
    leave,
    slow,
    stop,
)
from shoal.sim.virtual.control import BROKER
from shoal.sim.virtual.spec import PeerDevice, PeerSpec
from shoal.sim.virtual.wan import Wan
from shoal.sim.virtual.world import World

__all__ = [
    "CELLS",
    "LOSING",
    "PHASES",
    "SURVIVED",
    "Drawn",
    "Played",
    "draw",
    "explain",
    "play",
]

PHASES = ("forward", "backward", "clip", "update")
SURVIVED = (
    *("cut-off", "slow link", "flapping link", "corrupt message", "stopped for a moment"),
    *("broker away for a moment", "broker restarted", "spare leaves", "spare dies", "peer joins"),
)
LOSING = (
    *("holder dies", "holder leaves", "holder's stream cut", "holder stopped"),
    "broker away",
)
HANDED = ("holder leaves", "holder's stream cut")
"""The faults of these that need not lose it: its part is handed over, or it comes back."""
CELLS = tuple((kind, phase) for kind in (*SURVIVED, *LOSING) for phase in PHASES)
MOST_BEFORE = 6
"""Full steps at the begin."""
NEVER = 10_000
"""A step that no world comes to."""
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
    lost: str = ""
    """The holder that is lost for sure; "": none."""


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
    routed: bool = False,
) -> Drawn:
    """`graph`: full, for any microbatch size. The cells happen one after the other, in steps 1 to
    8. `routed`: microbatches leave stages out, and visit neighbours in another order."""
    rng = random.Random(f"world {seed}")
    holders = [f"p{i}" for i in range(rng.randint(3, 5))]
    spares, late = ([f"{word}-{i}" for i in range(len(cells))] for word in ("spare", "late"))
    names = [*holders, *spares]
    rng.shuffle(names)
    specs = {n: PeerSpec(name=n, flops_per_s=10 ** rng.uniform(8.5, 10.5)) for n in names + late}
    make = _routed_plan if routed else _plan
    plan = make(rng, holders, graph, microbatches, microbatch_size)
    faults: list[Fault] = []
    lost = ""
    for i, (kind, phase) in enumerate(cells):
        first = 1 + 8 * i // len(cells)
        step = rng.randint(first, max(first, 8 * (i + 1) // len(cells)))
        who = rng.choice(sorted({v.peer for route in plan.routes for v in route}))
        hub = plan.stages[-1].holders[0]
        other = hub if who != hub else rng.choice([p for p in plan.peers if p != hub])
        cast = _Cast(who, other, spares[i], late[i])
        faults.append(_FAULTS[kind](rng, cast, {"at_step": step, "phase": phase}))
        if kind in LOSING and kind not in HANDED:
            lost = who
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
        lost=lost,
    )


class _Cast(NamedTuple):
    """Whom a fault may concern: a holder, another that exchanges frames with it, a spare and one
    that is not there yet; the last two are of this fault alone."""

    holder: str
    other: str
    spare: str
    late: str


When = Mapping[str, Any]
Make = Callable[[random.Random, _Cast, When], Fault]

_FAULTS: Mapping[str, Make] = {
    "cut-off": lambda rng, of, when: cut_off(
        of.holder, of.other, for_s=rng.uniform(0.5, 12), **when
    ),
    "slow link": lambda rng, of, when: slow(
        of.holder, of.other, factor=rng.uniform(2, 50), for_s=rng.uniform(1, 9), **when
    ),
    "flapping link": lambda rng, of, when: flap(
        of.holder, of.other, for_s=rng.uniform(1, 9), **when
    ),
    "corrupt message": lambda rng, of, when: corrupt(of.holder, of.other, **when),
    # Shorter than the lease of 10 s less two heartbeats of 2 s.
    "stopped for a moment": lambda rng, of, when: stop(
        of.holder, for_s=rng.uniform(0.5, 5), **when
    ),
    "broker away for a moment": lambda rng, of, when: cut_off(
        of.holder, BROKER, for_s=rng.uniform(0.5, 5), **when
    ),
    "broker restarted": lambda rng, of, when: broker_restart(**when),
    "spare leaves": lambda rng, of, when: leave(of.spare, **when),
    "spare dies": lambda rng, of, when: kill(of.spare, **when),
    "peer joins": lambda rng, of, when: join(of.late, **when),
    "holder dies": lambda rng, of, when: kill(of.holder, **when),
    "holder leaves": lambda rng, of, when: leave(of.holder, **when),
    "holder's stream cut": lambda rng, of, when: flap(of.holder, BROKER, for_s=1.0, **when),
    "holder stopped": lambda rng, of, when: stop(of.holder, for_s=30.0, **when),
    "broker away": lambda rng, of, when: cut_off(of.holder, BROKER, for_s=30.0, **when),
}


def _plan(
    rng: random.Random, holders: Sequence[str], graph: Graph, microbatches: int, size: int
) -> Plan:
    """Two or three stages that all train, cut anywhere; one or two holders each, which add up
    gradients by any collective; every microbatch on a route of its own."""
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
    # Of its own, so that a seed's other draws do not depend on how many collectives and schedules
    # there are.
    lot = random.Random(f"{held}")
    return Plan(
        stages=tuple(StageSlot(a, b, tuple(h)) for (a, b), h in zip(parts, held, strict=True)),
        routes=tuple(
            tuple(Visit(i, rng.choice(h)) for i, h in enumerate(held)) for _ in range(microbatches)
        ),
        microbatch_size=size,
        schedule=lot.choice((rng.choice(("gpipe", "1f1b")), "zero-bubble")),
        exchanges=tuple(
            StageExchange(k, lot.choice(SUMS)) for k, h in enumerate(held) if len(h) > 1
        ),
    )


def _routed_plan(
    rng: random.Random, holders: Sequence[str], graph: Graph, microbatches: int, size: int
) -> Plan:
    """A stage for what stands before the blocks, for each one or two of them, and for what stands
    behind; each inner one is on some routes, and may change places with the next one. Every second
    plan has full steps, at the begin, at the end, or both."""
    row, names = row_of_blocks(graph), [PeerId(name) for name in holders]
    cuts = [0, row[0].start, *(b.stop for b in row if b is row[-1] or rng.random() < 0.8)]
    parts = list(pairwise((*cuts, len(graph.operators))))
    held = [rng.sample(names, rng.randint(1, 2)) for _ in parts]
    last = len(parts) - 1
    while True:
        routes = []
        for _ in range(microbatches):
            order = [k for k in range(1, last) if rng.random() < 0.6]
            at = rng.randrange(len(order)) if order and rng.random() < 0.5 else last
            if order[at + 1 : at + 2] == [k + 1 for k in order[at : at + 1]]:
                order[at : at + 2] = order[at : at + 2][::-1]
            routes.append(tuple(Visit(k, rng.choice(held[k])) for k in (0, *order, last)))
        if {v.stage for route in routes for v in route} == {*range(last + 1)}:
            break
    lot = random.Random(f"{routes}")
    return Plan(
        stages=tuple(StageSlot(a, b, tuple(h)) for (a, b), h in zip(parts, held, strict=True)),
        routes=tuple(routes),
        full=_full_steps(lot, routes) if lot.random() < 0.5 else None,
        microbatch_size=size,
        schedule=rng.choice(("gpipe", "1f1b", "zero-bubble")),
        exchanges=tuple(
            StageExchange(k, rng.choice(SUMS)) for k, h in enumerate(held) if len(h) > 1
        ),
    )


def _full_steps(lot: random.Random, routes: Sequence[Route]) -> FullSteps:
    """The first steps and the last ones, in which a microbatch also visits the stages that its
    route leaves out, at somebody who is visited for them by others."""
    there = sorted({v for route in routes for v in route}, key=lambda v: (v.stage, v.peer))
    full = []
    for route in routes:
        own = {v.stage: v for v in route}
        for k in {v.stage for v in there} - own.keys():
            own[k] = lot.choice([v for v in there if v.stage == k])
        full.append(tuple(own[k] for k in sorted(own)))
    before = lot.choice((0, lot.randint(1, MOST_BEFORE)))
    since = lot.choice((NEVER, before + lot.randint(1, 2 * MOST_BEFORE)))
    return FullSteps(before, since, tuple(full))


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


def play(
    drawn: Drawn,
    spec: broker_pb2.RunSpec,
    blobs: Mapping[str, bytes],
    folder: Path,
    *,
    device: Callable[[PeerSpec], PeerDevice] | None = None,
    losses: Sequence[float] = (),
    tolerance: float = 0.0,
    log: bool = False,
    all_happen: bool = True,
) -> Played:
    """Lets it happen. `losses` of the plain loop, by step, which the run's must equal to a relative
    `tolerance`. Raises Violation, with `all_happen` also for a fault that does not happen."""
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
    monitor = Monitor(
        world,
        seed=drawn.seed,
        losses=losses,
        tolerance=tolerance,
        most_terms=math.inf if any(kind in LOSING for kind, _ in drawn.cells) else 1,
    )
    faults = Faults(world, drawn.faults, specs=drawn.late)
    faults.start()
    planned = broker_pb2.RunSpec()
    planned.CopyFrom(spec)
    planned.plan.CopyFrom(plan_to_proto(drawn.plan))
    run = world.submit(planned)
    events = monitor.finish(run)
    last = events[-1].state
    wrong = "; ".join(faults.missed() if all_happen else ())
    if last.phase != broker_pb2.DONE:
        wrong = wrong or f"nothing that ends a run happened, and it is {_said(last)}"
    if all_happen and drawn.lost and last.term < 2:
        wrong = wrong or f"{drawn.lost} was lost, and nobody took its part"
    if wrong:
        raise monitor.violation(Broken("I9", wrong))
    members = world.broker.machine.members
    monitor.until(lambda: len(members.pool) == len(members.members))
    return Played(events, world.log, monitor.checks, world.now)


def explain(
    drawn: Drawn,
    spec: broker_pb2.RunSpec,
    blobs: Mapping[str, bytes],
    folder: Path,
    **options: Any,
) -> Violation:
    """Finds the fewest faults and steps with which a world that fails still does. `options` as of
    `play`. Raises ValueError for one that does not fail."""

    def fails(faults: tuple[Fault, ...], steps: int) -> Violation | None:
        lost = drawn.lost if drawn.lost and drawn.faults[-1] in faults else ""
        less = replace(drawn, faults=faults, lost=lost)
        try:
            play(less, shorter(spec, steps), blobs, folder, all_happen=False, **options)
        except Violation as violation:
            return violation
        return None

    return shortest(drawn.faults, spec.steps, fails)


def _said(state: broker_pb2.RunState) -> str:
    return f"{broker_pb2.Phase.Name(state.phase)}: {state.reason.text}"
