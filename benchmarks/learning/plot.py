"""The picture of learning.py: held-out loss over steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.benchmarks.learning.results import Mean

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot"]

PANELS: Sequence[tuple[str, Mapping[str, str]]] = (
    (
        "across the cuts of the pipeline",
        {
            "dense": "black",
            "adatopk": "tab:blue",
            "uniform_topk": "tab:orange",
            "adatopk_100": "tab:purple",
            "adatopk_own": "tab:red",
        },
    ),
    (
        "gradients between two replicas",
        {
            "dense": "black",
            "dense_beta99_lr8": "tab:gray",
            "ef_topk1pct": "tab:blue",
            "late_ef_topk1pct": "tab:orange",
            "topk1pct": "tab:red",
        },
    ),
)
"""Title, and the rows of a panel with their colours."""


def plot(file: Path, found: Mapping[str, Mean]) -> None:
    """Means over the seeds as lines, from the least to the most of the seeds shaded."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(13, 5.2), sharey=True)
    axes[0].set_ylim(*_range(found))
    for panel, (title, rows) in zip(axes, PANELS, strict=True):
        ends = []
        for name, colour in rows.items():
            if name not in found:
                continue
            steps, mean, least, most = zip(*found[name].curve, strict=True)
            panel.plot(steps, mean, color=colour, linewidth=1.8)
            panel.fill_between(steps, least, most, color=colour, alpha=0.15, linewidth=0)
            ends.append((steps[-1], mean[-1], found[name].row.title, colour))
        _label(panel, ends)
        panel.set_title(title)
        panel.set_xlabel("steps")
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("held-out loss, nats per byte")
    figure.tight_layout()
    figure.savefig(file, dpi=130)
    pyplot.close(figure)


def _range(found: Mapping[str, Mean]) -> tuple[float, float]:
    """What is worth seeing: the beginning of all curves is the same and is cut off."""
    shown = [found[name] for _, rows in PANELS for name in rows if name in found]
    least = min(mean.curve[-1][2] for mean in shown)
    most = max(mean.curve[-1][3] for mean in shown)
    return least - 0.05, max(most + 0.1, least + 1.0)


def _label(panel: Axes, ends: Sequence[tuple[int, float, str, str]]) -> None:
    """Each line's name behind its end, moved apart where they would touch."""
    low, high = panel.get_ylim()
    apart, at = (high - low) * 0.045, -math.inf
    right = max((step for step, *_ in ends), default=0)
    for step, loss, title, colour in sorted(ends, key=lambda end: end[1]):
        at = max(loss, at + apart)
        panel.annotate(
            f"{title}  {loss:.2f}",
            (step, loss),
            (right * 1.02, at),
            color=colour,
            fontsize=9,
            va="center",
            annotation_clip=False,
        )
    panel.set_xlim(0, right)
