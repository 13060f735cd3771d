"""Where clients with state are trained, by hand and at random."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from shoal.broker.policies.stateful import place_clients
from shoal.broker.records.client_homes import ClientHomes
from shoal.dag.rounds.cohorts import cohort_of, places_of, ranges_of, state_number
from shoal.proto.broker_pb2 import RoundBegun, RoundDone, RoundMember, RoundWork

CLIENTS, PER_ROUND, SEED = 9, 4, 5


def begin(homes: ClientHomes, number: int, places: dict[int, Sequence[int]], afresh: bool) -> dict:
    work = {
        n: RoundWork(replica=n, cohort=ranges_of(at), afresh=afresh) for n, at in places.items()
    }
    homes.begin(RoundBegun(round=number, work=work.values()))
    return work


rounds = st.lists(
    st.tuples(
        st.sets(st.integers(0, 3), min_size=1),  # in the round
        st.sets(st.integers(0, 3)),  # at work besides
        st.sets(st.integers(0, 3)),  # whose contribution counts
        st.sets(st.integers(0, PER_ROUND - 1)),  # places whose state is found to be lost
    ),
    max_size=8,
)


@given(rounds=rounds, shared=st.booleans())
def test_state_is_where_the_client_was_trained_last(rounds: list, shared: bool) -> None:
    """Against a dictionary of what each client came to where: nobody is told to go on with state
    that its replica does not have, or that is not its last; and of a mean that all share none is
    forgotten without all being so."""
    homes = ClientHomes(CLIENTS, SEED)
    has: dict[int, tuple[int, int]] = {}
    """By client, its replica and the number of its state."""
    for number, (inside, besides, counted, lost) in enumerate(rounds):
        asked = cohort_of(CLIENTS, SEED, number, range(PER_ROUND))
        seconds = dict.fromkeys(sorted(inside), 1.0)
        was = homes.lost
        found = place_clients(homes, asked, seconds, inside | besides, shared=shared)
        if found.afresh:
            assert shared
            has.clear()
        assert not (was and shared and not found.afresh)
        at = [place for places in found.places.values() for place in places]
        assert len(at) == len({*at}), "each once"
        assert at, "somebody is in the round"
        for n, places in found.places.items():
            assert n in inside
            assert list(places) == sorted(places)
            for place in places:
                client, since = asked[place], found.trained[place]
                home = has.get(client)
                assert since == 0 or home == (n, since)
                assert since or home is None or not shared, "its share of the mean would be lost"
                assert since or home is None or home[0] not in inside | besides or len(at) == 4
        for place in {*range(PER_ROUND)} - {*at}:
            assert has[asked[place]][0] in besides, "only who is at work elsewhere is left out"
        work = begin(homes, number, dict(found.places), found.afresh)
        for n in work:
            gone = sorted(lost & {*places_of(work[n].cohort)})
            if gone and shared:
                work[n].lost.extend(gone)
                homes.begin(RoundBegun(round=number, work=[work[n]]))
        members = [n for n in work if n in counted]
        done = RoundDone(round=number, members=[RoundMember(replica=n, term=2) for n in members])
        homes.done(done, work)
        for n in members:
            for client in cohort_of(CLIENTS, SEED, number, places_of(work[n].cohort)):
                has[client] = n, state_number(number, 2)
        again = ClientHomes(CLIENTS, SEED)
        again.restore(homes.kept())
        for ledger in (homes, again):
            told = {c: (ledger.replica(c), ledger.trained(c)) for c in range(CLIENTS)}
            assert told == {c: has.get(c, (None, 0)) for c in range(CLIENTS)}
        homes = again


def test_new_clients_go_where_least_is_done_for_their_speed() -> None:
    homes = ClientHomes(CLIENTS, SEED)
    found = place_clients(homes, [0, 1, 2, 3], {0: 1.0, 1: 3.0}, [0, 1], shared=False)
    assert {n: len(places) for n, places in found.places.items()} == {0: 3, 1: 1}
    assert not found.afresh


@given(st.sets(st.integers(0, 30)))
def test_ranges_are_those_of_places(places: set[int]) -> None:
    found = ranges_of(sorted(places))
    assert places_of(found) == sorted(places)
    assert all(b.first > a.first + a.count for a, b in pairwise(found))
