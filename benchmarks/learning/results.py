"""What the runs of learning.py say: means over the seeds, the table of codecs, the picture.

The table of codecs (planner/codecs/codec_table.json) tells `auto` what it may choose from,
by role and link class: every codec with which a run kept its mean held-out loss within TOLERANCE of
the uncompressed one, through the codecs and of the weights alone. A run counts for each (role,
class) in which it compressed; "fast" means that it did so on the fast links, whatever the slow ones
had. Gradients of parameters go between replicas, whose link has no class here; they count for both
classes of role sync, with which they travel. The least error comes first.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.benchmarks.learning.rows import BASELINE, PLAIN, ROWS, Row
from shoal.benchmarks.learning.runs import Run
from shoal.benchmarks.learning.wire import SUPPORT
from shoal.benchmarks.table import Figure

__all__ = [
    "TABLE",
    "Mean",
    "codec_table",
    "describe",
    "figures",
    "load",
    "means",
    "save",
    "table_text",
]

TABLE = Path(__file__).parents[2] / "planner" / "codecs" / "codec_table.json"
TOLERANCE = 0.02
TARGET = 1.05
"""Times the final loss of the uncompressed runs: the loss to which time is reckoned."""
Table = dict[str, dict[str, list[dict[str, Any]]]]


class Mean:
    """A row over its seeds."""

    def __init__(self, row: Row, runs: Sequence[Run]) -> None:
        self.row, self.runs = row, runs
        self.loss = statistics.fmean(run["loss"] for run in runs)
        self.weights_loss = statistics.fmean(run["weights_loss"] for run in runs)
        self.spread = max(r["loss"] for r in runs) - min(r["loss"] for r in runs)
        """Between the seeds' best and worst."""

    def over(self, other: Mean, *, weights: bool = False) -> float:
        """Mean loss, or that of the weights alone, over the other row's mean loss, with the seeds
        that both have; NaN without any."""
        mine = {run["seed"]: run["weights_loss" if weights else "loss"] for run in self.runs}
        others = {run["seed"]: run["loss"] for run in other.runs}
        seeds = mine.keys() & others.keys()
        return sum(mine[s] for s in seeds) / sum(others[s] for s in seeds) if seeds else math.nan

    @property
    def curve(self) -> list[tuple[int, float, float, float]]:
        """(step, mean, least, most) over the seeds."""
        found = []
        for points in zip(*(run["curve"] for run in self.runs), strict=True):
            losses = [loss for _, loss, _ in points]
            found.append((points[0][0], statistics.fmean(losses), min(losses), max(losses)))
        return found

    def steps_to(self, loss: float) -> float:
        """The step from which on the mean curve stays at or below a loss, between two evaluations
        as on a straight line; inf when the curve ends above."""
        at, (last_step, last, _, _) = math.inf, (0, math.inf, 0.0, 0.0)
        for step, mean, least, most in self.curve:
            if mean > loss:
                at = math.inf
            elif at == math.inf:
                share = (last - loss) / (last - mean) if math.isfinite(last) else 1.0
                at = last_step + share * (step - last_step)
            last_step, last, _, _ = step, mean, least, most
        return at

    @property
    def codecs(self) -> Mapping[str, str]:
        """By "role class", only what compressed."""
        texts: Mapping[str, str] = self.runs[0]["codecs"]
        return {label: text for label, text in texts.items() if text != "raw/1"}

    def error(self, label: str) -> float:
        return statistics.fmean(run["errors"][label] for run in self.runs)

    def sent_share(self, label: str) -> float:
        """Bytes sent over bytes without compression."""
        sent, dense = (sum(int(r[what][label]) for r in self.runs) for what in ("sent", "dense"))
        return sent / dense


def means(runs: Sequence[Run]) -> dict[str, Mean]:
    """By row, in the order of the rows; only rows that have run."""
    found = {}
    for row in ROWS:
        own = [run for run in runs if run["row"] == row.name]
        if own:
            found[row.name] = Mean(row, own)
    return found


def codec_table(found: Mapping[str, Mean]) -> Table:
    """See the module."""
    best: dict[tuple[str, str], dict[str, float]] = {
        (role, link): {}
        for role in ("activation", "activation_grad", "sync")
        for link in ("fast", "slow")
    }
    for codecs in best.values():
        codecs["lossless"] = 0.0  # nothing to measure: bit for bit the same
    for mean in found.values():
        dense = found[BASELINE]
        worse = max(mean.over(dense), mean.over(dense, weights=True))
        if not worse <= 1 + TOLERANCE:
            continue
        if mean.row.ahead:
            continue  # what is sent there is no gradient
        if any(codec.startswith(SUPPORT) for codec in mean.codecs.values()):
            continue  # what the activation may be hangs on its gradient here: no choice of one role
        for label, codec in mean.codecs.items():
            role, _, link = label.partition(" ")
            cells = [(role, link)] if link else [("sync", "fast"), ("sync", "slow")]
            for cell in cells:
                error = float(f"{mean.error(label):.2g}")
                best[cell][codec] = min(error, best[cell].get(codec, error))
    table: Table = {}
    for (role, link), codecs in best.items():
        ladder = sorted(codecs.items(), key=lambda item: (item[1], item[0]))
        table.setdefault(role, {})[link] = [{"codec": c, "error": e} for c, e in ladder]
    return table


