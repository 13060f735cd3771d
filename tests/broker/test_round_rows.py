"""Rounds as people read them: rows from events, and what becomes of them in a client's folder, in
its lines, on the page and in a report."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from shoal.broker.round_rows import RoundRows, sentence
from shoal.broker.service.page.digest import Digest, MetricTotals
from shoal.client.files.records import Recorder
from shoal.client.show.logs import lines
from shoal.client.show.progress import row_of
from shoal.proto.broker_pb2 import (
    BUILDING,
    DONE,
    RUNNING,
    WAITING,
    Evaluation,
    Outcome,
    Phase,
    Plan,
    ReplicaState,
    RoundBegun,
    RoundDone,
    RoundMember,
    RoundWork,
    Route,
    RunEvent,
    RunState,
    SampleRange,
    StageSlot,
    StepDone,
    VersionEvaluated,
)
from shoal.proto.common_pb2 import Reason
from shoal.sim.following import Following
from shoal.sim.live import LiveState
from shoal.sim.report import Summary, render, write_report
from shoal.sim.trace import Trace

SIZE = 2
"""Samples of a microbatch; a step of a replica has one."""
Story = list[tuple[list[int], list[bool]]]
"""By round, the steps of each replica, and who contributes."""

stories = st.integers(1, 3).flatmap(
    lambda n: st.lists(
        st.tuples(
            st.lists(st.integers(1, 4), min_size=n, max_size=n),
            st.lists(st.booleans(), min_size=n, max_size=n).filter(any),
        ),
        min_size=1,
        max_size=4,
    )
)


def told(story: Story) -> Iterator[RunEvent]:
    """The events of a run, numbered; losses are replica + step / 10."""
    count = len(story[0][0])
    step, committed = [0] * count, 0
    kinds = [(0, {"state": RunState(phase=RUNNING, steps=50, replicas=[ReplicaState()] * count)})]
    for k in range(count):
        plan = Plan(stages=[StageSlot(start=0, stop=1, holders=[f"p{k}"])], routes=[Route()])
        kinds.append((k, {"plan": plan}))
    for number, (steps, there) in enumerate(story):
        work = [
            RoundWork(replica=k, first_step=step[k], steps=h, samples=[SampleRange(count=h)])
            for k, h in enumerate(steps)
        ]
        kinds.append((0, {"round_begun": RoundBegun(round=number, work=work)}))
        for k, h in enumerate(steps):
            for j in range(step[k], step[k] + h):
                outcome = Outcome(loss=k + j / 10)
                kinds.append((k, {"step": StepDone(step=j, outcome=outcome, seconds=1.0)}))
            step[k] += h
        members = [RoundMember(replica=k, weight=SIZE * h) for k, h in enumerate(steps) if there[k]]
        committed += sum(h for h, t in zip(steps, there, strict=True) if t)
        done = RoundDone(
            round=number,
            attempt=1,
            members=members,
            drift=0.5,
            sent_bytes=1000,
            waited_s=1.0,
            seconds=4.0,
            microbatches=committed,
        )
        kinds.append((0, {"round_done": done}))
        evaluated = VersionEvaluated(round=number + 1, step=9, evaluation=Evaluation(loss=2.5))
        kinds.append((0, {"evaluated": evaluated}))
    for i, (replica, kind) in enumerate(kinds):
        yield RunEvent(number=i, at_s=float(i), replica=replica, term=1, **kind)


@given(stories)
def test_a_row_has_who_contributed_and_the_losses_of_their_own_steps(story: Story) -> None:
    played = RoundRows()
    for event in told(story):
        played.see(event)
    before, step = 0, [0] * len(story[0][0])
    for row, (steps, there) in zip(played.rows, story, strict=True):
        inside = [k for k, t in enumerate(there) if t]
        assert [m.replica for m in row.members] == inside
        assert [m.replica for m in row.left_out] == [k for k, t in enumerate(there) if not t]
        assert row.samples_before == before
        each = []
        for m in row.members:
            losses = [m.replica + j / 10 for j in range(step[m.replica], step[m.replica] + m.steps)]
            assert list(m.losses) == losses
            each += losses  # every step has as many samples
        assert row.loss is not None
        assert math.isclose(row.loss, sum(each) / len(each))
        before += row.samples
        step = [a + b for a, b in zip(step, steps, strict=True)]
        assert row.step == before // SIZE // len(there)
        assert f"round {row.round}: replicas {inside[0]} (" in sentence(row)


STORY: Story = [([2, 3], [True, True]), ([2, 3], [True, False])]


def test_each_replica_has_its_own_steps_in_the_folder_and_nothing_twice(tmp_path: Path) -> None:
    for _ in range(2):  # a second watcher adds nothing
        recorder, played = Recorder(tmp_path, 100), RoundRows(keep=False)
        for event in told(STORY):
            recorder.see(event, played.see(event))
        recorder.close()
    steps = [json.loads(x) for x in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert sorted((r["replica"], r["step"]) for r in steps) == [
        *((0, j) for j in range(4)),
        *((1, j) for j in range(6)),
    ]
    assert {r["tokens_per_s"] for r in steps} == {50.0}
    rounds = [json.loads(x) for x in (tmp_path / "rounds.jsonl").read_text().splitlines()]
    assert [r["kind"] for r in rounds] == ["round_done", "evaluated"] * 2
    assert rounds[2]["left_out"][0]["replica"] == 1
    assert rounds[3]["eval_loss"] == 2.5


def test_lines_tell_replicas_apart() -> None:
    found = [x[12:].strip() for x in lines(told(STORY))]
    assert "replica 0, steps 0 to 1 · loss 0.0000 -> 0.1000 · 1.00 s/step" in found
    assert "replica 1, steps 3 to 5 · loss 1.3000 -> 1.5000 · 1.00 s/step" in found
    assert sum("samples)" in x for x in found) == 2
    assert any("; without 1 ·" in x for x in found)


def test_lines_say_which_replica_was_lost_and_is_back() -> None:
    def of(number: int, phase: Phase, why: str, term: int = 1) -> RunEvent:
        states = [ReplicaState(phase=RUNNING, term=1) for _ in range(2)]
        states[number] = ReplicaState(phase=phase, reason=Reason(text=why), term=term)
        return RunEvent(replica=number, state=RunState(phase=RUNNING, replicas=states))

    found = lines(
        [
            of(1, RUNNING, ""),
            of(1, WAITING, "peer b was lost"),
            of(1, BUILDING, "1 stage is fetched", 2),
            of(1, RUNNING, "", 2),
            of(0, DONE, "9 rounds are done"),
        ]
    )
    assert [x[12:].strip() for x in found] == [
        "running",
        "replica 1 waiting: peer b was lost",
        "replica 1 building: 1 stage is fetched",
        "replica 1 running",
    ]


def test_rows_for_programs_name_the_replica_and_have_every_kind_of_round() -> None:
    played = RoundRows(keep=False)
    rows = [row_of(e, 0, played.see(e)) for e in told(STORY)]
    assert {r["replica"] for r in rows if r["kind"] == "step"} == {0, 1}
    begun = next(r for r in rows if r["kind"] == "round_begun")
    assert begun["work"][1] == {"replica": 1, "first_step": 0, "steps": 3}
    done = [r for r in rows if r["kind"] == "round_done"]
    assert [r["samples_committed"] for r in done] == [10, 14]
    assert next(r for r in rows if r["kind"] == "evaluated")["eval_loss"] == 2.5
    json.dumps(rows, allow_nan=False)


def test_the_page_shows_a_loss_for_each_round_and_counts_rounds() -> None:
    totals = MetricTotals()
    digest = Digest(10, totals, -1.0)
    for event in told(STORY):
        digest.add(event)
    row = digest.row()
    assert len(row["losses"]) == 2
    assert [p["replica"] for p in row["plans"]] == [0, 1]
    assert (totals.rounds, totals.round_bytes) == (2, 2000)
    assert row["round"]["round"] == 1
    json.dumps(row, allow_nan=False)


def test_the_screen_counts_steps_of_the_run_and_keeps_peers_of_other_replicas() -> None:
    view = LiveState("x")
    for event in told(STORY):
        view.event(event)
    assert view.step == 14 // SIZE // 2
    assert {p.name: (p.stages, p.step) for p in view.peers.values()} == {
        "p0": ((0,), 4),
        "p1": ((0,), 6),
    }


def test_the_report_has_a_line_and_a_section_of_rounds(tmp_path: Path) -> None:
    summary = Summary(name="x", world="w", seed=0)
    followed = Following(summary, {})
    for event in told(STORY):
        followed.see(event)
    followed.finish(10)
    assert (summary.losses, summary.held_out) == ((), ((10, 2.5), (14, 2.5)))
    assert summary.holders == summary.replicas == 2
    [line] = [x for x in render(summary).splitlines() if x.startswith("rounds")]
    assert line == (
        "rounds   2, 2 replicas, 0.00 MB sent per peer and round, waited 25% of the time, "
        "1 contribution left out"
    )
    write_report(tmp_path, summary, Trace())
    page = (tmp_path / "report.html").read_text()
    assert "<h2>Rounds</h2>" in page
    assert "0: 4; 1 left out" in page
    assert (tmp_path / "rounds.png").exists()
    assert len(json.loads((tmp_path / "summary.json").read_text())["rounds"]) == 2


def test_of_gossip_a_row_says_who_met() -> None:
    members = [RoundMember(replica=i, weight=4, group=g) for i, g in enumerate((2, 1, 2))]
    rows = RoundRows()
    [pairs, all_of_them] = [
        rows.see(RunEvent(round_done=RoundDone(round=n, members=m)))
        for n, m in enumerate((members, [RoundMember(replica=i, weight=4) for i in range(3)]))
    ]
    assert pairs is not None
    assert all_of_them is not None
    assert (pairs.pairs, all_of_them.pairs) == (((0, 2),), None)
    assert pairs.table()["pairs"] == [[0, 2]]
    assert " · pairs 0-2 · " in sentence(pairs)
    assert "pairs" not in sentence(all_of_them)


def test_of_clients_a_step_is_a_round() -> None:
    rows = RoundRows()
    work = RoundWork(replica=0, steps=7, cohort=[SampleRange(first=0, count=3)])
    for number in range(3):
        rows.see(RunEvent(round_begun=RoundBegun(round=number, work=[work])))
        member = RoundMember(replica=0, weight=30)
        done = RoundDone(round=number, members=[member], microbatches=number + 1)
        row = rows.see(RunEvent(round_done=done))
        assert row is not None
        assert (row.step, row.samples) == (number + 1, 30)
