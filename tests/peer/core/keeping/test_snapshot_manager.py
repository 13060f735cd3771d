"""Which snapshots are taken, given, kept and awaited: decisions of one peer, fact by fact."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.dag.plan.plan import PeerId
from shoal.dag.schedule.flow import Role
from shoal.net.links.frame import FrameKey
from shoal.peer.core import events as e
from shoal.peer.core.assignment import Assignment
from shoal.peer.core.keeping.snapshot_manager import SnapshotManager
from shoal.peer.core.options import Timeouts
from shoal.peer.core.part import Phase
from shoal.peer.core.part_events import answered
from shoal.peer.core.snapshots import BLOCKS, PART_BYTES, SnapshotId
from shoal.proto import broker_pb2

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")
"""a and b hold stages; c keeps what both take."""
TERM = 3


def plan(keepers: Iterable[tuple[str, str]] = ((A, C), (B, C))) -> broker_pb2.Plan:
    return broker_pb2.Plan(
        stages=[
            broker_pb2.StageSlot(start=0, stop=4, holders=[A]),
            broker_pb2.StageSlot(start=4, stop=9, holders=[B]),
        ],
        keepers=[broker_pb2.Keeper(holder=h, peer=p) for h, p in keepers],
    )


def assign(term: int = TERM, **fields: Any) -> broker_pb2.Assign:
    known = fields.pop("plan", plan())
    mine = broker_pb2.PlanSlice(plan=known, ring=[A, B] if known.keepers else [])
    return broker_pb2.Assign(**({"run": "r", "term": term, "slice": mine} | fields))


def keeping(peer: PeerId, message: broker_pb2.Assign | None = None) -> SnapshotManager:
    one = SnapshotManager(peer)
    one.begin(message or assign())
    return one


def name(step: int, holder: str, term: int = TERM) -> SnapshotId:
    return SnapshotId("r", term, step, holder)


def part(
    step: int, i: int = 0, of: int = 1, *, holder: str = A, to: str = C, term: int = TERM
) -> FrameKey:
    return name(step, holder, term).frame(TERM, i, of, holder, to)


def reports(out: Iterable[e.Instruction]) -> list[tuple[int, str, bool]]:
    found = [i.message.snapshot for i in out if isinstance(i, e.Tell)]
    return [(r.snapshot.step, r.snapshot.holder, r.held) for r in found]


def dropped(out: Iterable[e.Instruction]) -> list[SnapshotId]:
    return [i.snapshot for i in out if isinstance(i, e.DropSnapshot)]


def sent(out: Iterable[e.Instruction]) -> list[FrameKey]:
    return [i.key for i in out if isinstance(i, e.SendFrame)]


def own(one: SnapshotManager, step: int, parts: int = 1) -> list[e.Instruction]:
    """It takes one, which has so many parts."""
    (take,) = one.take(step)
    assert isinstance(take, e.TakeSnapshot)
    return one.taken(e.SnapshotTaken(take.snapshot, parts))


def order(step: int, needed: int, **fields: Any) -> broker_pb2.SnapshotOrder:
    return broker_pb2.SnapshotOrder(run="r", term=TERM, step=step, needed=needed, **fields)


# ---------------------------------------------------------------- own ones


def test_an_own_snapshot_is_reported_and_given_to_its_keeper() -> None:
    one = keeping(A)
    out = own(one, 5, parts=2)
    assert reports(out) == [(5, A, True)]
    assert sent(out) == [part(5, 0, 2), part(5, 1, 2)]
    assert [(s.start, s.stop) for s in one.held[name(5, A)][0].spans] == [(0, 4)]


def test_one_that_is_missed_or_fails_is_told_and_lies_nowhere() -> None:
    one = keeping(A)
    assert reports(one.missed(5, "step 6 has begun")) == [(5, A, False)]
    (take,) = one.take(6)
    assert isinstance(take, e.TakeSnapshot)
    out = one.failed(take.snapshot, "the disk is full")
    assert (dropped(out), reports(out)) == ([name(6, A)], [(6, A, False)])
    assert dropped(one.taken(e.SnapshotTaken(take.snapshot, 1))) == [name(6, A)], "too late"
    assert not one.held


def test_one_of_a_term_that_has_ended_is_dropped() -> None:
    one = keeping(A)
    (take,) = one.take(5)
    assert isinstance(take, e.TakeSnapshot)
    one.begin(assign(TERM + 1))
    assert one.taken(e.SnapshotTaken(take.snapshot, 1)) == [e.DropSnapshot(name(5, A))]


@given(st.integers(1, 40))
def test_two_parts_are_under_way_at_most_and_all_are_given_in_order(parts: int) -> None:
    one = keeping(A)
    given_parts = sent(own(one, 5, parts))
    assert len(given_parts) == min(2, parts)
    for at in range(parts):
        assert len(given_parts) - at <= 2, "those that are in memory"
        given_parts += sent(one.acknowledged(given_parts[at]))
        assert not one.acknowledged(given_parts[at]), "said twice"
    assert given_parts == [part(5, i, parts) for i in range(parts)]


def test_a_newer_one_goes_in_place_of_the_rest_of_an_older() -> None:
    one = keeping(A)
    first = sent(own(one, 5, 9))
    assert not sent(own(one, 6, 2)), "two are under way"
    after = [k for key in first for k in sent(one.acknowledged(key))]
    assert after == [part(6, 0, 2), part(6, 1, 2)]


def test_one_that_cannot_be_read_is_given_up() -> None:
    one = keeping(A)
    (key, *_) = sent(own(one, 5, 9))
    out = one.refused(key, "input/output error")
    assert (dropped(out), reports(out)) == ([name(5, A)], [(5, A, False)])
    assert not sent(one.acknowledged(key))


@given(st.integers(1, 2), st.integers(1, 9))
def test_after_parts_that_cannot_be_read_the_next_snapshot_is_given(bad: int, parts: int) -> None:
    one = keeping(A)
    for key in sent(own(one, 5, parts))[:bad]:
        assert not sent(one.refused(key, "input/output error")), "the rest of it is gone"
    left = sent(own(one, 6, parts))
    under_way = min(2, parts) - min(bad, parts)
    assert len(left) == min(2 - under_way, parts), "both slots are used again"
    for at in range(parts - 1 + under_way):
        old = part(5, at + min(bad, parts), parts)
        left += sent(one.acknowledged(old if at < under_way else left[at - under_way]))
    assert left == [part(6, i, parts) for i in range(parts)]


# ---------------------------------------------------------------- copies


@settings(max_examples=30)
@given(st.data())
def test_a_copy_is_whole_when_all_its_parts_came_in_any_order(data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, 9))
    doubled = data.draw(st.lists(st.integers(0, parts - 1), max_size=9))
    coming = data.draw(st.permutations([*range(parts), *doubled]))
    one, came = keeping(C), set[int]()
    for i in coming:
        out = one.arrived(part(5, i, parts))
        assert e.Release(part(5, i, parts)) in out
        before = len(came)
        came.add(i)
        whole = before < parts == len(came)
        assert reports(out) == ([(5, A, True)] if whole else [])
        assert [i.parts for i in out if isinstance(i, e.KeepSnapshot)] == [parts] * whole
        assert not dropped(out)
        assert (name(5, A) in one.held) == (len(came) == parts)
    assert [(s.start, s.stop) for s in one.held[name(5, A)][0].spans] == [(0, 4)]


def test_parts_that_name_another_count_spoil_a_copy() -> None:
    one = keeping(C)
    one.arrived(part(5, 0, 3))
    out = one.arrived(part(5, 1, 2))
    assert (dropped(out), reports(out)) == ([name(5, A)], [(5, A, False)])
    for i in range(3):
        assert not reports(one.arrived(part(5, i, 3))), "it was given up"
    assert not one.held


def test_a_copy_that_the_disk_does_not_take_is_given_up_and_the_next_one_kept() -> None:
    one = keeping(C)
    one.arrived(part(5, 0, 3))
    out = one.refused(part(5, 1, 3), "no space left")
    assert out[0] == e.Release(part(5, 1, 3))
    assert (dropped(out), reports(out)) == ([name(5, A)], [(5, A, False)])
    late = one.arrived(part(5, 2, 3))
    assert (dropped(late), reports(late)) == ([name(5, A)], []), "it may lie there"
    assert reports(one.arrived(part(6))) == [(6, A, True)]


def test_one_copy_of_a_holder_is_on_its_way() -> None:
    one = keeping(C)
    one.arrived(part(5, 0, 2))
    assert not dropped(one.arrived(part(5, 0, 2, holder=B))), "another's"
    assert dropped(one.arrived(part(6, 0, 2))) == [name(5, A)]
    assert not one.expects(part(5, 1, 2)), "older than what comes"
    assert reports(one.arrived(part(6, 1, 2))) == [(6, A, True)]


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 3)), max_size=40))
def test_whatever_a_holder_sends_little_lies_at_its_keeper(said: list[tuple[int, int]]) -> None:
    """A store beside it does what is said; at most three whole ones and one on its way."""
    one, store = keeping(C), set[SnapshotId]()
    for step, parts in said:
        for i in range(parts):
            key = part(step, i, parts)
            if one.expects(key):
                store.add(name(step, A))
            store -= {*dropped(one.arrived(key))}
        assert len(one.held) <= 3
        assert store >= one.held.keys()
        assert len(store) <= 4
    assert one.held.keys() >= {*sorted(one.held)[-2:]}
    store -= {*dropped(one.end())}
    assert store == one.held.keys(), "what is not whole goes with the assignment"
    store -= {*dropped(one.forget("r"))}
    assert not store


def test_those_that_may_be_needed_and_the_newest_stay() -> None:
    one = keeping(C)
    for step in (2, 4, 6):
        one.arrived(part(step))
    out = one.arrived(part(8))
    assert (dropped(out), reports(out)) == ([name(4, A)], [(8, A, True), (4, A, False)])
    assert [s.step for s in one.held] == [2, 6, 8]
    assert dropped(one.ordered(order(10, needed=8))) == [name(2, A), name(6, A)]
    assert not one.expects(part(7)), "nobody goes back to it"
    assert [s.step for s in one.newest(64)] == [8]


def test_a_holder_may_hear_of_its_new_keeper_first() -> None:
    """c is gone: a's copies go to b, which has a link with a and was no keeper."""
    one = keeping(B)
    assert one.expects(part(5, to=B))
    assert not one.expects(part(5, to=C)), "to another"
    assert not one.expects(part(5, to=B, term=TERM - 1)), "of another term"
    assert not one.expects(part(5, holder=C, to=B)), "c holds no stage"
    assert not one.expects(part(5, to=B)._replace(source=C)), "from another"
    assert not one.expects(part(5, to=B)._replace(term=TERM - 1))
    assert reports(one.arrived(part(5, to=B))) == [(5, A, True)]


