"""Clients of a replica that is lost in a round, handed to others in the same round. Pure.

Where all who are left have trained theirs, they train those of the lost as well, each some of them,
from the same version: a client's work is a function of (seed, round, client), so the round comes to
what it comes to if nobody is lost. Who takes more adds up what it has and what is to come by
weight, and says that it is ready once more (`RoundWork.more`). It is done only where the deadline
is expected to allow it, by how long the slowest took for its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy

from ...dag.rounds.cohorts import places_of, ranges_of
from ...proto.broker_pb2 import RoundWork
from .handing import divide

__all__ = ["handed_on", "with_places"]


def handed_on(
    given: Mapping[int, RoundWork],
    lost: Sequence[int],
    seconds: Mapping[int, float],
    *,
    took_s: float,
    left_s: float,
) -> list[RoundWork]:
    """Return the work of the round anew: none of the `lost`, more of those that take it; empty:
    nobody does. given: by replica. seconds: of one that may take some, what it needs for one
    client, by comparison; 0: not known. took_s: how long the slowest took for its own. left_s:
    until the deadline."""
    places = [place for n in lost for place in places_of(given[n].cohort)]
    if not places or not seconds:
        return []
    found, start = list[RoundWork](), 0
    for n, count in zip(seconds, divide(len(places), [*seconds.values()]), strict=True):
        own, taken = places_of(given[n].cohort), places[start : start + count]
        start += count
        if took_s * count > left_s * len(own):
            return []
        if taken:
            found.append(with_places(given[n], sorted([*own, *taken])))
            found[-1].more += 1
    return [*(with_places(given[n], ()) for n in lost), *found]


def with_places(work: RoundWork, places: Sequence[int]) -> RoundWork:
    """Return work with the clients at these places of the cohort in place of its own."""
    found = deepcopy(work)
    found.ClearField("cohort")
    found.cohort.extend(ranges_of(places))
    return found
