"""The tables of scenario.toml about what goes wrong, and about what must be reached all the same.

    [[faults]]
    do = "kill"
    who = ["home-3"]
    at_step = 20
    phase = "backward"

`scenario.py` checks that the peers exist; `sim/faults/` lets the faults happen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Self

from ...job.settings import Settings, SettingsError, expect
from ...job.units import Duration

__all__ = [
    "BETWEEN",
    "LASTING",
    "Churn",
    "Expectations",
    "FaultTable",
    "Renamed",
    "positive",
    "share",
]

# What the tables of scenario.toml share: keys that cannot be names of fields, and checks.


class Renamed(Settings):
    """Settings with keys in the file that cannot be the names of their fields."""

    KEYS: ClassVar[Mapping[str, str]]
    """Key in the file -> field."""

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> Self:
        for key, name in cls.KEYS.items():
            if name in table:
                raise SettingsError(name, f'is not a known key; did you mean "{key}"?')
        try:
            return super().from_table({cls.KEYS.get(k, k): v for k, v in table.items()})
        except SettingsError as error:
            wrong, problem = error.key, error.problem
            for key, name in cls.KEYS.items():
                head, bracket, rest = wrong.partition("[")
                wrong = f"{key}{bracket}{rest}" if head == name else wrong
                problem = problem.replace(name, key)
            raise SettingsError(wrong, problem) from None


def positive(settings: Settings, *names: str) -> None:
    """Raises SettingsError unless these fields are more than 0, and finite."""
    for name in names:
        finite = 0 < getattr(settings, name) < float("inf")
        expect(settings, name, finite, "more than 0, and finite")


def share(settings: Settings, name: str, *, whole: bool) -> None:
    """Raises SettingsError unless a field is None or from 0 to 1; 1 itself only if `whole`."""
    value = getattr(settings, name)
    if value is not None and not (0 <= value < 1 or (whole and value == 1)):
        most = "at most 1" if whole else "less than 1"
        raise SettingsError(name, f"is {value}: expected a share, from 0 to {most}")


ZERO, AWAY = Duration("0s"), Duration("60s")

BETWEEN = ("cut-off", "slow", "flap", "corrupt")
"""Faults of what is between peers: these may name others in `with`."""
ONE_WAY = ("cut-off", "slow")
"""Faults that may concern one direction only."""
LASTING = ("stop", "cut-off", "slow", "flap")
"""Faults that may end by themselves, after `for`."""
_WHEN = ("at", "at_step", "at_round")


@dataclass(frozen=True, kw_only=True)
class FaultTable(Renamed):
    """One thing that goes wrong. Whom it concerns is said by selectors: names of peers, with * and
    ?, or of places; "place:eu", "owner:ann", "memory>=10GiB"."""

    KEYS: ClassVar[Mapping[str, str]] = MappingProxyType({"with": "with_", "for": "for_s"})

    do: Literal[
        "kill",
        "stop",
        "leave",
        "join",
        "cut-off",
        "slow",
        "flap",
        "corrupt",
        "broker_restart",
    ]
    """kill: the process ends without a word. stop: it freezes, and goes on after `for`. leave: its
    owner's Ctrl-C. join: one that is gone comes again. cut-off: nothing passes between `who` and
    `with`. slow: what passes between them takes `factor` times as long. flap: they are parted and
    come together again in turn, until `for` is over. corrupt: the next message from each of `who`
    to each of `with` that sends one arrives changed. broker_restart: the broker's process ends
    without a word, and another begins with its journal."""
    who: tuple[str, ...] = ()
    """Selectors of peers; every fault but broker_restart has some. "broker" may stand beside them
    where something is between."""
    with_: tuple[str, ...] = ()
    """`with` in the file: the other side. Empty: everyone else."""
    at: Duration | None = None
    """When, from the start of the simulation; or:"""
    at_step: int | None = None
    """In which step, counted from 0, and `phase`; or:"""
    at_round: int | None = None
    """In which round of replicas or clients, counted from 0: when one of `who` begins it."""
    phase: Literal["any", "forward", "backward", "weight", "clip", "update"] = "any"
    """At the first action of this kind that `who` begins in the step."""
    for_s: Duration = ZERO
    """`for` in the file: how long; 0: for good."""
    factor: float = 1.0
    """How many times longer, for slow."""
    both: bool = True
    """For cut-off and slow: whether the way back too. false: only what goes from `who` to
    `with`."""

    def check(self) -> None:
        positive(self, "factor")
        given = [name for name in _WHEN if getattr(self, name) is not None]
        if len(given) != 1:
            found = f"given are {' and '.join(given) or 'none'}"
            raise SettingsError(
                "at", f"is one of at, at_step and at_round, and {found}: expected exactly one"
            )
        for name in _WHEN[1:]:
            if (value := getattr(self, name)) is not None and value < 0:
                raise SettingsError(name, f"is {value}: expected at least 0")
        if self.phase != "any" and self.at_step is None:
            raise SettingsError(
                "phase", f'is "{self.phase}", of a step: expected `at_step` to say of which'
            )
        if bool(self.who) == (self.do == "broker_restart"):
            expected = "none: it is the broker's" if self.who else "at least one selector"
            raise SettingsError("who", f'has {len(self.who)} of "{self.do}": expected {expected}')
        keys = (("with_", BETWEEN), ("for_s", LASTING), ("factor", ("slow",)), ("both", ONE_WAY))
        for name, meant in keys:
            if self.do not in meant and getattr(self, name) != getattr(type(self), name):
                raise SettingsError(
                    name, f'says nothing of "{self.do}": expected it with {", ".join(meant)} only'
                )
        if self.do == "slow" and self.factor == 1.0:
            raise SettingsError("factor", "is 1.0, which slows nothing: expected another factor")


@dataclass(frozen=True, kw_only=True)
class Churn(Settings):
    """Peers that come and go by chance, or as they were seen to."""

    fail_per_hour: float = 0.0
    """How often each peer is gone without a word, at exponential intervals."""
    return_after: Duration = AWAY
    """How long a failed peer stays away."""
    trace: str = ""
    """CSV of `time, peer, up|down` instead, from the scenario's folder."""

    def check(self) -> None:
        expect(self, "fail_per_hour", 0 <= self.fail_per_hour < float("inf"), "at least 0")
        positive(self, "return_after")
        if self.trace and self.fail_per_hour:
            raise SettingsError(
                "trace", "says when peers are gone, and so does `fail_per_hour`: expected one"
            )
        if self.return_after != AWAY and not self.fail_per_hour:
            raise SettingsError(
                "return_after", "is of peers that fail by chance: expected it with `fail_per_hour`"
            )


@dataclass(frozen=True, kw_only=True)
class Expectations(Settings):
    """What a simulation must reach, or it ends with exit code 1."""

    loss_below: float | None = None
    """A bound on the loss of the last step. Ghosts have none; then it says nothing."""
    goodput_at_least: float | None = None
    """Share of the time that went into steps that counted."""
    max_loss_difference: float | None = None
    """From the single process, at any step; the simulation is verified then."""
    step_time_error_at_most: float | None = None
    """A bound on the error of the prediction, relative to what was measured."""

    def check(self) -> None:
        share(self, "goodput_at_least", whole=True)
        for name in ("loss_below", "max_loss_difference", "step_time_error_at_most"):
            if (value := getattr(self, name)) is not None and not 0 <= value < float("inf"):
                raise SettingsError(name, f"is {value}: expected at least 0, and finite")
