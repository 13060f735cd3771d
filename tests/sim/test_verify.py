"""`--verify`: which difference fails a run, and steps in which nothing counts."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from shoal.client.runs.evaluate import _evaluate
from shoal.job import Job
from shoal.sim.plain import oracle
from shoal.sim.report import Summary
from shoal.sim.verify import TOLERANCE, as_one_stage, compare, judge, verify

JOB = Job(model="a:b", steps=1)
losses = st.lists(
    st.one_of(st.floats(-1e3, 1e3), st.sampled_from([math.nan, math.inf, -math.inf])),
    min_size=1,
    max_size=6,
)


def judged(got: list[float], wanted: list[float], job: Job = JOB, **more: Any) -> Summary:
    summary = Summary(name="s", world="w", seed=0, **more)
    compare(summary, got, wanted, "single process")
    both = zip(got, wanted, strict=True)
    judge(job, summary, [(f"loss of step {k}", a, b) for k, (a, b) in enumerate(both)])
    return summary


@given(losses)
def test_a_run_that_is_the_plain_loop_passes(wanted: list[float]) -> None:
    found = judged(list(wanted), wanted)
    assert (found.exit, found.error, found.max_loss_difference) == (0, "", 0.0)


@given(losses, st.data())
def test_one_loss_beyond_the_tolerance_fails_and_is_named(wanted: list[float], data: Any) -> None:
    step = data.draw(st.integers(0, len(wanted) - 1))
    got = list(wanted)
    if math.isfinite(wanted[step]):
        allowed = TOLERANCE["fp32"] * max(1.0, abs(wanted[step]))
        got[step] += 0.99 * allowed
        assert judged(got, wanted).exit == 0
        got[step] = wanted[step] + data.draw(st.sampled_from([1.01, -1.01, math.inf])) * allowed
    else:
        got[step] = data.draw(st.floats(-1e3, 1e3))
    found = judged(got, wanted)
    assert found.exit == 1
    assert f"--verify: the loss of step {step} is {got[step]:.6g}, in the single" in found.error


@pytest.mark.parametrize(
    "more", [{"lossy": ("int8",)}, {"inexact_from": 3}, {"rerouted": True}], ids=str
)
def test_what_is_not_meant_to_be_equal_does_not_fail(more: dict[str, Any]) -> None:
    found = judged([1.0, 2.0], [1.0, 1.0], **more)
    assert found.exit == 0
    assert found.loss_ratio == 2.0
    assert judged([1.0, 2.0], [1.0, 0.0], **more).loss_ratio is None


def test_bf16_is_meant_to_be_equal_only_roughly() -> None:
    bf16 = Job(model={"factory": "a:b", "dtype": "bf16"}, steps=1)
    assert judged([1.02], [1.0], bf16).exit == 0
    assert judged([1.05], [1.0], bf16).exit == 1


def test_fp16_is_meant_to_be_equal_to_torch_s_own() -> None:
    fp16 = Job(model={"factory": "a:b", "dtype": "fp16"}, steps=1)
    assert judged([1.008], [1.0], fp16).exit == 0
    assert judged([1.02], [1.0], fp16).exit == 1


def test_a_loss_that_torch_leaves_in_half_precision_has_no_plain_loop() -> None:
    """On a card it would be float32. A step at most scales would be skipped for nothing."""

    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.only = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.only(x).mean()

    def batches(step: int, m: int) -> dict[str, Tensor]:
        return {"x": torch.ones(2, 3)}

    train = Job(model="a:b", steps=1).train
    with pytest.raises(oracle.HalfLossError, match="leaves the loss in float16"):
        oracle.train(Mean(), batches, train, steps=1, microbatches=1, fp16=True)
    assert len(oracle.train(Mean(), batches, train, steps=1, microbatches=1).losses) == 1


class Masked(nn.Module):
    """The mean over the samples that count, which is NaN over none."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        each = self.second(self.first(x).tanh()).square()[:, 0]
        return {"loss": (each * y).sum() / y.sum(), "weight": y.sum()}


