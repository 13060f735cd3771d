"""An action: one entry of a peer's list, and its text.

    F3@1  forward of microbatch 3 through stage 1        B3@1  its backward
    W3@1  the weights' gradients of that backward, where a peer's list has them apart (`halved`)
    E2@1  forward of held-out microbatch 2, no gradient
    >@grad1  +1@grad1  *3@grad1  <4@grad1
             exchange of stage 1's gradients: give what was made here, add up in phase 1, pass on
             totals in phase 3, take the result in phase 4; others likewise, by `ExchangeContent`
    U     update: divide by the weight, clip, optimizer step, buffers
    C X M A V L  of a round between replicas: take down what was moved since the last version, begin
          an exchange, do what masks of its sums ask for, apply its result, show the version, have
          it land; in no list

What each action takes and gives stands in `dag/schedule/flow.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, NamedTuple

__all__ = [
    "EXCHANGES",
    "ROUNDS",
    "TRAITS",
    "VISITS",
    "Action",
    "ExchangeContent",
    "Kind",
    "KindTraits",
    "ScheduleError",
    "named",
    "training_visits",
]


class ScheduleError(ValueError):
    """Action lists that break a rule, or a text that is no action."""


class Kind(StrEnum):
    """What an action does; the text is what it prints as."""

    FORWARD = "F"
    BACKWARD = "B"
    """Without the weights' gradients where the list has them apart."""
    WEIGHT = "W"
    """The weights' gradients of a backward, which nobody waits for before the step ends."""
    EVALUATE = "E"
    GIVE = ">"
    """A participant gives what it made to an exchange."""
    REDUCE = "+"
    """Parts that came are added up, in a fixed order, and passed on."""
    RELAY = "*"
    """Totals that came are passed on as they are."""
    TAKE = "<"
    """A receiver takes the result."""
    UPDATE = "U"
    CONTRIBUTE = "C"
    """What the stages have moved since the last version is taken down, for a round."""
    EXCHANGE = "X"
    """The exchange of a round begins here: what this peer gives to itself is added."""
    UNMASK = "M"
    """What the broker told of the masks of an exchange is done."""
    APPLY = "A"
    """The result of a round becomes the next version."""
    SHOW = "V"
    """The version is in the stages, for an evaluation."""
    LAND = "L"
    """A version that was made beside local steps comes into the stages, and they stay."""

    __hash__ = str.__hash__  # an enum's own is slow, and actions are looked up all the time


class ExchangeContent(StrEnum):
    """What an exchange is about; the text is what its name begins with."""

    GRADIENT = "grad"
    """A stage's gradients, added up over its holders."""
    DELTA = "delta"
    """In their place where a strategy exchanges updates: those that each made of its gradients."""
    SECOND = "second"
    """What a strategy adds up next over them, once it has the sum of a stage's gradients."""
    STATISTICS = "stats"
    """Batch statistics of a stage's microbatches, to all of its holders."""
    TIED_PAIR = "pair"
    """Where holders exchange updates, the gradients of a tied parameter before they become some,
    added up over the i-th holders of its stages."""
    TIED = "tied"
    """The gradient of a tied parameter, added up over its stages."""
    TIED_DELTA = "both"
    """In its place where holders exchange updates: those of a tied parameter, of which all of its
    stages take the mean."""
    NORM = "norm"
    """Squares of the gradients, losses, weights and metrics of the step; the result goes to all, or
    only to who reports it (`Plan.without_norm`)."""
    SCORES = "eval"
    """Losses, weights and metrics of an evaluation, for who reports it."""

    __hash__ = str.__hash__


@dataclass(frozen=True, slots=True)
class KindTraits:
    """What whoever reads lists has to know of a kind of action."""

    of: Literal["visit", "exchange", "step", "round"]
    """What it belongs to: one microbatch in one stage, one exchange, the step, or a round between
    replicas."""
    word: Literal["forward", "backward", "weight", "evaluate", "update", "exchange"] = "exchange"
    """What traces, reports and faults call it."""
    work: Literal["", "forward", "backward", "weight"] = ""
    """The part of the stage's operators that it computes; a backward leaves out what is apart."""
    trains: bool = False
    """Whether it is a visit of a training step."""
    keeps: int = 0
    """By how many microbatches more its stage has between forward and backward behind it."""
    defers: int = 0
    """By how many microbatches more its stage has, behind it, whose weights' gradients wait, where
    its list has them apart."""
    adds_up: bool = False
    """Whether it adds gradients to those of the microbatches before, unless they wait."""
    recomputes: bool = False
    """Whether it does the forward again where its stage recomputes."""
    number: int = -1
    """Of a visit: what stands for the kind in lists on the wire; never another kind's later."""
    behind: Kind | None = None
    """Of a visit: the kind of the visit of the same microbatch and stage that its peer's list has
    before it."""
    by_itself: bool = False
    """Whether that is all it waits for, and no other visit waits for it."""


