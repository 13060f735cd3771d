"""How much of the broker's memory and journal the runs of one subject fill, and all together.

A run takes its spec, its newest plan, and its history. A submission that would pass the limit of
its subject, or of all, first pushes ended runs out: the subject's own, the oldest first; then
those of whoever has most. What no ended run can make room for is refused, with the numbers.
Histories share half of the same limits, so that open runs cannot grow past them later.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from ..events import RunId
from ..options import BrokerOptions
from .history import MOST_BYTES
from .run import RunRecord

__all__ = ["JOURNAL_SHARE", "make_room", "outnumbered", "share"]

JOURNAL_SHARE = 3
"""So many times its size a submission needs of the disk: in SQLite's log, then in the file, whose
pages are cut to their length now and then only."""
_LEAST_HISTORY = 64 << 10
"""Some 500 steps, or the last plans."""


def make_room(
    runs: Iterable[RunRecord], owner: str, size: int, free: int | None, options: BrokerOptions
) -> tuple[list[RunId], str]:
    """(ended runs to forget, so that a spec of `size` bytes has its place; why there is none).

    free: bytes that the journal's disk has for submissions; None: there is no disk.
    """
    if free is not None and JOURNAL_SHARE * size > free:
        return [], (
            f"the spec of the run has {size} bytes, and the disk of the broker has {max(0, free)} "
            f"bytes left for new runs, of which it needs {JOURNAL_SHARE * size}: make room there, "
            "or submit it later; runs that are there go on"
        )
    kept = list(runs)
    taken = Counter[str]()
    for run in kept:
        taken[run.owner] += run.kept_bytes
    # Without identities everybody is the same subject.
    most = options.subject_bytes if owner else options.kept_bytes
    mine = [run for run in kept if run.ended and run.owner == owner]
    gone: list[RunId] = []

    def forget(run: RunRecord) -> None:
        taken[run.owner] -= run.kept_bytes
        gone.append(run.id)

    while taken[owner] + size > most and mine:
        forget(mine.pop(0))
    if taken[owner] + size > most:
        count = sum(not run.ended for run in kept if run.owner == owner)
        return [], (
            f"the spec of the run has {size} bytes, and the {count} open runs of "
            f"{owner or 'this network'} take {taken[owner]} of at most {most}: submit it again "
            "when some of them have ended"
        )
    while taken.total() + size > options.kept_bytes:
        ended = [run for run in kept if run.ended and run.id not in gone]
        if not ended:
            return [], (
                f"the spec of the run has {size} bytes, and all open runs take {taken.total()} of "
                f"at most {options.kept_bytes}: submit it again when some of them have ended"
            )
        forget(max(ended, key=lambda run: taken[run.owner]))  # the oldest of whoever has most
    return gone, ""


def outnumbered(ended: Sequence[RunRecord], most: int) -> list[RunId]:
    """Which of the ended runs go, so that so many stay: the oldest of whoever has most of them."""
    left, gone = list(ended), list[RunId]()
    counts = Counter(run.owner for run in left)
    while len(left) > most:
        run = max(left, key=lambda run: counts[run.owner])
        counts[run.owner] -= 1
        left.remove(run)
        gone.append(run.id)
    return gone


def share(runs: Collection[RunRecord], options: BrokerOptions) -> None:
    """Gives the history of each run its part of half of what its subject, and all, may take."""
    counts = Counter(run.owner for run in runs)
    of_all = options.kept_bytes // 2 // max(1, len(runs))
    for run in runs:
        of_subject = options.subject_bytes // 2 // counts[run.owner] if run.owner else of_all
        run.history.most_bytes = max(_LEAST_HISTORY, min(MOST_BYTES, of_subject, of_all))
        run.history.trim()
