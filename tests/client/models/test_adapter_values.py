"""Adapters begin as those of peft over the model that transformers loads: the same loss, whatever
their values are made of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

from shoal.client import submission  # noqa: E402
from shoal.client.models import models  # noqa: E402
from shoal.client.models.adapters import (  # noqa: E402
    merged,
    of_adapter,
    plain_name,
    save_config,
)
from shoal.client.runs import weights  # noqa: E402
from shoal.dag.ir.recipe import make  # noqa: E402
from shoal.job import Job  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
SMALL: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
TARGETS = {"target_modules": ["q_proj", "up_proj"]}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": TARGETS,
    "saved head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "saved norms": {"target_modules": ["q_proj"], "modules_to_save": ["norm"]},
    "saved embedding": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    "dora": {**TARGETS, "use_dora": True},
    "pissa": {**TARGETS, "init_lora_weights": "pissa"},
    "pissa, quick": {**TARGETS, "init_lora_weights": "pissa_niter_4"},
    "olora": {**TARGETS, "init_lora_weights": "olora"},
    "orthogonal": {**TARGETS, "init_lora_weights": "orthogonal"},
    "gaussian": {**TARGETS, "init_lora_weights": "gaussian"},
    "rslora": {**TARGETS, "use_rslora": True},
    "patterns": {**TARGETS, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"up_proj": 32}},
    "embedding": {"target_modules": ["embed_tokens", "q_proj"]},
    "all layers": {"target_modules": "all-linear"},
    "bias": {**TARGETS, "bias": "all"},
    "tokens": {**TARGETS, "trainable_token_indices": [1, 2]},
    "dora and head": {**TARGETS, "use_dora": True, "modules_to_save": ["lm_head"]},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Models, tied or not, whose weights are not those that any factory makes."""
    return {tied: written(tmp_path_factory.mktemp("base"), tied) for tied in (True, False)}


def written(at: Path, tied: bool) -> Path:
    torch.manual_seed(3)
    config = transformers.AutoConfig.for_model("llama", **SMALL, tie_word_embeddings=tied)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.mul_(2.0 if "norm" in name else 5.0)
    model.save_pretrained(at)
    return at


FAST = {("saved head", True), ("saved norms", False), ("dora", False), ("pissa", True)}
CASES = [
    pytest.param(name, tied, marks=() if (name, tied) in FAST else pytest.mark.slow)
    for name in SETTINGS
    for tied in (True, False)
]


def job_of(at: Path, lora: dict[str, Any], **model: Any) -> Job:
    source = str(Path(__file__))
    return Job(
        model={"factory": f"hf:{at}", "lora": {"r": 4, "lora_alpha": 8, **lora}, **model},
        data={"length": 8, "source": source, "tokenizer": "bytes"},
        train={"steps": 1, "batch": 2, "microbatch": 2, "eval_every": 0},
    )


@torch.no_grad()
def loss_of(module: nn.Module) -> float:
    ids = torch.arange(32).view(2, 16) * 2
    return float(module.eval()(input_ids=ids, labels=ids, use_cache=False).loss)


def by_peft(at: Path, lora: dict[str, Any]) -> nn.Module:
    base = transformers.AutoModelForCausalLM.from_pretrained(at)
    settings = peft.LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **lora)
    made: nn.Module = peft.get_peft_model(base, settings)
    return made


