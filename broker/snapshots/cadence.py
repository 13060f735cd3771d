"""When a run takes its snapshots.

One set at a time: the next is ordered when the last is whole. It is of a step a little ahead of
what is committed, so that the order is with everybody before they are past it; when it was not,
the next one is further ahead. With `every` = 0 nothing is ordered, once a set is whole, for as long
as its copies were on their way, which use half of the time at most, and at least for half a second.
A pause of p seconds costs p / 2 of work done again at each loss; where holders are lost so often
that this would be over 1 % of the time, and peers of the pool keep the copies, it is as short as
makes it so.
"""

from __future__ import annotations

import math

from ...planner.replicas.copies import PAUSE_S

__all__ = ["SnapshotSchedule"]

_MOST_LEAD = 64
_SHARE = 0.5
_OF_TIME = 0.01
"""What pauses may cost in work done again."""
_LEAST_S, _LONGER = 300.0, 10.0
"""A set that is not whole after so long, or so many times as long as the last one, is given up."""


class SnapshotSchedule:
    """Decides when a run takes its next snapshots, within one term. Steps count updates; times are
    seconds of the broker's clock."""

    def __init__(self, every: int, first: int, took: float | None = None) -> None:
        """`first`: updates that are in the stages when the term begins. `took`: of an earlier
        term."""
        self.every = every
        self.pending: int | None = None
        """The step of the set that was ordered and is not whole."""
        self.whole: int | None = None
        """The step of the newest whole set."""
        self._first = first
        self._lead = 0
        self._taken_at: float | None = None
        self.took = took
        """Seconds that the copies of the last whole set were on their way; None: there was none."""
        self._not_before = -math.inf

    def begin_round(self, first: int) -> None:
        """From `first` updates on there is another version in the stages, which no set has."""
        self._first, self._not_before = first, -math.inf
        self.pending = self.whole = None

    def due(self, committed: int, steps: int, now: float, step_s: float = 0.0) -> int | None:
        """The step of the set to order now, if one is due. `step_s`: seconds of a step, so that a
        set which is taken behind the next one is ordered before a pause is over."""
        if self.pending is not None or now + step_s < self._not_before:
            return None
        if self.whole is None and committed == self._first and committed > 0:
            step = committed  # what was restored has no copies under this plan yet
        else:
            step = max(committed + 1 + self._lead, (self.whole or 0) + 1)
        if self.every and step != committed:
            step = -(-step // self.every) * self.every
            if step > committed + max(self.every, 1 + self._lead):
                return None
        return step if step < steps else None

    def next_step(self, committed: int) -> int:
        """The first step of which a set can be had, whatever is pending."""
        return max(committed + 1 + self._lead, (self.pending or 0) + 1, (self.whole or 0) + 1)

    def ordered(self, step: int) -> None:
        self.pending, self._taken_at = step, None

    def taken(self, step: int, now: float) -> None:
        """A holder has its snapshot; its copy is on its way."""
        if step == self.pending and self._taken_at is None:
            self._taken_at = now

    def overdue(self, now: float) -> bool:
        """Whether the pending set takes far longer than sets do: a copy of it was lost."""
        if self.pending is None or self._taken_at is None:
            return False
        return now - self._taken_at > max(_LEAST_S, _LONGER * (self.took or 0.0))

    def given_up(self) -> None:
        """The pending one cannot be whole, or is not wanted any more."""
        self.pending = None

    def missed(self, step: int) -> None:
        """Somebody was past it already, or could not keep it."""
        if step == self.pending:
            self.pending = None
            self._lead = min(_MOST_LEAD, 2 * self._lead + 1)

    def copied(self, now: float, between_s: float = math.inf) -> int:
        """The pending set is whole; returns its step. `between_s`: the mean time between losses."""
        assert self.pending is not None, "no set is pending"
        self.whole, self.pending = self.pending, None
        self.took = 0.0 if self._taken_at is None else now - self._taken_at
        if not self.every:
            pause_s = max(PAUSE_S, self.took * (1 / _SHARE - 1))
            self._not_before = now + min(pause_s, 2 * _OF_TIME * between_s)
        return self.whole

    def __repr__(self) -> str:
        every = self.every or "auto"
        return f"<SnapshotSchedule every {every}, whole {self.whole}, pending {self.pending}>"