def test_an_order_changes_to_whom_it_gives() -> None:
    one = keeping(A)
    one.ordered(order(5, 0, keeper=B))
    assert [k.destination for k in sent(own(one, 5))] == [B]
    one.ordered(order(6, 0))
    assert [k.destination for k in sent(own(one, 6))] == [B], "as before"
    one.ordered(order(7, 0, keeper=""))
    assert sent(own(one, 7)) == [], "nobody keeps them"


def test_an_order_of_another_term_changes_nothing_of_this() -> None:
    one = keeping(A)
    old = order(5, 0, keeper=B)
    old.term -= 1
    one.ordered(old)
    assert [k.destination for k in sent(own(one, 5))] == [C]


@pytest.mark.parametrize("end", ["ordered", "forget", "begin", "end"])
def test_what_lies_here_of_a_copy_that_nobody_completes_goes(end: str) -> None:
    one = keeping(C)
    one.arrived(part(5, 0, 2))
    out = {
        "ordered": lambda: one.ordered(order(0, needed=6)),
        "forget": lambda: one.forget("r"),
        "begin": lambda: one.begin(assign(TERM + 1)),
        "end": one.end,
    }[end]()
    assert dropped(out) == [name(5, A)]
    assert dropped(one.stray(part(5, 1, 2))) == [name(5, A)], "it came across the change"


