"""Holders of a replica go past a round together, in whatever order what they say comes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shoal.dag.plan.plan import PeerId
from shoal.peer.core.rounds.ahead import Agreement

ROUNDS = 3


@given(st.integers(1, 5), st.data())
def test_nobody_is_past_a_round_before_all_are_done_with_it(
    count: int, data: st.DataObject
) -> None:
    peers = [PeerId(f"p{i}") for i in range(count)]
    hub = data.draw(st.sampled_from(peers))
    known = {p: Agreement(p, hub, [q for q in peers if q != p]) for p in peers}
    done, at = dict.fromkeys(peers, -1), dict.fromkeys(peers, 0)
    """By peer, the newest round that it is done with, and the one that it is in."""
    sent: list[tuple[int, PeerId, PeerId]] = []
    while any(number < ROUNDS for number in at.values()):
        works = [p for p in peers if at[p] < ROUNDS and done[p] < at[p]]
        hears = range(len(sent))
        next_ = st.sampled_from([*(("works", p) for p in works), *(("hears", i) for i in hears)])
        kind, chosen = data.draw(next_)
        if kind == "works":
            done[chosen] = at[chosen]
        else:
            number, source, to = sent.pop(chosen)
            known[to].hears(number, source)
            known[to].hears(number, source)  # again has no effect
        for p in peers:
            while at[p] < ROUNDS and done[p] >= at[p]:
                sent += [(at[p], p, to) for to in known[p].says(at[p])]
                if not known[p].holds(at[p]):
                    break
                assert all(done[q] >= at[p] for q in peers)
                at[p] += 1
    assert not any(known[p].says(ROUNDS - 1) for p in peers), "it is said once"


def test_who_is_alone_waits_for_nobody() -> None:
    alone = Agreement(PeerId("p"), PeerId("p"), ())
    assert not alone.says(0)
    assert alone.holds(0)
    assert not alone.holds(1)


def test_what_somebody_else_says_counts_for_nothing() -> None:
    hub = Agreement(PeerId("p"), PeerId("p"), [PeerId("q")])
    hub.hears(0, PeerId("x"))
    assert not hub.says(0)
    hub.hears(0, PeerId("q"))
    assert hub.says(0) == ("q",)
