"""Which snapshots make a set that a run can go on from. The oracle counts operators."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shoal.broker.snapshots.sets import MOST_SNAPSHOTS, SnapshotCatalog, SnapshotSet
from shoal.dag.plan.plan import PeerId, Plan, StageSlot, Visit
from shoal.proto.broker_pb2 import Snapshot, Span

OPERATORS = 5
PEERS = tuple(PeerId(p) for p in "abc")


def snapshot(
    step: int, holder: str, *spans: tuple[int, int], term: int = 1, round_: int = 0
) -> Snapshot:
    message = Snapshot(run="r", term=term, step=step, holder=holder, round=round_)
    message.spans.extend(Span(start=a, stop=b) for a, b in spans)
    return message


SPANS = {
    (holder, term): [(i, j)]
    for holder, (i, j) in zip("hij", ((0, 2), (2, 5), (1, 4)), strict=True)
    for term in (1, 2)
}
DEEDS = st.lists(
    st.tuples(
        st.sampled_from(["held", "held", "held", "not_held", "gone", "not_needed"]),
        st.sampled_from(PEERS),
        st.integers(1, 3),
        st.integers(1, 2),
        st.sampled_from("hij"),
    ),
    max_size=30,
)


def spoil(sets: SnapshotCatalog, found: SnapshotSet | None) -> None:
    """Two peers could not go on from it."""
    for peer in ("x", "y"):
        sets.spoilt(found, PeerId(peer), only=False)


@given(deeds=DEEDS, most=st.integers(0, 4), mute=st.sets(st.sampled_from(PEERS)))
def test_the_newest_set_covers_every_operator_with_what_lies_at_peers_that_give(
    deeds, most, mute
) -> None:
    sets, known = SnapshotCatalog(), set()
    for what, peer, step, term, holder in deeds:
        message = snapshot(step, holder, *SPANS[holder, term], term=term)
        if what == "gone":
            sets.gone(peer)
            known = {k for k in known if k[0] != peer}
        elif what == "not_needed":
            sets.not_needed(step)
            known = {k for k in known if k[1] >= step}
        elif what == "held":
            sets.held(peer, message)
            known.add((peer, step, term, holder))
        else:
            sets.not_held(peer, message)
            known.discard((peer, step, term, holder))
    for peer in PEERS:
        lying = {(peer, *key[:2], holder) for key, holder in sets._at.get(peer, ())}
        assert lying == {k for k in known if k[0] == peer}
    assert set(sets.peers) == {k[0] for k in known}

    def covered(step: int, term: int) -> bool:
        there = {k[3] for k in known if (k[1], k[2]) == (step, term) and k[0] not in mute}
        return all(
            any(a <= op < b for h in there for a, b in SPANS[h, term]) for op in range(OPERATORS)
        )

    found = sets.newest(OPERATORS, most, lambda peer: peer not in mute)
    whole = [(s, t) for s in (1, 2, 3) for t in (1, 2) if s <= most and covered(s, t)]
    assert (found and (found.step, found.term)) == (max(whole) if whole else None)
    if found:
        assert {(p, h) for h, (_, where) in found.where.items() for p in where} == {
            (k[0], k[3])
            for k in known
            if (k[1], k[2]) == (found.step, found.term) and k[0] not in mute
        }


@given(spans=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 5)), min_size=1, max_size=3))
def test_overlapping_are_those_that_share_an_operator(spans) -> None:
    sets = SnapshotCatalog()
    for holder in "hij":
        sets.held(PEERS[0], snapshot(1, holder, *SPANS[holder, 1]))
    found = sets.newest(OPERATORS, 1)
    assert found is not None
    wanted = {op for a, b in spans for op in range(a, b)}
    shared = {h for h in "hij" for a, b in SPANS[h, 1] if wanted & set(range(a, b))}
    proper = [(a, b) for a, b in spans if a < b]
    assert set(found.overlapping(proper)) == shared


def test_a_spoilt_set_is_not_gone_on_from_and_an_older_one_is() -> None:
    sets = SnapshotCatalog()
    for step in (1, 2):
        sets.held(PEERS[0], snapshot(step, "h", (0, OPERATORS)))
    spoil(sets, sets.newest(OPERATORS, 9))
    found = sets.newest(OPERATORS, 9)
    assert found is not None
    assert found.step == 1
    spoil(sets, found)
    assert sets.newest(OPERATORS, 9) is None
    assert not sets.peers


def test_it_is_copied_when_each_holder_and_its_keeper_have_it() -> None:
    slots = (StageSlot(0, 2, (PEERS[0],)), StageSlot(2, 5, (PEERS[1],)))
    plan = Plan(slots, ((Visit(0, PEERS[0]), Visit(1, PEERS[1])),), 1)
    keepers = {PEERS[0]: PEERS[2], PEERS[1]: PEERS[2]}
    sets = SnapshotCatalog()
    todo = [("a", "a"), ("b", "b"), ("c", "a"), ("c", "b")]
    for peer, holder in todo:
        assert not sets.copied(1, 1, plan.peers, keepers)
        sets.held(PeerId(peer), snapshot(1, holder, (0, 2) if holder == "a" else (2, 5)))
    assert sets.copied(1, 1, plan.peers, keepers)
    sets.gone(PEERS[2])
    assert not sets.copied(1, 1, plan.peers, keepers)
    assert sets.copied(1, 1, plan.peers, {}), "where nobody keeps copies, one's own is all there is"


def test_what_one_peer_tells_is_bounded_and_crowds_nobody_out() -> None:
    sets = SnapshotCatalog()
    sets.held(PEERS[1], snapshot(1, "h", (0, OPERATORS)))
    for i in range(MOST_SNAPSHOTS + 50):
        sets.held(PEERS[0], snapshot(2 + i % 7, f"x{i}", (0, 1)))
    assert len(sets._at[PEERS[0]]) == MOST_SNAPSHOTS
    found = sets.newest(OPERATORS, 1)
    assert found is not None
    assert found.where == {"h": (((0, OPERATORS),), ("b",))}


@given(
    said=st.lists(
        st.tuples(
            st.sampled_from("abc"), st.sampled_from("ab"), st.sampled_from([True, False, None])
        )
    )
)
def test_whether_it_is_copied_is_found_again_whatever_changes_between_questions(said) -> None:
    """Against the definition, over all that was said; None: the peer is gone."""
    holders = (PEERS[0], PEERS[1])
    wanted = [{}, {PEERS[0]: PEERS[2], PEERS[1]: PEERS[2]}, {PEERS[0]: PEERS[1]}]
    sets, known = SnapshotCatalog(), set()
    for name, holder, held in said:
        peer, found = PeerId(name), snapshot(1, holder, *SPANS["h", 1])
        if held is None:
            sets.gone(peer)
            known = {k for k in known if k[0] != name}
        elif held:
            sets.held(peer, found)
            known.add((name, holder))
        else:
            sets.not_held(peer, found)
            known.discard((name, holder))
        for keepers in (*wanted, *wanted):
            own = all((h, h) in known for h in holders)
            copies = all((keepers[h], h) in known for h in holders if h in keepers)
            for _ in range(2):
                assert sets.copied(1, 1, holders, keepers) == (own and copies)
            assert not sets.copied(2, 1, holders, keepers)


def test_of_one_step_there_may_be_a_set_before_a_version_and_one_behind_it() -> None:
    sets, keepers = SnapshotCatalog(), {PeerId("h"): PEERS[1]}
    for round_ in (3, 4):
        message = snapshot(7, "h", (0, OPERATORS), round_=round_)
        sets.held(PeerId("h"), message)
        assert not sets.copied(7, 1, [PeerId("h")], keepers, round_), "nobody has a copy of it"
        sets.held(PEERS[1], message)
        assert sets.copied(7, 1, [PeerId("h")], keepers, round_)
    for round_ in (3, 4):
        found = sets.newest(OPERATORS, 9, round_=round_)
        assert found is not None
        assert (found.step, found.round) == (7, round_)
    spoil(sets, found)
    assert sets.newest(OPERATORS, 9, round_=4) is None
    assert sets.newest(OPERATORS, 9, round_=3) is not None
    assert sets.newest(OPERATORS, 9, round_=5) is None
