"""Groups of gossip in later attempts, against what a lost member may concern."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shoal.broker.policies.gossip import regrouped
from shoal.proto.broker_pb2 import RoundMember


@given(st.data())
def test_only_a_group_that_lost_somebody_is_planned_anew(data: st.DataObject) -> None:
    count = data.draw(st.integers(2, 9))
    groups = data.draw(st.permutations([i // 2 + 1 for i in range(count)]))
    before = [
        RoundMember(replica=n, weight=n + 1, term=1, group=g, attempt=1)
        for n, g in enumerate(groups)
    ]
    gone = data.draw(st.sets(st.integers(0, count - 1)))
    other_term = data.draw(st.sets(st.integers(0, count - 1)))
    anew = data.draw(st.sets(st.integers(0, count - 1)))
    late = data.draw(st.integers(0, 2))
    ready = [
        RoundMember(replica=n, weight=n + 1, term=1 + (n in other_term))
        for n in range(count + late)
        if n not in gone
    ]
    found = {m.replica: m for m in regrouped(before, ready, anew, 2)}
    assert found.keys() == {m.replica for m in ready}
    for m in before:
        mates = {n for n, g in enumerate(groups) if g == m.group}
        if m.replica in found:
            broken = mates & (gone | other_term | anew)
            assert found[m.replica].attempt == (2 if broken else 1)
            assert found[m.replica].group == m.group
    alone = [found[n].group for n in range(count, count + late)]
    assert len(set(alone)) == late
    assert not set(alone) & set(groups)
