"""What schedules take where a hop costs as much as a stage computes.

    python benchmarks/schedules/wan.py [--json FILE] [--rows FILE]

Eight equal stages in a chain, a peer each: a forward takes 1, a backward 2 or 1 and its gradients
of weights 1, a message holds its link for t and arrives a later; 16 and 64 microbatches. Every list
is executed by the same event calculation with these times, after check_listed has proved it.
Columns: GPipe; 1F1B with the textbook's K - i in flight; 1F1B listed with the real times, of at
most 2K in flight and without a bound, and the least in flight beyond K - i with which the latter's
time is reached; zero bubble of at most K - i and 2K in flight and without a bound, where gradients
of weights may wait as long as they like. `bound` is the largest, over stages and directions of
links, of what nothing can go below; `apart` that with gradients of weights apart.

Behind it stand DT-FM's cases 1 to 4 and the testbeds: what `auto` plans, executed by ghosts,
against the steps of the plans without depth, which tests/sim/recorded/plans has.
`testbed_gain_geomean` is the geometric mean of the gains. With --rows, a case that the file has is
not executed again.

`wan_depth_over_textbook`: 1F1B without a bound over the textbook's, the geometric mean of the
rows; `wan_depth_over_best`: over the better of GPipe and the textbook; `wan_depth_over_bound`: the
worst row over its bound. `wan_schedule_over_reference`: the better of listed and zero bubble with
K - i, 2K and any number in flight, each over the best of REFERENCE with as many, the worst of all
rows; `wan_schedule_over_bound`: the worst row of zero bubble without a bound over `apart`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import geometric_mean
from tempfile import TemporaryDirectory

from shoal.benchmarks.table import Figure, arguments, report
from shoal.dag.plan.action import Action, Kind
from shoal.dag.plan.cut import Stage, bare_stages
from shoal.dag.plan.outline import Crossed, Outline, StageOutline
from shoal.dag.plan.plan import PeerId, Plan, StageSlot, Visit
from shoal.dag.schedule.orders import gpipe, one_f_one_b, zero_bubble
from shoal.dag.schedule.orders.list_scheduler import Lists, Visited
from shoal.dag.schedule.schedule import check_listed, executed_s, with_visits
from shoal.planner.schedulers.schedulers import plan as make_plan
from shoal.tests.sim.recorded import ghost_steps
from shoal.tests.sim.recorded.planned_cases import CASES
from shoal.tests.sim.recorded.records import read

STAGES = 8
GRID = ((0, 0), (0.5, 0), (1, 0), (3, 0), (10, 0), (0, 1), (0, 2.5), (0.5, 3.5), (1, 6))
"""Latency of a hop and the time for which a message holds its link, in forwards of a stage."""
MICROBATCHES = (16, 64)
REFERENCE: Mapping[int, Sequence[tuple[float, ...]]] = {
    16: (
        (69, 69, 69, 62, 55, 55),
        (76, 89, 76, 69, 58.5, 58.5),
        (83, 109, 83, 89, 62, 62),
        (111, 189, 111, 169, 89, 89),
        (209, 469, 209, 449, 187, 187),
        (83, 109, 83, 89, 62, 62),
        (134, 169, 104, 149, 93, 93),
        (185, 229, 134, 209, 128, 128),
        (302, 349, 216, 329, 205, 205),
    ),
    64: (
        (213, 213, 213, 206, 199, 199),
        (220, 275, 220, 213, 202.5, 202.5),
        (227, 337, 227, 275, 211, 206),
        (255, 585, 309, 523, 293, 220),
        (353, 1453, 704, 1391, 687, 283),
        (227, 337, 227, 275, 211, 206),
        (374, 523, 296, 461, 266.5, 222.5),
        (521, 709, 374, 647, 356, 296.5),
        (878, 1081, 595, 1019, 553, 493),
    ),
}
"""By microbatches and row of GRID, step times of another event calculation: GPipe; 1F1B with K - i
and 2K in flight; zero bubble with K - i and 2K and without a bound."""


def in_memory(row: Sequence[float], microbatches: int) -> tuple[float, float, float]:
    """The best of a row of REFERENCE with K - i, 2K and any number in flight."""
    flush, textbook, deep, apart, apart_deep, free = row
    least = min(textbook, apart)
    capped = min(least, deep, apart_deep, *((flush,) if microbatches <= 2 * STAGES else ()))
    return least, capped, min(capped, flush, free)


@dataclass(frozen=True)
class Wan:
    """Equal stages and equal links. `apart`: whether gradients of weights are visits of their
    own."""

    latency: float
    hold: float
    apart: bool = False

    def visit(self, peer: PeerId, action: Action) -> float:
        return 2.0 if action.kind is Kind.BACKWARD and not self.apart else 1.0

    def message(self, source: Visited, target: Visited) -> tuple[float, float]:
        return self.hold, self.latency


def chain(microbatches: int, count: int = STAGES) -> tuple[Plan, tuple[Stage, ...]]:
    """The plan of one microbatch after the other through `count` stages, not listed yet."""
    peers = [PeerId(f"p{k}") for k in range(count)]
    outline = Outline(
        tuple(
            StageOutline(
                k,
                (Crossed(f"v{k}", (k + 1,), (k + 1,)),) if k + 1 < count else (),
                trainable=True,
                makes_loss=k + 1 == count,
                has_backward=True,
            )
            for k in range(count)
        )
    )
    plan = Plan(
        tuple(StageSlot(k, k + 1, (p,)) for k, p in enumerate(peers)),
        (tuple(Visit(k, p) for k, p in enumerate(peers)),) * microbatches,
        1,
        outline=outline,
    )
    return plan, bare_stages(plan)


def bound(wan: Wan, microbatches: int) -> float:
    """What no order goes below: a stage works all its visits off between the first arrival and the
    way back of the last gradient, and so does a link its messages. Gradients of weights that are
    apart need no way back, but those of one microbatch stand at the end of it."""
    hop, back, last = wan.latency + wan.hold, 1 if wan.apart else 2, 1 if wan.apart else 0
    visits = microbatches * (1 + back)
    found = [visits + 2 * k * hop + (1 + back) * k + last for k in range(STAGES)]
    found += [microbatches * 3 + k * (hop + 1) for k in range(STAGES)]
    # A link's first message leaves behind k + 1 forwards, and behind its last one comes the rest of
    # the way there and back.
    for k in range(STAGES - 1):
        there = (k + 1) + k * hop + microbatches * wan.hold + wan.latency
        rest = (STAGES - 1 - k) * (1 + back) + 2 * (STAGES - 2 - k) * hop + hop
        found.append(there + rest + back * (k + 1) + k * hop + last)
    return max(found)


@dataclass(frozen=True)
class Row:
    """One network and a number of microbatches."""

    plan: Plan
    stages: tuple[Stage, ...]
    wan: Wan

    @property
    def microbatches(self) -> int:
        return len(self.plan.routes)

    def took(self, lists: Lists) -> float:
        """Seconds of a step in which peers follow these lists."""
        visits = tuple(tuple(lists[p]) for p in self.plan.peers)
        listed = with_visits(self.plan, self.stages, visits)
        check_listed(listed, self.stages)
        apart = any(a.kind is Kind.WEIGHT for mine in visits for a in mine)
        return executed_s(listed, self.stages, replace(self.wan, apart=apart))

    def deep(self, bounds: Mapping[int, int]) -> float:
        """Seconds of 1F1B listed with the real times under these bounds by stage."""
        return self.took(one_f_one_b.order(self.plan, self.stages, self.wan, bounds))

    def beyond(self, more: int) -> float:
        """Likewise, with so many in flight beyond the textbook's."""
        return self.deep(self.most(more))

    def apart(self, bounds: Mapping[int, int]) -> float:
        """Seconds of zero bubble listed with the real times under these bounds by stage."""
        free, wan = dict.fromkeys(bounds, self.microbatches), replace(self.wan, apart=True)
        return self.took(zero_bubble.order(self.plan, self.stages, wan, bounds, free))

    def most(self, more: int) -> dict[int, int]:
        """By stage, so many in flight beyond the textbook's."""
        return {k: min(self.microbatches, STAGES - k + more) for k in range(STAGES)}


