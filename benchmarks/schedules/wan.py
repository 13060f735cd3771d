"""What schedules take where a hop costs as much as a stage computes.

    python benchmarks/schedules/wan.py [--json FILE]

Eight equal stages in a chain, a peer each: a forward takes 1, a backward 2, a message holds its
link for t and arrives a later; 16 and 64 microbatches. Every list is executed by the same event
calculation with these times, after check_listed has proved it. Columns: GPipe; 1F1B with the
textbook's K - i in flight; 1F1B listed with the real times, of at most 2K in flight and without a
bound, and the least in flight beyond K - i with which the latter's time is reached. `bound` is the
largest, over stages and directions of links, of what nothing can go below.

Behind it stand DT-FM's cases 1 to 4 and the testbeds: what `auto` plans, executed by ghosts,
against the steps of the plans without depth, which tests/sim/recorded/plans has.
`testbed_gain_geomean` is the geometric mean of the gains.

`wan_depth_over_textbook`: 1F1B without a bound over the textbook's, the geometric mean of the
rows; `wan_depth_over_best`: over the better of GPipe and the textbook; `wan_depth_over_bound`: the
worst row over its bound.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean
from tempfile import TemporaryDirectory

from shoal.benchmarks.table import Figure, arguments, report
from shoal.dag.plan.action import Action, Kind
from shoal.dag.plan.cut import Stage, bare_stages
from shoal.dag.plan.outline import Crossed, Outline, StageOutline
from shoal.dag.plan.plan import PeerId, Plan, StageSlot, Visit
from shoal.dag.schedule.orders import gpipe, one_f_one_b
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


@dataclass(frozen=True)
class Wan:
    """Equal stages and equal links."""

    latency: float
    hold: float

    def visit(self, peer: PeerId, action: Action) -> float:
        return 2.0 if action.kind is Kind.BACKWARD else 1.0

    def message(self, source: Visited, target: Visited) -> tuple[float, float]:
        return self.hold, self.latency


def chain(microbatches: int) -> tuple[Plan, tuple[Stage, ...]]:
    """The plan of one microbatch after the other, not listed yet."""
    peers = [PeerId(f"p{k}") for k in range(STAGES)]
    outline = Outline(
        tuple(
            StageOutline(
                k,
                (Crossed(f"v{k}", (k + 1,), (k + 1,)),) if k + 1 < STAGES else (),
                trainable=True,
                makes_loss=k + 1 == STAGES,
                has_backward=True,
            )
            for k in range(STAGES)
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
    way back of the last gradient, and so does a link its messages."""
    hop = wan.latency + wan.hold
    found = [microbatches * 3 + 2 * k * hop + 3 * k for k in range(STAGES)]
    # A link's first message leaves behind k + 1 forwards, and behind its last one comes the rest of
    # the way there and back.
    for k in range(STAGES - 1):
        there = (k + 1) + k * hop + microbatches * wan.hold + wan.latency
        rest = (STAGES - 1 - k) * 3 + 2 * (STAGES - 2 - k) * hop + hop + 2 * (k + 1) + k * hop
        found.append(there + rest)
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
        return executed_s(listed, self.stages, self.wan)

    def deep(self, bounds: Mapping[int, int]) -> float:
        """Seconds of 1F1B listed with the real times under these bounds by stage."""
        return self.took(one_f_one_b.order(self.plan, self.stages, self.wan, bounds))

    def beyond(self, more: int) -> float:
        """Likewise, with so many in flight beyond the textbook's."""
        return self.deep({k: min(self.microbatches, STAGES - k + more) for k in range(STAGES)})


def testbeds() -> list[float]:
    """By case, seconds of the recorded step over those of the one that is planned now."""
    recorded, gains = Path(ghost_steps.__file__).parent / "plans", []
    for name in CASES:
        if name.startswith(("synthetic", "dtfm-0")):
            continue
        request = CASES[name]()
        made = make_plan(request)
        with TemporaryDirectory() as folder:
            now = ghost_steps.executed_s(request, made.plan, Path(folder))
        before = read(recorded, name)["executed_s"]
        gains.append(before / now)
        print(f"{name:24} {before:8.4f} s {now:8.4f} s {gains[-1]:6.3f}  {made.plan.schedule}")
    return gains


def main() -> None:
    options = arguments(__doc__).parse_args()
    rows: list[tuple[float, float, float, float]] = []
    print("  M     a    t     gpipe      1f1b  deep, 2K      deep  beyond K-i     bound")
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
            print(
                f"{count:3} {latency:5} {hold:4} {flush:9.1f} {textbook:9.1f} {capped:9.1f} "
                f"{free:9.1f} {more:11} {least:9.1f}"
            )
    figures = {
        "wan_depth_over_textbook": geometric_mean(free / t for _, t, free, _ in rows),
        "wan_depth_over_best": geometric_mean(free / min(g, t) for g, t, free, _ in rows),
        "wan_depth_over_bound": max(free / least for *_, free, least in rows),
    }
    gain = geometric_mean(testbeds())
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
