"""An action: one entry of a peer's list, and its text.

    F3@1  forward of microbatch 3 through stage 1        B3@1  its backward
    E2@1  forward of held-out microbatch 2, no gradient
    S>@1  S+@1  S<@1   exchange of stage 1 among its holders: give parts, add up, take the sums
    S=@1  S*@1  in rows (`grid.py`): add up a row's parts before S+, pass totals on behind it
    T>@0  T+@0  T<@0   the same for the gradient of tied group 0 among its stages
    N>    N+    N<     the same for norm, weight and loss among all peers; the hub adds up
    U     update: divide by the weight, clip, optimizer step, buffers
    V>    V+           results of an evaluation go to the hub, which adds them up

What each action takes and gives stands in `flow.py`.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import NamedTuple

__all__ = ["EXCHANGES", "VISITS", "Action", "Kind", "ScheduleError"]


class ScheduleError(ValueError):
    """Action lists that break a rule, or a text that is no action."""


class Kind(StrEnum):
    """What an action does; the text is what it prints as."""

    FORWARD = "F"
    BACKWARD = "B"
    EVALUATE = "E"
    PAIR_GIVE = "t>"
    PAIR_COMBINE = "t+"
    PAIR_TAKE = "t<"
    SYNC_GIVE = "S>"
    SYNC_ROW = "S="
    SYNC_COMBINE = "S+"
    SYNC_RELAY = "S*"
    SYNC_TAKE = "S<"
    TIED_GIVE = "T>"
    TIED_COMBINE = "T+"
    TIED_TAKE = "T<"
    NORM_GIVE = "N>"
    NORM_COMBINE = "N+"
    NORM_TAKE = "N<"
    UPDATE = "U"
    EVAL_GIVE = "V>"
    EVAL_COMBINE = "V+"

    __hash__ = str.__hash__  # an enum's own is slow, and actions are looked up all the time


VISITS = frozenset({Kind.FORWARD, Kind.BACKWARD, Kind.EVALUATE})
"""Kinds that belong to one microbatch and one stage."""
EXCHANGES = frozenset(
    {
        Kind.PAIR_GIVE,
        Kind.PAIR_COMBINE,
        Kind.PAIR_TAKE,
        Kind.SYNC_GIVE,
        Kind.SYNC_ROW,
        Kind.SYNC_COMBINE,
        Kind.SYNC_RELAY,
        Kind.SYNC_TAKE,
        Kind.TIED_GIVE,
        Kind.TIED_COMBINE,
        Kind.TIED_TAKE,
    }
)
"""Kinds that belong to one stage, or for T and t to one tied group."""

_TEXT = re.compile(
    r"(?P<visit>[FBE])(?P<microbatch>0|[1-9]\d{0,8})@(?P<stage>0|[1-9]\d{0,8})"
    r"|(?P<exchange>[STt][>+<]|S[=*])@(?P<group>0|[1-9]\d{0,8})"
    r"|(?P<single>N[>+<]|V[>+]|U)",
    re.ASCII,
)


class Action(NamedTuple):
    """One entry of a list. `stage` is the tied group's index for T and t; numbers that the kind has
    no use for stay 0."""

    kind: Kind
    microbatch: int = 0
    stage: int = 0

    def __str__(self) -> str:
        if self.kind in VISITS:
            return f"{self.kind.value}{self.microbatch}@{self.stage}"
        return f"{self.kind.value}@{self.stage}" if self.kind in EXCHANGES else self.kind.value

    @classmethod
    def parse(cls, text: str) -> Action:
        """The action that prints as `text`; raises ScheduleError for any other text."""
        match = _TEXT.fullmatch(text)
        if match is None:
            raise ScheduleError(
                f"{text!r} is no action: expected e.g. F3@1, B0@2, S>@1, T+@0, N<, U"
            )
        if match["visit"]:
            return cls(Kind(match["visit"]), int(match["microbatch"]), int(match["stage"]))
        if match["exchange"]:
            return cls(Kind(match["exchange"]), stage=int(match["group"]))
        return cls(Kind(match["single"]))
