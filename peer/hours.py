"""The hours of the day in which an owner lets a peer take part, by the host's own clock."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from typing import Self

__all__ = ["Hours"]

_DAY = 24 * 60
_TEXT = re.compile(r"(\d{1,2})(?::(\d{2}))?\s*-\s*(\d{1,2})(?::(\d{2}))?")


@dataclass(frozen=True, slots=True)
class Hours:
    """From minute `begin` of the day up to minute `end`; past midnight where `end` comes first."""

    begin: int
    end: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads "22-08" and "22:30-8:15". Raises ValueError."""
        match = _TEXT.fullmatch(text.strip())
        if match is None:
            raise ValueError(f'is "{text}": expected hours such as "22-08" or "22:30-08:15"')
        first, first_minute, last, last_minute = (int(part or 0) for part in match.groups())
        for hour, minute in ((first, first_minute), (last, last_minute)):
            if 60 * hour + minute > _DAY or minute > 59:
                raise ValueError(f'is "{text}": expected times from 00:00 to 24:00')
        begin, end = 60 * first + first_minute, 60 * last + last_minute
        if begin == end:
            raise ValueError(f'is "{text}", which is no time at all: leave it out for every hour')
        return cls(begin, end)

    def __contains__(self, at: datetime) -> bool:
        minute = 60 * at.hour + at.minute
        if self.begin < self.end:
            return self.begin <= minute < self.end
        return minute >= self.begin or minute < self.end

    def __str__(self) -> str:
        return f"{_clock(self.begin)}-{_clock(self.end)}"


def _clock(minute: int) -> str:
    return f"{minute // 60:02}:{minute % 60:02}"
