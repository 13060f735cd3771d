"""Names of peers: "home-{1..4}" stands for four, and selectors pick some of them."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from ...job.settings import SettingsError, meant
from ...job.units import ByteCount, UnitError

if TYPE_CHECKING:
    from .tables import PeerTable

__all__ = ["BROKER", "MOST_PEERS", "NAME", "count", "expand", "named", "select"]

MOST_PEERS = 4096
"""The most peers of one scenario: its matrices have this many squared numbers, 134 MB each."""
BROKER = "broker"
"""What the broker is called where peers have names."""

NAME = re.compile(r"[A-Za-z0-9_.-]+")
_RANGE = re.compile(r"\{([0-9]{1,18})\.\.([0-9]{1,18})\}")


def count(name: str) -> int:
    """How many peers a name stands for. Raises SettingsError unless it is one, or has one range."""
    ranges = _RANGE.findall(name)
    if not NAME.fullmatch(_RANGE.sub("", name) or "-") or len(ranges) > 1 or not name:
        example = 'letters, digits, - _ . and at most one range such as "home-{1..4}"'
        raise SettingsError("name", f'is "{name}": expected {example}')
    if not ranges:
        return 1
    first, last = (int(n) for n in ranges[0])
    if not first <= last < first + MOST_PEERS:
        problem = f"ends before it starts: {first} to {last}"
        if last > first:
            problem = f"is {last - first + 1} peers: expected at most {MOST_PEERS}"
        raise SettingsError("name", f'is "{name}": its range {problem}')
    return last - first + 1


def expand(name: str) -> tuple[str, ...]:
    """The names that a name with a range stands for, after `count`."""
    ranges = _RANGE.search(name)
    if ranges is None:
        return (name,)
    numbers = range(int(ranges[1]), int(ranges[2]) + 1)
    return tuple(f"{name[: ranges.start()]}{n}{name[ranges.end() :]}" for n in numbers)


def named(peers: Sequence[PeerTable]) -> Iterator[PeerTable]:
    """Each peer by itself. Raises SettingsError for too many, and for a name that is taken."""
    total, seen, places = 0, dict[str, int](), {p.place for p in peers}
    for i, entry in enumerate(peers):
        total += count(entry.name)
        if total > MOST_PEERS:
            raise SettingsError(
                f"peers[{i}].name", f"makes {total} peers: expected at most {MOST_PEERS} in all"
            )
        for name in expand(entry.name):
            if name in seen:
                raise SettingsError(
                    f"peers[{i}].name",
                    f'gives the name "{name}", which number {seen[name] + 1} of [[peers]] has '
                    "already: expected a name of its own for every peer",
                )
            if name in places:
                raise SettingsError(
                    f"peers[{i}].name",
                    f'gives the name "{name}", which is a place: links could not tell them apart',
                )
            if name == BROKER:
                raise SettingsError(
                    f"peers[{i}].name",
                    f'gives the name "{BROKER}", which is what faults call the broker',
                )
            seen[name] = i
            peer = copy.copy(entry)  # checked already, and there may be thousands
            object.__setattr__(peer, "name", name)
            if entry.entry is None:  # else it was expanded before
                object.__setattr__(peer, "entry", i)
            yield peer


def select(
    selectors: Sequence[str], peers: Sequence[PeerTable], key: str = "who"
) -> tuple[str, ...]:
    """The names of the peers that any of the selectors picks, in the peers' order; "broker", where
    it is one of the selectors, comes last. `key` is where the selectors stand in the file.

    Raises SettingsError for one that picks nobody.
    """
    picked: set[str] = set()
    for i, selector in enumerate(selectors):
        if selector == BROKER:
            continue
        here = [peer.name for peer in peers if _picks(selector, peer, f"{key}[{i}]")]
        if not here:
            known = [p.name for p in peers] + [p.place for p in peers]
            raise SettingsError(
                f"{key}[{i}]",
                f'is "{selector}", which no peer is called and none fits'
                f"{meant(selector.rpartition(':')[2], dict.fromkeys(known))}",
            )
        picked.update(here)
    names = [peer.name for peer in peers if peer.name in picked]
    return (*names, BROKER) if BROKER in selectors else tuple(names)


def _picks(selector: str, peer: PeerTable, key: str) -> bool:
    kind, _, value = selector.partition(":")
    if kind == "place":
        return fnmatchcase(peer.place, value)
    if kind == "owner":
        return fnmatchcase(peer.owner, value)
    if selector.startswith("memory>="):
        try:
            return peer.memory >= ByteCount(selector.removeprefix("memory>="))
        except UnitError as error:
            raise SettingsError(key, f"is not readable: {error}") from None
    return fnmatchcase(peer.name, selector) or peer.place == selector
