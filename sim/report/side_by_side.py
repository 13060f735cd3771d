"""Runs side by side: one table, one picture, and what their jobs have in common and what not.

A row of the table is a run, or several that differ by their seed alone: then it has their means,
and behind each half the distance between the least and the most.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...job import LIVE, Job, SettingsError
from ...job.settings import json_object
from ...job.settings import plain as plain_settings
from ...job.words import columns
from ...net.surroundings import naming
from .pictures.charts import Series, curves, smooth
from .pictures.palette import SERIES
from .pictures.picture import Label, Picture, Rect, width_of
from .words import cut, figure, plain, seconds, size

__all__ = ["RunComparison", "Told", "reported"]

APART = ("log", "name", "output", "seed", "version")
"""Keys of a job that say nothing of how it learns, beside those of its seed."""
MOST_LINES = 8
"""Rows of the table that have a colour of their own in the picture."""
SMOOTHED = 20
"""Losses of training from which on the mean around each is what counts."""
MOST_NAME = 44
"""Characters of a row's name."""
_AXES: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("step", "steps", figure),
    ("samples", "samples", figure),
    ("sent_bytes", "sent between peers", size),
    ("seconds", "time", seconds),
)


@dataclass(frozen=True, kw_only=True)
class Told:
    """What a run, or the report of a simulation, tells of itself."""

    label: str
    """Those with the same one are one row."""
    seed: int
    job: Mapping[str, Any]
    """Its settings, table by table."""
    course: Sequence[Mapping[str, Any]]
    """Points as `Course` has them."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """What it was run in and is no setting of its job, such as the world of a simulation."""
    error: str = ""
    """Why it failed; empty: it did not."""

    @property
    def points(self) -> list[dict[str, Any]]:
        """The points, each with its samples."""
        batch = self.job.get("train", {}).get("batch", 0)
        return [
            {**p, "samples": p["step"] * batch}
            if p["samples"] is None and p["step"] is not None
            else dict(p)
            for p in self.course
        ]


def reported(file: Path, label: str) -> Told:
    """Read what a simulation wrote as summary.json. Raises SettingsError for one that does not say
    enough, OSError."""
    found = json_object(file.read_text(encoding="utf-8"))
    if not found.get("job") or "course" not in found:
        again = f"{found.get('again') or 'shoal sim'} --report {file.parent}"
        raise SettingsError(
            "", f"{file} does not say which job it is of, as of an older Shoal; again: {again}"
        )
    more = {"scenario": found["name"], "world": found["world"], "peers": found["peers"]}
    return Told(
        label=label,
        seed=found["seed"],
        job=found["job"],
        course=[_as_it_was(point) for point in found["course"]],
        more=more,
        error=(found["error"] or "failed") if found["exit"] else "",
    )


def _as_it_was(point: Mapping[str, Any]) -> Mapping[str, Any]:
    """A point read from JSON, where the loss of a step that is no number is null."""
    of_step = bool(point["step"]) and point["samples"] is None
    return {**point, "loss": math.nan} if of_step and point["loss"] is None else point


class RunComparison:
    """A comparison of runs. Raises SettingsError for fewer than two, and where those of one row
    differ by more than their seed, or not even by that."""

    def __init__(self, told: Sequence[Told]) -> None:
        if len(told) < 2:
            raise SettingsError("", f"{len(told)} run to compare: expected two or more")
        self.rows: dict[str, list[Told]] = {}
        for one in told:
            self.rows.setdefault(one.label, []).append(one)
        for label, of in self.rows.items():
            _check_row(label, of)
        held = [_known(one.points, "held_out") for one in told if one.course]
        self.by = "held_out" if held and all(len(points) > 1 for points in held) else "loss"
        """What is drawn, and what the target is of: the first where all were evaluated twice."""
        self._lines = {id(one): self._line(one) for one in told}
        ends = [points[-1][self.by] for points in self._lines.values() if points]
        self.target = max(ends) if len(ends) == len(told) else None
        """The worst end: a loss that all came to. None: of some run no loss is known."""
        self.equal, self.different = self._settings()

    def __str__(self) -> str:
        return self.text()

    __repr__ = __str__

    def _line(self, told: Told) -> list[dict[str, Any]]:
        """Return points with a number in `by`; of the losses of many steps the mean around each."""
        found = _known(told.points, self.by)
        if self.by == "loss" and len(found) >= SMOOTHED:
            means = smooth([p["loss"] for p in found])
            found = [{**p, "loss": mean} for p, mean in zip(found, means, strict=True)]
        return found

    def _settings(self) -> tuple[dict[str, Any], dict[str, list[Any]]]:
        """Settings that all have and that are no defaults; and those that differ, by row."""
        flat = [_stated(of[0]) for of in self.rows.values()]
        apart = APART if len(self._lines) > len(self.rows) else (*{*APART} - {"seed"},)
        usual = dict(_flat(plain_settings(Job(model={"factory": "a:b"}, train={"steps": 1}))))
        equal, different = dict[str, Any](), dict[str, list[Any]]()
        for key in dict.fromkeys(key for one in flat for key in one):
            if key.partition(".")[0] in apart:
                continue
            values = [one.get(key) for one in flat]
            if any(value != values[0] for value in values):
                different[key] = values
            elif values[0] != usual.get(key):
                equal[key] = values[0]
        return equal, different

    def reached(self, told: Told) -> Mapping[str, Any] | None:
        """Return the first of its points that is as good as the target."""
        target = math.inf if self.target is None else self.target
        return next((p for p in self._lines[id(told)] if p[self.by] <= target), None)

    # What programs read.

    def table(self) -> dict[str, Any]:
        """Return all of it as plain values."""
        return {
            "by": self.by,
            "target": self.target,
            "equal": self.equal,
            "different": {
                key: dict(zip(self.rows, values, strict=True))
                for key, values in self.different.items()
            },
            "runs": [
                {
                    "label": one.label,
                    "seed": one.seed,
                    "error": one.error,
                    **_end(one),
                    "reached": None if self.target is None else self.reached(one),
                    "points": one.points,
                }
                for of in self.rows.values()
                for one in of
            ],
        }

    # What people read.

    def text(self) -> str:
        """Return the table, the settings that are equal and those that differ, as lines."""
        heads = ["", "steps", "samples", "loss", "held-out", "sent", "time"]
        if self.target is not None:
            heads += ["steps", "samples", "sent", "time"]
        lines = [heads]
        for label, of in self.rows.items():
            ends = [_end(one) for one in of]
            count = f" ({len(of)} seeds)" if len(of) > 1 else ""
            cells = [cut(plain(label), MOST_NAME) + count]
            cells += [
                _cell((end[key] for end in ends), text)
                for key, text in (
                    ("step", figure),
                    ("samples", figure),
                    ("loss", _loss),
                    ("held_out", _loss),
                    ("sent_bytes", size),
                    ("seconds", seconds),
                )
            ]
            if self.target is not None:
                at = [found for one in of if (found := self.reached(one)) is not None]
                cells += [_cell((p[key] for p in at), text) for key, _, text in _AXES]
            lines.append(cells)
        made = []
        if self.target is not None:
            what = "held-out loss" if self.by == "held_out" else "loss of training"
            made.append(
                f"the last columns: up to a {what} of {_loss(self.target)}, which all reach"
            )
        made += ["", *columns(lines), ""]
        for of in self.rows.values():
            made += [f"{plain(one.label)}: FAILED: {plain(one.error)}" for one in of if one.error]
        if self.different:
            names = [cut(plain(label), MOST_NAME) for label in self.rows]
            rows = [["  " + plain(k), *map(_said, values)] for k, values in self.different.items()]
            made += ["different", *columns([["  key", *names], *rows])]
        else:
            live = self.equal.get("model.factory", "").startswith(LIVE)
            model = " (of a live module a job knows the class alone)" if live else ""
            made.append(f"no setting of their jobs differs{model}")
        if self.equal:
            same = " · ".join(f"{plain(k)} = {_said(v)}" for k, v in self.equal.items())
            made.append(f"equal: {same}; all else is as in any job")
        return "\n".join(made).lstrip("\n")

    def picture(self) -> Picture:
        """Return the loss over steps, samples, bytes and time, each a panel of four."""
        colours = {
            label: SERIES[i] if i < MOST_LINES else "wait" for i, label in enumerate(self.rows)
        }
        panels = [self._panel(key, unit, text, colours) for key, unit, text in _AXES]
        wide, high = panels[0].width, panels[0].height
        whole = 2 * wide + 16
        legend = _legend(colours, whole)
        top = legend.height
        what = "held-out loss" if self.by == "held_out" else "loss of training"
        found = Picture(whole, top + 2 * (high + 8), f"{what}, nats")
        found.put(legend, 0, 0)
        for i, panel in enumerate(panels):
            found.put(panel, (i % 2) * (wide + 16), top + (i // 2) * (high + 8))
        found.add(Label(8, 16, f"{what}, nats", 13, bold=True))
        return found

    def draw(self, file: Path) -> None:
        """Write the picture as a PNG. Raises OSError with the file's name."""
        with naming(file):
            self.picture().png(file)

    def _panel(
        self, key: str, unit: str, text: Callable[[float], str], colours: Mapping[str, str]
    ) -> Picture:
        lines = [
            Series(
                name=cut(plain(label), MOST_NAME),
                points=[(p[key], p[self.by]) for p in _known(self._lines[id(one)], key)],
                colour=colours[label],
                dots=self.by == "held_out",
                faint=len(of) > 1,
            )
            for label, of in self.rows.items()
            for one in of
        ]
        return curves(unit, lines, unit=unit, across_text=text, legend=False)


