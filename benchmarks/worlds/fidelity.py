"""Whether simulations tell the truth: shaped paths against what they were set to, and steps of the
virtual world against steps of shaped real processes.

    python benchmarks/worlds/fidelity.py [--json FILE] [--only shaping|transfer|snapshots|worlds]
                                  [--cases NAME …]

shaping    Throughput and round trips of paths of 8 Mbit/s to 1 Gbit/s and 1 to 150 ms, by bare
           sockets and by the real transport.
transfer   2 GB, or as much as goes in 30 s, by the real transport over 1 Gbit/s with a round trip
           of 200 ms: the share of the rate that it has after 10 s.
snapshots  Frames of the training beside snapshots on one link: how much longer they take, and
           which share of the rate the snapshots have.
worlds     Scenarios of 2 to 6 unequal peers: the step time of the virtual world, and of the real
           daemons with stretched compute, one thread each, over shaped paths, under the same plan.

Nothing else may run on the machine meanwhile. A run of real processes whose threads waited for a
core more than a tenth of the time, on cores that were busy for more than 70 % of it, or whose speed
was a quarter off, is NOT A MEASUREMENT: it is tried again, by the speed that it showed, and in the
end left out. A core's speed drifts by a tenth from minute to minute: the virtual world computes at
the speed that the real run had, so the error is that of everything else.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Sequence

from shoal.benchmarks.table import Figure, arguments, report
from shoal.benchmarks.worlds import shaped_ends, shaped_worlds

__all__ = ["figures"]

PARTS = ("shaping", "transfer", "snapshots", "worlds")
PATHS = ((8, 1), (8, 40), (25, 150), (100, 20), (300, 75), (1000, 1), (1000, 100))
"""(Mbit/s, ms one way)."""
SECONDS = 6.0
"""Of each stream; longer where the path is: four round trips at least."""
LATE = 0.02
"""Share of pieces that may be delivered 5 ms late, for want of a core, in a measurement."""
DELAY_S, DELAY = 0.005, 0.05
"""A delay may be off by this many seconds, or this share of it, whichever is more."""
BIG = (1000, 100, 2_000_000_000, 30.0)
"""Mbit/s, ms one way, bytes, seconds."""
WARM_UP_S = 10.0
SNAPSHOT_PATHS = ((8, 40), (20, 12), (50, 90), (100, 20), (300, 75), (1000, 1))
SNAPSHOT_SECONDS = 15.0


def shaping(again: int) -> Iterator[Figure]:
    """The worst errors over all paths and both ways to use them."""
    rates, delays, left_out = [], [], 0
    for mbit, ms in PATHS:
        for way in ("sockets", "grpc"):
            rate, latency_s = mbit * 1e6 / 8, ms / 1e3
            seconds = max(SECONDS, 8 * latency_s + 3.0)
            for _ in range(again + 1):
                if way == "sockets":
                    found, _ = shaped_ends.socket_path(rate, latency_s, seconds)
                else:
                    found, _ = shaped_ends.grpc_path(rate, latency_s, seconds, sys.maxsize)
                good = found.late <= LATE
                off = found.rate / rate - 1
                delay_s = (found.round_trip_s - 2 * latency_s) / 2
                print(
                    f"{mbit:5d} Mbit/s {ms:4d} ms {way:7s}  rate {off:+7.2%}  delay "
                    f"{delay_s * 1e3:+6.2f} ms  late {found.late:5.1%}"
                    + ("" if good else "  NOT A MEASUREMENT (the machine is busy)"),
                    flush=True,
                )
                if good:
                    rates.append(abs(off))
                    delays.append(delay_error(delay_s, latency_s))
                    break
            else:
                left_out += 1
    if rates:
        yield Figure("shaping_bandwidth_error", max(rates), "ratio", "lower")
        yield Figure("shaping_delay_error", max(delays), "ratio", "lower")
    yield Figure("shaping_left_out", left_out, "paths", "lower")


def delay_error(off_s: float, latency_s: float) -> float:
    """Relative to what a delay may be off by, in units of the bar: 0.05 is 5 ms or 5 %."""
    return DELAY * abs(off_s) / max(DELAY_S, DELAY * latency_s)


def transfer() -> Iterator[Figure]:
    mbit, ms, size, seconds = BIG
    rate = mbit * 1e6 / 8
    found, stream = shaped_ends.grpc_path(rate, ms / 1e3, seconds, size)
    reached = stream.rate(WARM_UP_S) / rate
    print(
        f"{stream.bytes[-1] / 1e9:.2f} GB over {mbit} Mbit/s, {2 * ms} ms round trip: "
        f"{stream.seconds[-1]:.1f} s, {reached:.1%} of the rate after {WARM_UP_S:.0f} s; "
        f"late {found.late:.1%}",
        flush=True,
    )
    yield Figure("wan_transfer_share", reached, "ratio", "higher")


def snapshots(again: int) -> Iterator[Figure]:
    """The worst over all paths; a measurement as in `shaping`."""
    found = []
    for mbit, ms in SNAPSHOT_PATHS:
        for _ in range(again + 1):
            one = shaped_ends.beside_snapshots(mbit * 1e6 / 8, ms / 1e3, SNAPSHOT_SECONDS)
            good = one.late <= LATE
            print(
                f"{mbit:5d} Mbit/s {ms:4d} ms  a frame takes {one.alone_s * 1e3:6.1f} ms, beside "
                f"snapshots {one.beside_s * 1e3:6.1f} ms; they have {one.share:.1%} of the rate; "
                f"late {one.late:.1%}"
                + ("" if good else "  NOT A MEASUREMENT (the machine is busy)"),
                flush=True,
            )
            if good:
                found.append(one)
                break
    if found:
        held_s = max(f.beside_s - f.alone_s for f in found)
        yield Figure("snapshot_holds_up_seconds", held_s, "s", "lower")
        yield Figure("snapshot_rate_share", min(f.share for f in found), "ratio", "higher")
    yield Figure("snapshot_left_out", len(SNAPSHOT_PATHS) - len(found), "paths", "lower")


def worlds(wanted: Sequence[str], again: int, tensors: bool, time_scale: float) -> Iterator[Figure]:
    found = list(shaped_worlds.outcomes(wanted, again, tensors, time_scale))
    errors = [o.error for o in found if not o.why_not]
    if errors:
        yield Figure("fidelity_median_error", statistics.median(errors), "ratio", "lower")
        yield Figure("fidelity_worst_error", max(errors), "ratio", "lower")
    yield Figure("fidelity_cases", len(errors), "cases", "higher")
    yield Figure("fidelity_left_out", len(found) - len(errors), "cases", "lower")


def figures(
    only: str = "",
    wanted: Sequence[str] = (),
    again: int = 3,
    tensors: bool = False,
    time_scale: float = 1.0,
) -> Iterator[Figure]:
    """`only`: one part; empty: all. `wanted`: parts of names of cases. `again`: further tries of
    what was no measurement. `tensors`: the virtual world computes, too. `time_scale`: of the real
    processes."""
    if only in ("", "shaping"):
        yield from shaping(again)
    if only in ("", "transfer"):
        yield from transfer()
    if only in ("", "snapshots"):
        yield from snapshots(again)
    if only in ("", "worlds"):
        yield from worlds(wanted, again, tensors, time_scale)


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--only", choices=PARTS, default="")
    parser.add_argument("--cases", nargs="+", default=[], help="parts of names of worlds' cases")
    parser.add_argument("--again", type=int, default=3, help="tries of what was no measurement")
    parser.add_argument("--tensors", action="store_true", help="real tensors in the virtual world")
    parser.add_argument("--time-scale", type=float, default=1.0, help="slows real processes")
    o = parser.parse_args()
    found = list(figures(o.only, o.cases, o.again, o.tensors, o.time_scale))
    report("fidelity", found, o.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
