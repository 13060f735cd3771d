"""Whether processes that share a machine got their turns: how long their threads stood runnable
while other threads had the cores.

    before = snapshot({"eu-1": process.pid, …})
    …
    why = contended(before, snapshot({…}), seconds)        # "" for a run that is a measurement

Linux counts it for each thread: the second number of /proc/PID/task/TID/schedstat, nanoseconds that
it waited on a run queue. A supervisor's number includes the workers below it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from ..processes import started_by

__all__ = [
    "MOST_WAITING",
    "Snapshot",
    "busy_share",
    "contended",
    "processor",
    "snapshot",
    "waited_s",
]

MOST_WAITING = 0.1
"""Share of the time that one peer's threads may have waited, all together."""

Snapshot = Mapping[str, Mapping[tuple[int, int], int]]
"""Name -> (process, thread) -> nanoseconds that it has waited; an empty name's map: nothing is
known."""


def snapshot(processes: Mapping[str, int], root: Path = Path("/proc")) -> Snapshot:
    """What the threads of these processes, and of all below them, have waited since they began."""
    return {
        name: {
            (pid, tid): waited
            for pid in _with_children(process, root)
            for tid, waited in _threads(pid, root)
        }
        for name, process in processes.items()
    }


def waited_s(before: Snapshot, after: Snapshot) -> dict[str, float]:
    """Seconds that the threads of each waited between two snapshots, summed. A thread that began
    in between counts from its beginning; what one waited that has ended is not known."""
    return {
        name: sum(ns - before.get(name, {}).get(key, 0) for key, ns in threads.items()) / 1e9
        for name, threads in after.items()
    }


def contended(before: Snapshot, after: Snapshot, seconds: float) -> str:
    """Why what was measured in these seconds is no measurement; empty when it is one."""
    unknown = [name for name, threads in after.items() if not threads]
    if unknown:
        return f"how long threads of {', '.join(unknown)} waited for a core is not known here"
    shares = {name: waited / seconds for name, waited in waited_s(before, after).items()}
    if not shares:
        return "no process was watched"
    worst = max(shares, key=lambda name: shares[name])
    if shares[worst] <= MOST_WAITING:
        return ""
    return (
        f"threads of {worst} waited for a core for {shares[worst]:.0%} of the time: at most "
        f"{MOST_WAITING:.0%} of it makes a measurement"
    )


def processor(root: Path = Path("/proc")) -> tuple[int, int]:
    """(ticks that the cores worked, ticks in all) since the machine started; (0, 0): not known.
    Ticks that a hypervisor took count as work."""
    first, _, _ = _read(root / "stat").partition("\n")
    ticks = [int(word) for word in first.split()[1:9]]  # user, nice, system, idle, iowait, …
    return (sum(ticks) - ticks[3] - ticks[4], sum(ticks)) if len(ticks) == 8 else (0, 0)


def busy_share(before: tuple[int, int], after: tuple[int, int]) -> float:
    """Share of the machine's cores that worked between two readings of `processor`."""
    return (after[0] - before[0]) / max(1, after[1] - before[1])


def _with_children(pid: int, root: Path) -> Iterator[int]:
    """The process and all below it, as far as they still run."""
    yield pid
    for child in started_by(pid, root):
        yield from _with_children(child, root)


def _threads(pid: int, root: Path) -> Iterator[tuple[int, int]]:
    """(thread, nanoseconds waited)."""
    for path in (root / str(pid) / "task").glob("*/schedstat"):
        numbers = _read(path).split()
        if len(numbers) >= 2:
            yield int(path.parent.name), int(numbers[1])


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # it has ended
        return ""
