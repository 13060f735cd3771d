"""Hours of virtual time under churn, in one process (see soak.py).

What grows is looked for where it counts, in the machines that ship: every few virtual minutes all
objects that can be reached from the broker's machine, from all links, and from the machines and the
devices of peers that nobody ever kills, are counted and weighed. The simulator itself keeps a log
of its world (events that clients have seen, the journal's records), which is left out.
"""

from __future__ import annotations

import gc
import heapq
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, cast

from google.protobuf.message import Message

from shoal.benchmarks.soak.gauge import growth
from shoal.benchmarks.table import Figure
from shoal.client.front import SimulationFront
from shoal.job import Job
from shoal.sim.faults.faults import Faults
from shoal.sim.ghost.device import Ghosts
from shoal.sim.ghost.hashes import expected
from shoal.sim.monitor.monitor import Monitor
from shoal.sim.scenario.sentences import Fault, join, kill, leave
from shoal.sim.virtual.world import PeerSpec, World

__all__ = ["reachable", "virtual"]

STEADY, GUESTS = 2, 5
MICROBATCHES = 4
MEAN_S, AWAY_S = 120.0, 20.0
"""Of each guest: how long it stays on the average, how long it is away."""
_NOT_OURS = (ModuleType, type, FunctionType, BuiltinFunctionType, World, Faults, Monitor)


def job_of(steps: int) -> Job:
    """A GPT of two blocks in three stages; ghosts compute hashes of it."""
    return Job.from_table(
        {
            "version": 1,
            "name": "soak",
            "model": {
                "factory": "shoal.examples.gpt:gpt",
                "args": {"layers": 2, "width": 8, "heads": 1, "length": 8, "dropout": 0.0},
            },
            "data": {"kind": "text", "length": 8},
            "plan": {"scheduler": "uniform", "stages": 3, "pipelines": 1},
            "train": {
                **{"steps": steps, "batch": MICROBATCHES, "microbatch": 1, "lr": 0.01},
                **{"eval_every": 100, "eval_batches": 1, "schedule": "constant", "warmup": 0},
            },
        }
    )


def churn(names: list[str], seed: int) -> Iterator[Fault]:
    """Each guest stays by chance, then dies or leaves in good order, and comes again."""
    return heapq.merge(
        *(_of(name, random.Random(f"{seed} {name}")) for name in names),
        key=lambda fault: cast(float, fault.at),
    )


def _of(name: str, rng: random.Random) -> Iterator[Fault]:
    at = 0.0
    while True:
        at += rng.expovariate(1 / MEAN_S)
        yield rng.choice((kill, leave))(name, at_s=at)
        # One that leaves hands its part over first: whoever is here still, finds nothing to do.
        for later in (AWAY_S, 2 * AWAY_S):
            yield join(name, at_s=at + later)
        at += 2 * AWAY_S


def reachable(root: object, stop: tuple[type, ...] = _NOT_OURS) -> tuple[Counter[str], int]:
    """How many objects of each type can be reached from `root`, and their bytes; classes, modules,
    functions and what is of a type in `stop` are left out, with everything behind them."""
    seen, todo, kinds, size = {id(root)}, [root], Counter[str](), 0
    while todo:
        one = todo.pop()
        kinds[type(one).__qualname__] += 1
        size += one.ByteSize() if isinstance(one, Message) else sys.getsizeof(one)
        for other in gc.get_referents(one):
            if id(other) not in seen and not isinstance(other, stop):
                seen.add(id(other))
                todo.append(other)
    return kinds, size


def virtual(hours: float, seed: int, every_s: float = 120.0) -> list[Figure]:
    """One run, for so long."""
    front = SimulationFront()
    packed = front.pack(job_of(10**6))
    names = [f"steady-{i}" for i in range(STEADY)] + [f"guest-{i}" for i in range(GUESTS)]
    specs = [PeerSpec(name=name, flops_per_s=2e6) for name in names]
    began = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        ghosts = Ghosts()
        world = World(
            specs, blobs=packed.blobs, folder=Path(folder), device=ghosts, seed=seed, log=False
        )
        faults = Faults(world, (), specs=specs, churn=churn(names[STEADY:], seed))
        faults.start()
        run = world.submit(packed.spec)
        at: list[float] = []
        held: dict[str, list[tuple[Counter[str], int]]] = {}
        while world.now < 3600 * hours:
            end = world.now + every_s
            world.until(lambda end=end: world.now >= end or run in world.broker.ended)  # type: ignore[misc]
            assert run not in world.broker.ended, world.broker.ended[run].reason.text
            at.append(world.now)
            gc.collect()
            for name, root in _roots(world).items():
                held.setdefault(name, []).append(reachable(root, (*_NOT_OURS, Ghosts)))
            steps = sum(e.HasField("step") for e in world.events(run))
            line = f"{world.now / 60:.0f} min: {steps} steps, {faults.churned} changes"
            for name, looks in held.items():
                kinds, size = looks[-1]
                line += f", {name} {sum(kinds.values())} objects {size / 1e3:.0f} kB"
            print(line, flush=True)
        done = [e for e in world.events(run) if e.HasField("step")]
        bound = packed.facts.graph.bind(1)
        wanted = expected(bound, 0, len(done), MICROBATCHES).losses
        wrong = [e.step.outcome.loss for e in done] != wanted
        doubled = [e.step.step for e in done] != list(range(len(done)))
        calls = len(world._heap) + len(world._soon)
    front.close()
    figures = [
        Figure("virtual_hours", world.now / 3600, "h", "higher"),
        Figure("virtual_steps", len(done), "steps", "higher"),
        Figure("virtual_changes", faults.churned, "peers that came, left or died", "higher"),
        Figure("virtual_calls_to_come", calls, "calls", "lower"),
        Figure("virtual_cpu_seconds", time.process_time() - began, "s", "lower"),
    ]
    warm = len(at) // 4
    for name, seen in held.items():
        counts = [sum(kinds.values()) for kinds, _ in seen]
        sizes = [size for _, size in seen]
        for what, values in (("objects", counts), ("bytes", sizes)):
            grown = growth(at[warm:], values[warm:])
            figures.append(Figure(f"virtual_{name}_{what}_growth", grown, "share", "lower"))
        more = seen[-1][0] - seen[warm][0]
        print(f"{name}: more than after warm-up: {more.most_common(8)}")
    return [*figures, Figure("problems", wrong + doubled, "problems", "lower")]


def _roots(world: World) -> dict[str, Any]:
    # Every link of everybody can be reached through the network.
    found: dict[str, Any] = {"broker": world.broker.machine, "links": world.network}
    for i in range(STEADY):
        shell = world.peers[f"steady-{i}"]
        found[f"peer_{i}"] = [shell.machine, shell.device]
    return found
