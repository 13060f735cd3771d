"""Who meets whom in gossip: bandwidth of the pairs against how fast they mix, and what it costs.

    python benchmarks/gossip/saps.py          # half a minute
    python benchmarks/gossip/saps.py --digits # training as well, three minutes

300 rounds among 32 replicas whose links have U(0, 5) of some unit in both directions, and the same
for five networks more, of which the least bottleneck and the largest ρ count.

saps_bottleneck_…   the slowest link of a round, mean over rounds (worst of all networks: …_worst)
saps_mean_link_…    the mean link of a round, mean over rounds
saps_rho_…          second eigenvalue of E[WᵀW] (…_worst)
saps_learned_…      the same of "auto", where the broker knows only links that were measured: of
                    each replica to four landmarks, and those of rounds that were (landmarks);
                    before the first round also to 16 others (measured), or to all (all). 100 rounds
                    each of six networks (`broker/policies/pairs/measuring.py`)
saps_match_1000_seconds      CPU: one round among 1,000 after a history of ten, threshold given
saps_threshold_1000_seconds  CPU: the threshold where none is given, once in a round
saps_cardinality             least share of networkx's maximum, 200 random graphs of up to 100
saps_digits_…                test accuracy (`benchmarks/gossip/digits.py`)
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Sequence

import networkx
import numpy as np
from numpy.typing import NDArray

from shoal.benchmarks.gossip import digits
from shoal.benchmarks.gossip.mixing import of_random_pairs, pairs_of_rounds, second_eigenvalue
from shoal.benchmarks.table import Figure, arguments, report
from shoal.broker.links.links import Links
from shoal.broker.links.probed import LINKS
from shoal.broker.policies.pairs.matching import ALONE, maximal, maximum, weights
from shoal.broker.policies.pairs.measuring import OTHERS, tournament
from shoal.broker.policies.pairs.selection import Pairs, PairSettings, pairs_of_round
from shoal.broker.policies.pairs.threshold import fastest_threshold
from shoal.dag.plan.plan import PeerId

ROUNDS = 300
MORE = 5
LEARNED_ROUNDS = 100
CASES: dict[str, tuple[str, PairSettings]] = {
    "random": ("random-pairs", PairSettings()),
    "ring": ("ring", PairSettings()),
    "b2_t5": ("saps", PairSettings(threshold=2, recent=5)),
    "b3_t3": ("saps", PairSettings(threshold=3, recent=3)),
    "b3_t10": ("saps", PairSettings(threshold=3, recent=10)),
    "b4_t10": ("saps", PairSettings(threshold=4, recent=10)),
    "auto": ("saps", PairSettings()),
}


def names(n: int) -> list[str]:
    return [f"replica-{i:04}" for i in range(n)]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--digits", action="store_true", help="train as well")
    args = parser.parse_args()
    figures = []
    for case in CASES:
        figures += of_case(case)
    figures.append(Figure("saps_rho_random_closed_form", of_random_pairs(32), "", "lower"))
    figures += [
        Figure(f"saps_learned_{name}", learned(turns), "", "higher")
        for name, turns in (("landmarks", 0), ("measured", OTHERS), ("all", 31))
    ]
    figures += seconds()
    figures.append(Figure("saps_cardinality", cardinality(), "ratio", "higher"))
    if args.digits:
        figures += digits.figures()
    report("saps", figures, args.json)


def of_case(case: str) -> list[Figure]:
    first, *more = (measured(case, seed) for seed in range(1 + MORE))
    bottleneck, mean, rho = first
    return [
        Figure(f"saps_bottleneck_{case}", bottleneck, "", "higher"),
        Figure(f"saps_bottleneck_{case}_worst", min(m[0] for m in [first, *more]), "", "higher"),
        Figure(f"saps_mean_link_{case}", mean, "", "higher"),
        Figure(f"saps_rho_{case}", rho, "", "lower"),
        Figure(f"saps_rho_{case}_worst", max(m[2] for m in [first, *more]), "", "lower"),
    ]


def measured(case: str, seed: int) -> tuple[float, float, float]:
    """Bottleneck, mean link and ρ."""
    method, settings = CASES[case]
    who, rate = names(32), digits.uniform(32, seed)
    at = {name: i for i, name in enumerate(who)}
    rounds = pairs_of_rounds(method, seed, range(ROUNDS), who, rate, settings)
    met = [[rate[at[a], at[b]] for a, b in pairs] for pairs in rounds]
    slowest = float(np.mean([min(links) for links in met]))
    return slowest, float(np.mean(met)), second_eigenvalue(who, rounds)


def learned(turns: int, n: int = 32) -> float:
    """The bottleneck of saps_learned_… after so many turns."""
    return float(np.mean([_learned(turns, n, seed) for seed in range(1 + MORE)]))


def _learned(turns: int, n: int, seed: int) -> float:
    who, rate = [PeerId(name) for name in names(n)], digits.uniform(n, seed) * 1e6
    links, met = Links(), list[Pairs]()

    def measure(pairs: Iterable[tuple[int, int]]) -> None:
        for a, b in pairs:
            for one, other in ((a, b), (b, a)):
                links.report(who[one], who[other], 0.02, float(rate[one, other]), 0.0, "probe")

    def slowest(pairs: Sequence[tuple[int, int]]) -> float:
        return float(min(min(rate[a, b], rate[b, a]) for a, b in pairs)) / 1e6

    measure((a, b) for a in range(n) for b in range(LINKS) if a != b)
    for turn in tournament(n, seed, turns):
        measure(turn)
    found = []
    for number in range(LEARNED_ROUNDS):
        known = links.network(who, {}, 0.0)
        ends = np.minimum(known.up[:, None], known.down[None, :])
        seen = np.minimum(known.bandwidth, ends)
        met.append(pairs_of_round("saps", seed, number, who, seen, met))
        pairs = [(int(a[-4:]), int(b[-4:])) for a, b in met[-1]]
        found.append(slowest(pairs))
        measure(pairs)
    return float(np.mean(found))


def seconds() -> list[Figure]:
    who, rate = names(1000), digits.uniform(1000, 0)
    settings = PairSettings(threshold=4)
    history = pairs_of_rounds("saps", 0, range(10), who, rate, settings)

    def match() -> None:
        pairs_of_round("saps", 0, 10, who, rate, history, settings)

    return [
        Figure("saps_match_1000_seconds", _timed(match), "s", "lower"),
        Figure(
            "saps_threshold_1000_seconds", _timed(lambda: fastest_threshold(rate)), "s", "lower"
        ),
    ]


def _timed(call: object) -> float:
    assert callable(call)
    times = []
    for _ in range(5):
        begun = time.process_time()
        call()
        times.append(time.process_time() - begun)
    return statistics.median(times)


def cardinality() -> float:
    rng = np.random.default_rng(0)
    return min(
        _share(rng, int(rng.integers(2, 101)), float(rng.uniform(0.5, 8))) for _ in range(200)
    )


def _share(rng: np.random.Generator, n: int, degree: float) -> float:
    edges: NDArray[np.bool_] = np.triu(rng.random((n, n)) < degree / n, 1)
    edges |= edges.T
    order, alone = weights(n, n), np.full(n, ALONE)
    ours = (maximum(edges, order, maximal(edges, order, alone)) != ALONE).sum() / 2
    graph = networkx.from_numpy_array(edges)
    best = len(networkx.max_weight_matching(graph, maxcardinality=True))
    return float(ours / best) if best else 1.0


if __name__ == "__main__":
    main()