def test_a_stray_part_takes_nothing_away_that_is_used() -> None:
    one = keeping(C)
    one.arrived(part(5))
    one.arrived(part(6, 0, 2))
    assert one.stray(part(5)) == [e.Release(part(5))]
    assert one.stray(part(6, 1, 2)) == [e.Release(part(6, 1, 2))]
    odd = FrameKey("r", TERM, 5, Role.SNAPSHOT, 0, 1, "nothing", A, C)
    assert one.stray(odd) == [e.Release(odd)]
    taking = keeping(A)
    taking.take(5)
    assert not dropped(taking.stray(part(5, to=A)._replace(source=B)))


# ---------------------------------------------------------------- going on


def resuming(to: str = B, holder: str = A, source: str = C) -> broker_pb2.Assign:
    spans = [broker_pb2.Span(start=0, stop=5)]
    transfer = broker_pb2.SnapshotTransfer(
        holder=holder, source=source, destination=to, spans=spans
    )
    resume = broker_pb2.Resume(term=2, holders=["a", "old", "far"], transfers=[transfer])
    return assign(first_step=7, resume=resume)


def test_a_gift_is_awaited_and_says_what_is_in_it() -> None:
    one = keeping(B, resuming())
    assert one.awaits
    key = name(7, A, 2).frame(TERM, 0, 1, C, B)
    assert not one.expects(key._replace(source=A)), "another was to give it"
    assert reports(one.arrived(key)) == [(7, A, True)]
    assert not one.awaits
    assert one.resumed == (name(7, A, 2),)
    assert [(s.start, s.stop) for s in one.held[name(7, A, 2)][0].spans] == [(0, 5)]


