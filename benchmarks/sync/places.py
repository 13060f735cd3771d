"""What it saves that members near each other give one sum: 86M parameters, twelve replicas in
three places, 1 Gbit/s inside and 20 Mbit/s on each pair between, in the virtual world with ghosts.

    python benchmarks/sync/places.py        # four minutes

places_over_alone        seconds of an exchange of plain means, over the same without places
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any
from unittest.mock import patch

import numpy as np

from shoal.benchmarks.sync.exposed import ARGS, FLOPS, ghosts
from shoal.benchmarks.sync.worlds import MBIT, Field
from shoal.benchmarks.table import Figure, arguments, report
from shoal.broker.policies import places, policy
from shoal.dag.cost.network import Network
from shoal.dag.plan.plan import PeerId
from shoal.sim.virtual.control import BROKER
from shoal.sim.virtual.spec import PeerSpec

REPLICAS, PLACES = 12, 3
NEAR, FAR = 1000 * MBIT, 20 * MBIT
SETTLED_S = 1800.0
"""By then the links of all pairs were measured."""
JOB: Mapping[str, Any] = {
    "version": 1,
    "name": "places",
    "model": {"factory": "shoal.examples.gpt:gpt", "args": ARGS},
    "data": {"kind": "text", "length": 1024},
    "plan": {"replicas": REPLICAS, "stages": 1, "scheduler": "uniform", "replan": False},
    "recovery": {"ladder": []},
    "sync": {"kind": "local", "every": 4, "method": "average"},
    "train": {
        **{"steps": 12, "batch": REPLICAS, "microbatch": 1},
        **{"eval_every": 0, "schedule": "constant", "warmup": 0},
    },
}


def network(names: list[str]) -> Network:
    """Pairs of peers, and the broker's, which has fast ones to all."""
    at = np.array([*(i % PLACES for i in range(REPLICAS)), -1])
    near = at[:, None] == at[None, :]
    near[-1, :] = near[:, -1] = True
    latency, free = np.where(near, 0.001, 0.03), np.full(len(at), np.inf)
    np.fill_diagonal(latency, 0.0)
    peers = tuple(map(PeerId, (*names, BROKER)))
    return Network(peers, latency, np.where(near, NEAR, FAR), free, free)


def nowhere(network: Network, elements: int) -> dict[PeerId, int]:
    """Return that nobody is near another."""
    return {}


def main() -> int:
    args = arguments(__doc__).parse_args()
    names = [f"p{i:02}" for i in range(REPLICAS)]
    specs = [
        PeerSpec(name=n, place=f"s{i % PLACES}", flops_per_s=FLOPS, memory_bytes=64 << 30)
        for i, n in enumerate(names)
    ]
    found = []
    with Field(JOB) as field:
        for near in (True, False):
            with patch.object(policy, "places_of", places.places_of if near else nowhere):
                ran = field.play(specs, network(names), device=ghosts(), settled_s=SETTLED_S)
            last = ran.rounds[-2].round_done
            print(
                f"{'in places' if near else 'each by itself'}: an exchange takes "
                f"{last.exchange_s:.1f} s, and {last.sent_bytes / 1e9:.2f} GB are sent",
                flush=True,
            )
            found.append(last.exchange_s)
    ratio = Figure("places_over_alone", found[0] / found[1], "ratio", "lower")
    report("places", [ratio], args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
