"""Goodput of local steps under losses: eight replicas with warm spares, in the virtual world.

    python benchmarks/sync/goodput.py --ghosts                # two minutes
    python benchmarks/sync/goodput.py --minutes 2             # with tensors, fifteen

Each replica is a pipeline of two peers, and there are two spares for each, which may be warm for
another one too; a round is 15 steps of a second and a half. Holders are killed, and are back as
spares 10 s later. Goodput is what is committed a second over what it is without losses.

rounds_goodput           one holder lost every 15 s, whoever's it is
rounds_goodput_each      one of each replica every 15 s, not all at once
rounds_goodput_single    as the first, replicas of one peer each with a warm one
"""

from __future__ import annotations

import random
import sys
import time

from shoal.benchmarks.sync.worlds import MBIT, Field, Played, lines
from shoal.benchmarks.table import Figure, arguments, report
from shoal.benchmarks.worlds.recovery_world import card
from shoal.broker.events import RunId
from shoal.sim.ghost.device import Ghosts
from shoal.sim.virtual.spec import PeerSpec
from shoal.sim.virtual.world import World

REPLICAS, SPARES, EVERY_S, BACK_S = 8, 2, 15.0, 10.0
JOB = {
    "version": 1,
    "name": "goodput",
    "model": {
        "factory": "shoal.examples.gpt:gpt",
        "args": {"layers": 2, "width": 8, "heads": 1, "length": 8, "dropout": 0.0},
    },
    "data": {"kind": "text", "length": 8},
    "plan": {"replicas": REPLICAS, "stages": 2, "scheduler": "uniform", "replan": False},
    "sync": {"kind": "local", "every": 15},
    "train": {
        **{"steps": 100_000, "batch": REPLICAS, "microbatch": 1, "lr": 0.01},
        **{"eval_every": 0, "schedule": "constant", "warmup": 0},
    },
}


class Losses:
    """Kills holders and lets them come again, from the beginning of the first round on."""

    def __init__(self, specs: list[PeerSpec], each: bool, seed: int = 7) -> None:
        self.specs = {spec.name: spec for spec in specs}
        self.each, self.count, self._random = each, 0, random.Random(seed)

    def __call__(self, world: World, run: str) -> None:
        self._world, self._run = world, run
        if not self.each:
            self._again(EVERY_S, None)
            return
        for number in range(REPLICAS):
            world.after(EVERY_S * number / REPLICAS, lambda n=number: self._again(EVERY_S, n))  # type: ignore[misc]

    def _again(self, after_s: float, number: int | None) -> None:
        self._world.after(after_s, lambda: self._kill(number))

    def _kill(self, number: int | None) -> None:
        world = self._world
        replicas = world.broker.machine.runs[RunId(self._run)].record.replicas
        mine = [r for r in replicas if number is None or r.number == number]
        here = [p for r in mine for p in r.peers if world.peers[p].alive]
        if here:
            name = self._random.choice(here)
            world.kill(name)
            world.after(BACK_S, lambda: world.join(self.specs[name]))
            self.count += 1
        self._again(EVERY_S, number)


def peers(each: int, flops: float) -> list[PeerSpec]:
    return [
        PeerSpec(name=f"r{i}-{k}", place=f"place-{i}", hardware=card(flops))
        for i in range(REPLICAS)
        for k in range(each)
    ]


def played(
    field: Field, minutes: float, stages: int, losses: str, ghosts: bool = False, seed: int = 7
) -> tuple[Played, int]:
    specs = peers(stages + SPARES, FLOPS / stages)
    network = lines([s.name for s in specs], {s.name: 100 * MBIT for s in specs}, 0.02)
    lost = Losses(specs, losses == "each", seed)
    ran = field.play(
        specs,
        network,
        limit_s=60 * minutes,
        device=Ghosts() if ghosts else None,
        begun=lost if losses else lambda world, run: None,
        plan={"stages": stages},
    )
    return ran, lost.count


FLOPS = 3e5
"""Of a replica: a step takes about a second."""


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="virtual, of each run")
    parser.add_argument("--ghosts", action="store_true", help="in place of tensors")
    parser.add_argument("--seed", type=int, default=7, help="of who is lost")
    args = parser.parse_args()
    figures = []
    with Field(JOB) as field:
        for stages, cases in ((2, ("", "one", "each")), (1, ("", "one"))):
            for case in cases:
                began = time.monotonic()
                ran, lost = played(field, args.minutes, stages, case, args.ghosts, args.seed)
                rate = ran.samples_per_s if ran.rounds else 0.0
                if not case:
                    calm = rate
                steps = [e.step.seconds for e in ran.events if e.HasField("step")]
                members = [len(r.round_done.members) for r in ran.rounds]
                print(
                    f"{stages} peers a replica, {case or 'no'} losses: {rate:.3f} samples/s, "
                    f"{lost} lost, {len(ran.rounds)} rounds, step "
                    f"{sorted(steps)[len(steps) // 2]:.2f} s, members {members}, "
                    f"{rate / calm:.3f}; {time.monotonic() - began:.0f} s here",
                    flush=True,
                )
                if case:
                    name = "single" if stages == 1 else case
                    name = {"one": "", "each": "_each", "single": "_single"}[name]
                    figures.append(Figure(f"rounds_goodput{name}", rate / calm, "share", "higher"))
    report("goodput", figures, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