def test_a_gift_is_given_by_who_has_it() -> None:
    snapshot = broker_pb2.Snapshot(run="r", term=2, step=7, holder=A)
    one = SnapshotManager(C, [(snapshot, 3)])
    assert sent(one.begin(resuming())) == [name(7, A, 2).frame(TERM, i, 3, C, B) for i in (0, 1)]
    assert not sent(SnapshotManager(C).begin(resuming())), "it does not lie here"


def test_only_what_has_some_of_its_stages_is_loaded() -> None:
    """The pool peer that kept all of a set takes one stage."""
    spans = {"a": (0, 4), "old": (4, 6), "far": (6, 9)}
    found = [
        broker_pb2.Snapshot(
            run="r", term=2, step=7, holder=h, spans=[broker_pb2.Span(start=a, stop=b)]
        )
        for h, (a, b) in spans.items()
    ]
    for peer, wanted in ((A, ["a"]), (B, ["old", "far"]), (C, [])):
        one = SnapshotManager(peer, [(s, 1) for s in found])
        one.begin(assign(first_step=7, resume=broker_pb2.Resume(term=2, holders=list(spans))))
        assert [s.holder for s in one.resumed] == wanted


def assignment(peer: PeerId, message: broker_pb2.Assign) -> Assignment:
    return Assignment(peer, message, 0, Timeouts(), 100)


def test_it_builds_when_the_gift_is_whole_from_what_lies_here() -> None:
    one = assignment(B, resuming())
    assert not [i for i in one.begin() if isinstance(i, e.Build)]
    keys = [name(7, A, 2).frame(TERM, i, 2, C, B) for i in range(2)]
    assert not [i for i in one.frame(keys[0], 0.0) if isinstance(i, e.Build)]
    builds = [i for i in one.frame(keys[1], 0.0) if isinstance(i, e.Build)]
    assert [b.snapshots for b in builds] == [(name(7, A, 2),)]
    assert not [i for i in one.frame(keys[1], 0.0) if isinstance(i, e.Build)], "twice"


def test_without_its_gift_it_cannot_build_and_says_so() -> None:
    one = assignment(B, resuming())
    one.begin()
    out = one.frame_refused(name(7, A, 2).frame(TERM, 0, 2, C, B), "no space left", 0.0)
    faults = [i.message.fault for i in out if isinstance(i, e.Tell) and i.message.HasField("fault")]
    assert [(f.reason.code, f.reason.text) for f in faults] == [("frame", "no space left")]
    assert name(7, A, 2) in dropped(out)