def table_text(table: Table) -> str:
    """A line for each codec, so that a change reads well."""
    roles = []
    for role, links in table.items():
        ladders = []
        for link, ladder in links.items():
            rungs = ",\n".join(f"      {json.dumps(rung)}" for rung in ladder)
            ladders.append(f'    "{link}": [\n{rungs}\n    ]' if ladder else f'    "{link}": []')
        roles.append(f'  "{role}": {{\n' + ",\n".join(ladders) + "\n  }")
    return "{\n" + ",\n".join(roles) + "\n}\n"


def save(file: Path, about: Mapping[str, Any], runs: Sequence[Run]) -> None:
    """A line for each run."""
    lines = ",\n".join("  " + json.dumps(run) for run in runs)
    file.write_text(f'{{\n"about": {json.dumps(about)},\n"runs": [\n{lines}\n]\n}}\n')


def load(file: Path) -> tuple[Mapping[str, Any], list[Run]]:
    found = json.loads(file.read_text())
    return found["about"], found["runs"]


def figures(found: Mapping[str, Mean]) -> list[Figure]:
    """The ratios that are promised, then every row's loss and its ratio to dense."""

    def ratio(name: str, above: str, below: str) -> list[Figure]:
        if above not in found or below not in found:
            return []
        return [Figure(name, found[above].over(found[below]), "ratio", "lower")]

    # It has an optimizer's settings of its own, which the uncompressed runs may have, too.
    plain = [name for name in PLAIN if name in found]
    best = min(plain, key=lambda name: found[name].loss, default=BASELINE)
    promised = [
        *ratio("adatopk_loss_over_dense", "adatopk", BASELINE),
        *ratio("adatopk_loss_over_uniform_topk", "adatopk", "uniform_topk"),
        *ratio("ef_topk1pct_loss_over_dense", "ef_topk1pct", best),
        *ratio("ef_topk1pct_rate4_loss_over_same", "ahead_topk1pct_beta99", "dense_beta99"),
    ]
    promised += _to_a_loss(found)
    there = {figure.name for figure in promised}
    rest = []
    for name, mean in found.items():
        rest.append(Figure(f"loss_{name}", mean.loss, "nats/byte", "lower"))
        if mean.weights_loss != mean.loss:
            rest.append(Figure(f"weights_loss_{name}", mean.weights_loss, "nats/byte", "lower"))
        if name != BASELINE and f"{name}_loss_over_dense" not in there:
            rest += ratio(f"{name}_loss_over_dense", name, BASELINE)
    return promised + rest


def _to_a_loss(found: Mapping[str, Mean]) -> list[Figure]:
    """Steps until TARGET over those of the uncompressed runs, and how much sooner that is on the
    links of these runs, where links rule the step; nothing for runs too short to have a curve."""
    if BASELINE not in found or not found[BASELINE].curve:
        return []
    dense = found[BASELINE]
    loss = TARGET * dense.curve[-1][1]
    figures = [Figure("target_loss", loss, "nats/byte", "lower")]
    for name in ("adatopk", "uniform_topk"):
        if name in found:
            more = found[name].steps_to(loss) / dense.steps_to(loss)
            shorter = dense.row.step_seconds / found[name].row.step_seconds
            figures += [
                Figure(f"{name}_steps_to_loss_over_dense", more, "ratio", "lower"),
                Figure(f"{name}_step_speedup", shorter, "ratio", "higher"),
                Figure(f"{name}_time_to_loss_speedup", shorter / more, "ratio", "higher"),
            ]
    return figures


def describe(found: Mapping[str, Mean]) -> str:
    """The rows as a table: loss through the codecs, half the range of the seeds, over dense, the
    same of the weights alone; of the tensors that lose most, share of the bytes and error."""
    dense = found.get(BASELINE)
    lines = [("", "seeds", "loss", "±", "over dense", "weights alone", "bytes", "error")]
    for mean in found.values():
        hardest = max(mean.codecs, key=mean.error, default="")
        lines.append(
            (
                mean.row.title,
                str(len(mean.runs)),
                f"{mean.loss:.4f}",
                f"{mean.spread / 2:.4f}",
                f"{mean.over(dense) - 1:+.2%}" if dense else "",
                f"{mean.over(dense, weights=True) - 1:+.2%}" if dense else "",
                f"{mean.sent_share(hardest):.3f}" if hardest else "1",
                f"{mean.error(hardest):.2g}" if hardest else "0",
            )
        )
    widths = [max(len(line[i]) for line in lines) for i in range(8)]
    return "\n".join(
        f"{line[0]:<{widths[0]}}  "
        + "  ".join(f"{cell:>{w}}" for cell, w in zip(line[1:], widths[1:], strict=True))
        for line in lines
    )
