"""Clients of federated training that are pipelines: only where no peer has the memory for the whole
model, since one peer trains its clients side by side, and exchanges nothing for it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from ..base.interface import NoPlan, PlannerOptions
from ..requests.requirements import RunRequirements

__all__ = ["fewest_of", "most_of", "or_deeper"]

T = TypeVar("T")


def or_deeper(wish: RunRequirements, made: Callable[[PlannerOptions], T]) -> T:
    """Return what is made by the options that are asked for; where that lacks memory for a client
    on one peer, by those with as many stages as it takes. Raises NoPlan."""
    try:
        return made(wish.options)
    except NoPlan as error:
        alone = wish.cohorts is not None and wish.options.stages == 1
        if not alone or error.code != "memory":
            raise
        if (deeper := wish.deeper) is None:
            text = f"{error.reason}; several peers cannot train a client together: {wish.one_peer}"
            raise NoPlan(text, error.code, error.short_bytes) from None
        return made(deeper)


def most_of(most: int, made: Callable[[int], T]) -> T:
    """Return what is made of as many as can be, up to `most`. Raises NoPlan where it cannot be made
    of one."""
    found, least = made(1), 1
    while least < most:
        middle = (least + most + 1) // 2
        try:
            found, least = made(middle), middle
        except NoPlan:
            most = middle - 1
    return found


def fewest_of(least: int, most: int, made: Callable[[int], T]) -> T:
    """Return what is made of as few as it takes, from `least` to `most`. Raises NoPlan where it
    cannot be made of the most."""
    if least < most:
        with suppress(NoPlan):
            return made(least)
    found = made(most)
    while most - least > 1:
        middle = (least + most) // 2
        try:
            found, most = made(middle), middle
        except NoPlan:
            least = middle
    return found
