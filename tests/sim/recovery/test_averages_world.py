"""Runs with an exponential mean of weights, in the simulated world: exported and evaluated is what
AveragedModel comes to beside the plain loop, whatever the plan and whoever is lost."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from shoal.client.models import models
from shoal.dag.plan.plan import PeerId, Plan, StageSlot, Visit
from shoal.job import Job
from shoal.peer.sync.optimizer import StageOptimizer
from shoal.sim.monitor.monitor import Monitor
from shoal.sim.plain import oracle
from shoal.sim.virtual.world import PeerSpec
from shoal.tests.peer.optimizers.eight_bits import from_elements
from shoal.tests.sim.recovery.test_checkpoints import JOB as CHECKPOINTS
from shoal.tests.sim.recovery.test_checkpoints import Lab as Checkpoints
from shoal.tests.sim.recovery.test_recovery import JOB, Lab
from shoal.tests.sim.virtual.test_exactness import EXAMPLES, random_plan, small_job
from shoal.tests.sim.virtual.test_head_in_blocks import plan_of, untied  # noqa: F401 (a fixture)

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


@pytest.fixture
def raw(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Tensor]]:
    """The weights behind each update that was made, by name, as the first holder to make it had
    them."""
    seen: dict[str, list[Tensor]] = {}
    average = StageOptimizer.average

    def watched(self: StageOptimizer) -> None:
        for name, parameter in self._named.items():
            mine = self.__dict__.setdefault("_seen", {})
            mine[name] = mine.get(name, 0) + 1
            if mine[name] > len(seen.setdefault(name, [])):
                seen[name].append(parameter.detach().clone())
        average(self)

    monkeypatch.setattr(StageOptimizer, "average", watched)
    return seen


def mean_of(series: list[Tensor]) -> Tensor:
    """AveragedModel of weights, one after the other."""
    of = nn.ParameterList([series[0].float()])
    mean = AveragedModel(of, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    for tensor in series:
        of[0].data = tensor.float()
        mean.update_parameters(of)
    return mean.module[0].detach()  # type: ignore[index, no-any-return]


CASES: dict[str, dict[str, Any]] = {
    "codec": {"codec": {"default": "int8"}},
    "ahead": {"codec": {"grad": "topk:ratio=4", "feedback": "ahead"}},
    "bf16": {"model": {"dtype": "bf16"}},
    "bf16 state": {"train": {"state_dtype": "bf16"}},
    "demo": {
        "sync": {"method": "demo", "options": {"block": 8, "top": 4}},
        "train": {"optimizer": "sgd", "momentum": 0.0},
    },
    "muon": {"train": {"optimizer": "muon"}},
    "lora": {
        "model": {
            "factory": "hf:hf_llama",
            "args": {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 24},
            "lora": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
        }
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_whatever_trains_the_mean_is_of_the_weights_behind_each_update(
    laboratory: Callable[..., Any], tmp_path: Path, raw: dict[str, list[Tensor]], case: str
) -> None:
    table = json.loads(small_job("gpt_bytes", tmp_path).to_json())
    table["train"] |= {"ema": DECAY, "lr": 0.01}
    table["model"]["factory"] = "shoal.examples.gpt:gpt"
    for key, wanted in CASES[case].items():
        table[key] = table[key] | wanted
    job = replace(Job.from_table(table | {"name": f"ema {case}"}), folder=EXAMPLES)
    lab = laboratory(job)
    n = len(lab.graph.operators)
    a, b, c = (PeerId(f"p{i}") for i in range(3))
    slots = (StageSlot(0, n // 2, (a, b)), StageSlot(n // 2, n, (c,)))
    routes = tuple((Visit(0, (a, b)[m % 2]), Visit(1, c)) for m in range(4))
    plan = Plan(slots, routes, 2, evaluation_routes=routes[:2])
    got = lab.train(lab.world([PeerSpec(name=p) for p in (a, b, c)]), plan)
    trained = [p.name for p in lab.graph.parameters if p.trainable]
    assert raw.keys() >= {*trained}
    assert {len(raw[name]) for name in trained} == {lab.job.train.steps}
    for name in trained:
        mean, last = mean_of(raw[name]), raw[name][-1]
        torch.testing.assert_close(
            got.weights[name], mean.to(last.dtype), rtol=1e-5, atol=1e-7, msg=name
        )
    apart = [float((got.weights[n] - raw[n][-1]).abs().max()) for n in trained]
    assert max(apart) > 1e-3, "the weights themselves are others"
    if job.codec.default == "none" and job.model.dtype == "fp32":
        module, reader = copy.deepcopy(lab.module), lab.reader()
        with torch.no_grad():
            for name in trained:
                module.get_parameter(name).copy_(got.weights[name])
            with models.ready(module.eval(), job) as ready:
                outs = [ready(**reader.held_out(m, 2)) for m in range(2)]
        held = [float(out if isinstance(out, Tensor) else out["loss"]) for out in outs]
        assert got.evaluations[-1] == pytest.approx(sum(held) / 2, rel=1e-5)


@pytest.mark.slow
def test_a_head_in_blocks_has_the_mean_of_each(
    untied: Any,  # noqa: F811
    laboratory: Callable[..., Any],
    raw: dict[str, list[Tensor]],
) -> None:
    job = untied[0].job
    lab = laboratory(replace(job, name="ema blocks", train=replace(job.train, ema=DECAY)))
    plan = plan_of(lab, ["a+b", "b+c", "c", "a+c", "b"])
    got = lab.train(lab.world([PeerSpec(name=n) for n in "abc"]), plan)
    parts = [mean_of(raw[f"head.weight..{i}/3"]) for i in range(3)]
    torch.testing.assert_close(got.weights["head.weight"], torch.cat(parts), rtol=1e-5, atol=1e-7)
    # As a plain loop has it that knows of no blocks.
    whole = [
        torch.cat(p) for p in zip(*(raw[f"head.weight..{i}/3"] for i in range(3)), strict=True)
    ]
    torch.testing.assert_close(whole[-1], untied[1].weights["head.weight"], rtol=1e-3, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit"])
def test_a_run_that_goes_on_from_a_checkpoint_goes_on_with_its_mean(
    laboratory: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, optimizer: str
) -> None:
    from_elements(monkeypatch, 200)  # of smaller parameters moments are in 32 bits
    lab = Checkpoints(laboratory)
    train = CHECKPOINTS["train"] | {"ema": DECAY, "optimizer": optimizer}
    calm = lab.world()
    Monitor(calm).finish(first := calm.submit(lab.spec(train=train)), 3600.0)
    found = next(e.checkpoint for e in calm.events(first) if e.HasField("checkpoint"))
    assert 0 < found.step < train["steps"]

    def ended(**more: Any) -> tuple[list[float], dict[str, Tensor]]:
        world = lab.world(saved=calm)
        world.blobs |= calm.blobs
        run = world.submit(lab.spec(found, train=train | more))
        Monitor(world).finish(run, 3600.0)
        return outcome(world, run)

    losses, weights = outcome(calm, first)
    again, mean = ended()
    assert again == losses[found.step :]
    assert mean.keys() == weights.keys()
    assert all(torch.equal(mean[n], weights[n]) for n in weights)
    _, plain = ended(ema=0.0)
    assert any(not torch.equal(plain[n], mean[n]) for n in mean)


def outcome(world: Any, run: str) -> tuple[list[float], dict[str, Tensor]]:
    """The losses of all steps, and what was exported."""
    events = world.events(run)
    exported = [e.weights for e in events if e.HasField("weights")][-1]
    files = [load(world.blobs[f.blob.hash]) for f in exported.files]
    losses = [e.step.outcome.loss for e in events if e.HasField("step")]
    return losses, {n: t for file in files for n, t in file.items()}
