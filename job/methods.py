"""The methods of `[sync] kind = "allreduce"` with the options of each: what holders of a stage make
of their gradients so that all have equal weights after every step.

A method that is not "exact" encodes gradients itself. How: `peer/sync/`; what plans must know of
it: `dag/plan/strategies.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from .settings import Settings, SettingsError, at_least, at_most, expect, meant

__all__ = ["METHODS", "Method", "method_options", "method_text"]


class Method(Settings):
    """The options of a method."""

    COLLECTIVE: ClassVar[str] = ""
    """By which alone its messages go; empty: by any that adds up."""


@dataclass(frozen=True, kw_only=True)
class Exact(Method):
    """The mean gradient, as any codec of `codec.grad` carries it."""


@dataclass(frozen=True, kw_only=True)
class PowerSGDOptions(Method):
    """Gradients of low rank, added up in two messages, with error feedback."""

    rank: int = 4
    """Of each matrix; 1 to 4 are usual."""
    saving: float = 2.0
    """A matrix that low rank does not make so many times smaller goes as it is; 0: none does."""

    def check(self) -> None:
        at_least(self, 1, "rank")
        at_least(self, 0, "saving")


@dataclass(frozen=True, kw_only=True)
class ACPSGDOptions(PowerSGDOptions):
    """Options of PowerSGD with one message in a step: one of both factors in turns."""


@dataclass(frozen=True, kw_only=True)
class GTopKOptions(Method):
    """About the largest numbers of the sum of all gradients of a stage, with error feedback."""

    COLLECTIVE: ClassVar[str] = "tree"

    ratio: float = 1000.0
    """The ratio-th part of them, in messages of as many pairs."""

    def check(self) -> None:
        at_least(self, 1, "ratio")


@dataclass(frozen=True, kw_only=True)
class DeMoOptions(Method):
    """The fastest components of each holder's momentum, and a step by their sign. It is the
    optimizer: with it goes SGD without momentum."""

    COLLECTIVE: ClassVar[str] = "gather"

    block: int = 64
    """Side of the blocks that a parameter is transformed in."""
    top: int = 32
    """How many numbers of each block are sent."""
    decay: float = 0.999
    """Of the momentum, in [0, 1)."""

    def check(self) -> None:
        at_least(self, 1, "block", "top")
        at_most(self, 128, "block")
        expect(self, "decay", 0 <= self.decay < 1, "a share in [0, 1)")


@dataclass(frozen=True, kw_only=True)
class LAGSOptions(Method):
    """The largest gradients of each parameter of every holder, with error feedback, and more of
    them where the time is there."""

    COLLECTIVE: ClassVar[str] = "gather"

    ratio: float = 1000.0
    """At least the ratio-th part of each parameter; of a stage more, if by prediction it arrives
    while earlier stages still compute."""

    def check(self) -> None:
        at_least(self, 1, "ratio")


METHODS: Mapping[str, type[Method]] = {
    "exact": Exact,
    "gtopk": GTopKOptions,
    "demo": DeMoOptions,
    "lags": LAGSOptions,
    "powersgd": PowerSGDOptions,
    "acp-sgd": ACPSGDOptions,
}
"""By the name that `[sync] method` has."""


def method_options(method: str, options: Mapping[str, Any]) -> Method:
    """The settings of a method. Raises SettingsError for a method or an option that there is
    not."""
    if method not in METHODS:
        known = ", ".join(f'"{name}"' for name in METHODS)
        raise SettingsError(
            "method", f'is "{method}", which there is not{meant(method, METHODS)} (known: {known})'
        )
    try:
        return METHODS[method].from_table(options)
    except SettingsError as error:
        raise error.inside("options") from None


def method_text(method: str, options: Mapping[str, Any]) -> str:
    """As plans name it, with all options."""
    if method == "exact":
        return "mean"
    found = method_options(method, options)
    named = ((f.name, float(getattr(found, f.name))) for f in fields(found))  # type: ignore[arg-type]
    text = ",".join(f"{name}={value!r}".removesuffix(".0") for name, value in named)
    return f"{method}:{text}" if text else method
