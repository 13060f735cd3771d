"""The model without every second block at the end of a run: its held-out loss is that of the plain
module whose blocks pass on what comes."""

from __future__ import annotations

import copy
import hashlib
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.client.models import models
from shoal.client.runs.evaluate import evaluation_spec
from shoal.client.runs.half import HalfModel, half_spec, last_evaluation
from shoal.dag.schedule.convert_plan import plan_to_proto
from shoal.job import Job
from shoal.proto.broker_pb2 import (
    Evaluation,
    Plan,
    Route,
    RunEvent,
    RunSpec,
    StageSlot,
    StepDone,
    Visit,
    Weights,
)
from shoal.proto.common_pb2 import BlobRef
from shoal.tests.sim.test_skipped_blocks import DEEPER, drawn
from shoal.tests.sim.virtual.test_exactness import EXAMPLES, PEERS, small_job


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet_digits", "gpt_bytes", "hf_llama"])
def test_half_the_model_is_the_module_without_every_second_block(
    laboratory: Callable[..., Any], tmp_path: Path, name: str
) -> None:
    """With running statistics too: nothing of them changes in the step that evaluates."""
    job = small_job(name, tmp_path)
    args = {**job.model.args, **DEEPER[name]}
    train = replace(job.train, steps=2, eval_every=2)
    lab = laboratory(
        replace(job, model=replace(job.model, args=args), train=train, folder=EXAMPLES)
    )
    world, spec = lab.world(PEERS), RunSpec()
    spec.CopyFrom(lab.spec)
    spec.plan.CopyFrom(plan_to_proto(drawn(lab, random.Random(name))[0]))
    run = world.submit(spec)
    trained, events = lab.finish(world, run), world.events(run)
    whole = last_evaluation(events)
    assert whole is not None
    assert whole.loss == pytest.approx(trained.evaluations[-1])

    def store(data: bytes) -> BlobRef:
        found = hashlib.sha256(data).hexdigest()
        world.blobs[found] = data
        return BlobRef(hash=found, size_bytes=len(data))

    weights = [e.weights for e in events if e.HasField("weights")][-1]
    half, names = half_spec(spec, weights, lab.graph, store)
    done = [e.step for e in world.finish(world.submit(half)) if e.HasField("step")]
    module, reader, size = copy.deepcopy(lab.module), lab.reader(), lab.job.train.microbatch_size
    # A run has buffers too that are none of the state_dict.
    assert not module.load_state_dict(trained.weights, strict=False).missing_keys
    for block in names:
        module.get_submodule(block).forward = lambda x, *a, **k: x  # type: ignore[method-assign]
    count = lab.job.train.evaluation_microbatches
    with models.ready(module, lab.job), torch.no_grad():
        made = [module.eval()(**reader.held_out(m, size)) for m in range(count)]
    losses = [float(out if isinstance(out, Tensor) else out["loss"]) for out in made]
    assert len(names) >= 1
    assert done[-1].evaluation.loss == pytest.approx(sum(losses) / count, rel=1e-5)
    assert abs(done[-1].evaluation.loss - whole.loss) > 1e-6
    assert names[0] in str(HalfModel(names, done[-1].evaluation.loss, whole.loss))


def test_a_run_that_leaves_nothing_out_or_evaluates_nothing_has_no_half() -> None:
    stages = [StageSlot(start=k, stop=k + 1, holders=["a"]) for k in range(3)]
    whole, short = ([0, 1, 2], [0, 2])
    routes = {
        name: Route(visits=[Visit(stage=k, peer="a") for k in order])
        for name, order in (("whole", whole), ("short", short))
    }
    evaluated = RunEvent(step=StepDone(step=1, evaluation=Evaluation(loss=2.0)))
    step = RunEvent(step=StepDone(step=2))

    def plan(*names: str) -> RunEvent:
        return RunEvent(plan=Plan(stages=stages, routes=[routes[n] for n in names]))

    assert last_evaluation([plan("whole"), evaluated]) is None
    assert last_evaluation([plan("whole", "short"), step]) is None
    found = last_evaluation([plan("whole", "short"), evaluated, step])
    assert found is not None
    assert found.loss == 2.0


def test_an_evaluation_of_a_run_with_full_steps_is_a_job_that_may_be() -> None:
    """Of its one step none would be left to leave something out."""
    skips = {"skip": 0.3, "reorder": True, "skip_warmup": 4, "skip_scaling": "sum"}
    job = Job(model="a:b", steps=9, plan=skips)
    spec = evaluation_spec(RunSpec(job=job.to_json()), Weights())
    assert not Job.from_json(spec.job).plan.reroutes
