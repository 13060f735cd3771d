"""Peers that come and go: by chance, or as a trace recorded it. Both are streams of faults, in the
order of their times, that `faults.py` lets happen.

By chance every peer fails at exponential intervals, without a word, and comes back after a fixed
time. Each peer has a generator of its own, seeded with the scenario's seed and its name: another
peer more or less changes nothing for the rest.

A trace is CSV, one row for each time that a peer went or came:

    time,peer,state            (this line may be left out)
    0,home-1,up                seconds from the start of the simulation
    310.5,home-1,down

A peer whose first row is `up` is not there before; every other one is there from the start, as is
one without a row.
"""

from __future__ import annotations

import csv
import heapq
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import cast

from ...job.settings import SettingsError, meant
from ..scenario.mishaps import Churn
from ..scenario.sentences import Fault, join, kill

__all__ = ["absent_at_first", "churn_of", "random_churn", "recorded_churn"]

_HEADER = ["time", "peer", "state"]


def churn_of(churn: Churn, names: Sequence[str], seed: int, folder: Path) -> Iterable[Fault]:
    """What [churn] of a scenario asks for. Raises SettingsError and OSError for its trace; a stream
    by chance has no end."""
    if churn.trace:
        return recorded_churn(folder / churn.trace, names)
    return random_churn(names, churn.fail_per_hour, float(churn.return_after), seed)


def random_churn(
    names: Sequence[str], fail_per_hour: float, return_after_s: float, seed: int
) -> Iterator[Fault]:
    """Kills and joins without an end, none for a rate of 0. While a peer is away it cannot fail:
    the mean time between two failures of one is 3600 s / fail_per_hour + return_after_s."""
    if fail_per_hour <= 0:
        return iter(())
    mean_s = 3600.0 / fail_per_hour
    each = (_failures(name, mean_s, return_after_s, seed) for name in names)
    return heapq.merge(*each, key=lambda fault: cast(float, fault.at))


def _failures(name: str, mean_s: float, return_after_s: float, seed: int) -> Iterator[Fault]:
    generator, now = random.Random(f"{seed}/{name}"), 0.0
    while True:
        now += generator.expovariate(1.0 / mean_s)
        yield kill(name, at_s=now)
        now += return_after_s
        yield join(name, at_s=now)


def recorded_churn(path: Path, names: Sequence[str]) -> tuple[Fault, ...]:
    """The rows of a trace. Raises OSError when it cannot be read, and SettingsError, with file and
    line, for a row that is none, time that runs backwards, an unknown peer, and one that goes or
    comes twice."""
    found: list[Fault] = []
    here: dict[str, tuple[bool, int]] = {}  # by peer: whether it is up, and since which line
    before = 0.0
    with path.open(newline="", encoding="utf-8") as file:
        for number, row in enumerate(csv.reader(file), start=1):
            where, cells = f"{path}:{number}", [cell.strip() for cell in row]
            if not any(cells) or (number == 1 and cells == _HEADER):
                continue
            at_s, name, up = _row(cells, names, where)
            if at_s < before:
                raise SettingsError(
                    "", f"time runs backwards: {at_s:g} s after {before:g} s", where
                )
            if name in here and here[name][0] == up:
                was, line = "up" if up else "down", here[name][1]
                raise SettingsError(
                    "", f"{name} is {was} twice: it has been since line {line}", where
                )
            before, here[name] = at_s, (up, number)
            found.append(join(name, at_s=at_s) if up else kill(name, at_s=at_s))
    return tuple(found)


def _row(cells: list[str], names: Sequence[str], where: str) -> tuple[float, str, bool]:
    """(seconds, peer, whether it comes)."""
    if len(cells) != len(_HEADER):
        raise SettingsError("", f"has {len(cells)} columns: expected {', '.join(_HEADER)}", where)
    time, name, state = cells
    try:
        at_s = float(time)
    except ValueError:
        at_s = math.nan
    if not 0 <= at_s < math.inf:
        raise SettingsError("time", f'is "{time}": expected seconds, from 0 on', where)
    if name not in names:
        what = f'is "{name}", which the scenario does not have{meant(name, names)}'
        raise SettingsError("peer", what, where)
    if state not in ("up", "down"):
        raise SettingsError("state", f'is "{state}": expected "up" or "down"', where)
    return at_s, name, state == "up"


def absent_at_first(faults: Iterable[Fault]) -> tuple[str, ...]:
    """Peers that the world begins without: the first that these faults say of each by name is that
    it joins. Not for a stream without an end."""
    first: dict[str, str] = {}
    for fault in faults:
        if fault.do in ("join", "kill", "leave"):
            for name in fault.who:
                first.setdefault(name, fault.do)
    return tuple(name for name, do in first.items() if do == "join")