@pytest.mark.parametrize(("name", "tied"), CASES)
def test_the_first_loss_is_that_of_peft(folders: dict[bool, Path], name: str, tied: bool) -> None:
    lora, folder = SETTINGS[name], folders[tied]
    built, oracle = models.build(job_of(folder, lora)), by_peft(folder, lora)
    assert loss_of(built) == pytest.approx(loss_of(oracle), rel=1e-6)
    trained = {plain_name(built)(n) for n, p in built.named_parameters() if p.requires_grad}
    wanted = {plain_name(oracle)(n) for n, p in oracle.named_parameters() if p.requires_grad}
    assert trained == wanted


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "saved norms", "dora and head", "pissa", "tokens"])
@pytest.mark.parametrize("tied", [True, False])
def test_peers_begin_with_these_values(folders: dict[bool, Path], name: str, tied: bool) -> None:
    """From files, the recipe and what is sent, by the names of the graph."""
    job = job_of(folders[tied], SETTINGS[name])
    built = models.build(job)
    plain, wanted = plain_name(built), dict(built.named_parameters())
    with submission.prepare(job) as prepared:
        found: dict[str, Tensor] = dict(load_file(prepared.weights))
        if prepared.recipe is not None:
            made = prepared.recipe
            found |= {n: make(i, made.seed) for n, i in made.tensors.items()}
        assert prepared.pretrained is not None
        read = dict(prepared.pretrained.tensors())
        assert not read.keys() & found.keys(), "one answer for each"
        found |= read
    for name, parameter in wanted.items():
        torch.testing.assert_close(found[plain(name)], parameter.detach(), rtol=1e-6, atol=1e-7)


OWN = """
import torch, peft
from torch import nn
import torch.nn.functional as F

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x, y):
        return F.cross_entropy(self.b(self.a(x).relu()), y)

def make(**settings):
    return peft.inject_adapter_in_model(peft.LoraConfig(r=2, **settings), Net())
"""


def test_an_adapter_that_was_made_before_its_base_is_loaded_is_refused(tmp_path: Path) -> None:
    """Where it would begin elsewhere: a copy of the head begins as the head of the file."""
    (tmp_path / "own.py").write_text(OWN)
    torch.manual_seed(1)
    weights = {
        "a.weight": torch.randn(8, 4),
        "a.bias": torch.randn(8),
        "b.weight": torch.randn(3, 8),
        "b.bias": torch.randn(3),
    }
    save_file(weights, tmp_path / "base.safetensors")

    def job(**args: Any) -> Job:
        model = {"factory": "own.py:make", "weights": "base.safetensors", "args": args}
        return Job(model=model, folder=tmp_path, train={"steps": 1})

    for args in ({"use_dora": True}, {"init_lora_weights": "pissa"}):
        with pytest.raises(models.ModelError, match=r"use_dora|init_lora_weights = .pissa"):
            models.build(job(target_modules=["a"], **args))
    built = models.build(job(target_modules=["a"], modules_to_save=["b"]))
    for kind in ("original_module", "modules_to_save.default"):
        assert torch.equal(built.get_parameter(f"b.{kind}.weight"), weights["b.weight"])


@pytest.mark.parametrize(("name", "tied"), [c for c in CASES if "quick" not in str(c.values[0])])
def test_both_exports_are_the_trained_model(
    folders: dict[bool, Path], name: str, tied: bool, tmp_path: Path
) -> None:
    """Merged, loaded by transformers; the adapter alone, loaded by peft over its base."""
    built = models.build(job_of(folders[tied], SETTINGS[name]))
    plain, generator = plain_name(built), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in built.parameters():
            if p.requires_grad:
                p.add_(torch.randn(p.shape, generator=generator) * 0.02)
    wanted = loss_of(built)
    sidecars = tmp_path / "sidecars"
    sidecars.mkdir()
    _, names = save_config(built, sidecars)
    trained = {plain(n): p.detach() for n, p in built.named_parameters() if p.requires_grad}
    exported = of_adapter(trained, json.loads(names.read_text()))
    alone = weights.write(exported, tmp_path, None, "peft")
    base = transformers.AutoModelForCausalLM.from_pretrained(folders[tied])
    loaded = peft.PeftModel.from_pretrained(base, alone)
    assert loss_of(loaded) == pytest.approx(wanted, rel=1e-5)
    model: Any = merged(built)
    model.config.save_pretrained(sidecars)
    whole = weights.write(model.state_dict(), tmp_path, None, "hf")
    assert {p.name for p in whole.iterdir()} == {"config.json", "model.safetensors"}
    again = transformers.AutoModelForCausalLM.from_pretrained(whole)
    assert loss_of(again) == pytest.approx(wanted, rel=1e-5)
