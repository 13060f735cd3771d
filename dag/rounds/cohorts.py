"""Which clients are in a round of federated training: a pure function of (seed, round).

The cohort of a round are the first `per_round` of its clients in the order that `permute` gives
them under the key (seed, COHORT, round) (`permutation.py`). Where a rule of the submitter's has
chosen others, they are said by their places in that order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from ...proto.broker_pb2 import SampleRange
from ..permutation import Domain, key, permute

__all__ = [
    "WEIGHT_UNIT",
    "client_steps",
    "cohort_of",
    "effective_lengths",
    "places_of",
    "places_of_clients",
    "ranges_of",
    "state_number",
]

WEIGHT_UNIT = 1 << 20
"""What a sample counts for where weights of clients are told: they are integers, and shares are
not."""
_TERMS = 1 << 20


def state_number(round_: int, term: int) -> int:
    """Return the number of the state of clients that a replica trained in a round and in a term of
    its own, above 0: another peer that trains the same ones in its place has another."""
    return (round_ + 1) * _TERMS + term % _TERMS


def places_of(ranges: Iterable[SampleRange]) -> list[int]:
    """Return the places of a cohort that lie in these ranges."""
    return [place for r in ranges for place in range(r.first, r.first + r.count)]


def ranges_of(places: Sequence[int]) -> list[SampleRange]:
    """Return ranges of places, given in ascending order."""
    found: list[SampleRange] = []
    for place in places:
        if found and place == found[-1].first + found[-1].count:
            found[-1].count += 1
        else:
            found.append(SampleRange(first=place, count=1))
    return found


def cohort_of(clients: int, seed: int, round_: int, places: Iterable[int]) -> list[int]:
    """Return which of so many clients are at these places of a round's cohort, by number. seed: the
    run's."""
    at = np.fromiter(places, np.int64)
    found: list[int] = permute(at, clients, key(seed, Domain.COHORT, round_)).tolist()
    return found


def places_of_clients(clients: int, seed: int, round_: int, chosen: Iterable[int]) -> list[int]:
    """Return the places at which these clients, by number, stand in a round's order of all,
    ascending: what `cohort_of` returns them for."""
    wanted = np.fromiter(chosen, np.int64)
    order = np.array(cohort_of(clients, seed, round_, range(clients)))
    found: list[int] = np.flatnonzero(np.isin(order, wanted)).tolist()
    return found


def client_steps(
    sizes: npt.ArrayLike, batch: int, *, passes: int, steps: int
) -> npt.NDArray[np.int64]:
    """Return how many steps each client makes in a round, (clients,), by its `sizes` in samples:
    `passes` over these in batches of `batch`, or so many `steps`; one of the two is 0."""
    samples = np.asarray(sizes, np.int64)
    return np.full(samples.shape, steps) if steps else passes * -(-samples // batch)


def effective_lengths(
    sizes: npt.ArrayLike, batch: int, *, passes: int, steps: int, momentum: float
) -> npt.NDArray[np.float64]:
    """Return what the local steps of SGD of each client count for together, (clients,), a_i of
    FedNova (Wang et al. 2020, 2007.07481): of t steps with momentum m, of which step k counts for
    1 + m + ... + m^(t - k), that is (t - m (1 - m^t) / (1 - m)) / (1 - m); t (t + 1) / 2 where m
    is 1.

    The arguments are those of `client_steps`."""
    each = client_steps(sizes, batch, passes=passes, steps=steps)
    left = 1.0 - momentum
    if not left:
        return np.asarray(each * (each + 1.0) / 2.0, np.float64)
    return np.asarray((each - momentum * (1.0 - momentum**each) / left) / left, np.float64)
