"""Who meets whom in a round: a pure function of seed, round, links and who is there.

    saps           fast links, and no two parts apart for long (2002.09692, with a rule of ours)
    random-pairs   a random matching of all, whatever the links are
    ring           neighbours in the order of their names: the next one, then the one before

SAPS, in one round, the slower direction of a link being its rate:

    1. high = links of at least the threshold.
    2. Where the last T rounds left parts unconnected, links between parts, as few as connect them,
       nobody twice: high ones at random, else the fastest.
    3. Of the others, high links that join components of the last T / 2 rounds, in random order;
       then other high links; then augmenting paths over all high links.
    4. Whoever is left is matched without restriction.

The authors take links that were not used recently, whatever their rate, as soon as the last T
rounds are unconnected. Ours has T / 2 rounds to connect them by high links, and then takes a slow
one only where there is no high one, so T may be short. Rounds before the history began count
neither as connected nor as unconnected.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from .matching import ALONE, Bools, Mates, maximal, maximum, weights
from .threshold import fastest_threshold

__all__ = ["METHODS", "PairLinks", "PairSettings", "Pairs", "pairs_of_round"]

Floats = NDArray[np.float64]
Pairs = tuple[tuple[str, str], ...]
"""Of one round, in ascending order, and so are both names in a pair; nobody is in two."""


@dataclass(frozen=True, kw_only=True)
class PairSettings:
    """What a user may say of saps."""

    threshold: float | None = None
    """Bytes/s in both directions from which a link is a fast one. None: the most that leaves
    everybody two partners to alternate between."""
    recent: int = 10
    """Rounds after which parts that did not meet are made to. Fewer cost bandwidth where fast links
    alone do not connect all."""

    def __post_init__(self) -> None:
        if self.threshold is not None and not self.threshold >= 0:
            raise ValueError(f"threshold is {self.threshold}: expected bytes/s, 0 or more")
        if self.recent < 1:
            raise ValueError(f"recent is {self.recent}: expected at least 1 round")


@dataclass(frozen=True, eq=False)
class PairLinks:
    """What a method knows of n replicas in the order of their names."""

    rate: Floats
    """(n, n) bytes/s in the slower direction; 0: no link, and so on the diagonal."""
    settings: PairSettings

    @cached_property
    def high(self) -> Bools:
        """Booleans of the pairs at or above the threshold, (n, n)."""
        threshold = self.settings.threshold
        if threshold is None:
            threshold = fastest_threshold(self.rate)
        return (self.rate > 0) & (self.rate >= threshold)


Method = Callable[[PairLinks, int, int, Sequence[Mates]], Mates]
"""(links, key, round, past): `key` is 64 random bits of this round, `past` the rounds before."""


def pairs_of_round(
    method: str,
    seed: int,
    number: int,
    who: Sequence[str],
    bandwidth: Floats,
    history: Sequence[Pairs] = (),
    settings: PairSettings | None = None,
) -> Pairs:
    """Return the pairs of round `number`.

    `bandwidth` (n, n): bytes/s from row to column, in the order of `who`; 0 or NaN: no link.
    `history`: the pairs of the rounds before it, the newest last, of which `settings.recent` are
    enough; names that are not in `who` do not count. The order of `who` changes nothing. Raises
    ValueError for a method that there is not, and where names and shape do not fit.
    """
    if method not in METHODS:
        raise ValueError(f"method is {method!r}: expected one of {', '.join(METHODS)}")
    if len(set(who)) < len(who) or bandwidth.shape != (len(who), len(who)):
        raise ValueError(f"bandwidth has shape {bandwidth.shape} for {len(who)} names: {who}")
    settings = settings or PairSettings()
    order = sorted(range(len(who)), key=lambda i: who[i])
    names = [who[i] for i in order]
    both = np.minimum(bandwidth, bandwidth.T)  # NaN where one is
    rate = np.where(both > 0, both, 0.0)[np.ix_(order, order)]
    np.fill_diagonal(rate, 0.0)
    links = PairLinks(rate, settings)
    past = [_mates(names, pairs) for pairs in history]
    mates = METHODS[method](links, _key(seed, number), number, past)
    return tuple((names[i], names[j]) for i, j in enumerate(mates.tolist()) if i < j)


def saps(links: PairLinks, key: int, round: int, past: Sequence[Mates]) -> Mates:
    """The rule at the top of this file."""
    rate, high, recent = links.rate, links.high, links.settings.recent
    order, mates = weights(key, len(rate)), _alone(len(rate))
    if len(past) >= recent:
        any_high = rate.max(initial=0.0) * (1 + order / 2.0**64)
        mates = _joined(np.where(high, any_high, rate), _components(past[-recent:], len(rate)))
    part = _components(past[len(past) - min(len(past), recent // 2) :], len(rate))
    others = mates == ALONE
    high = high & others & others[:, None]
    mates = maximal(high & (part[:, None] != part), order, mates)
    mates = maximum(high, order, maximal(high, order, mates))
    return maximal(rate > 0, order, mates)


def random_pairs(links: PairLinks, key: int, round: int, past: Sequence[Mates]) -> Mates:
    """A random matching of all."""
    linked = links.rate > 0
    order = weights(key, len(linked))
    return maximum(linked, order, maximal(linked, order, _alone(len(linked))))


def ring(links: PairLinks, key: int, round: int, past: Sequence[Mates]) -> Mates:
    """In an even number everybody meets the two neighbours in turn; of an odd one somebody else is
    alone in each round. Where neighbours have no link, both are alone."""
    n = len(links.rate)
    mates = _alone(n)
    for i in range(round, round + n - 1, 2):
        a, b = i % n, (i + 1) % n
        if links.rate[a, b] > 0:
            mates[a], mates[b] = b, a
    return mates


METHODS: Mapping[str, Method] = {"saps": saps, "random-pairs": random_pairs, "ring": ring}
"""The registry: by name, who meets whom in one round."""


def _key(seed: int, round: int) -> int:
    digest = hashlib.blake2b(struct.pack("<qq", seed, round), digest_size=8, person=b"pairs")
    return int.from_bytes(digest.digest(), "little")


def _alone(n: int) -> Mates:
    return np.full(n, ALONE, dtype=np.int64)


def _mates(names: Sequence[str], pairs: Pairs) -> Mates:
    at, mates = {name: i for i, name in enumerate(names)}, _alone(len(names))
    for a, b in pairs:
        if a in at and b in at:
            mates[at[a]], mates[at[b]] = at[b], at[a]
    return mates


def _components(rounds: Sequence[Mates], n: int) -> NDArray[np.int64]:
    """(n,): a number for the component that each replica is in, by who met whom."""
    part = np.arange(n)
    while True:
        before, part = part, part[part]  # labels are members: their labels are as good
        for mates in rounds:
            part = np.minimum(part, part[np.where(mates == ALONE, np.arange(n), mates)])
        if np.array_equal(part, before):
            return part


def _joined(rate: Floats, part: NDArray[np.int64]) -> Mates:
    """The fastest links that connect the parts, nobody twice; all alone where there is one part."""
    part, mates = part.copy(), _alone(len(part))
    while len(np.unique(part)) > 1:
        free = mates == ALONE
        between = np.where((part[:, None] != part) & free & free[:, None], rate, 0.0)
        a, b = divmod(int(between.argmax()), len(part))
        if between[a, b] == 0.0:
            break
        mates[a], mates[b] = b, a
        part[part == part[b]] = part[a]
    return mates
