"""Names of peers: "home-{1..4}" stands for four, and selectors pick some of them."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from ...job.settings import SettingsError, meant
from ...job.units import ByteCount, UnitError
from .tables import MOST_PEERS, PeerTable, count, expand

__all__ = ["BROKER", "named", "select"]

BROKER = "broker"
"""What the broker is called where peers have names."""


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
            taken = "is what faults call the broker" if name == BROKER else ""
            if name in places:
                taken = "is a place: links could not tell them apart"
            if name in seen:
                taken = f"number {seen[name] + 1} of [[peers]] has already: expected a name of its "
                taken += "own for every peer"
            if taken:
                raise SettingsError(f"peers[{i}].name", f'gives the name "{name}", which {taken}')
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
