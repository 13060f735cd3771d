"""What unequal uplinks of clients do to federated training, and what BCRS and OPWA (2408.14736)
make of it, in the modelled world.

    python benchmarks/federated/links.py [--seeds 4] [--rounds 100]      # a minute of CPU

20 clients have uplinks of 0.5 to 20 Mbit/s, evenly drawn, and 50 ms of latency; the least ratio is
0.01. An upload takes the latency, and its encoded bytes by the rate.

spread      rounds of a perceptron of 1.1 million numbers, played through broker and peers on a
            virtual clock, with hashes in place of tensors: by how much the uploads of clients
            that are not clamped differ, at most
time        scikit-learn's digits, Dirichlet 0.1, 10 of the clients a round, a perceptron of 2,410
            numbers, 20 steps of SGD 0.1 with batches of 8, in a bare loop that takes numbers and
            weights from the broker's policy: modelled time to 90 % accuracy on held-out data (mean
            of five versions) of FedAvg + top-k, divided by that of each other one. A round is as
            long as its longest upload, which is the same one for all; computing takes no time.
            Accuracy is the mean of the last ten versions. Behind each, half the width of a 95 %
            interval over seeds
"""

from __future__ import annotations

import math
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn.functional import cross_entropy

from shoal.benchmarks.sync.worlds import MBIT, Field, lines
from shoal.benchmarks.table import Figure, arguments, report
from shoal.broker.policies.uploads import Update, links_of, weights_of
from shoal.compression.echo import TensorShape
from shoal.compression.sparse.topk import TopK
from shoal.dag.rounds.cohorts import cohort_of
from shoal.job.clients.client_compression import ClientLinks
from shoal.peer.data.partition.divide import partition
from shoal.sim.ghost.device import Ghosts
from shoal.sim.virtual.spec import PeerSpec

PEERS, CLIENTS, PER_ROUND, RATIO, TARGET = 2, 20, 10, 0.01, 0.9
LINKS = {"up": "uniform:0.5Mbit,20Mbit", "latency": "50ms"}
WIDE = (64, 1024, 1024, 10)
MODEL = """
from torch import nn

class Classifier(nn.Module):
    def __init__(self, widths):
        super().__init__()
        layers = [nn.Linear(a, b) for a, b in zip(widths, widths[1:])]
        self.layers = nn.Sequential(*layers)

    def forward(self, x, y):
        return nn.functional.cross_entropy(self.layers(x), y)
"""


# ------------------------------------------------------------ how long uploads take


def table_of(folder: Path, seed: int) -> dict[str, Any]:
    """The job of the large model."""
    (folder / "model.py").write_text(MODEL)
    images, labels = load_digits(return_X_y=True)
    np.savez(folder / "digits.npz", x=images.astype(np.float32), y=labels.astype(np.int64))
    return {
        **{"version": 1, "name": "links", "seed": seed},
        "model": {"factory": f"{folder / 'model.py'}:Classifier", "args": {"widths": [*WIDE]}},
        "data": {
            **{"kind": "arrays", "source": str(folder / "digits.npz")},
            "partition": {"kind": "dirichlet", "alpha": 0.1, "clients": CLIENTS, "seed": seed},
        },
        "sync": {
            **{"kind": "federated", "per_round": CLIENTS, "compression": "bcrs"},
            "compression_options": {"least_ratio": RATIO},
            "client_links": {**LINKS, "seed": seed},
        },
        "plan": {"replicas": PEERS, "scheduler": "uniform", "replan": False},
        "train": {"steps": 2, "batch": 8, "lr": 0.1, "optimizer": "sgd"},
    }


