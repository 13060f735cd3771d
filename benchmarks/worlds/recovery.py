"""What losing peers costs a run: hours to a loss under churn, goodput, and the parts of a recovery.

    python benchmarks/worlds/recovery.py [checkfree rungs goodput healthy] [--json FILE]
    python benchmarks/worlds/recovery.py checkfree --steps 10000  the whole of it, in an hour

Worlds of ghosts: the broker's and the peers' own machines, the link protocol and the modelled
network run; tensors are hashes, and every loss is compared with the plain loop's. A failure is a
process that is gone without a word; it comes back, empty, some time later, into the pool.

checkfree   The set-up of CheckFree (arXiv 2506.15461, section 5.2, 500M): a GPT of 24 blocks of
            width 1,024 in six stages, 91.3 s a step, each of whose holders fails with 5, 10 and
            16 % an hour (a Poisson process for each peer that holds a stage). Here: six holders and
            POOL peers in the pool on links of 62.5 MB/s and 20 ms, one of them warm, four
            microbatches of one window; a snapshot each step; who failed is back after an hour. So
            large a pool that six are always there: with fewer the run is planned anew over those,
            and its steps are other ones than the paper's.
            Ghosts have no loss, so that hours are steps times seconds per step: the 10,000 steps
            that the paper needs without failures, because nothing is lost here, times what a step
            took on the average over the steps that were simulated. What is published for others is
            printed beside it.
rungs       The same with our `neighbour` and `neighbour+` (ends held twice, no snapshots): the
            steps that the paper needs with CheckFree and CheckFree+, times our seconds per step.
goodput     Six holders, seven peers in the pool, links of 12.5 MB/s and 2 ms; one of the holders
            fails every 15 s and is back after 45 s, for a virtual hour. A snapshot takes at least
            five steps of a holder's uplink. Goodput is the fault-free time of the committed steps
            over the time that they took. `plain` is what a synchronous run without any of this
            makes of the same failures: everybody starts again from the last checkpoint, for which
            the whole of it has to be written and read (its best interval is searched for). `cold`
            is without warm peers. `often` has failures as often as leave `plain` 27 %.
healthy     The step with snapshots over the step without.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

from shoal.benchmarks.table import Figure, report
from shoal.benchmarks.worlds.recovery_world import STAGES, Case, graph_of, played

PAPER_STEPS = 10_000
"""Steps to the paper's validation loss of 2.85 without failures, derived from its table 2."""
PAPER_STEP_S = 91.32
POOL = 7
PAPER_HOURS = {
    "checkpoints": (558.23, 621.67, 634.35),
    "redundant computation": (419.56, 419.56, 419.56),
    "CheckFree": (367.81, 405.87, 562.96),
    "CheckFree+": (355.13, 367.81, 460.6),
}
"""To that loss at 5, 10 and 16 % an hour (table 2 there)."""
PAPER_RUNG_STEPS = {"neighbour": (14_500, 16_000, 22_000), "neighbour+": (14_000, 14_500, 18_000)}
"""Derived from the same table: with CheckFree and CheckFree+."""
PLAIN_SHARE = 0.27
"""What torchft publishes of a run that is restarted from its checkpoints."""


# -------------------------------------------------------------------- CheckFree's table

_CHECKFREE = Case(
    layers=24,
    width=1024,
    length=512,
    microbatches=4,
    pool=POOL,
    bytes_per_s=62.5e6,
    latency_s=0.02,
    flops_per_s=1e12,
    recovery={"snapshot_every": 1},
    heartbeat_s=60.0,
)


def as_slow(case: Case, step_s: float) -> Case:
    """At the speed that makes a fault-free step last so long: a + b / speed."""

    def step(flops: float) -> float:
        found = played(replace(case, flops_per_s=flops, recovery={"ladder": []}), steps=4)
        return float(statistics.median(found.step_s))

    one, two = step(1e12), step(2e12)
    b = (one - two) * 2e12  # a + b/1e12 - a - b/2e12
    a = one - b / 1e12
    assert step_s > a, f"a step takes {a:.1f} s without any computing"
    return replace(case, flops_per_s=b / (step_s - a))


def checkfree(steps: int) -> list[Figure]:
    for name, published in PAPER_HOURS.items():
        print(f"{name}: {' / '.join(map(str, published))} h at 5 / 10 / 16 % an hour (the paper)")
    case = as_slow(_CHECKFREE, PAPER_STEP_S)
    print(
        "CheckFree, 500M: hours to the loss (the paper's: none 253.7, CheckFree+ 355 / 368 / 461)"
    )
    figures = []
    for percent in (0, 5, 10, 16):
        began = time.perf_counter()
        mean_s = -3600.0 / math.log(1 - percent / 100) if percent else math.inf
        found = played(replace(case, mean_s=mean_s), steps)
        hours = found.mean_step_s * PAPER_STEPS / 3600
        per_loss = (found.seconds - PAPER_STEP_S * found.steps) / max(1, found.losses)
        print(
            f"  {percent:2} % an hour: {hours:.1f} h ({found.steps} steps simulated, "
            f"{found.losses} losses, {per_loss:.0f} s each, {found.cuts} plans with other stages; "
            f"{time.perf_counter() - began:.0f} s)",
            flush=True,
        )
        figures.append(Figure(f"checkfree_hours_{percent}pct", hours, "h", "lower"))
    return figures


