"""The columns that Shoal itself writes beside a model's own numbers: in metrics.jsonl, in
rounds.jsonl and in what `--json` prints. A number of the model with such a name would take its
place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

__all__ = ["COLUMNS", "EVALUATED", "ColumnError", "check_names", "own_numbers"]

COLUMNS = frozenset(
    {
        *("step", "loss", "lr", "grad_norm", "weight", "tokens_per_s", "seconds", "compute_s"),
        *("sent_bytes", "again_bytes", "eval_loss", "replica", "round", "event", "kind", "term"),
        *("at_s", "text", "replicas", "loss_scale", "skipped"),
    }
)
EVALUATED = "eval_"
"""What the names of held-out numbers begin with."""


class ColumnError(ValueError):
    """A number of the model whose name is taken."""


def check_names(names: Iterable[str]) -> None:
    """Raise ColumnError for names of a model's numbers that are columns, or would be two."""
    names = [*names]
    for name in names:
        for column in (name, EVALUATED + name):
            if column in COLUMNS or (column != name and column in names):
                raise ColumnError(
                    f'the model returns a number called "{name}", and metrics.jsonl has a column '
                    f'"{column}" already: return it by another name. Taken are '
                    f"{', '.join(sorted(COLUMNS))}"
                )


def own_numbers(numbers: Iterable[tuple[str, float]], begins: str = "") -> Mapping[str, float]:
    """A model's numbers as columns, without any that would take the place of one of COLUMNS: names
    come from peers, too."""
    found = {begins + name: value for name, value in numbers}
    return {name: value for name, value in found.items() if name not in COLUMNS}
