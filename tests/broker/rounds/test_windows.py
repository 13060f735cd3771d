"""Whose part counts in a round that somebody is past, against all that each replica's weights have
come from."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shoal.broker.rounds.windows import settled
from shoal.proto.broker_pb2 import RoundMember

REPLICAS, ROUNDS = 5, 4
Part = tuple[int, int]
"""What a replica gave in a round."""


def partners(data: st.DataObject) -> list[dict[int, int]]:
    """By round, with whom each exchanges; who is alone, with itself."""
    found = []
    for _ in range(ROUNDS):
        order = data.draw(st.permutations(range(REPLICAS)))
        pairs = list(zip(order[::2], order[1::2], strict=False))
        alone = {n: n for n in order[2 * len(pairs) :]}
        found.append(alone | {a: b for a, b in pairs} | {b: a for a, b in pairs})
    return found


@given(st.data())
def test_a_part_counts_if_somebody_who_is_there_goes_on_with_it(data: st.DataObject) -> None:
    met = partners(data)
    at, did = dict.fromkeys(range(REPLICAS), 0), dict.fromkeys(range(REPLICAS), 0)
    """The round of each, and whether it has given its part there (1), and made the version (2)."""
    has: dict[Part, set[Part]] = {(n, 0): set() for n in range(REPLICAS)}
    """By replica and round, what is in the weights that it begins the round with."""
    for n in data.draw(st.lists(st.integers(0, REPLICAS - 1), max_size=60)):
        round_, other = at[n], met[at[n]][n] if at[n] < ROUNDS else n
        if round_ == ROUNDS:
            continue
        theirs = 3 if at[other] > round_ else did[other] if at[other] == round_ else 0
        if did[n] == 0 or (did[n] == 1 and theirs >= 1):
            did[n] += 1
        elif did[n] == 2 and theirs >= 2:  # all that it sent has come
            both = has[n, round_] | has[other, round_]
            has[n, round_ + 1] = both | {(n, round_), (other, round_)}
            at[n], did[n] = round_ + 1, 0
    gone = data.draw(st.sets(st.integers(0, REPLICAS - 1)))
    there = {n: k for n, k in at.items() if n not in gone}
    wanted = {part for n, k in there.items() for part in has[n, k] if part[0] in gone}
    rounds = [
        [RoundMember(replica=n, group=1 + min(n, m[n])) for n in range(REPLICAS)] for m in met
    ]
    for first in range(ROUNDS):
        found = settled(rounds[first:], first, there)
        assert found >= {n for n, round_ in wanted if round_ == first}
        assert found <= gone
        for n in found:  # it has done it
            assert at[n] > first or (at[n] == first and did[n] >= 1)