def _stated(told: Told) -> dict[str, Any]:
    """Return all that a run was made with, by key."""
    return {**dict(_flat(told.job)), **told.more, "seed": told.seed}


def _check_row(label: str, of: Sequence[Told]) -> None:
    """Raises SettingsError unless runs of one row are one setting with several seeds."""
    if len({one.seed for one in of}) < len(of):
        raise SettingsError("", f"{label} stands there twice with one seed: expected each run once")
    first, *others = map(_stated, of)
    for other in others:
        for key in {**first, **other}:
            if key.partition(".")[0] not in APART and first.get(key) != other.get(key):
                raise SettingsError(
                    "",
                    f"runs called {label} differ in {key}, and not by their seed alone: expected "
                    "a name for each setting (their means would be of nothing)",
                )


def _legend(colours: Mapping[str, str], width: float) -> Picture:
    """The names of the lines, below a title, in as many rows as they need."""
    x, y = 8.0, 38.0
    found = Picture(width, 0, "")
    for label, colour in colours.items():
        name = cut(plain(label), MOST_NAME)
        needed = 34 + width_of(name, 12)
        if x > 8 and x + needed > width:
            x, y = 8.0, y + 18
        found.add(Rect(x, y - 6, 12, 4, colour), Label(x + 18, y, name, 12))
        x += needed
    found.height = y + 4
    return found


def _known(points: Iterable[Mapping[str, Any]], key: str) -> list[dict[str, Any]]:
    """The points with a finite number under a key."""
    return [dict(p) for p in points if p[key] is not None and math.isfinite(p[key])]


def _end(told: Told) -> dict[str, Any]:
    """What a run came to: of each number the last that is known."""
    keys = ("step", "samples", "loss", "held_out", "sent_bytes", "seconds")
    points = told.points
    return {
        key: next((p[key] for p in reversed(points) if p[key] is not None), None) for key in keys
    }


def _cell(values: Iterable[float | None], text: Callable[[float], str]) -> str:
    known = [v for v in values if v is not None]
    if not known:
        return "-"
    mean, half = sum(known) / len(known), (max(known) - min(known)) / 2
    return f"{text(mean)} ± {text(half)}" if half > 1e-4 * abs(mean) else text(mean)


def _loss(x: float) -> str:
    return f"{x:.4f}"


def _said(value: Any) -> str:
    """A setting as a job.toml has it; of None, that the job does not say it."""
    return "-" if value is None else plain(json.dumps(value))


def _flat(table: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """The settings of a job, by keys such as train.lr."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value
