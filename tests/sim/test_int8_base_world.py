"""Adapters over a base in 8 bits. The oracle is one loop over the same module, whose frozen
matrices were rounded and made float32 again by the formula, in the lines of `rounded`."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shoal.client.models import models
from shoal.client.models.adapters import plain_name
from shoal.job import Job
from shoal.sim.monitor.monitor import Monitor
from shoal.sim.virtual.world import PeerSpec, World

from .virtual.test_exactness import PEERS, random_plan

# peft asks transformers by a name that goes away.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
MODELS: dict[str, dict[str, Any]] = {
    "llama": {
        "factory": "hf:hf_llama",  # its head is tied to its embedding
        "args": {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 24},
        "lora": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
    },
    "untied": {
        "factory": "hf:hf_llama",
        "args": {
            **{"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 24},
            "tie_word_embeddings": False,
        },
        "lora": {"r": 4, "target_modules": ["q_proj"]},
    },
    "gpt2": {
        "factory": "hf:hf_gpt2",  # its matrices are (in, out)
        "args": {
            **{"n_layer": 2, "n_embd": 16, "n_head": 2},
            **{"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
        },
        "lora": {"r": 4, "target_modules": "auto", "fan_in_fan_out": True},
    },
    "mixtral": {
        "factory": f"{__name__}:mixtral",  # its experts are in one tensor
        "lora": {"r": 4, "target_modules": ["q_proj"]},
    },
}


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"vocab_size": 256, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4}
    return MixtralForCausalLM(MixtralConfig(**sizes, **heads, max_position_embeddings=32))


def job(name: str, **model: Any) -> Job:
    table = {
        "version": 1,
        "name": f"int8-{name}",
        "model": {**MODELS[name], "frozen_dtype": "int8", **model},
        "data": {"kind": "text", "length": 16, "source": str(EXAMPLES / "*.py")},
        "train": {"steps": 4, "batch": 8, "microbatch": 2, "lr": 1e-2, "eval_every": 2}
        | {"eval_batches": 1},
        "plan": {"scheduler": "uniform"},
    }
    return replace(Job.from_table(table), folder=EXAMPLES)


def rounded(lab: Any) -> nn.Module:
    """The module whose frozen matrices have the values that 8 bits give them."""
    found = copy.deepcopy(lab.module)
    columns = {
        part.weight for part in found.modules() if type(part).__name__ == "Conv1D"
    }  # (in, out)
    with torch.no_grad(), models.ready(found, lab.job):
        for p in found.parameters():
            if not p.requires_grad and p.dim() in (2, 3):  # experts: (experts, out, in)
                scale = p.abs().amax(-2 if p in columns else -1, keepdim=True) / 127
                p.copy_((p / scale).round() * scale)
    return found


def wanted(lab: Any) -> Any:
    """What the plain loop makes of the rounded module; by the names of the graph, frozen weights as
    they were before."""
    own = copy.copy(lab)
    own.module = rounded(lab)
    found, name_of = own.plain(), plain_name(lab.module)
    before = {name_of(n): t for n, t in lab.module.state_dict().items()}
    trained = {p.name for p in lab.graph.parameters if p.trainable}
    after = {name_of(n): t for n, t in found.weights.items()}
    return replace(found, weights=before | {n: after[n] for n in trained})


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", MODELS)
def test_every_plan_trains_adapters_as_the_rounded_module(laboratory, equal_training, name):
    """In three stages anywhere, with copies of stages, a peer of the core set, and a tied matrix in
    two stages; then in one. What is exported of the base is as it was."""
    pytest.importorskip("peft")
    lab = laboratory(job(name))
    expected, operators = wanted(lab), len(lab.graph.operators)
    for stages in (3, 1):
        plan = random_plan(random.Random(f"{name} {stages}"), operators, stages, lab.job.train)
        got = lab.train(lab.world(PEERS), plan)
        equal_training(got, expected)
        narrow = [n for n, t in got.weights.items() if t.dtype is torch.int8 or ".." in n]
        assert not narrow, "the export has weights in 8 bits"
    unrounded = lab.plain()
    apart = [abs(a - b) / b for a, b in zip(unrounded.losses, expected.losses, strict=True)]
    assert 1e-6 < max(apart) < 1e-3  # beyond rounding of float32, and small


# A lost holder, and peers without room for float32: with a GPT whose matrices are frozen.

FROZEN = ["blocks.*.weight", "bytes.*", "positions.*"]


def gpt(**tables: Any) -> Job:
    args = {"layers": 1, "width": 16, "heads": 1, "length": 8, "dropout": 0.0}
    model = {"factory": "shoal.examples.gpt:gpt", "args": args, "freeze": FROZEN}
    table = {
        "version": 1,
        "name": "int8-gpt",
        "model": {**model, "frozen_dtype": "int8"},
        "data": {"kind": "text", "length": 8},
        "plan": {"scheduler": "uniform", "stages": 2},
        "train": {"steps": 4, "batch": 4, "microbatch": 2, "lr": 0.1, "eval_every": 0}
        | {"optimizer": "sgd"},
        "recovery": {"snapshot_every": 1},
    }
    return Job.from_table(table | tables)


def losses(world: World, run: str) -> list[float]:
    return [e.step.outcome.loss for e in world.events(run) if e.HasField("step")]


def test_a_lost_holder_of_8_bits_is_replaced_to_the_bit(laboratory, equal_training):
    """Whoever takes its part over makes the same numbers of what the run began with."""
    lab = laboratory(gpt())
    calm = lab.world(3)
    run = calm.submit(lab.spec)
    equal_training(lab.finish(calm, run), wanted(lab))
    world = lab.world(3)
    again = world.submit(lab.spec)
    replica = lambda: world.broker.machine.replica(again).record  # noqa: E731  (short)
    world.until(lambda: again in world.broker.machine.runs and replica().committed >= 2)
    (holder,) = replica().plan.stages[1].holders
    world.kill(holder)
    world.finish(again)
    assert replica().term > 1
    assert losses(world, again) == losses(calm, run)


@pytest.mark.slow
def test_a_plan_puts_on_a_peer_what_float32_has_no_room_for(laboratory):
    """The monitor holds that no peer has more than it offers (I4)."""
    large = {"layers": 1, "width": 64, "heads": 1, "length": 8, "dropout": 0.0}
    model = {"factory": "shoal.examples.gpt:gpt", "args": large, "freeze": FROZEN}
    found = {}
    for kind in ("int8", ""):
        made = gpt(
            name=f"room-{kind}",
            model={**model, "frozen_dtype": kind},
            plan={"scheduler": "uniform", "stages": 1},
        )
        lab = laboratory(made)
        world = lab.world([PeerSpec(name="p0", memory_bytes=320_000)])
        run = world.submit(lab.spec)
        if kind:
            Monitor(world).finish(run, 3600.0)
            found[kind] = losses(world, run)
        else:
            world.until(lambda: world.now > 60.0)  # noqa: B023  (called in this turn)
            (*_, state) = (e.state for e in world.events(run) if e.HasField("state"))
            assert "memory" in state.reason.text
    assert len(found["int8"]) == 4