def spread(seeds: int) -> list[Figure]:
    """Of what the broker told clients of a large model. Bytes are those of the codec."""
    elements, worst = sum(a * b + b for a, b in pairwise(WIDE)), 0.0
    names = [f"p{i}" for i in range(PEERS)]
    network = lines(names, dict.fromkeys(names, 1000 * MBIT), 0.01)
    specs = [PeerSpec(name=n, place=n) for n in names]
    for seed in range(seeds):
        with tempfile.TemporaryDirectory() as folder, Field(table_of(Path(folder), seed)) as field:
            played = field.play(specs, network, device=Ghosts())
        for begun in (e.round_begun for e in played.events if e.HasField("round_begun")):
            kept = [k for w in begun.work for k in w.kept]
            clients = cohort_of(CLIENTS, seed, begun.round, range(CLIENTS))
            links = links_of(ClientLinks(**LINKS, seed=seed), clients)
            ends = [
                latency + encoded_bytes(k, elements) / rate
                for k, latency, rate in zip(
                    kept, links.latency_s.tolist(), links.bytes_per_s.tolist(), strict=True
                )
                if round(RATIO * elements) < k < elements
            ]
            worst = max(worst, max(ends) / min(ends) - 1)
    return [Figure("fed_bcrs_spread", worst, "share", "lower")]


def encoded_bytes(kept: int, elements: int) -> int:
    """Return what so many numbers take, with where they are."""
    spec = TensorShape((elements,), "float32", 4 * elements)
    return TopK(ratio=elements / kept, values="fp32").size_bytes(spec)


# ------------------------------------------------------------ time to an accuracy


@dataclass(frozen=True)
class Sends:
    """What clients send, and what it counts for. by_links: BCRS."""

    by_links: bool = True
    ratio: float = RATIO
    alpha: float = 0.0
    gamma: float = 1.0


SENDS: Mapping[str, Sends] = {
    "topk": Sends(by_links=False),
    "dense": Sends(by_links=False, ratio=1.0),
    "bcrs": Sends(),
    "bcrs_alpha1": Sends(alpha=1.0),
    "topk_opwa3": Sends(by_links=False, gamma=3.0),
    "bcrs_opwa3": Sends(gamma=3.0),
    "bcrs_opwa5": Sends(gamma=5.0),
}
SHAPES = ((64, 32), (1, 32), (32, 10), (1, 10))
ELEMENTS = sum(a * b for a, b in SHAPES)


@dataclass(frozen=True)
class Learned:
    """Of one run. accuracy: of each version on held-out data. seconds: modelled, of each round.
    sent: bytes of all clients."""

    accuracy: list[float]
    seconds: list[float]
    sent: int

    @property
    def last(self) -> float:
        """The mean accuracy of the last ten versions."""
        return statistics.mean(self.accuracy[-10:])

    def time_to(self, target: float) -> float | None:
        """Seconds until the mean of five versions has the accuracy; None: it never has."""
        for n in range(5, len(self.accuracy) + 1):
            if statistics.mean(self.accuracy[n - 5 : n]) >= target:
                return sum(self.seconds[:n])
        return None


