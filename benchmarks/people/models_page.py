"""Text of docs/models.md: the table of `zoo.py`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from shoal.benchmarks.people.compared import STAGES, STEPS, Row

__all__ = ["page"]

_HEAD = """# Models

Language models of transformers {version} (`AutoModelForCausalLM`); this page is written by
`python benchmarks/people/zoo.py --docs`. Each family is made small (hidden 64, two to four layers,
a vocabulary of 128), captured from its folder as a job captures it, cut in {stages} stages, and
trained for {steps} steps of SGD by the code that peers run. It is *equal* where losses and weights
are those of a plain loop over the same model, to 1e-4. What is refused is refused before training,
with the line and the reason. A family that transformers itself does not build or step so is not
here. What a capture takes at all: `docs/module.md`.

{count} families: {equal} captured and equal, {refused} not captured, {wrong} with other numbers.
{untried}
| family | captured | equal | why not |
|---|---|---|---|
"""


_OTHERS = """
## Other tasks

Some families of each other task (`args.task`, `docs/pretrained.md`), compared in the same way
(`python benchmarks/people/zoo.py --others --docs`).

| task | captured and equal | not captured | with other numbers |
|---|---|---|---|
"""


def page(rows: Sequence[Row], others: Sequence[Row], untried: Sequence[str], version: str) -> str:
    """Return the text of the page. others: rows of other tasks, which are called TASK/FAMILY.
    untried: families of the list that have no row yet."""
    shown = sorted((r for r in rows if r.status != "not built"), key=lambda r: r.family)
    count = {kind: sum(r.status == kind for r in shown) for kind in ("equal", "wrong")}
    head = _HEAD.format(
        version=version,
        stages=STAGES,
        steps=STEPS,
        count=len(shown),
        refused=len(shown) - sum(count.values()),
        untried=f"Not tried yet: {', '.join(untried)}.\n" if untried else "",
        **count,
    )
    return head + "".join(_line(row) for row in shown) + _of_others(others)


def _of_others(rows: Sequence[Row]) -> str:
    """The table of other tasks: which families came to what."""
    by: dict[str, dict[str, list[str]]] = {}
    for row in rows:
        task, _, family = row.family.partition("/")
        kind = row.status if row.status in ("equal", "wrong", "not built") else "refused"
        by.setdefault(task, {}).setdefault(kind, []).append(family)
    lines = [
        f"| {task} | "
        + " | ".join(", ".join(of.get(k, ())) for k in ("equal", "refused", "wrong"))
        + " |"
        for task, of in by.items()
    ]
    return _OTHERS + "\n".join(lines) + "\n" if lines else ""


def _line(row: Row) -> str:
    captured = "yes" if row.status in ("equal", "wrong") else "no"
    equal = {"equal": "yes", "wrong": "no"}.get(row.status, "")
    return f"| {row.family} | {captured} | {equal} | {_short(row.why)} |\n"


def _short(why: str) -> str:
    """The reason without folders of this machine and without advice, in a cell of a table."""
    why = re.sub(r"/\S*/(\w+\.py:\d+)", r"\1", why)
    why = re.sub(r"^\w+: ", "", why).partition(": this model family")[0]
    why = re.sub(r"^(.{240}).+$", r"\1 …", why)
    return re.sub(r"([|<*_])", r"\\\1", why)
