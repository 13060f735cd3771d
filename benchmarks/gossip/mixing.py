"""How fast replicas that meet in pairs become alike.

A round's matrix W has ½ where two meet, and 1 for who is alone. Per coordinate that is exchanged, a
round leaves the share ρ of E‖x - mean‖² at most, the second eigenvalue of E[WᵀW]; where a share s
of the coordinates is exchanged, 1 - (1 - ρ)·s. Random perfect matchings: (n - 2) / (2(n - 1)).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shoal.broker.policies.pairs.selection import Pairs, PairSettings, pairs_of_round

__all__ = ["matrix", "of_random_pairs", "pairs_of_rounds", "second_eigenvalue"]


def pairs_of_rounds(
    method: str,
    seed: int,
    rounds: range,
    who: Sequence[str],
    bandwidth: NDArray[np.float64],
    settings: PairSettings | None = None,
    history: Sequence[Pairs] = (),
) -> tuple[Pairs, ...]:
    """Return the pairs of rounds that follow one another; `history`: of those before them."""
    met, settings = [*history], settings or PairSettings()
    for number in rounds:
        past = met[-settings.recent :]
        met.append(pairs_of_round(method, seed, number, who, bandwidth, past, settings))
    return tuple(met[len(history) :])


def matrix(who: Sequence[str], pairs: Pairs) -> NDArray[np.float64]:
    """(n, n): what each replica is after a round, of what all were before. Doubly stochastic."""
    at = {name: i for i, name in enumerate(who)}
    found = np.eye(len(who))
    for a, b in pairs:
        both = [at[a], at[b]]
        found[np.ix_(both, both)] = 0.5
    return found


def second_eigenvalue(who: Sequence[str], rounds: Sequence[Pairs]) -> float:
    """ρ over these rounds; 1 where two parts never met. For two replicas or more."""
    matrices = [matrix(who, pairs) for pairs in rounds]
    mean = np.mean([w.T @ w for w in matrices], axis=0)
    return float(np.linalg.eigvalsh(mean)[-2])


def of_random_pairs(n: int) -> float:
    """ρ of random perfect matchings of n replicas, n even."""
    return (n - 2) / (2 * (n - 1))
