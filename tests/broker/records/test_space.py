"""Whose ended runs make room for a new one, and what is refused, as plain functions."""

from __future__ import annotations

from shoal.broker.events import RunId, RunSubmitted
from shoal.broker.machine import BrokerMachine
from shoal.broker.options import BrokerOptions
from shoal.broker.records.run import RunRecord
from shoal.broker.records.space import JOURNAL_SHARE, make_room, outnumbered, share
from shoal.broker.records.submitted import SubmittedRun
from shoal.planner.requests.requirements import read_spec
from shoal.proto.broker_pb2 import CANCELLED, ReplicaState, RunEvent, RunState

from ..conftest import World, make_spec

EACH = make_spec().ByteSize()
OPTIONS = BrokerOptions(subject_bytes=10 * EACH, kept_bytes=20 * EACH)


def run(name: str, owner: str, *, ended: bool = False) -> RunRecord:
    spec = make_spec()
    made = RunRecord(SubmittedRun(RunId(name), 1, owner, spec, read_spec(spec), OPTIONS), [])
    if ended:
        stands = ReplicaState(replica=name, phase=CANCELLED)
        made.apply(RunEvent(state=RunState(run=name, replicas=[stands])))
    return made


def runs(owner: str, count: int, *, ended: bool = False) -> list[RunRecord]:
    return [
        run(f"{owner}-{i}{'-ended' if ended else ''}", owner, ended=ended) for i in range(count)
    ]


def test_ended_runs_of_the_same_subject_go_first_and_no_more_than_needed() -> None:
    kept = runs("eve", 6, ended=True) + runs("eve", 4) + runs("ann", 3, ended=True)
    gone, why = make_room(kept, "eve", 2 * EACH, None, OPTIONS)
    assert (gone, why) == (["eve-0-ended", "eve-1-ended", "eve-2-ended"], "")


def test_what_open_runs_take_is_refused_with_its_numbers() -> None:
    kept = runs("eve", 9) + runs("eve", 3, ended=True)
    gone, why = make_room(kept, "eve", 2 * EACH, None, OPTIONS)
    assert gone == []
    assert f"the 9 open runs of eve take {9 * EACH} of at most {10 * EACH}" in why
    assert make_room(kept, "ann", 2 * EACH, None, OPTIONS)[1] == ""


def test_when_all_take_too_much_the_ended_runs_of_whoever_has_most_go() -> None:
    kept = runs("bob", 3, ended=True) + runs("ann", 9, ended=True) + runs("eve", 8)
    gone, why = make_room(kept, "new", 2 * EACH, None, OPTIONS)
    assert (gone, why) == (["ann-0-ended", "ann-1-ended", "ann-2-ended"], "")
    full = runs("ann", 10) + runs("eve", 10)
    gone, why = make_room(full, "new", EACH, None, OPTIONS)
    assert gone == []
    assert f"all open runs take {20 * EACH} of at most {20 * EACH}" in why


def test_without_identities_only_what_all_take_counts() -> None:
    kept = runs("", 15)
    assert make_room(kept, "", EACH, None, OPTIONS) == ([], "")


def test_a_disk_without_room_is_said_in_bytes() -> None:
    assert make_room([], "ann", EACH, JOURNAL_SHARE * EACH, OPTIONS) == ([], "")
    gone, why = make_room([], "ann", EACH, JOURNAL_SHARE * EACH - 1, OPTIONS)
    assert gone == []
    assert f"{JOURNAL_SHARE * EACH - 1} bytes left for new runs" in why


def test_of_too_many_ended_runs_those_of_whoever_has_most_go() -> None:
    kept = runs("ann", 2, ended=True) + runs("eve", 5, ended=True)
    assert outnumbered(kept, 4) == ["eve-0-ended", "eve-1-ended", "eve-2-ended"]
    assert outnumbered(kept, 9) == []


def test_histories_share_half_of_what_may_be_kept() -> None:
    options = BrokerOptions(subject_bytes=8 << 20, kept_bytes=1 << 30)
    kept: list[RunRecord] = [*runs("eve", 4), *runs("ann", 1)]
    share(kept, options)
    assert [r.history.most_bytes for r in kept] == [1 << 20] * 4 + [4 << 20]


def test_shares_of_histories_follow_the_runs_that_there_are() -> None:
    options = BrokerOptions(subject_bytes=8 << 20, kept_runs=1)
    world = World(BrokerMachine("broker-1", options))

    def shares() -> list[int]:
        return [run.record.history.most_bytes for run in world.machine.runs.values()]

    for count in (1, 2, 3):
        world.handle(RunSubmitted(world.request(), make_spec(), "eve"))
        assert shares() == [(4 << 20) // count] * count
    world.restart()
    assert shares() == [(4 << 20) // 3] * 3
    for run in list(world.machine.runs):
        world.cancel(run)
    world.handle(RunSubmitted(world.request(), make_spec(), "eve"))
    assert shares() == [2 << 20] * 2, "of the ended ones the newest is kept"
