"""Reports on replicas that are unequal: each is compared with its own plan, and what each figure
says is what a synthetic run was made of."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.broker.round_rows import RoundRow
from shoal.proto.broker_pb2 import (
    Formation,
    Outcome,
    Plan,
    PlanReport,
    Prediction,
    ReplicaState,
    RunEvent,
    RunState,
    StageSlot,
    StepDone,
)
from shoal.sim.following import Following
from shoal.sim.report import Summary, render
from shoal.sim.report.measures.measure import measure
from shoal.sim.report.measures.verdict import judge
from shoal.sim.report.rounds import behind_rounds
from shoal.sim.report.tables import comparison
from shoal.sim.report.text import outrun
from shoal.sim.trace import Span, Trace

Paces = list[tuple[float, int]]
"""By replica, seconds of a local step and how many it makes."""
paces = st.lists(st.tuples(st.floats(0.1, 10.0), st.integers(2, 6)), min_size=1, max_size=4)


def followed(made: Paces, predicted: list[float]) -> Following:
    found = Following(Summary(name="job", world="virtual", seed=1), {})
    found.see(RunEvent(state=RunState(replicas=[ReplicaState()] * len(made))))
    for k, expected in enumerate(predicted):
        peers = Prediction(step_s=expected)
        peers.peers.add(peer=f"p{k}", compute_s=expected)
        peers.links.add(source=f"p{k}", destination=f"q{k}", bytes=1_000_000)
        plan = Plan(stages=[StageSlot(start=0, stop=1, holders=[f"p{k}"])])
        found.see(RunEvent(replica=k, plan=plan, report=PlanReport(predicted=peers)))
    for k, (step_s, steps) in enumerate(made):
        for j in range(steps):
            step = StepDone(step=j, outcome=Outcome(loss=1.0), seconds=step_s)
            found.see(RunEvent(replica=k, step=step))
    found.finish(1)
    return found


def traced(made: Paces) -> Trace:
    """Each peer computes the whole of its steps, and sends a megabyte in each; between two of
    them it evaluates for long, and its rounds send much."""
    trace = Trace()
    spans = []
    for k, (step_s, steps) in enumerate(made):
        peer, at = f"p{k}", 0.0
        for j in range(steps):
            common = {"peer": peer, "step": j, "microbatch": 0, "stage": 0}
            spans.append(Span(start_s=at, end_s=at + step_s, kind="forward", **common))
            at += step_s
            spans.append(Span(start_s=at, end_s=at + 7, kind="evaluate", **common))
            at += 7
            for role, size in (("activation", 1_000_000), ("round", 50_000_000)):
                sent = {"to": f"q{k}", "role": role, "size_bytes": size, "step": j}
                spans.append(Span(start_s=at, end_s=at, peer=peer, kind="send", **sent))
    for span in sorted(spans, key=lambda s: s.start_s):
        trace.add(span)
    return trace


@given(paces)
def test_a_run_that_goes_as_it_was_planned_has_no_error(made: Paces) -> None:
    found = followed(made, [step_s for step_s, _ in made])
    s = found.summary
    assert s.predicted_step_s == pytest.approx(s.step_s)
    assert s.step_s == pytest.approx(
        sum(t * max(1, n - 1) for t, n in made) / sum(max(1, n - 1) for _, n in made)
    )
    rows = comparison(s, measure(traced(made)), found.report, {})
    of_peers = [r for r in rows if "computes" in r.what]
    of_links = [r for r in rows if "→" in r.what]
    assert len(of_peers) == len(of_links) == len(made)
    assert not [r for r in rows if r.error is not None and abs(r.error) > 1e-6]


@given(paces, st.floats(1.2, 3.0))
def test_a_prediction_that_is_off_by_a_factor_is_shown_with_it(made: Paces, factor: float) -> None:
    found = followed(made, [step_s * factor for step_s, _ in made])
    s = found.summary
    assert s.predicted_step_s / s.step_s == pytest.approx(factor)


@pytest.mark.parametrize(("predicted", "wrong"), [(432, False), (50_000, True)])
def test_a_few_bytes_are_never_called_wrong(predicted: int, wrong: bool) -> None:
    trace = Trace()
    for step in range(3):
        one = {"peer": "a", "step": step, "microbatch": 0, "stage": 0}
        trace.add(Span(start_s=step, end_s=step + 1, kind="forward", **one))
        sent = {"to": "b", "role": "sync", "size_bytes": 8, "step": step}
        trace.add(Span(start_s=step, end_s=step + 0.1, peer="a", kind="send", **sent))
    report = PlanReport()
    report.predicted.links.add(source="a", destination="b", bytes=predicted)
    s = Summary(name="job", world="virtual", seed=1, step_s=1.0)
    [row] = [r for r in comparison(s, measure(trace), report, {}) if "→" in r.what]
    assert (row.error is not None) == wrong


def test_what_replicas_wait_between_steps_is_said_beside_what_their_steps_hang_on() -> None:
    trace = Trace()
    for step in range(4):
        one = {"peer": "a", "step": step, "microbatch": 0, "stage": 0}
        trace.add(Span(start_s=step, end_s=step + 1, kind="forward", **one))
    row = {"waited_s": 3.0, "exchange_s": 1.0, "seconds": 5.0, "sent_bytes": 0, "attempt": 1}
    row |= {"left_out": []}
    s = Summary(name="job", world="virtual", seed=1, step_s=1.0, rounds=(row,), replicas=2)
    verdict = behind_rounds(judge(trace, measure(trace)), s)
    assert verdict.text.startswith("Replicas wait up to 60% of the time behind their local steps.")
    assert "it computes 100% of the time" in verdict.text.partition("Within these: ")[2]
    text = render(s)
    assert "waited 60% of the time, exchanges 20%" in text


@pytest.mark.parametrize(
    ("holders", "alone_s", "measured", "wrong"),
    [
        (3, 0.33, False, True),
        (3, 1.5, False, False),
        (1, 0.33, False, False),
        (3, 0.33, True, True),
    ],
)
def test_a_peer_that_would_be_faster_alone_is_said_on_top(
    holders: int, alone_s: float, measured: bool, wrong: bool
) -> None:
    s = Summary(name="job", world="virtual", seed=1, step_s=1.0, predicted_step_s=1.0)
    s.holders = holders
    (s.against_measured if measured else s.against)["best single peer"] = alone_s
    assert bool(outrun(s)) == wrong
    top = render(s).splitlines()[1]
    assert top.startswith("choice   a pipeline over this network is the wrong choice") == wrong
    if wrong:
        assert "3.03 times faster" in top
        assert ("[measured here]" if measured else "[predicted]") in top


def test_replicas_are_compared_with_other_ways_by_the_time_for_a_batch_of_all() -> None:
    found = followed([(1.0, 6), (2.0, 3)], [1.0, 2.0])
    formed = Formation(kind="local", every=3, batch=12, local_s=6.0, exchange_s=2.0, exposed_s=1.5)
    formed.alternatives.add(name="one replica", step_s=5.0)
    formed.alternatives.add(name="unknown")
    found.see(RunEvent(formed=formed))
    common = {"attempt": 1, "members": (), "left_out": (), "joined": (), "samples_before": 0}
    common |= {"step": 3, "pairs": None, "drift": 1.0, "sent_bytes": 0, "waited_s": 2.0}
    found.played.rows.append(RoundRow(round=0, exchange_s=1.0, seconds=7.0, **common))
    found.finish(1)
    s = found.summary
    assert s.predicted_batch_s == pytest.approx((6.0 + 1.5) / 3)
    [line] = [x for x in render(s).splitlines() if x.startswith("against")]
    assert line == (
        "against  one replica 2.00x [predicted] (its time for a batch over this run's, both as "
        "marked)"
    )