def test_a_keeper_whose_disk_is_full_stays_in_the_run() -> None:
    one = assignment(C, assign())
    one.begin()
    out = one.frame_refused(part(5), "no space left", 0.0)
    assert reports(out) == [(5, A, False)]
    assert one.phase is Phase.WARM


def test_snapshots_that_are_damaged_are_forgotten_and_the_broker_hears_the_code() -> None:
    one = assignment(B, resuming())
    one.begin()
    one.frame(name(7, A, 2).frame(TERM, 0, 1, C, B), 0.0)
    failed = e.BuildFailed("r", TERM, "'w' has another hash", "snapshot")
    out = answered(one, failed, 0.0, away=False)
    assert name(7, A, 2) in dropped(out)
    assert not one.keeping.held
    assert reports([i for i in out if isinstance(i, e.Tell) and i.message.HasField("snapshot")])
    assert [i.message.fault.reason.code for i in out if isinstance(i, e.Tell)][-1] == "snapshot"


def test_the_newest_are_told() -> None:
    found = [
        broker_pb2.Snapshot(run="r", term=1, step=step, holder=h)
        for step in range(50)
        for h in "ab"
    ]
    one = SnapshotManager(C, [(s, 1) for s in found])
    told = one.newest(64)
    assert len(told) == 64
    assert min(s.step for s in told) == 50 - 32


def test_a_copy_larger_than_the_peer_announced_is_refused_by_its_first_part() -> None:
    one = SnapshotManager(C, most_bytes=2 * PART_BYTES)
    one.begin(assign())
    out = one.arrived(part(5, 0, 3))
    assert reports(out) == [(5, A, False)]
    assert dropped(out) == [name(5, A)]
    assert not one.expects(part(5, 1, 3)), "nor is the rest of it kept"
    assert one.expects(part(6, 0, 2))
    one.arrived(part(6, 0, 2))
    assert reports(one.arrived(part(6, 1, 2))) == [(6, A, True)]


# ---------------------------------------------------------------- blocks of neighbours


def rebuilding(peer: PeerId) -> SnapshotManager:
    """c makes the stage of b anew, from what a gives."""
    stages = [
        broker_pb2.StageSlot(start=0, stop=4, holders=[A]),
        broker_pb2.StageSlot(start=4, stop=9, holders=[C]),
    ]
    spans = [broker_pb2.Span(start=0, stop=4)]
    transfer = broker_pb2.SnapshotTransfer(holder=A, source=A, destination=C, spans=spans)
    resume = broker_pb2.Resume(live=True, rebuilt=[C], transfers=[transfer])
    message = assign(plan=broker_pb2.Plan(stages=stages), first_step=7, resume=resume)
    return keeping(peer, message)


def test_blocks_are_given_when_the_stages_stand_and_nobody_else_hears_of_them() -> None:
    one = rebuilding(A)
    assert not one.awaits
    (take,) = one.give_blocks()
    assert isinstance(take, e.TakeSnapshot)
    assert SnapshotId.of(take.snapshot) == name(7, A, BLOCKS)
    out = one.taken(e.SnapshotTaken(take.snapshot, 2))
    assert sent(out) == [part(7, i, 2, term=BLOCKS) for i in range(2)]
    assert reports(out) == []
    assert dropped(one.rebuilt()) == [name(7, A, BLOCKS)]


def test_who_makes_a_stage_anew_awaits_the_blocks_and_keeps_them_until_then() -> None:
    one = rebuilding(C)
    assert one.awaits
    assert one.give_blocks() == []
    out = [i for n in range(2) for i in one.arrived(part(7, n, 2, term=BLOCKS))]
    assert reports(out) == []
    assert not [i for i in out if isinstance(i, e.KeepSnapshot)]
    assert not one.awaits
    assert one.resumed == (name(7, A, BLOCKS),)
    assert dropped(one.end()) == [name(7, A, BLOCKS)]
    assert one.newest(9) == []


def test_without_rebuilt_stages_nobody_gives_blocks() -> None:
    assert keeping(A).give_blocks() == []
