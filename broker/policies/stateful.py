"""Clients that have state: where each is trained in a round.

State stays with the replica that trained the client last (`broker/records/client_homes.py`), so it
is trained there again, and whose replica is not in the round is left out of it. Whose state is gone
for good begins without; and so do all, where replicas share the mean of all states, for it would be
that of no clients any more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ..records.client_homes import ClientHomes
from .handing import divide

__all__ = ["StatefulWork", "place_clients"]


@dataclass(frozen=True)
class StatefulWork:
    """places: by replica, which of the cohort it trains, ascending. trained: by place, as in
    RoundStart. afresh: whether no client has state from here on."""

    places: Mapping[int, Sequence[int]]
    trained: Sequence[int]
    afresh: bool


def place_clients(
    homes: ClientHomes,
    asked: Sequence[int],
    seconds: Mapping[int, float],
    running: Collection[int],
    *,
    shared: bool,
) -> StatefulWork:
    """Return where the clients of a cohort are trained. `asked`: by place of the cohort, the
    client. `seconds`: by replica that is in the round, how long it takes for one, 0: not known.
    `running`: replicas that are at work, in the round or not. `shared`: whether replicas share the
    mean of all states."""
    at = [homes.replica(client) for client in asked]
    lost = [homes.lost and shared, *(n is not None and n not in running for n in at)]
    if not any(n is None or n not in running or n in seconds for n in at):
        lost = [True for _ in lost]  # else nobody would be in the round
    afresh = shared and (any(lost) or not homes.known)
    found: defaultdict[int, list[int]] = defaultdict(list)
    new, trained = list[int](), [homes.trained(client) for client in asked]
    for place, number in enumerate(at):
        if afresh or number is None or lost[1 + place]:
            trained[place] = 0
            new.append(place)
        elif number in seconds:
            found[number].append(place)
    replicas = sorted(seconds)
    whole = len(new) + sum(map(len, found.values()))
    share = dict(zip(replicas, divide(whole, [seconds[n] for n in replicas]), strict=True))
    for place in new:
        most = max(replicas, key=lambda n: (share[n] - len(found[n]), -n))
        found[most].append(place)
    places = {n: sorted(found[n]) for n in replicas if found[n]}
    return StatefulWork(places, trained, afresh)
