"""Which clients are in a round of federated training: a pure function of (seed, round).

The cohort of a round are the first `per_round` of its clients in the order that `permute` gives
them under the key (seed, COHORT, round) (`permutation.py`).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ...proto.broker_pb2 import SampleRange
from .permutation import Domain, key, permute

__all__ = ["cohort_of", "places_of"]


def places_of(ranges: Iterable[SampleRange]) -> list[int]:
    """Return the places of a cohort that lie in these ranges."""
    return [place for r in ranges for place in range(r.first, r.first + r.count)]


def cohort_of(clients: int, seed: int, round_: int, places: Iterable[int]) -> list[int]:
    """Return which of so many clients are at these places of a round's cohort, by number. seed: the
    run's."""
    at = np.fromiter(places, np.int64)
    found: list[int] = permute(at, clients, key(seed, Domain.COHORT, round_)).tolist()
    return found
