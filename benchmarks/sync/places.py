"""What it saves that members near each other give one sum: 86M parameters, twelve replicas in
three places, 1 Gbit/s inside and 20 Mbit/s on each pair between, in the virtual world with ghosts.
And how long exchanges of small models take, of which nearly all is one matrix: 100 Mbit/s and 5 ms
inside of places, 100 ms between, or each member behind a line of its own.

    python benchmarks/sync/places.py                # four minutes
    python benchmarks/sync/places.py --small        # ten minutes

places_over_alone        seconds of an exchange of plain means, over the same without places
small_…_s                seconds of an exchange of a model of 1M parameters by 12 members, by rates
                         between places in Mbit/s; of lines, where each has its own
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.benchmarks.sync.exposed import ARGS, FLOPS, ghosts
from shoal.benchmarks.sync.worlds import MBIT, Field, lines
from shoal.benchmarks.table import Figure, arguments, report
from shoal.broker.policies import policy
from shoal.dag.cost.network import Network
from shoal.dag.plan.plan import PeerId
from shoal.planner.network.places import places_of
from shoal.sim.virtual.control import BROKER
from shoal.sim.virtual.spec import PeerSpec

REPLICAS, PLACES = 12, 3
NEAR, FAR = 1000 * MBIT, 20 * MBIT
INSIDE, AWAY_S = 100 * MBIT, 0.1
SIZES: Mapping[str, tuple[int, int]] = {"0.3M": (220, 520), "1M": (400, 1600), "5M": (1500, 2800)}
"""Of small models: width of the embedding, and of the layer behind it."""
SMALL = [
    *((size, members, rate, True) for size in SIZES for members in (6, 12) for rate in (0.5, 20.0)),
    *((size, 20, 2.0, True) for size in SIZES),
    *(("1M", members, rate, False) for members in (6, 12, 20) for rate in (2.0, 20.0)),
]
"""Size, members, Mbit/s, and whether these are of pairs between places; else of lines."""
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


class Wide(nn.Module):
    """Predicts the next byte; nearly all parameters are those of one matrix."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.wide = nn.Linear(width, hidden, bias=False)
        self.head = nn.Linear(hidden, 256, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """x, y (B, T): bytes and the bytes that follow them. Returns the mean loss per byte."""
        found = self.head(torch.relu(self.wide(self.bytes(x))))
        return F.cross_entropy(found.flatten(0, 1), y.flatten())


def wide(width: int = 16, hidden: int = 64) -> Wide:
    """A model of (256 + hidden)·width + 256·hidden parameters."""
    return Wide(width, hidden)


def network(
    names: list[str],
    near_s: float = 0.001,
    far_s: float = 0.03,
    inside: float = NEAR,
    far: float = FAR,
) -> Network:
    """Pairs of peers, and the broker's, which has fast ones to all."""
    at = np.array([*(i % PLACES for i, _ in enumerate(names)), -1])
    near = at[:, None] == at[None, :]
    near[-1, :] = near[:, -1] = True
    latency, free = np.where(near, near_s, far_s), np.full(len(at), np.inf)
    np.fill_diagonal(latency, 0.0)
    peers = tuple(map(PeerId, (*names, BROKER)))
    return Network(peers, latency, np.where(near, inside, far), free, free)


def nowhere(network: Network, elements: int) -> dict[PeerId, int]:
    """Return that nobody is near another."""
    return {}


def specs_of(names: list[str]) -> list[PeerSpec]:
    """Peers with memory for any model, in places in turn."""
    return [
        PeerSpec(name=n, place=f"s{i % PLACES}", flops_per_s=FLOPS, memory_bytes=64 << 30)
        for i, n in enumerate(names)
    ]


def large() -> list[Figure]:
    """Play 86M parameters with places and without."""
    names, found = [f"p{i:02}" for i in range(REPLICAS)], []
    with Field(JOB) as field:
        for near in (True, False):
            with patch.object(policy, "places_of", places_of if near else nowhere):
                ran = field.play(
                    specs_of(names), network(names), device=ghosts(), settled_s=SETTLED_S
                )
            last = ran.rounds[-2].round_done
            print(
                f"{'in places' if near else 'each by itself'}: an exchange takes "
                f"{last.exchange_s:.1f} s, and {last.sent_bytes / 1e9:.2f} GB are sent",
                flush=True,
            )
            found.append(last.exchange_s)
    return [Figure("places_over_alone", found[0] / found[1], "ratio", "lower")]


def small() -> list[Figure]:
    """Play small models."""
    figures = []
    for size, members, rate, between in SMALL:
        names = [f"p{i:02}" for i in range(members)]
        width, hidden = SIZES[size]
        model = {
            "factory": "shoal.benchmarks.sync.places:wide",
            "args": {"width": width, "hidden": hidden},
        }
        table = {
            **{**JOB, "model": model, "data": {"kind": "text", "length": 64}},
            "plan": {**JOB["plan"], "replicas": members},
            "train": {**JOB["train"], "batch": members},
        }
        far = network(names, 0.005, AWAY_S, INSIDE, rate * MBIT)
        lined = lines(names, dict.fromkeys(names, rate * MBIT), AWAY_S)
        with Field(table) as field:
            ran = field.play(
                specs_of(names), far if between else lined, device=ghosts(), settled_s=SETTLED_S
            )
        last = ran.rounds[-2].round_done
        print(
            f"{size}, {members} members, {rate:g} Mbit/s {'between places' if between else 'lines'}"
            f": an exchange takes {last.exchange_s:.2f} s, and {last.sent_bytes / 1e6:.1f} MB are "
            f"sent",
            flush=True,
        )
        if (size, members) == ("1M", 12):
            name = f"small_{'' if between else 'lines_'}{rate:g}_s".replace(".", "_")
            figures.append(Figure(name, last.exchange_s, "s", "lower"))
    return figures


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--small", action="store_true", help="small models, and nothing else")
    args = parser.parse_args()
    report("places", small() if args.small else large(), args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