TRAITS: Mapping[Kind, KindTraits] = {
    Kind.FORWARD: KindTraits("visit", "forward", "forward", trains=True, keeps=1, number=0),
    Kind.BACKWARD: KindTraits(
        "visit",
        "backward",
        "backward",
        trains=True,
        keeps=-1,
        defers=1,
        adds_up=True,
        recomputes=True,
        number=1,
        behind=Kind.FORWARD,
    ),
    Kind.WEIGHT: KindTraits(
        "visit",
        "weight",
        "weight",
        trains=True,
        defers=-1,
        adds_up=True,
        number=3,
        behind=Kind.BACKWARD,
        by_itself=True,
    ),
    Kind.EVALUATE: KindTraits("visit", "evaluate", "forward", number=2),
    **dict.fromkeys((Kind.GIVE, Kind.REDUCE, Kind.RELAY, Kind.TAKE), KindTraits("exchange")),
    Kind.UPDATE: KindTraits("step", "update"),
    **dict.fromkeys((Kind.CONTRIBUTE, Kind.EXCHANGE, Kind.UNMASK), KindTraits("round")),
    **dict.fromkeys((Kind.APPLY, Kind.SHOW, Kind.LAND), KindTraits("round")),
}
"""The table of actions. Lists, their checker, costs, memory, traces, reports and faults ask it;
beside it stand only the wiring (`dag/schedule/flow.py`), and what a device and a ghost do for an
action."""
VISITS = frozenset(k for k, traits in TRAITS.items() if traits.of == "visit")
"""Kinds that belong to one microbatch and one stage."""
EXCHANGES = frozenset(k for k, traits in TRAITS.items() if traits.of == "exchange")
"""Kinds that belong to one exchange."""
ROUNDS = frozenset(k for k, traits in TRAITS.items() if traits.of == "round")
"""Kinds that belong to a round between replicas."""


def training_visits(has_backward: bool, halved: bool = False) -> tuple[Kind, ...]:
    """The visits that a microbatch of a training step makes to a stage, in order. `halved`: whether
    weights' gradients are apart."""
    return tuple(
        kind
        for kind, traits in TRAITS.items()
        if traits.trains
        and (has_backward or traits.work == "forward")
        and (halved or traits.work != "weight")
    )


_SINGLE = frozenset({ExchangeContent.NORM, ExchangeContent.SCORES})
"""What there is one exchange of."""
_NUMBER = r"(?:0|[1-9]\d{0,8})"
_TEXT = re.compile(
    rf"(?P<visit>[{''.join(sorted(VISITS))}])(?P<microbatch>{_NUMBER})@(?P<stage>{_NUMBER})"
    rf"|(?P<exchange>[{''.join(sorted(EXCHANGES))}])(?P<phase>{_NUMBER})?"
    rf"@(?:(?P<single_content>{'|'.join(sorted(_SINGLE))})"
    rf"|(?P<content>{'|'.join(sorted({*ExchangeContent} - _SINGLE))})(?P<index>{_NUMBER}))"
    r"|(?P<single>U)",
    re.ASCII,
)


def named(content: ExchangeContent, index: int) -> str:
    """The name of an exchange."""
    return content.value if content in _SINGLE else f"{content.value}{index}"


class Action(NamedTuple):
    """One entry of a list. Of an action of an exchange, `microbatch` is the phase (0 of a giving)
    and `stage` the index of the exchange among those of its content: that of the stage or of the
    tied group, else 0; numbers that the kind has no use for stay 0."""

    kind: Kind
    microbatch: int = 0
    stage: int = 0
    content: ExchangeContent | None = None

    @property
    def phase(self) -> int:
        """When in its exchange this happens: what is taken was given in a lower one."""
        return self.microbatch

    def __str__(self) -> str:
        if self.content is not None:
            return f"{self.kind.value}{self.phase or ''}@{named(self.content, self.stage)}"
        if self.kind in VISITS:
            return f"{self.kind.value}{self.microbatch}@{self.stage}"
        return self.kind.value

    @classmethod
    def parse(cls, text: str) -> Action:
        """The action that prints as `text`; raises ScheduleError for any other text."""
        match = _TEXT.fullmatch(text)
        if match is None:
            raise ScheduleError(
                f"{text!r} is no action: expected e.g. F3@1, B0@2, >@grad1, +1@tied0, <2@norm, U"
            )
        if match["visit"]:
            return cls(Kind(match["visit"]), int(match["microbatch"]), int(match["stage"]))
        if match["exchange"]:
            kind, phase = Kind(match["exchange"]), int(match["phase"] or 0)
            if (kind is Kind.GIVE) != (phase == 0):
                raise ScheduleError(f"{text!r}: expected no phase for >, one from 1 on for + * <")
            content = ExchangeContent(match["single_content"] or match["content"])
            return cls(kind, phase, int(match["index"] or 0), content)
        return cls(Kind(match["single"]))
