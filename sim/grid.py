"""A scenario with several settings of its job, and with several seeds: a simulation for each, and
all of them compared.

Each has a folder of its own with its report. One that is there already, of the same job, files,
scenario and seed, and that did not fail, is not run again: a grid that was interrupted goes on.
"""

from __future__ import annotations

import itertools
import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..client.front import SimulationFront
from ..job.settings import SettingsError, json_object
from ..net.finite import finite
from .options import Setting, SimOptions
from .report import Summary
from .report.side_by_side import RunComparison, Told, reported
from .report.words import seconds, size
from .simulate import STDOUT, simulated

__all__ = ["Sweep"]

FOLDER = Path("runs")
"""Where the folder of a grid is made whose report nobody asked for elsewhere."""
MOST = 1000
"""Simulations of a grid."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One simulation of a grid."""

    label: str
    """What sets it apart, without its seed."""
    options: SimOptions
    folder: Path


class Sweep:
    """Every combination of values, with every seed. `changes`: KEY=VALUE or KEY=VALUE,VALUE… each.
    Raises SettingsError for what no grid can have, and for values that do not go together, each by
    its name; else as `Setting.of` does."""

    def __init__(self, options: SimOptions, changes: Sequence[str], seeds: int) -> None:
        choices = [_choices(change) for change in changes]
        count = seeds
        for one in choices:
            count *= len(one)
        self.several = count > 1
        self.only = replace(options, changes=tuple(one[0] for one in choices)).completed()
        """The options of the one simulation that there is otherwise."""
        self._root = options.report or FOLDER
        self._json = options.json
        self.cells: list[Cell] = []
        if not self.several:
            return
        if count > MOST:
            raise SettingsError("", f"a grid of {count} simulations: expected at most {MOST}")
        for flag in ("keep", "compare"):
            if getattr(options, flag):
                raise SettingsError("", f"--{flag} is of one simulation: expected none with a grid")
        varied = {one[0].partition("=")[0] for one in choices if len(one) > 1}
        labels = {
            chosen: ", ".join(c for c in chosen if c.partition("=")[0] in varied)
            for chosen in itertools.product(*choices)
        }
        first = self._first(labels)
        self._root = options.report or FOLDER / f"grid-{_as_name(first.name)}"
        for chosen, label in labels.items():
            label = label or first.name
            for seed in range(first.seed, first.seed + seeds):
                name = f"{_as_name(label)}-seed-{seed}"
                if any(cell.folder.name == name for cell in self.cells):
                    raise SettingsError("", f"two values have one name, {name}: expected others")
                folder = self._root / name
                own = replace(
                    self.only, changes=chosen, seed=seed, report=folder, json=None, quiet=True
                )
                self.cells.append(Cell(label=label, options=own, folder=folder))

    def _first(self, labels: Mapping[tuple[str, ...], str]) -> Setting:
        """Return the first setting, where all of them can be."""
        refused: dict[str, ValueError] = {}
        found: list[Setting] = []
        for chosen, label in labels.items():
            try:
                one = Setting.of(replace(self.only, changes=chosen))
                one.job.check_idle()
                found.append(one)
            except ValueError as error:
                refused[label] = error
        if not found:
            raise next(iter(refused.values()))
        if refused:
            why = "\n".join(f"  {label}: {error}" for label, error in refused.items())
            raise SettingsError(
                "",
                f"{len(refused)} of the grid's {len(labels)} settings cannot be, and none was run; "
                f"leave their values out, or change what they do not go with:\n{why}",
            )
        return found[0]

    def run(self, front: SimulationFront, say: Callable[[str], None]) -> int:
        """Run what is not there yet, and print the comparison; return the exit code. One that
        cannot run is said, and left out of it. Raises OSError, and as `simulated` does where fewer
        than two can."""
        quiet, told = self._json == STDOUT, list[Told]()
        refused: ValueError | None = None
        for i, cell in enumerate(self.cells, 1):
            setting = Setting.of(cell.options)
            try:
                kept = _is_kept(cell, setting.digest())
                what = "is there" if kept else _in_short(simulated(cell.options, front))
                told.append(reported(cell.folder / "summary.json", cell.label))
            except ValueError as error:
                refused, what = error, f"REFUSED: {error}"
            if not quiet:
                say(f"{i} of {len(self.cells)} · {cell.label}, seed {setting.seed}: {what}")
        if refused is not None and len(told) < 2:
            raise refused
        found = RunComparison(told)
        text = json.dumps(finite(found.table()), indent=1)
        (self._root / "compare.json").write_text(text + "\n", encoding="utf-8")
        found.draw(self._root / "compare.png")
        if self._json is not None and not quiet:
            self._json.write_text(text + "\n", encoding="utf-8")
        say(text if quiet else "\n".join(("", found.text(), "", *self._where())))
        return int(refused is not None or any(one.error for one in told))

    def _where(self) -> Iterator[str]:
        yield f"picture: {self._root / 'compare.png'}"
        yield f"again: shoal compare {shlex.quote(str(self._root))}/*/"


def _is_kept(cell: Cell, digest: str) -> bool:
    """Whether a report is there, of this very setting, that did not fail and was verified if that
    is asked for."""
    try:
        found = json_object((cell.folder / "summary.json").read_text(encoding="utf-8"))
    except (OSError, SettingsError):
        return False
    if cell.options.verify and not found.get("verified_against"):
        return False
    return found.get("setting") == digest and found.get("exit") == 0


def _in_short(s: Summary) -> str:
    if s.exit:
        return f"FAILED: {s.error}"
    loss = [] if s.loss_last is None else [f"loss {s.loss_last:.4f}"]
    held = [] if s.eval_loss is None else [f"held-out {s.eval_loss:.4f}"]
    return " · ".join([*loss, *held, size(s.bytes_on_wire), f"ran {seconds(s.seconds)}"])


def _choices(change: str) -> list[str]:
    """A change for each value that it names; commas within brackets and quotes are of a value."""
    key, equals, text = change.partition("=")
    if not equals:
        return [change]  # which the job refuses, and says what it expects
    values, depth, quoted = [""], 0, ""
    for c in text:
        if quoted:
            quoted = "" if c == quoted else quoted
        elif c in "\"'":
            quoted = c
        elif c in "[{":
            depth += 1
        elif c in "]}":
            depth -= 1
        elif c == "," and not depth:
            values.append("")
            continue
        values[-1] += c
    return list(dict.fromkeys(f"{key.strip()}={value.strip()}" for value in values))


def _as_name(text: str) -> str:
    """As the name of a folder on any machine."""
    return re.sub(r"[^\w.=+-]+", "_", text)[:80]
