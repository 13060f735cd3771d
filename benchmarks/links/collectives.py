"""What it takes to add up a large gradient among 4, 8, 16 and 40 holders, by each collective.

    python benchmarks/links/collectives.py                 # one minute

Holders on peers of testbed-24 and testbed-48, in the order of the files and drawn at random; 124M
numbers in fp32; by the event calculation that planners, reports and the simulator share. The bound
is

    max(N / slowest line, 2·(P - 1)·N / Σ lines, N / what crosses between some and the rest)

of N bytes among P peers, a line being the least of up, down, and all its pairs together, and the
least latency there besides: nothing adds up faster. What crosses is looked at for places and, of up
to MOST_CUT peers, for all subsets.

collective_over_bound_auto        the worst of what the planner takes over the bound
collective_over_bound_auto_lines  the same where lines, and not pairs across an ocean, set it
collective_choice_over_best       the worst of it over the best collective that a job can name
collective_over_bound_all_to_all  the worst of equal shares over the bound; and so for the others
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from shoal.benchmarks.table import Figure, arguments, report
from shoal.broker.scheduler.base.interface import PeerOffer, PlannerOptions, PlanRequest
from shoal.broker.scheduler.cost.candidate import Candidate, StageShare
from shoal.broker.scheduler.cost.cost_model import CostModel
from shoal.broker.scheduler.network.communities import groupings, rates
from shoal.broker.scheduler.search.collectives import with_collectives
from shoal.dag.cost.network import Network
from shoal.dag.cost.speed import Speeds
from shoal.dag.exchange.collectives import SUMS
from shoal.dag.ir.graph import Graph, Input, Operator, Output, Parameter, Ref, TensorSpec
from shoal.dag.plan.plan import StageExchange
from shoal.sim.scenario.scenario import Scenario

SCENARIOS = Path(__file__).parents[2] / "sim" / "scenarios"
HOLDERS = (4, 8, 16, 40)
DRAWN = 3
MOST_CUT = 8
ELEMENTS = 124_000_000
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


def modelled() -> list[Figure]:
    """Prints a row for each network."""
    graph = graph_of(ELEMENTS)
    size_bytes = 4.0 * ELEMENTS
    worst: dict[str, float] = {}
    choice = lines = 0.0
    print(f"{'':28}{'bound':>9}{'auto':>8}" + "".join(f"{n:>14}" for n in SUMS))
    for what, links in networks():
        by_line, by_place = bounds_s(links, size_bytes)
        least = max(by_line, by_place)
        judge, candidate = judged(graph, links, "auto")
        chosen = with_collectives(judge, candidate)
        seconds = {"auto": judge.seconds(chosen)}
        for name in SUMS:
            other, _ = judged(graph, links, name)
            seconds[name] = other.seconds(candidate)
        ratios = {name: s / least for name, s in seconds.items()}
        worst = {name: max(r, worst.get(name, 0.0)) for name, r in ratios.items()}
        if by_line >= by_place:
            lines = max(lines, ratios["auto"])
        choice = max(choice, seconds["auto"] / min(seconds.values()))
        (taken,) = judge.plan(chosen).plan.exchanges or (StageExchange(0),)
        shares = f" in shares of {sorted(taken.weights)[::-1]}" if taken.weights else ""
        print(
            f"{what:28}{least:8.1f}s{ratios['auto']:8.3f}"
            + "".join(f"{ratios[n]:14.3f}" for n in SUMS)
            + f"  {taken.collective}, {taken.chunks} chunks{shares}",
            flush=True,
        )
    return [
        Figure("collective_over_bound_auto", worst.pop("auto"), "ratio", "lower"),
        Figure("collective_over_bound_auto_lines", lines, "ratio", "lower"),
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