def rungs(steps: int) -> list[Figure]:
    """CheckFree and CheckFree+ by our own machines: a loss costs them a term and no step."""
    figures = []
    for rung, wanted in PAPER_RUNG_STEPS.items():
        recovery: dict[str, object] = {"ladder": ["neighbour", "checkpoint"]}
        base = replace(_CHECKFREE, rung=rung, recovery=recovery)
        case = as_slow(base, PAPER_STEP_S)
        for percent, needed in zip((5, 10, 16), wanted, strict=True):
            mean_s = -3600.0 / math.log(1 - percent / 100)
            found = played(replace(case, mean_s=mean_s), steps)
            hours = found.mean_step_s * needed / 3600
            print(
                f"  {rung}, {percent} % an hour: {found.mean_step_s:.1f} s a step ({found.steps} "
                f"steps, {found.losses} losses), {hours:.0f} h for the paper's {needed} steps",
                flush=True,
            )
            name = rung.replace("+", "_plus")
            figures.append(Figure(f"{name}_hours_{percent}pct", hours, "h", "lower"))
    return figures


# -------------------------------------------------------------------- goodput

_FAST = Case(
    layers=6,
    width=224,
    length=64,
    microbatches=2,
    pool=7,
    bytes_per_s=12.5e6,
    latency_s=0.002,
    flops_per_s=5e12,
    every_s=15.0,
    back_s=45.0,
)


def goodput(hour_s: float) -> list[Figure]:

    calm = played(replace(_FAST, every_s=math.inf), steps=200)
    step_s = statistics.median(calm.step_s)
    state = snapshot_bytes(_FAST)
    upload_s = state / _FAST.bytes_per_s
    print(
        f"goodput: a step takes {step_s:.3f} s, a snapshot of {state / 1e6:.1f} MB "
        f"{upload_s / step_s:.1f} steps of an uplink"
    )
    figures = []
    often_s = interval_for(PLAIN_SHARE, step_s, STAGES * state)
    cold = replace(_FAST, recovery={"warm_spares": 0})
    cases = {"": _FAST, "_cold": cold, "_often": replace(_FAST, every_s=often_s)}
    for name, case in cases.items():
        found = played(case, limit_s=hour_s)
        value = found.steps * step_s / found.seconds
        parts = [statistics.median(p) for p in zip(*found.recoveries, strict=True)]
        print(
            f"  {name.strip('_') or 'warm'}: {value:.1%} over {found.seconds / 3600:.2f} h, "
            f"{found.losses} losses, one every {case.every_s:.1f} s; decided after "
            f"{parts[0]:.2f} s, built after {parts[1]:.2f} s, "
            f"a new step after {parts[2]:.2f} s (medians)"
        )
        figures.append(Figure(f"goodput{name}", value, "share", "higher"))
        if not name:
            figures.append(Figure("recovery_seconds_median", parts[2], "s", "lower"))
            figures.append(Figure("recovery_decided_seconds", parts[0], "s", "lower"))
            figures.append(Figure("recovery_built_seconds", parts[1], "s", "lower"))
    value = plain(step_s, STAGES * state, _FAST.every_s)
    figures.append(Figure("goodput_plain", value, "share", "higher"))
    return figures


def interval_for(share: float, step_s: float, whole_bytes: float) -> float:
    """Seconds between failures, to 0.1 the fewest, that leave `plain` so much."""
    found = (k / 10 for k in range(1, 10_000))
    return next(every_s for every_s in found if plain(step_s, whole_bytes, every_s) >= share)


def snapshot_bytes(case: Case) -> float:
    """Of the largest stage: parameters and two slots each."""
    graph = graph_of(case.layers, case.width, case.length)
    total = sum(graph.spec[f"param:{p.name}"].size_bytes for p in graph.parameters)
    return float(3 * total / STAGES)


def plain(step_s: float, whole_bytes: float, every_s: float) -> float:
    """Goodput of checkpoints alone at the same failures, at the best interval of c steps: each
    stops everybody while the whole state leaves by one uplink; after a failure it is read back by
    all, and what was done since the last one is done again."""
    write_s = float(whole_bytes / _FAST.bytes_per_s)

    def at(c: int) -> float:
        # Of every_s between two failures: reading, then whole intervals; what is left is lost.
        left = max(0.0, every_s - write_s)
        intervals = math.floor(left / (c * step_s + write_s))
        return intervals * c * step_s / every_s

    return max(at(c) for c in range(1, 200))


# -------------------------------------------------------------------- while nothing happens


def healthy() -> list[Figure]:

    quiet = replace(_FAST, every_s=math.inf)
    without = played(replace(quiet, recovery={"ladder": ["checkpoint"]}), steps=300)
    having = played(quiet, steps=300)
    a, b = without.mean_step_s, having.mean_step_s
    print(f"healthy: {a:.4f} s a step without snapshots, {b:.4f} s with them")
    return [Figure("healthy_overhead", b / a - 1, "share", "lower")]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    groups = ("checkfree", "rungs", "goodput", "healthy")
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=", ".join(groups))
    parser.add_argument("--steps", type=int, default=2000, help="simulated of CheckFree's (2000)")
    parser.add_argument("--hours", type=float, default=1.0, help="virtual, of goodput (1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures as JSON")
    asked = parser.parse_args()
    figures: list[Figure] = []
    for group in asked.groups or groups:
        if group == "checkfree":
            figures += checkfree(asked.steps)
        elif group == "rungs":
            figures += rungs(asked.steps)
        elif group == "goodput":
            figures += goodput(3600 * asked.hours)
        elif group == "healthy":
            figures += healthy()
        else:
            parser.error(f"{group!r}: expected some of {', '.join(groups)}")
    report("recovery", figures, asked.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
