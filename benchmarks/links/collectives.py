"""What it takes to add up a large gradient among 4, 8, 16 and 40 holders, by each collective.

    python benchmarks/links/collectives.py                 # six minutes

Holders on peers of testbed-24 and testbed-48, in the order of the files and drawn at random; 124M
numbers in fp32; by the event calculation that planners, reports and the simulator share, until the
last holder has the sum. (A step with a global norm is two latencies longer.) The bound is

    max(N / slowest line, 2·(P - 1)·N / Σ lines, N / what crosses between some and the rest)

of N bytes among P peers, a line being the least of up, down, and all its pairs together, and the
least latency there besides: nothing adds up faster. What crosses is looked at for places and, of up
to MOST_CUT peers, for all subsets.

Where pairs are narrow nobody reaches that bound. What adds up does so along trees that span all
peers, each for a part of the vector, which crosses every edge once each way; so the most that trees
get of pairs and lines, by a linear program, is a second bound (`trees`).

collective_over_bound_auto        the worst of what the planner takes over the bound
collective_over_bound_auto_lines  the same where lines, and not pairs across an ocean, set it
collective_over_trees_auto        the worst over the greater of the two bounds
collective_choice_over_best       the worst of it over the best collective that a job can name
collective_over_bound_all_to_all  the worst of equal shares over the bound; and so for the others
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator
from pathlib import Path

import networkx
import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog

from shoal.benchmarks.table import Figure, arguments, report
from shoal.dag.cost.network import Network
from shoal.dag.cost.speed import Speeds
from shoal.dag.exchange.collectives import SUMS
from shoal.dag.ir.graph import Graph, Input, Operator, Output, Parameter, Ref, TensorSpec
from shoal.dag.plan.action import ExchangeContent
from shoal.dag.plan.plan import StageExchange
from shoal.planner.base.interface import PeerOffer, PlannerOptions, PlanRequest
from shoal.planner.cost.candidate import Candidate, StageShare
from shoal.planner.cost.cost_model import CostModel
from shoal.planner.network.communities import groupings, rates
from shoal.planner.search.collectives import with_collectives
from shoal.sim.scenario.scenario import Scenario

SCENARIOS = Path(__file__).parents[2] / "sim" / "scenarios"
HOLDERS = (4, 8, 16, 40)
DRAWN = 3
MOST_CUT = 8
ELEMENTS = 124_000_000
ENOUGH = 1e-3
"""The bound of trees is so near to the least."""
FAST = Speeds.of_flops(1e18)
"""Computing takes nothing, so that a step is its exchange."""


def graph_of(elements: int) -> Graph:
    """One operator with so many trained numbers."""
    row, scalar = TensorSpec((2,), "float32"), TensorSpec((), "float32")
    add = Operator("v", "aten.add.Tensor", (Ref("in:x"), Ref("in:x")), (), (Output(row, True),))
    mean = Operator("w", "aten.mean.default", (Ref("param:p"),), (), (Output(scalar, True),))
    last = Operator("l", "aten.add.Tensor", (Ref("v"), Ref("w")), (), (Output(row, True),))
    weight = Parameter("p", TensorSpec((elements,), "float32"))
    return Graph((Input("x", row),), (weight,), (), (add, mean, last), "l").bind(2)


def networks() -> Iterator[tuple[str, Network]]:
    """(what it is, the links among its holders)."""
    for name in ("testbed-24", "testbed-48"):
        whole = Scenario.from_toml(SCENARIOS / f"{name}.toml").network()
        everybody = range(len(whole.peers))
        for count in HOLDERS:
            if count > len(everybody):
                continue
            yield f"{name}, first {count}", whole.part(list(everybody)[:count])
            for seed in range(DRAWN):
                some = sorted(random.Random(seed).sample(everybody, count))
                yield f"{name}, {count} drawn ({seed})", whole.part(some)


def judged(graph: Graph, links: Network, collective: str) -> tuple[CostModel, Candidate]:
    n = len(links.peers)
    offers = tuple(PeerOffer(p, device_memory_bytes=1 << 40, speeds=FAST) for p in links.peers)
    options = PlannerOptions(collective=collective)
    judge = CostModel(PlanRequest(graph, offers, n, 2, options=options, links=links))
    whole = tuple((StageShare(i, 0, judge.operators),) for i in range(n))
    return judge, Candidate(whole, (1,) * n)


def seconds_of(judge: CostModel, candidate: Candidate) -> float:
    """Until all have the sum."""
    structure, timeline = judge.play(candidate)
    ends = zip(structure.program.actions, timeline.end, strict=True)
    return max(end for a, end in ends if a.content is ExchangeContent.GRADIENT)


def bounds_s(links: Network, size_bytes: float) -> tuple[float, float]:
    """Seconds that lines, and places, take at least."""
    pairs = links.rates().copy()
    np.fill_diagonal(pairs, 0.0)
    line = np.minimum(np.minimum(links.up, links.down), np.minimum(pairs.sum(0), pairs.sum(1)))
    n = len(line)
    latency = links.latency_s + np.where(np.eye(n, dtype=bool), np.inf, 0.0)
    least = np.minimum(latency.min(axis=0), latency.min(axis=1))
    by_line = max(*(size_bytes / line + least), 2 * (n - 1) * size_bytes / line.sum() + least.min())
    by_place = 0.0
    groups = {group for grouping in groupings(rates(links)) for group in grouping}
    if n <= MOST_CUT:
        groups |= {s for k in range(1, n) for s in itertools.combinations(range(n), k)}
    for group in groups:
        if 1 < len(group) < n - 1:
            inside = np.zeros(n, dtype=bool)
            inside[list(group)] = True
            cut = np.ix_(inside, ~inside)
            rate = min(
                np.minimum(pairs[cut].sum(1), links.up[inside]).sum(),
                np.minimum(pairs[cut].sum(0), links.down[~inside]).sum(),
            )
            by_place = max(by_place, size_bytes / rate + latency[cut].min())
    return by_line, by_place


def trees_s(links: Network, size_bytes: float) -> float:
    """Seconds that the best trees take at least. A tree of share f puts f·N each way on its edges,
    and on the line of a peer for each edge there. Trees that may still help are found by prices."""
    pairs = rates(links)
    n = len(pairs)
    i, k = np.triu_indices(n, 1)
    room = np.concatenate([pairs[i, k], np.minimum(links.up, links.down)])
    number = {edge: e for e, edge in enumerate(zip(i.tolist(), k.tolist(), strict=True))}
    graph = networkx.Graph()

    def column(edges: Iterable[tuple[int, int]]) -> NDArray[np.float64]:
        load = np.zeros(len(room))
        for a, b in edges:
            load[[number[min(a, b), max(a, b)], len(i) + a, len(i) + b]] += 1
        return load

    columns = [column((r, p) for p in range(n) if p != r) for r in range(n)]
    while True:
        found = linprog([-1.0] * len(columns), np.column_stack(columns), room / room.max())
        price = -found.ineqlin.marginals
        costs = price[: len(i)] + price[len(i) + i] + price[len(i) + k]
        graph.add_weighted_edges_from(zip(i.tolist(), k.tolist(), costs.tolist(), strict=True))
        tree = list(networkx.minimum_spanning_edges(graph))
        cheapest = sum(data["weight"] for _, _, data in tree)
        if cheapest > 1 - ENOUGH:
            # Prices over the cheapest tree's are a bound of what any trees get.
            return float(size_bytes / room.max() / -found.fun * cheapest)
        columns.append(column((a, b) for a, b, _ in tree))


def modelled() -> list[Figure]:
    """Prints a row for each network."""
    graph = graph_of(ELEMENTS)
    size_bytes = 4.0 * ELEMENTS
    worst: dict[str, float] = {}
    choice = lines = trees = 0.0
    print(f"{'':28}{'bound':>9}{'trees':>8}{'auto':>8}" + "".join(f"{n:>14}" for n in SUMS))
    for what, links in networks():
        by_line, by_place = bounds_s(links, size_bytes)
        least = max(by_line, by_place)
        judge, candidate = judged(graph, links, "auto")
        chosen = with_collectives(judge, candidate)
        by_tree = max(least, trees_s(links, size_bytes)) / least
        seconds = {"auto": seconds_of(judge, chosen)}
        for name in SUMS:
            other, _ = judged(graph, links, name)
            seconds[name] = seconds_of(other, candidate)
        ratios = {name: s / least for name, s in seconds.items()}
        worst = {name: max(r, worst.get(name, 0.0)) for name, r in ratios.items()}
        if by_line >= by_place:
            lines = max(lines, ratios["auto"])
        trees = max(trees, ratios["auto"] / by_tree)
        choice = max(choice, seconds["auto"] / min(seconds.values()))
        (taken,) = judge.plan(chosen).plan.exchanges or (StageExchange(0),)
        shares = f" in shares of {sorted(taken.weights)[::-1]}" if taken.weights else ""
        print(
            f"{what:28}{least:8.1f}s{by_tree:8.3f}{ratios['auto']:8.3f}"
            + "".join(f"{ratios[n]:14.3f}" for n in SUMS)
            + f"  {taken.collective}, {taken.chunks} chunks{shares}",
            flush=True,
        )
    return [
        Figure("collective_over_bound_auto", worst.pop("auto"), "ratio", "lower"),
        Figure("collective_over_bound_auto_lines", lines, "ratio", "lower"),
        Figure("collective_over_trees_auto", trees, "ratio", "lower"),
        Figure("collective_choice_over_best", choice, "ratio", "lower"),
        *(
            Figure(f"collective_over_bound_{name.replace('-', '_')}", r, "ratio", "lower")
            for name, r in worst.items()
        ),
    ]


def main() -> None:
    args = arguments(__doc__).parse_args()
    report("collectives", modelled(), args.json)


if __name__ == "__main__":
    main()
