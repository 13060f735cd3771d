"""Which samples a participant's batches have: a pure function of (seed, round, participant).

A participant walks its own samples in passes without replacement, each in another order, in batches
of `batch`; the last one of a pass has what is left. Sample i of pass e of round r is its sample
`permute(i)` under the key (seed, BATCH, r, participant, e) of `dag/permutation.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...dag.permutation import Domain, Indices, key, permute

__all__ = ["Participant", "batches"]


@dataclass(frozen=True, slots=True, eq=False)
class Participant:
    """A client of the cohort of a round. samples: (n,) int64, places of its samples in the data
    set."""

    number: int
    samples: Indices


def batches(
    cohort: Sequence[Participant],
    *,
    seed: int,
    round_: int,
    batch: int,
    passes: int = 0,
    steps: int = 0,
) -> list[list[Indices]]:
    """By participant, the places of the samples of each of its batches: (batch,) or, at the end of
    a pass, fewer. `passes` over its samples, or so many `steps`: one of the two is 0. Raises
    ValueError for a participant without samples."""
    assert bool(passes) != bool(steps), "passes or steps"
    counts = [len(p.samples) for p in cohort]
    if 0 in counts:
        number = cohort[counts.index(0)].number
        raise ValueError(f"participant {number} has no samples: expected at least one")
    walks = [passes or -(-steps // -(-n // batch)) for n in counts]
    # All orders of all participants in one go: each is a few operations on arrays.
    each = np.repeat(counts, walks)  # by pass of a participant
    of = np.repeat([p.number for p in cohort], walks)
    at = np.concatenate([np.arange(w) for w in walks])
    index = np.arange(each.sum()) - np.repeat(np.cumsum(each) - each, each)
    keys = key(seed, Domain.BATCH, round_, of.astype(np.uint64), at.astype(np.uint64))
    order = permute(index, np.repeat(each, each), np.repeat(keys, each))
    found, start = list[list[Indices]](), 0
    for participant, n, walk in zip(cohort, counts, walks, strict=True):
        mine = participant.samples[order[start : start + n * walk]]
        start += n * walk
        cuts = [
            (e, min(e + batch, end))
            for end in range(n, n * walk + 1, n)
            for e in range(end - n, end, batch)
        ]
        found.append([mine[a:b] for a, b in cuts[: steps or None]])
    return found
