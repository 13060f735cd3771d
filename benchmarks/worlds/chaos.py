"""Random worlds in which nearly everything goes wrong, one after the other or at once.

    python benchmarks/worlds/chaos.py [--seeds 5000] [--jobs 2] [--json FILE]  0.5 CPU s each
    python benchmarks/worlds/chaos.py --first 137 --seeds 1                     one of them again
    python benchmarks/worlds/chaos.py --routes [--seeds 500]                    skipping, 0.7 CPU s
    python benchmarks/worlds/chaos.py --sync [--ghosts] [--seeds 1000]          rounds, 2 CPU s
    python benchmarks/worlds/chaos.py --sync --signed [--seeds 300]             receipts, 6 CPU s
    python benchmarks/worlds/chaos.py --clients "by client" [--seeds 20]        clients, 6 CPU s

Each is drawn from its seed: three to five unequal holders under a plan nobody would write, a few
peers in the pool, links of 1 to 100 ms, and one to five faults in phases of steps: peers that die,
leave, stop or lose their stream, links that part, slow down, flap or corrupt messages, brokers
that are restarted, and peers that join. Most are worlds of ghosts; one in twenty has real tensors.
A monitor looks at every event (I1 to I10, `sim/monitor/`), and each committed step's loss must be
that of a plain loop: of ghosts to the bit. A run may end in no other way than with all its steps.

With --routes, microbatches leave blocks of a model of four out, and visit neighbours in another
order, in half of the worlds not in the first steps and the last ones; until routes change after a
loss, losses are those of a loop of hashes over the same routes.

With --sync, two or three replicas meet in rounds, with real tensors (`tests/sim/random_rounds.py`):
what they come to must be what copies of the module come to that are fed with the committed rounds.
With --ghosts as well, the same worlds have hashes in place of tensors, and each version must have
the hash that a plain loop of them comes to. With --signed, there are three, which sign what
they give as peers with certificates do, and all sums are added up again that can be: none of what
goes wrong may look like a lie.

With --clients KIND, three peers that sign train clients (`tests/sim/clients/random_clients.py`):
the weights must be those of a plain loop over the clients that were committed.
"""

from __future__ import annotations

import multiprocessing
import random
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import torch

from shoal.benchmarks.table import Figure, arguments, report
from shoal.client.models import models
from shoal.client.submission import prepare
from shoal.dag.plan.cut import cut
from shoal.dag.plan.plan import Plan
from shoal.dag.plan.routes import segments
from shoal.job import Job
from shoal.sim.ghost.device import Ghosts
from shoal.sim.ghost.hashes import expected
from shoal.sim.monitor.violation import Violation
from shoal.tests.sim import random_rounds
from shoal.tests.sim.clients import random_clients
from shoal.tests.sim.conftest import Laboratory
from shoal.tests.sim.played_rounds import Rounds
from shoal.tests.sim.random_worlds import CELLS, draw, play

torch.set_num_threads(1)  # tensors are tiny: a second thread spins, for ten times the CPU seconds

STEPS, MICROBATCHES = 20, 4
REAL = 20
"""One world in so many has real tensors."""
TOLERANCE = 1e-4
"""Relative, of real losses against the plain loop: sums have another order under another cut."""
JOB = Job.from_table(
    {
        "version": 1,
        "name": "chaos",
        "model": {
            "factory": "shoal.examples.gpt:gpt",
            "args": {"layers": 2, "width": 8, "heads": 1, "length": 8, "dropout": 0.0},
        },
        "data": {"kind": "text", "length": 8},
        "plan": {"scheduler": "uniform"},
        "train": {
            **{"steps": STEPS, "batch": MICROBATCHES, "microbatch": 1, "lr": 0.01},
            **{"eval_every": 0, "schedule": "constant", "warmup": 0},
        },
    }
)


ROUTED = replace(
    JOB, name="chaos-routes", model=replace(JOB.model, args={**JOB.model.args, "layers": 4})
)


@dataclass(frozen=True)
class Outcome:
    """What came of one world. `violation`: "" when every invariant held. `terms`: plans that it
    had."""

    seed: int
    cells: tuple[tuple[str, str], ...]
    real: bool
    terms: int
    virtual_s: float
    violation: str


class Lab:
    """What all worlds of one process share: the captured model, its data, and the losses of plain
    loops."""

    def __init__(self, job: Job) -> None:
        self._open = ExitStack()
        module, prepared = models.build(job), self._open.enter_context(prepare(job))
        self.made = Laboratory(job, prepared, module)
        self.bound = self.made.graph.bind(1)
        self.ghosts = expected(self.bound, job.seed, STEPS, MICROBATCHES).losses
        self.plain = self.made.plain().losses

    def over(self, plan: Plan) -> list[float]:
        """Losses of a loop of hashes over a plan's routes."""
        stages = cut(self.bound, [(s.start, s.stop) for s in plan.stages])
        orders = [segments(stages, route) for route in plan.routes]
        seed = self.made.job.seed
        full = plan.full.has if plan.full else lambda step: False
        return expected(self.bound, seed, STEPS, MICROBATCHES, orders=orders, full=full).losses


@cache
def lab(routed: bool = False) -> Lab:
    return Lab(ROUTED if routed else JOB)


def cells_of(seed: int) -> list[tuple[str, str]]:
    """One to five faults, each in a phase of a step."""
    rng = random.Random(f"chaos {seed}")
    return [rng.choice(CELLS) for _ in range(rng.randint(1, 5))]


