"""Runs with an exponential mean of weights, in the simulated world: exported and evaluated is what
AveragedModel comes to beside the plain loop, whatever the plan and whoever is lost."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from shoal.client.models import models
from shoal.sim.plain import oracle
from shoal.sim.virtual.world import PeerSpec
from shoal.tests.sim.recovery.test_recovery import JOB, Lab
from shoal.tests.sim.virtual.test_exactness import random_plan, small_job

DECAY = 0.7


def test_the_mean_is_exported(
    laboratory: Callable[..., Any], tmp_path: Path, equal_training: Any, monkeypatch: Any
) -> None:
    job = small_job("gpt_bytes", tmp_path)
    lab = laboratory(replace(job, name="small-ema", train=replace(job.train, ema=DECAY)))
    module, train, reader = copy.deepcopy(lab.module), lab.job.train, lab.reader()
    mean = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    made = oracle.optimizer_of

    def watched(model: Any, settings: Any) -> Any:
        optimizer = made(model, settings)
        optimizer.register_step_post_hook(lambda *_: mean.update_parameters(model))
        return optimizer

    monkeypatch.setattr(oracle, "optimizer_of", watched)
    with models.ready(module, lab.job):
        seen = oracle.train(
            module,
            lambda step, m: reader.batch(step, m, train.microbatch_size),
            train,
            steps=train.steps,
            microbatches=train.microbatches,
        )
    plan = random_plan(random.Random("ema"), len(lab.graph.operators), 3, train)
    got = lab.train(lab.world([PeerSpec(name=f"p{i}") for i in range(5)]), plan)
    wanted = copy.copy(got)
    wanted.losses, wanted.weights = seen.losses, dict(mean.module.state_dict())
    equal_training(got, wanted)
    # The last evaluation is behind the last step, over equal held-out microbatches.
    mean.module.eval()
    size, count = train.microbatch_size, len(plan.evaluation_routes)
    with torch.no_grad():
        held = [float(mean.module(**reader.held_out(m, size))) for m in range(count)]
        raw = [float(module.eval()(**reader.held_out(m, size))) for m in range(count)]
    assert got.evaluations[-1] == pytest.approx(sum(held) / count, rel=1e-5)
    assert abs(sum(raw) - sum(held)) / count > 1e-3, "the weights themselves say something else"


@pytest.mark.slow
def test_with_a_lost_peer_it_is_the_same_bit_for_bit(
    laboratory: Callable[..., Any], plans_once: None
) -> None:
    lab = Lab(laboratory, train={**JOB["train"], "ema": DECAY})
    for at, name in ((lab.calm.records // 2, "p0"), (lab.calm.records * 3 // 4, "p1")):
        lab.assert_same(lab.play({at: name}), f"{name} at {at}")
