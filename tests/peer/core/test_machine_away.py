"""Scripted facts to one machine whose broker is away, and to one that gives its weights."""

from __future__ import annotations

import pytest

from shoal.dag.schedule.schedule import Action
from shoal.peer.core import events as e
from shoal.peer.core.machine import PeerMachine
from shoal.peer.core.options import PeerOptions, Timeouts
from shoal.proto import broker_pb2, common_pb2
from shoal.tests.peer.scripted import (
    WELCOME,
    Make,
    finish_step,
    of,
    resumed,
    said,
    told,
)

# ---------------------------------------------------------------- without the broker


def back(one: PeerMachine, welcome: e.BrokerSaid, now: float = 2.0) -> list[e.Instruction]:
    """Lets a peer whose stream broke attach again."""
    one.handle(e.TimerFired("connect"), now)
    one.handle(e.Attached(), now)
    return one.handle(welcome, now)


def test_without_the_broker_the_run_goes_on_and_reports_wait(running: Make) -> None:
    one = running()
    one.handle(e.Detached("the stream broke"), 0.5)
    out = finish_step(one)
    assert of(out, e.Compute)
    assert not of(out, e.Tell)
    one.handle(e.TimerFired("connect"), 2.0)
    (hello,) = told(one.handle(e.Attached(), 2.0), "hello")
    assert (hello.holding.run, hello.holding.term, hello.holding.step) == ("r", 1, 1)
    (report,) = told(one.handle(resumed(0), 2.0), "step")
    assert (report.step, report.seconds) == (0, 1.0)


def test_a_broker_that_was_started_again_is_told_what_it_lacks_in_order(running: Make) -> None:
    one = running(steps=9)
    for _ in range(2):
        assert len(told(finish_step(one), "step")) == 1
    one.handle(e.Detached("the stream broke"), 1.5)
    finish_step(one)
    assert [r.step for r in told(back(one, resumed(1)), "step")] == [1, 2]
    one.handle(e.Detached("the stream broke"), 3.0)
    assert [r.step for r in told(back(one, resumed(1), 4.0), "step")] == [1, 2], "told once more"


def test_a_broker_that_does_not_go_on_with_the_run_is_told_nothing_of_it(running: Make) -> None:
    one = running()
    one.handle(e.Detached("the stream broke"), 0.5)
    finish_step(one)
    assert not told(back(one, WELCOME), "step")


def test_reports_of_committed_steps_are_not_kept(running: Make) -> None:
    one = running(steps=9)
    for _ in range(3):
        finish_step(one)
    one.handle(said(committed=broker_pb2.Committed(run="r", term=1, step=2)), 1.5)
    assert one.assignment is not None
    assert len(one.assignment.reports) == 1
    one.handle(said(committed=broker_pb2.Committed(run="r", term=0, step=3)), 1.5)
    assert len(one.assignment.reports) == 1, "of an older term (I3)"
    one.handle(e.Detached("the stream broke"), 2.0)
    assert [r.step for r in told(back(one, resumed(0), 3.0), "step")] == [2]


def test_who_keeps_all_the_reports_that_it_may_pauses_until_the_broker_has_some_i8(
    running: Make,
) -> None:
    one = running(steps=99, reports=64)
    one.handle(e.Detached("the stream broke"), 0.5)
    for step in range(63):
        assert of(finish_step(one), e.Compute)[-1].step == step + 1
    assert of(finish_step(one), e.Compute)[-1].step == 63, "it begins no other step"
    one.handle(e.DataReady("r", 1, 64), 1.5)
    assert of(one.handle(e.TimerFired("stall"), 900.0), e.SetTimer), "and blames nobody"
    out = back(one, resumed(1), 901.0)
    assert [r.step for r in told(out, "step")] == [*range(1, 64)]
    assert of(out, e.Compute)[0].step == 64


def test_a_peer_that_could_keep_too_few_reports_is_refused() -> None:
    with pytest.raises(ValueError, match="reports is 3: expected at least 64"):
        PeerOptions(reports=3)


def test_a_fault_is_told_again_to_a_broker_that_may_have_died_with_it(running: Make) -> None:
    one = running()
    assert told(one.handle(e.ComputeFailed("r", 1, 0, Action.parse("F0@0"), "no"), 0.5), "fault")
    one.handle(e.Detached("the stream broke"), 0.6)
    one.handle(e.TimerFired("connect"), 2.0)
    assert told(one.handle(e.Attached(), 2.0), "hello")[0].holding.run == "r"
    assert told(one.handle(resumed(0), 2.0), "fault")[0].reason.code == "compute"


def test_data_that_cannot_be_had_without_the_broker_is_fetched_when_it_is_back(
    running: Make,
) -> None:
    one = running()
    one.handle(e.Detached("the stream broke"), 0.5)
    assert one.handle(e.DataFailed("r", 1, 1, "nobody answers"), 1.0) == []
    assert e.Prefetch("r", 1, 1) in back(one, resumed(0))
    assert told(one.handle(e.DataFailed("r", 1, 1, "it is damaged"), 3.0), "fault")


def test_who_holds_a_run_tries_often_enough_for_a_broker_that_waits_for_a_lease(
    running: Make,
) -> None:
    one = running()
    now = 0.5
    for _ in range(12):
        (timer,) = of(one.handle(e.Detached("refused"), now), e.SetTimer)
        assert timer.at - now < 9 / 3
        now = timer.at
        one.handle(e.TimerFired("connect"), now)


# ---------------------------------------------------------------- weights


BLOB = common_pb2.BlobRef(hash="0" * 64, size_bytes=1)


def test_weights_asked_for_in_mid_run_are_copied_before_the_next_step(running: Make) -> None:
    one = running()
    one.handle(said(export=broker_pb2.Export(run="r", term=1)), 0.5)
    out = finish_step(one)
    orders = [i for i in out if isinstance(i, e.UploadWeights | e.Compute)]
    assert orders[-2] == e.UploadWeights("r", 1, 1)
    assert orders[-1].step == 1
    assert told(one.handle(e.ExportedWeights("r", 1, 1, BLOB), 2.0), "exported")[0].step == 1


def test_weights_of_the_end_are_tried_again_before_it_is_a_fault(running: Make) -> None:
    one = running(patience=Timeouts(export_tries=2, export_retry_s=1.0))
    finish_step(one)
    assert of(finish_step(one), e.UploadWeights) == [e.UploadWeights("r", 1, 2)]
    assert one.handle(e.ExportFailed("r", 1, 2, "no space"), 3.0) == [e.SetTimer("export", 4.0)]
    assert one.handle(e.TimerFired("export"), 4.0) == [e.UploadWeights("r", 1, 2)]
    (fault,) = told(one.handle(e.ExportFailed("r", 1, 2, "no space"), 5.0), "fault")
    assert "no space" in fault.reason.text


def test_an_upload_that_fails_without_the_broker_waits_for_it(running: Make) -> None:
    one = running(patience=Timeouts(export_tries=1))
    finish_step(one)
    finish_step(one)
    one.handle(e.Detached("the stream broke"), 2.0)
    assert one.handle(e.ExportFailed("r", 1, 2, "nobody answers"), 3.0) == []
    assert e.UploadWeights("r", 1, 2) in back(one, resumed(2), 60.0)
    one.handle(e.ExportedWeights("r", 1, 2, BLOB), 61.0)
    one.handle(e.Detached("the stream broke"), 62.0)
    assert told(back(one, resumed(2), 63.0), "exported")[0].step == 2
