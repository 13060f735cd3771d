"""What processes hold, read from /proc every few seconds: memory, descriptors, threads, children.

with Gauge(lambda: {"broker": [pid], "peer-1": [pid, pid]}, every_s=10.0) as gauge:
    …
gauge.longest("broker").growth("rss", warmup_s=300)         0.012: 1.2 % from then to the end
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Literal

from scipy.stats import theilslopes

__all__ = ["Gauge", "Sample", "Series", "growth", "held_by"]

What = Literal["rss", "anonymous", "descriptors", "threads"]


@dataclass(frozen=True, slots=True)
class Sample:
    """One process at one time. `rss`, `anonymous` (neither files nor shared): bytes."""

    at_s: float
    rss: int
    anonymous: int
    descriptors: int
    threads: int

    def __str__(self) -> str:
        return f"{self.rss / 1e6:.0f} MB {self.descriptors} fds"


@dataclass
class Series:
    """One process, from the first time that it was seen."""

    role: str
    pid: int
    samples: list[Sample] = field(default_factory=list)

    @property
    def lasted_s(self) -> float:
        return self.samples[-1].at_s - self.samples[0].at_s

    def of(self, what: What, warmup_s: float = 0.0) -> list[float]:
        """The values from `warmup_s` of its own age on."""
        begin = self.samples[0].at_s + warmup_s
        return [getattr(s, what) for s in self.samples if s.at_s >= begin]

    def growth(self, what: What, warmup_s: float) -> float:
        """See `growth`; NaN with fewer than three samples after warm-up."""
        begin = self.samples[0].at_s + warmup_s
        late = [s for s in self.samples if s.at_s >= begin]
        return growth([s.at_s for s in late], [getattr(s, what) for s in late])


def growth(at_s: Sequence[float], values: Sequence[float]) -> float:
    """By which share of its first fitted value something has grown at the end: a line through the
    median of all slopes (Theil and Sen), which no single peak moves."""
    if len(values) < 3:
        return float("nan")
    slope, first, _, _ = theilslopes(values, [t - at_s[0] for t in at_s])
    return float(slope * (at_s[-1] - at_s[0]) / first)


def held_by(pid: int, at_s: float) -> Sample | None:
    """None: it is gone."""
    folder = Path(f"/proc/{pid}")
    try:
        lines = (folder / "status").read_text().splitlines()
        table = {k: v.split() for k, _, v in (line.partition(":") for line in lines)}
        descriptors = len(os.listdir(folder / "fd"))
        rss, anonymous = (int(table[k][0]) * 1024 for k in ("VmRSS", "RssAnon"))
        return Sample(at_s, rss, anonymous, descriptors, int(table["Threads"][0]))
    except (OSError, KeyError):  # it ended, or has ended and nobody has waited for it yet
        return None


class Gauge:
    """`roles`: the processes to look at, by what they are; `disks`: folders whose size is taken."""

    def __init__(
        self,
        roles: Callable[[], Mapping[str, Iterable[int]]],
        every_s: float = 10.0,
        disks: Mapping[str, Path] | None = None,
    ) -> None:
        self._roles, self._every_s, self._disks = roles, every_s, disks or {}
        self.series: dict[tuple[str, int], Series] = {}
        self.disk: dict[str, list[tuple[float, int]]] = {name: [] for name in self._disks}
        self.processes: list[tuple[float, int]] = []
        """How many there were."""
        self._error: Exception | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gauge", daemon=True)

    def __enter__(self) -> Gauge:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join()
        if self._error is not None:  # figures of a part would pass for those of the whole
            raise RuntimeError("the gauge came to an end before the run") from self._error

    def _run(self) -> None:
        try:
            while not self._ended.wait(0.0 if not self.processes else self._every_s):
                self.look()
        except Exception as error:
            self._error = error

    def look(self) -> None:
        """Takes one sample of everything."""
        now, count = time.monotonic(), 0
        for role, pids in self._roles().items():
            for pid in pids:
                if (sample := held_by(pid, now)) is not None:
                    series = self.series.setdefault((role, pid), Series(role, pid))
                    series.samples.append(sample)
                    count += 1
        self.processes.append((now, count))
        for name, folder in self._disks.items():
            self.disk[name].append((now, _size(folder)))

    def longest(self, role: str) -> Series:
        """The process of a role that lasted longest. Raises KeyError when there was none."""
        found = [s for s in self.series.values() if s.role == role]
        if not found:
            raise KeyError(f"nothing was seen of {role}")
        return max(found, key=lambda s: s.lasted_s)

    def at_age(self, role: str, age_s: float) -> list[tuple[float, int]]:
        """(when, resident bytes) of each process of a role once it was so old: whether a later one
        of its processes needs more than an earlier one."""
        found = []
        for series in self.series.values():
            if series.role == role and series.lasted_s >= age_s:
                old_s = series.samples[0].at_s + age_s
                found.append(next((s.at_s, s.rss) for s in series.samples if s.at_s >= old_s))
        return sorted(found)

    def line(self) -> str:
        """How it is now, for people."""
        newest = max((s.samples[-1].at_s for s in self.series.values()), default=0.0)
        here = [s for s in self.series.values() if s.samples[-1].at_s == newest]
        parts = [f"{one.role} {one.samples[-1]}" for one in here]
        disks = [f"{n} {v[-1][1] / 1e6:.1f} MB on disk" for n, v in self.disk.items() if v]
        return ", ".join([*parts, *disks])


def _size(folder: Path) -> int:
    """Bytes of the files below a folder, whatever comes and goes meanwhile."""
    total = 0
    for where, _, files in os.walk(folder):  # passes over folders that are gone
        for name in files:
            with suppress(OSError):
                total += os.lstat(os.path.join(where, name)).st_size
    return total
