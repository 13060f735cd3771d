"""Worlds of several replicas, drawn from a seed, in which peers die, leave, stand still and come,
links part, and the broker is started again, at any moment of a round; in most, steps go on while
one is exchanged.

    drawn = draw(seed)
    violation = play(rounds, drawn)         # "": it is done, and is what a plain loop makes of it

Where peers sign, every sum that can be is added up again, and what goes wrong shows no lie.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np

from shoal.broker.policies import segments
from shoal.dag.cost.network import Network
from shoal.dag.plan.plan import PeerId
from shoal.job.rounds import GOSSIP
from shoal.proto.broker_pb2 import DONE, WAITING
from shoal.sim.faults.faults import Faults
from shoal.sim.ghost.device import Ghosts
from shoal.sim.monitor.monitor import Monitor
from shoal.sim.monitor.violation import Violation
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
from shoal.sim.virtual.spec import PeerSpec
from shoal.sim.virtual.wan import Wan
from shoal.tests.sim.played_rounds import LOCAL, lies_of, sync_of

__all__ = ["FAULTS", "Drawn", "draw", "play"]


@dataclass(frozen=True)
class Drawn:
    """A world, its job's tables, and what happens in it."""

    seed: int
    peers: tuple[PeerSpec, ...]
    late: tuple[PeerSpec, ...]
    network: Network
    tables: dict[str, Any]
    faults: tuple[Fault, ...]


Make = Callable[[random.Random, str, str, str, float], Fault]

FAULTS: dict[str, Make] = {
    "dies": lambda rng, who, other, late, at: kill(who, at_s=at),
    "leaves": lambda rng, who, other, late, at: leave(who, at_s=at),
    "stands still": lambda rng, who, other, late, at: stop(
        who, for_s=rng.choice((1.0, 4.0, 30.0)), at_s=at
    ),
    "loses its stream": lambda rng, who, other, late, at: flap(who, BROKER, for_s=1.0, at_s=at),
    "is cut off": lambda rng, who, other, late, at: cut_off(
        who, other, for_s=rng.uniform(0.5, 20), at_s=at
    ),
    "is slow": lambda rng, who, other, late, at: slow(
        who, other, factor=rng.uniform(2, 50), for_s=rng.uniform(1, 9), at_s=at
    ),
    "gets a damaged message": lambda rng, who, other, late, at: corrupt(who, other, at_s=at),
    "comes": lambda rng, who, other, late, at: join(late, at_s=at),
    "broker restarts": lambda rng, who, other, late, at: broker_restart(at_s=at),
}
METHODS = ("diloco", "average", "saps", "noloco", "random-pairs")
_LOSING = ("dies", "leaves", "stands still", "loses its stream")
_LAST_S = 60.0
"""No fault begins or ends later."""