@pytest.fixture
def masked(tmp_path: Path) -> Job:
    rng = np.random.default_rng(0)
    counts = (np.arange(16) % 3 == 0).astype(np.float32)
    np.savez(tmp_path / "data.npz", x=rng.normal(size=(16, 3)).astype(np.float32), y=counts)
    return Job(
        name="masked",
        model=Masked(),
        data={"kind": "arrays", "source": "data.npz", "holdout": 0.2},
        batch=2,
        microbatch=1,
        steps=12,
        eval_every=0,
        plan={"stages": 2, "pipelines": 1},
        folder=tmp_path,
    )


def test_a_step_in_which_nothing_counts_updates_nothing_in_both(
    masked: Job, laboratory: Any, equal_training: Any
) -> None:
    lab = laboratory(masked)
    got, wanted = lab.train(lab.world(2)), lab.plain()
    none = [math.isnan(x) for x in wanted.losses]
    assert 0 < sum(none) < len(none)
    assert [math.isnan(x) for x in got.losses] == none
    for run in (got, wanted):
        run.losses = [x for x in run.losses if not math.isnan(x)]
    equal_training(got, wanted)


def test_an_evaluation_passes_over_what_does_not_count(masked: Job, laboratory: Any) -> None:
    lab = laboratory(masked)
    reader = lab.reader()
    found = [_evaluate(lab.module, lab.job, reader, n) for n in (1, 2, 3)]
    parts = [reader.held_out(m, 1) for m in range(3)]
    weights = [float(part["y"].sum()) for part in parts]
    assert 0.0 in weights
    for n, result in enumerate(found, 1):
        x, y = (torch.cat([part[k] for part in parts[:n]]) for k in "xy")
        with torch.no_grad():
            wanted = lab.module(x, y)["loss"]
        assert result["loss"] == pytest.approx(float(wanted), rel=1e-5, nan_ok=True)
        assert result["weight"] == sum(weights[:n])


def test_a_run_that_ended_early_is_compared_over_its_own_steps() -> None:
    """Its masks are those of one stage that goes on to the end, whatever time that takes."""
    job = Job(model="a:b", train={"steps": 5, "stop": {"time": "2s"}})
    summary = Summary(name="s", world="w", seed=0)
    followed = SimpleNamespace(
        losses=[3.0, 2.0], played=SimpleNamespace(rows=()), summary=summary, microbatch_size=8
    )
    asked: list[Job] = []

    def one_stage(alone: Job) -> list[float]:
        asked.append(alone)
        return [3.0, 2.0, 1.0, 0.5, 0.2]

    facts: Any = SimpleNamespace(job=job, random=True)
    verify(job, followed, facts, None, one_stage, lambda line: None)  # type: ignore[arg-type]
    assert (summary.exit, summary.max_loss_difference) == (0, 0.0)
    [alone] = asked
    assert (alone.train.steps, bool(alone.train.stop)) == (5, False)
    followed.losses = [3.0, 1.0]
    verify(job, followed, facts, None, one_stage, lambda line: None)  # type: ignore[arg-type]
    assert "the loss of step 1 is 1, in the one-stage run 2" in summary.error


@pytest.mark.parametrize(
    "tables",
    [
        {"plan": {"scheduler": "swarm", "stages": 3}},
        {"plan": {"skip": 0.3, "reorder": True, "skip_warmup": 1, "skip_scaling": "sum"}},
        {"plan": {"schedule": "zero-bubble", "in_flight": 3}},
        {"plan": {"stages": 4}, "recovery": {"ladder": ["neighbour+"]}},
        {"plan": {"replicas": 2}, "sync": {"kind": "local"}},
        {"sync": {"method": "demo"}, "train": {"optimizer": "sgd", "momentum": 0}},
        {"sync": {"method": "powersgd", "options": {"rank": 2}}},
        {"sync": {"collective": "ring"}},
    ],
)
def test_any_job_is_also_one_of_one_stage(tables: dict[str, Any]) -> None:
    """With which a run is compared whose masks depend on how its batch was divided."""
    train = {"steps": 4, "batch": 8, **tables.get("train", {})}
    alone = as_one_stage(Job(model="a:b", **tables | {"train": train}), 2)
    assert (alone.plan.stages, alone.plan.pipelines, alone.train.microbatch) == (1, 1, 2)
    assert alone.rounds is None
    alone.check_idle()
