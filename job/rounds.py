"""What replicas do between their own steps: the methods of [sync] with their options, and what of
that peers get."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .settings import Settings, SettingsError, at_least

__all__ = ["LOCAL", "Average", "Diloco", "RoundSettings", "options_of"]


@dataclass(frozen=True, kw_only=True)
class Average(Settings):
    """average: every replica goes on from the mean of all."""


@dataclass(frozen=True, kw_only=True)
class Diloco(Settings):
    """diloco: what replicas moved on the mean is a gradient for an outer SGD with Nesterov
    momentum."""

    lr: float = 0.7
    """Outer learning rate."""
    momentum: float = 0.9
    """Outer momentum, in [0, 1)."""

    def check(self) -> None:
        if not self.lr > 0:
            raise SettingsError("lr", f"is {self.lr}: expected more than 0")
        if not 0 <= self.momentum < 1:
            raise SettingsError("momentum", f"is {self.momentum}: expected a number in [0, 1)")


LOCAL: Mapping[str, type[Settings]] = {"diloco": Diloco, "average": Average}
"""Methods of kind "local", and their options."""


def options_of(method: str, options: Mapping[str, Any]) -> Settings:
    """The options of a method, read strictly. Raises SettingsError."""
    if method not in LOCAL:
        raise SettingsError("method", f'is "{method}": expected one of {", ".join(LOCAL)}')
    return LOCAL[method].from_table(options)


@dataclass(frozen=True, kw_only=True)
class RoundSettings(Settings):
    """What a peer needs to know of rounds between replicas."""

    method: str
    """As in [sync]."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of the method."""
    codec: str = "none"
    """What contributions and results are encoded with."""
    replicas: int = 1
    """Among so many a batch is divided."""

    def check(self) -> None:
        options_of(self.method, self.options)
        at_least(self, 1, "replicas")
