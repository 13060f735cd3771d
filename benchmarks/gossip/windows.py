"""What a round of gossip costs that replicas know ahead, where the broker is far: four homes, each
of one peer, and of two that are a pipeline, in the virtual world with ghosts.

    python benchmarks/gossip/windows.py        # two minutes

121,000 parameters, rounds of four steps, 100 Mbit/s for each peer, 20 ms between homes, 1 ms inside
one, 100 ms to the broker. Peers of a pipeline compute half as fast.

gossip_round_s_METHOD_STAGES_WINDOW    seconds of a round of pairs
gossip_window_gain_METHOD_STAGES       samples/s of the run with window "auto" over those with 1
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np

from shoal.benchmarks.sync.exposed import ghosts
from shoal.benchmarks.sync.worlds import MBIT, Field, lines
from shoal.benchmarks.table import Figure, arguments, report
from shoal.dag.cost.network import Network
from shoal.sim.virtual.spec import PeerSpec

HOMES, EVERY, ROUNDS = 4, 4, 17
LINE, LATENCY_S, INSIDE_S, TO_BROKER_S = 100 * MBIT, 0.02, 0.001, 0.1
JOB: Mapping[str, Any] = {
    "version": 1,
    "name": "windows",
    "model": {
        "factory": "shoal.examples.gpt:gpt",
        "args": {"layers": 2, "width": 64, "heads": 4, "length": 64, "dropout": 0.0},
    },
    "data": {"kind": "text", "length": 64},
    "plan": {"replicas": HOMES, "stages": 1, "scheduler": "uniform", "replan": False},
    "recovery": {"ladder": []},
    "sync": {"kind": "gossip", "every": EVERY},
    "train": {
        **{"steps": EVERY * ROUNDS, "batch": 4 * HOMES, "microbatch": 4},
        **{"eval_every": 0, "schedule": "constant", "warmup": 0},
    },
}


def homes(peers: int) -> tuple[list[PeerSpec], Network]:
    """So many peers in each, and their lines."""
    names = [f"p{i}" for i in range(HOMES * peers)]
    network = lines(names, dict.fromkeys(names, LINE), LATENCY_S)
    latency = network.latency_s.copy()
    for i in range(HOMES):
        inside = slice(i * peers, (i + 1) * peers)
        latency[inside, inside] = INSIDE_S
    latency[-1, :-1] = latency[:-1, -1] = TO_BROKER_S
    np.fill_diagonal(latency, 0.0)
    specs = [
        PeerSpec(name=n, place=f"home{i // peers}", flops_per_s=1e10 / peers, memory_bytes=1 << 30)
        for i, n in enumerate(names)
    ]
    return specs, replace(network, latency_s=latency)


def main() -> int:
    args = arguments(__doc__).parse_args()
    figures, speed = list[Figure](), dict[str, float]()
    for method, stages in product(("random-pairs", "saps-outer"), (1, 2)):
        specs, network = homes(stages)
        with Field(JOB) as field:
            for window in (1, "auto"):
                sync = {"method": method, "options": {"window": window}}
                plan = {"stages": stages}
                ran = field.play(specs, network, device=ghosts(), sync=sync, plan=plan)
                step_s = statistics.median(e.step.seconds for e in ran.events if e.HasField("step"))
                pairs = [e.round_done for e in ran.rounds[1:-1]]
                round_s = sum(d.seconds for d in pairs) / len(pairs)
                speed[f"{window}"] = ran.samples_per_s
                print(
                    f"{method}, {stages} stages, window {window}: {round_s:.3f} s a round, {EVERY} "
                    f"steps of it {EVERY * step_s:.3f} s; {ran.samples_per_s:.1f} samples/s",
                    flush=True,
                )
                name = f"gossip_round_s_{method}_{stages}_{window}"
                figures.append(Figure(name, round_s, "s", "lower"))
            gain = speed["auto"] / speed["1"]
            figures.append(Figure(f"gossip_window_gain_{method}_{stages}", gain, "ratio", "higher"))
    report("windows", figures, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
