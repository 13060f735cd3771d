"""Numbers of a model beside the columns that Shoal writes itself."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.client.files.columns import COLUMNS, ColumnError, check_names
from shoal.client.files.records import evaluation_numbers, step_numbers
from shoal.client.show.progress import row_of
from shoal.proto.broker_pb2 import (
    Evaluation,
    NamedNumber,
    Outcome,
    RunEvent,
    StepDone,
    VersionEvaluated,
)

NAMES = st.sampled_from(sorted(COLUMNS)) | st.text("abcdef_", min_size=1, max_size=8)


def done(names: list[str]) -> StepDone:
    """A step with everything that one may have; each number of the model is -1."""
    metrics = [NamedNumber(name=name, value=-1.0) for name in names]
    return StepDone(
        step=3,
        outcome=Outcome(
            loss=2.0, weight=4.0, grad_norm=1.0, lr=0.1, metrics=metrics, loss_scale=8.0
        ),
        evaluation=Evaluation(loss=5.0, weight=4.0, metrics=metrics),
        seconds=1.0,
        sent_bytes=7,
        compute_s=0.5,
        again_bytes=9,
    )


def event(names: list[str]) -> RunEvent:
    return RunEvent(number=8, at_s=2.0, term=1, replica=1, step=done(names))


@given(st.lists(NAMES, unique=True, max_size=6))
def test_no_number_of_a_model_takes_the_place_of_a_column(names: list[str]) -> None:
    """Whatever the names: those that pass are all there, and no name changes a column."""
    plain = row_of(event([]), 100)
    assert {k: v for k, v in row_of(event(names), 100).items() if k in plain} == plain
    try:
        check_names(names)
    except ColumnError:
        return
    row = step_numbers(done(names), 100)
    assert all(row[name] == row[f"eval_{name}"] == -1.0 for name in names)
    assert len(row) == len(step_numbers(done([]), 100)) + 2 * len(names)


def test_every_column_is_refused_as_a_name() -> None:
    found = VersionEvaluated(round=1, step=3, evaluation=Evaluation(loss=5.0), replicas=2)
    written = {*step_numbers(done([]), 100), *evaluation_numbers(found), *row_of(event([]), 100)}
    assert written <= COLUMNS
    for name in COLUMNS:
        with pytest.raises(ColumnError, match=f'a number called "{name}".*by another name'):
            check_names(["accuracy", name])
    with pytest.raises(ColumnError, match='"eval_accuracy" already'):
        check_names(["accuracy", "eval_accuracy"])
