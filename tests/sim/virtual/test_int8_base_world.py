"""Adapters over a base in 8 bits. The oracle is one loop over the same module, whose frozen matrices
were rounded and made float32 again by the formula, in the lines of `rounded`."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shoal.client.models.adapters import plain_name
from shoal.job import Job

from .test_exactness import PEERS, random_plan

pytest.importorskip("peft")
# peft asks transformers by a name that goes away.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")
EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
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
}


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


def rounded(module: nn.Module) -> nn.Module:
    """The module whose frozen matrices have the values that 8 bits give them."""
    found = copy.deepcopy(module)
    columns = {
        part.weight for part in found.modules() if type(part).__name__ == "Conv1D"
    }  # (in, out)
    with torch.no_grad():
        for p in found.parameters():
            if not p.requires_grad and p.dim() == 2:
                scale = p.abs().amax(0 if p in columns else 1, keepdim=True) / 127
                p.copy_((p / scale).round() * scale)
    return found


def wanted(lab: Any) -> Any:
    """What the plain loop makes of the rounded module; by the names of the graph, frozen weights as
    they were before."""
    own = copy.copy(lab)
    own.module = rounded(lab.module)
    found, name_of = own.plain(), plain_name(lab.module)
    weights = {n: t for n, t in found.weights.items() if ".lora_" in n}
    weights |= {n: t for n, t in lab.module.state_dict().items() if ".lora_" not in n}
    return replace(found, weights={name_of(n): t for n, t in weights.items()})


@pytest.mark.parametrize("name", ["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_every_plan_trains_as_the_rounded_module(laboratory, equal_training, name):
    """In three stages anywhere, with copies of stages, a peer of the core set, and a tied matrix in
    two stages; then in one. What is exported of the base is as it was."""
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
