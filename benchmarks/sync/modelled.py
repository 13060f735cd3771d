"""What the runs of learning.py would take on networks: time to a loss, modelled, and a picture.

As if the model had 124M parameters and a step of all replicas took a second of computing: bytes
grow with the parameters, sent ones and received ones cross the line at the same time, and each
round adds the times of its messages one after another, of which a ring has 2·(P - 1), an exchange
with who adds up 2, a tree 2 for each of its floors, and a pair, or one where all send to all, 1.
Nothing is hidden behind computing.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from shoal.benchmarks.sync.rows import Row
from shoal.dag.ir.graph import TensorSpec

__all__ = ["NETWORKS", "curve", "plot", "seconds_to"]

PARAMETERS, STEP_S = 124e6, 1.0


class Line(NamedTuple):
    """What each peer has: bytes/s one way, and seconds to another one."""

    bytes_per_s: float
    latency_s: float


NETWORKS: Mapping[str, Line] = {
    "datacenter": Line(12.5e9, 1e-4),
    "campus": Line(125e6, 1e-3),
    "continents": Line(25e6, 0.1),
    "homes": Line(2.5e6, 0.03),
}
"""100 Gbit/s; 1 Gbit/s; 200 Mbit/s between two continents; 20 Mbit/s up."""


def curve(runs: Sequence[Mapping[str, Any]], steps: int) -> list[tuple[int, float]]:
    """(step, held-out loss), the mean of a row's runs with one number of replicas, which all have
    the same steps."""
    found = []
    for points in zip(*(run["curve"] for run in runs), strict=True):
        found.append((points[0][0], statistics.fmean(loss for _, loss in points)))
    return [*found, (steps, statistics.fmean(run["loss"] for run in runs))]


def seconds_to(
    loss: float,
    points: Iterable[tuple[int, float]],
    row: Row,
    replicas: int,
    specs: Sequence[TensorSpec],
    line: Line,
) -> float:
    """Until a loss is first measured, or inf."""
    step = next((step for step, found in points if found <= loss), None)
    if step is None:
        return math.inf
    sent = row.bytes(specs, replicas, step) / 2 * PARAMETERS / sum(spec.elements for spec in specs)
    ring = 2 * (replicas - 1)
    hops = {"dense": ring, "noloco": 1, "saps": 1, "lags": 1, "demo": 1}.get(row.method, 2)
    hops = {"powersgd": 2 * ring, "acp-sgd": ring}.get(row.method, hops)
    if row.method == "gtopk":
        hops = 2 * math.floor(math.log2(replicas))
    rounds = math.ceil(step / row.round_steps)
    return step * STEP_S + sent / line.bytes_per_s + rounds * hops * line.latency_s


def plot(
    file: Path,
    found: Mapping[tuple[str, int], Sequence[tuple[int, float]]],
    over_dense: Mapping[tuple[str, int], float],
    rows: Sequence[Row],
    specs: Sequence[TensorSpec],
) -> None:
    """Loss at the end over how many times fewer bytes, and on the way over bytes, with the most
    replicas; `found`: curves by row and replicas, `over_dense`: their ends over dense's."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (ends, ways) = pyplot.subplots(1, 2, figsize=(13, 5.4))
    named = {row.name: row for row in rows}
    counts = sorted({count for name, count in found if named[name].method != "dense"})
    dense = next(points for (name, _), points in found.items() if named[name].method == "dense")
    last_step, _ = dense[-1]
    whole = sum(spec.size_bytes for spec in specs)
    colours = pyplot.get_cmap("tab10")
    for n, row in enumerate(r for r in rows if r.method != "dense"):
        there = [(c, found[row.name, c]) for c in counts if (row.name, c) in found]
        for count, points in there:
            at = row.ratio(specs, count, last_step), over_dense[row.name, count]
            mark = "o" if count == counts[-1] else "^"
            ends.scatter(*at, color=colours(n), marker=mark, s=36)
            if count == counts[-1]:
                ends.annotate(
                    row.name, at, (6, 4), textcoords="offset points", color=colours(n), fontsize=8
                )
                sent = [row.bytes(specs, count, step) / whole for step, _ in points]
                ways.plot(sent, [x for _, x in points], color=colours(n), label=row.name)
    full = [named["dense"].bytes(specs, counts[-1], s) / whole for s, _ in dense]
    ways.plot(full, [x for _, x in dense], color="black", label="dense")
    for bar, text in ((1.01, "1 %"), (1.03, "3 %")):
        ends.axhline(bar, color="gray", linewidth=0.8, linestyle=":")
        ends.annotate(text, (ends.get_xlim()[0], bar), fontsize=8, color="gray", va="bottom")
    ends.set_xlabel(f"times fewer bytes than dense  (● {counts[-1]} replicas, ▲ {counts[0]})")
    ends.set_ylabel("held-out loss over dense")
    ways.set_xlabel("sent and received by a peer, in fp32 models")
    ways.set_ylabel("held-out loss, nats per byte")
    ways.legend(fontsize=8, frameon=False)
    for panel in (ends, ways):
        panel.set_xscale("log")
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(file, dpi=130)
    pyplot.close(figure)