def world(seed: int, *, routed: bool = False) -> Outcome:
    known, cells = lab(routed), cells_of(seed)
    made, real = known.made, seed % REAL == 0 and not routed
    size = {"microbatches": MICROBATCHES, "microbatch_size": 1}
    drawn = draw(seed, made.graph, **size, cells=cells, routed=routed)
    ghosts = known.over(drawn.plan) if routed else known.ghosts
    folder, terms, virtual_s, violation = made.prepared.weights.parent, 0, 0.0, ""
    try:
        played = play(
            drawn,
            made.spec,
            made.blobs,
            folder,
            device=None if real else Ghosts(),
            losses=known.plain if real else ghosts,
            tolerance=TOLERANCE if real else 0.0,
            all_happen=False,  # a peer that is gone already cannot die once more
        )
    except Violation as error:
        violation = str(error).strip()
    else:
        terms, virtual_s = played.events[-1].state.term, played.virtual_s
    return Outcome(seed, tuple(cells), real, terms, virtual_s, violation)


_OPEN = ExitStack()
"""What is open as long as the process lives."""


@cache
def rounds() -> Rounds:
    def made(job: Job) -> Laboratory:
        job = replace(job, plan=replace(job.plan, scheduler="uniform"))
        return Laboratory(job, _OPEN.enter_context(prepare(job)), models.build(job))

    return Rounds(made)


def world_of_rounds(seed: int, *, ghosts: bool, signs: bool) -> Outcome:
    drawn = random_rounds.draw(seed, signs=signs)
    cells = tuple((fault.do, "") for fault in drawn.faults)
    problem = random_rounds.play(rounds(), drawn, ghosts=ghosts, signs=signs)
    return Outcome(seed, cells, True, 1, 0.0, problem)


@cache
def client_rounds() -> random_clients.ClientRounds:
    def made(job: Job) -> Laboratory:
        return Laboratory(job, _OPEN.enter_context(prepare(job)), models.build(job))

    folder = Path(_OPEN.enter_context(tempfile.TemporaryDirectory()))
    return random_clients.ClientRounds(made, folder)


def world_of_clients(seed: int, *, kind: str) -> Outcome:
    drawn = random_clients.draw_clients(seed, kind)
    cells = tuple((fault.do, "") for fault in drawn.faults)
    return Outcome(seed, cells, True, 1, 0.0, random_clients.play_clients(client_rounds(), drawn))


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--seeds", type=int, default=200, metavar="N", help="worlds (200)")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="seed of the first (0)")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="processes (2)")
    parser.add_argument("--routes", action="store_true", help="microbatches leave stages out")
    parser.add_argument("--sync", action="store_true", help="rounds between replicas")
    parser.add_argument("--ghosts", action="store_true", help="with --sync: hashes for tensors")
    parser.add_argument("--signed", action="store_true", help="with --sync: peers sign, and audit")
    parser.add_argument("--clients", choices=random_clients.SYNC, help="peers train clients")
    asked = parser.parse_args()
    if asked.ghosts and not asked.sync:
        parser.error("--ghosts is of --sync: other worlds have hashes in any case")
    if asked.signed and (asked.ghosts or not asked.sync):
        parser.error("--signed is of --sync without --ghosts: nothing else has what is signed")
    if asked.clients and (asked.sync or asked.routes):
        parser.error("--clients goes by itself: its rounds are of clients")
    if asked.routes and asked.sync:
        parser.error("--routes is of worlds without --sync: a route is one step's")
    began, seeds = time.perf_counter(), range(asked.first, asked.first + asked.seeds)
    broken: list[Outcome] = []
    kinds: Counter[str] = Counter()
    terms: Counter[int] = Counter()
    virtual_s = 0.0
    with multiprocessing.get_context("spawn").Pool(min(asked.jobs, asked.seeds)) as pool:
        drawn = partial(world_of_rounds, ghosts=asked.ghosts, signs=asked.signed)
        if asked.clients:
            drawn = partial(world_of_clients, kind=asked.clients)
        elif not asked.sync:
            drawn = partial(world, routed=asked.routes)
        for n, found in enumerate(pool.imap(drawn, seeds, chunksize=1), 1):
            kinds.update(kind for kind, _ in found.cells)
            terms[found.terms] += 1
            virtual_s += found.virtual_s
            if found.violation:
                broken.append(found)
                print(f"seed {found.seed}: {found.violation}\n", flush=True)
            if sys.stderr.isatty() or n % 100 == 0:
                took = time.perf_counter() - began
                line = f"{n} of {asked.seeds} worlds, {len(broken)} violations, {took:.0f} s"
                print(line, end="\r" if sys.stderr.isatty() else "\n", file=sys.stderr, flush=True)
    for kind, count in sorted(kinds.items()):
        print(f"{kind:26}{count:7}")
    print("plans that a run had: " + ", ".join(f"{k} {n} times" for k, n in sorted(terms.items())))
    figures = [
        Figure("scenarios", asked.seeds, "worlds", "higher"),
        Figure("violations", len(broken), "worlds", "lower"),
        Figure("recoveries", sum((k - 1) * n for k, n in terms.items() if k), "terms", "higher"),
        Figure("virtual_hours", virtual_s / 3600, "h", "higher"),
    ]
    sync = "chaos_signed" if asked.signed else "chaos_sync"
    name = sync if asked.sync else "chaos_routes" if asked.routes else "chaos"
    if asked.clients:
        name = f"chaos_clients_{asked.clients.replace(' ', '_')}"
    report(name, figures, asked.json)
    raise SystemExit(1 if broken else 0)


if __name__ == "__main__":
    main()
