"""Results of steps and rounds: numbers that overflow, names that act, and who may say them."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.broker.membership.bounds import MOST_METRICS, MOST_NAME, sound_report, sound_round
from shoal.broker.round_rows import Local, RoundRow
from shoal.broker.service.page.digest import Digest, MetricTotals
from shoal.broker.service.page.seen import Look
from shoal.net.identity.names import Party, PartyRole
from shoal.proto.broker_pb2 import (
    Description,
    Evaluation,
    NamedNumber,
    Outcome,
    RoundReport,
    RunEvent,
    RunState,
    StepReport,
)

from ...broker.conftest import World, make_world, world  # noqa: F401  # fixtures

ANY = st.floats() | st.sampled_from([1.7e308, -1.7e308, math.inf, math.nan, 5e-324, 3.4e38])
METRIC = st.builds(NamedNumber, name=st.text(max_size=8), value=ANY)
EVALUATION = st.builds(Evaluation, loss=ANY, weight=ANY, metrics=st.lists(METRIC, max_size=3))
OUTCOME = st.builds(
    Outcome,
    loss=ANY,
    weight=ANY,
    grad_norm=ANY,
    lr=ANY,
    metrics=st.lists(METRIC, max_size=3),
    loss_scale=ANY,
    skipped=st.booleans(),
)
ESCAPE = "acc\x1b[2J\nroot"


def shown(*events: RunEvent) -> dict[str, Any]:
    """What a browser reads of a run; raises where it is no JSON."""
    digest = Digest(8, MetricTotals(), 0.0)
    for number, event in enumerate(events):
        event.number = number
        digest.add(event)
    seen = Look(
        Description(runs=[RunState(run="r")]), {"r": digest}, {"r": ""}, 0.0, lambda peer: ()
    )

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    found: dict[str, Any] = json.loads(
        seen.text(Party(PartyRole.OPERATOR, "")), parse_constant=refuse
    )["runs"][0]
    return found


@settings(max_examples=60)
@given(OUTCOME, EVALUATION, st.floats())
def test_no_number_of_a_peer_ends_the_pages_data(
    outcome: Outcome, evaluation: Evaluation, drift: float
) -> None:
    report = StepReport(outcome=outcome, evaluation=evaluation)
    sound_report(report)
    of_round = RoundReport(evaluation=evaluation, drift=drift, waited_s=drift, skipped=2**64 - 1)
    sound_round(of_round)
    events = [RunEvent() for _ in range(4)]
    for event in events[:2]:
        event.step.outcome.CopyFrom(report.outcome)
        event.step.evaluation.CopyFrom(report.evaluation)
    events[2].evaluated.evaluation.CopyFrom(of_round.evaluation)
    events[3].round_done.drift = of_round.drift
    events[3].round_done.skipped = 10_000 * of_round.skipped
    shown(*events)
    for metric in (*report.outcome.metrics, *report.evaluation.metrics):
        assert metric.name.isprintable()
    losses = (outcome.loss, outcome.loss)
    told = (report.outcome.loss, report.outcome.loss)
    assert all(math.isnan(a) == math.isnan(b) for a, b in zip(losses, told, strict=True))
    row = Local(replica=0, steps=2, samples=2**40, losses=told)
    assert row.loss is None or math.isfinite(row.loss)
    means = RoundRow(
        round=0, attempt=1, members=(row, row), left_out=(), joined=(), pairs=None,
        samples_before=0, step=1, drift=0.0, sent_bytes=0, waited_s=0.0, seconds=1.0,
        exchange_s=0.0,
    )  # fmt: skip
    assert means.loss is None or math.isfinite(means.loss)


def test_many_metrics_and_long_names_are_cut() -> None:
    report = StepReport()
    report.outcome.metrics.add(name="x" * 10**5, value=1)
    for i in range(10**4):
        report.outcome.metrics.add(name=f"{i}", value=1)
    report.outcome.metrics.add(name=ESCAPE, value=1)
    sound_report(report)
    assert len(report.outcome.metrics) == MOST_METRICS
    assert max(len(m.name) for m in report.outcome.metrics) == MOST_NAME


def results(world: World, run: str, step: int, who: str, **told: float) -> list[Any]:  # noqa: F811
    report = StepReport(run=run, term=1, step=step)
    report.outcome.CopyFrom(Outcome(loss=told["loss"], weight=1.0))
    report.evaluation.CopyFrom(Evaluation(loss=told["loss"], weight=1.0))
    report.evaluation.metrics.add(name=ESCAPE, value=0.5)
    out = world.say(who, step=report)
    return [e for e in world.published(out) if e.HasField("step")]


@pytest.mark.parametrize("order", ["abc", "cab", "bca"])
def test_losses_and_evaluations_are_the_hubs_and_evaluations_come_when_they_are_due(
    world: World,  # noqa: F811
    order: str,
) -> None:
    """Stages on a, b and c, of which the last makes the loss; a and b say more than they may."""
    run = world.start("a", "b", "c", steps=5, eval_every=2)
    losses = {"a": 0.001, "b": 1e308, "c": 2.5}
    held_out = []
    for step in range(5):
        found = [e for who in order for e in results(world, run, step, who, loss=losses[who])]
        (event,) = found
        assert event.step.outcome.loss == 2.5
        if event.step.HasField("evaluation"):
            held_out.append(step)
            assert event.step.evaluation.loss == 2.5
            (metric,) = event.step.evaluation.metrics
            assert metric.name == "acc?[2J?root"
    assert held_out == [1, 3, 4]