def draw(seed: int, *, signs: bool = False) -> Drawn:
    """Two or three replicas, three where peers sign, of one or two stages, up to three spares, one
    to four faults; of these fewer lose a peer than there are replicas, and where some do, rounds
    wait for all, so that somebody always has the version."""
    rng = random.Random(f"rounds {seed}")
    fewest = 3 if signs else 2  # two others have to have a sum that is added up again
    replicas, stages = rng.randint(fewest, 3), rng.randint(1, 2)
    count = replicas * stages + rng.randint(0, 3)
    peers = [
        PeerSpec(name=f"p{i}", place=f"s{i % replicas}", flops_per_s=10 ** rng.uniform(6.7, 7.5))
        for i in range(count)
    ]
    late = [PeerSpec(name=f"late-{i}", flops_per_s=1e7) for i in range(4)]
    faults, losing = list[Fault](), 0
    for i in range(rng.randint(1, 4)):
        kind = rng.choice([k for k in FAULTS if k not in _LOSING or losing < replicas - 1])
        losing += kind in _LOSING
        who, other = rng.sample([p.name for p in peers], 2)
        at = rng.uniform(5.0, 30.0)
        faults.append(FAULTS[kind](rng, who, other, late[i].name, at))
    tables: dict[str, Any] = {
        "plan": {"replicas": replicas, "stages": stages},
        "train": {"steps": rng.randint(10, 30), "eval_every": rng.choice((0, 4))},
        "sync": {
            "every": rng.randint(2, 8),
            "deadline": "auto" if losing else rng.choice(("auto", "2s", "5s")),
            "quorum": "100%" if losing else rng.choice(("100%", "50%")),
            **sync_of(rng.choice(METHODS)),
        },
    }
    names = [*(p.name for p in peers), *(p.name for p in late), BROKER]
    n = len(names)
    latency = np.array([[10 ** rng.uniform(-3, -1) for _ in range(n)] for _ in range(n)])
    np.fill_diagonal(latency, 0.0)
    network = Network(
        peers=tuple(PeerId(name) for name in names),
        latency_s=latency,
        bandwidth=np.array([[10 ** rng.uniform(4.7, 7) for _ in range(n)] for _ in range(n)])
        + np.diag([np.inf] * n),
        up=np.array([10 ** rng.uniform(5, 8) for _ in names]),
        down=np.array([10 ** rng.uniform(5, 8) for _ in names]),
    )
    sync, of_round = tables["sync"], tables["sync"]["every"]
    if sync["method"] in LOCAL:
        if rng.random() < 1 / 3:
            sync["method"], of_round = "streaming-diloco", of_round // 2
        more = {"bits": 32} if sync["method"] == "streaming-diloco" else {}
        sync["options"] = {"overlap": rng.choice((0, "auto", *range(1, of_round))), **more}
    return Drawn(seed, tuple(peers), tuple(late), network, tables, tuple(faults))


def play(rounds: Any, drawn: Drawn, *, ghosts: bool = False, signs: bool = False) -> str:
    """What is wrong with what came of it; "": nothing. `rounds`: `Rounds`, or what plays and knows
    other jobs."""
    tables = drawn.tables
    if not signs:
        return _play(rounds, drawn, tables, device=Ghosts() if ghosts else None)
    sync = tables["sync"]
    if sync.get("method") not in GOSSIP and "aggregate" not in sync:  # else it would tell nothing
        tables = tables | {"sync": sync | {"audit": 1.0}}
    with patch.object(segments, "UNDIVIDED", 64):  # or one member adds up all of so small a model
        return _play(rounds, drawn, tables, signs=True)


def _play(rounds: Any, drawn: Drawn, tables: dict[str, Any], **options: Any) -> str:
    wan, ghosts = Wan(drawn.network, seed=drawn.seed), options.get("device") is not None
    world = rounds.lab.world(list(drawn.peers), log=False, wan=wan, seed=drawn.seed, **options)
    monitor = Monitor(world, seed=drawn.seed)
    Faults(world, drawn.faults, specs=drawn.late).start()
    run = world.submit(rounds.spec(**tables))

    def lacks_peers() -> bool:
        """Those that it has to have were lost before it began."""
        said = world.events(run)
        return world.now > _LAST_S and bool(said) and said[-1].state.phase == WAITING

    try:
        monitor.until(lambda: run in world.broker.ended or lacks_peers(), 3600.0)
        if run not in world.broker.ended:
            for spec in drawn.late:
                if spec.name not in world.peers:
                    world.join(spec)
        monitor.finish(run, 3600.0)
        end = world.broker.ended[run]
        if end.phase != DONE:
            return f"it is not done: {end.reason.text}"
        if lies := lies_of(world, run):
            return f"honest peers are said to have lied: {[lie.peer for lie in lies]}"
        (rounds.assert_versions if ghosts else rounds.assert_expected)(world, run)
    except (Violation, AssertionError, ValueError, KeyError) as error:
        return f"{type(error).__name__}: {str(error)[:2000]}"
    return ""