def learned(sends: Sends, seed: int, rounds: int) -> Learned:
    """A run on digits, of which a fifth is held out."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(labels))
    x, y = torch.tensor(images[order] / 16).float(), torch.tensor(labels[order])
    test = len(y) // 5
    parts = partition(y[test:].numpy(), kind="dirichlet", alpha=0.1, clients=CLIENTS, seed=seed)
    g = torch.Generator().manual_seed(seed)
    begin = [torch.randn(a, b, generator=g) * (a > 1) * (2 / a) ** 0.5 for a, b in SHAPES]
    now = torch.cat([p.reshape(-1) for p in begin])
    update, sizes, found = Update(ELEMENTS), parts.sizes.tolist(), Learned([], [], 0)
    sent = 0
    for round_ in range(rounds):
        clients = cohort_of(CLIENTS, seed, round_, range(PER_ROUND))
        links = links_of(ClientLinks(**LINKS, seed=seed), clients)
        kept = update.least(sends.ratio, PER_ROUND)
        kept = update.by_links(sends.ratio, links) if sends.by_links else kept
        weights = weights_of([sizes[c] for c in clients], kept, sends.alpha)
        mine = [torch.tensor(parts.train(c)) + test for c in clients]
        moved, o = trained(now, x, y, mine, g) - now, torch.zeros(ELEMENTS)
        for u, k in zip(moved, kept.tolist(), strict=True):
            mask = torch.zeros_like(u).index_fill_(0, u.abs().topk(k).indices, 1.0)
            u *= mask
            o += mask
        share = torch.tensor(weights, dtype=torch.float64) / sum(weights)
        now = now + torch.where(o == 1, sends.gamma, 1.0) * (share @ moved.double()).float()
        right = logits(now[None], x[None, :test])[0].argmax(1) == y[:test]
        found.accuracy.append(float(right.float().mean()))
        found.seconds.append(float(update.seconds(kept, links).max()))
        sent += int(update.bytes(kept).sum())
    return Learned(found.accuracy, found.seconds, sent)


def trained(
    version: Tensor, x: Tensor, y: Tensor, mine: Sequence[Tensor], g: torch.Generator
) -> Tensor:
    """Return what clients come to, (clients, ELEMENTS), in 20 steps of batches by lot."""
    flat = version.expand(len(mine), -1).clone()
    for _ in range(20):
        at = torch.stack([m[torch.randint(len(m), (8,), generator=g)] for m in mine])
        leaf = flat.requires_grad_()
        loss = cross_entropy(logits(leaf, x[at]).flatten(0, 1), y[at].flatten(), reduction="sum")
        [grad] = torch.autograd.grad(loss / 8, leaf)
        flat = (leaf - 0.1 * grad).detach()
    return flat


def logits(flat: Tensor, x: Tensor) -> Tensor:
    """(clients, samples, 10) of (clients, ELEMENTS) and (clients, samples, 64)."""
    parts = torch.split(flat, [a * b for a, b in SHAPES], dim=1)
    w, b, v, c = (p.view(-1, *shape) for p, shape in zip(parts, SHAPES, strict=True))
    found: Tensor = torch.relu(x @ w + b) @ v + c
    return found


def learning(seeds: int, rounds: int) -> list[Figure]:
    runs = {
        name: [learned(sends, seed, rounds) for seed in range(seeds)]
        for name, sends in SENDS.items()
    }
    found = list[Figure]()
    for name, some in runs.items():
        found += _with_interval(f"fed_links_{name}_accuracy", [r.last for r in some], "share")
        round_s = statistics.mean(sum(r.seconds) / rounds for r in some)
        found.append(Figure(f"fed_links_{name}_round_s", round_s, "s", "lower"))
        sent = statistics.mean(r.sent / rounds for r in some)
        found.append(Figure(f"fed_links_{name}_round_bytes", sent, "bytes", "lower"))
        times = [r.time_to(TARGET) for r in some]
        reached = sum(t is not None for t in times)
        found.append(Figure(f"fed_links_{name}_reached", reached, "seeds", "higher"))
        pairs = zip([r.time_to(TARGET) for r in runs["topk"]], times, strict=True)
        ratios = [base / mine for base, mine in pairs if base is not None and mine is not None]
        if ratios and name != "topk":
            found += _with_interval(f"fed_links_{name}_times_faster", ratios, "ratio")
    return found


T_95 = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36}
"""Student's quantile, by degrees of freedom."""


def _with_interval(name: str, values: Sequence[float], unit: str) -> list[Figure]:
    """The mean, and half of its 95 % interval where there are several."""
    found = [Figure(name, statistics.mean(values), unit, "higher")]
    if (n := len(values)) > 1:
        half = T_95.get(n - 1, 2.0) * statistics.stdev(values) / math.sqrt(n)
        found.append(Figure(f"{name}_half", half, unit, "lower"))
    return found


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=100)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    found = [*learning(asked.seeds, asked.rounds), *spread(asked.seeds)]
    report("links", found, asked.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