def testbeds(rows: Path | None) -> list[float]:
    """By case, seconds of the recorded step over those of the one that is planned now. `rows`: a
    file of cases that were executed."""
    recorded, gains = Path(ghost_steps.__file__).parent / "plans", []
    there = rows.read_text().splitlines() if rows and rows.exists() else []
    known: dict[str, tuple[float, str]] = {
        name: (s, how) for name, s, how in map(json.loads, there)
    }
    for name in CASES:
        if name.startswith(("synthetic", "dtfm-0")):
            continue
        if name not in known:
            request = CASES[name]()
            made = make_plan(request)
            with TemporaryDirectory() as folder:
                now = ghost_steps.executed_s(request, made.plan, Path(folder))
            known[name] = now, made.plan.schedule
            if rows:
                with rows.open("a") as file:
                    file.write(json.dumps([name, *known[name]]) + "\n")
        (now, how), before = known[name], read(recorded, name)["executed_s"]
        gains.append(before / now)
        print(f"{name:24} {before:8.4f} s {now:8.4f} s {gains[-1]:6.3f}  {how}", flush=True)
    return gains


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rows", type=Path, metavar="FILE", help="cases that were executed")
    options = parser.parse_args()
    rows: list[tuple[float, float, float, float]] = []
    over_reference, over_bound = [], []
    print(
        "  M     a    t     gpipe      1f1b  deep, 2K      deep  beyond K-i     bound"
        "    zb, K-i     zb, 2K         zb     apart"
    )
    for count in MICROBATCHES:
        for latency, hold in GRID:
            row = Row(*chain(count), Wan(latency, hold))
            flush = row.took(gpipe.order(row.plan, row.stages))
            textbook = row.took(one_f_one_b.order(row.plan, row.stages))
            capped = row.deep({k: min(count, 2 * STAGES) for k in range(STAGES)})
            free = row.beyond(count)
            more = next(x for x in range(count + 1) if row.beyond(x) <= free)
            least = bound(row.wan, count)
            rows.append((flush, textbook, free, least))
            both = dict.fromkeys(range(STAGES), min(count, 2 * STAGES))
            apart = [row.apart(most) for most in (row.most(0), both, row.most(count))]
            ours = [min(a, b) for a, b in zip(apart, (textbook, capped, free), strict=True)]
            nothing_below = bound(replace(row.wan, apart=True), count)
            theirs = REFERENCE[count][GRID.index((latency, hold))]
            over_reference += [a / b for a, b in zip(ours, in_memory(theirs, count), strict=True)]
            over_bound.append(ours[-1] / nothing_below)
            print(
                f"{count:3} {latency:5} {hold:4} {flush:9.1f} {textbook:9.1f} {capped:9.1f} "
                f"{free:9.1f} {more:11} {least:9.1f} "
                f"{apart[0]:10.1f} {apart[1]:10.1f} {apart[2]:10.1f} {nothing_below:9.1f}"
            )
    figures = {
        "wan_depth_over_textbook": geometric_mean(free / t for _, t, free, _ in rows),
        "wan_depth_over_best": geometric_mean(free / min(g, t) for g, t, free, _ in rows),
        "wan_depth_over_bound": max(free / least for *_, free, least in rows),
        "wan_schedule_over_reference": max(over_reference),
        "wan_schedule_over_bound": max(over_bound),
    }
    gain = geometric_mean(testbeds(options.rows))
    report(
        "schedules on a WAN",
        [
            *(Figure(name, value, "ratio", "lower") for name, value in figures.items()),
            Figure("testbed_gain_geomean", gain, "ratio", "higher"),
        ],
        options.json,
    )


if __name__ == "__main__":
    main()
