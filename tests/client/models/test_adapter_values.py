"""Adapters begin as those of peft over the model that transformers loads: the same loss, whatever
their values are made of."""

from __future__ import annotations

import json
from dataclasses import replace
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
    AdapterError,
    merged,
    of_adapter,
    plain_name,
    save_config,
)
from shoal.client.runs import weights  # noqa: E402
from shoal.dag.ir.recipe import make  # noqa: E402
from shoal.job import Job, SettingsError  # noqa: E402

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

def make(kind="LoraConfig", whole=False, **settings):
    config = getattr(peft, kind)(**settings)
    return (peft.get_peft_model if whole else lambda m, c: peft.inject_adapter_in_model(c, m))(
        Net(), config
    )
"""
KINDS: dict[str, dict[str, Any]] = {
    "IA3Config": {"target_modules": ["a", "b"], "feedforward_modules": ["b"]},
    "OFTConfig": {"target_modules": ["a"], "oft_block_size": 2},
    "LoHaConfig": {"target_modules": ["a"]},
    "LoKrConfig": {"target_modules": ["a"]},
    "AdaLoraConfig": {"target_modules": ["a"], "total_step": 9},
}


def own_job(folder: Path, **model: Any) -> Job:
    (folder / "own.py").write_text(OWN)
    generator = torch.Generator().manual_seed(1)
    shapes = {"a.weight": (8, 4), "a.bias": (8,), "b.weight": (3, 8), "b.bias": (3,)}
    values = {n: torch.randn(shape, generator=generator) for n, shape in shapes.items()}
    save_file(values, folder / "base.safetensors")
    numbers = {"x": torch.randn(9, 4, generator=generator), "y": torch.arange(9) % 3}
    save_file(numbers, folder / "data.safetensors")
    return Job(
        model={"factory": "own.py:make", **model},
        data={"kind": "arrays", "source": "data.safetensors"},
        train={"steps": 1, "batch": 2, "eval_every": 0},
        output={"format": "peft"},
        folder=folder,
    )


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("kind", ["LoHaConfig", "LoKrConfig", "AdaLoraConfig"])
def test_an_adapter_that_would_not_be_pefts_is_refused(
    kind: str, whole: bool, tmp_path: Path
) -> None:
    args = {"kind": kind, "whole": whole, **KINDS[kind]}
    with pytest.raises(AdapterError, match=rf"peft's {kind[:-6].upper()}, which .* expected LoRA"):
        models.build(own_job(tmp_path, args=args))


@pytest.mark.parametrize("weights_", ["init", "base.safetensors"])
@pytest.mark.parametrize(
    ("kind", "whole"),
    [("IA3Config", True), pytest.param("OFTConfig", False, marks=pytest.mark.slow)],
)
def test_other_adapters_are_pefts_over_any_base(
    kind: str, whole: bool, weights_: str, tmp_path: Path
) -> None:
    """At the begin the loss is that of the base; trained, both exports are what peft computes. That
    the graph's gradients are the module's is proved at each submission."""
    args = {"kind": kind, "whole": whole, **KINDS[kind]}
    job = own_job(tmp_path, args=args, weights=weights_)
    numbers = load_file(tmp_path / "data.safetensors")
    if weights_ != "init":
        fresh = replace(job, model=replace(job.model, fresh=("b.bias",)))
        with (
            pytest.raises(SettingsError, match=r"output\.format.* b\.bias begin fresh"),
            submission.prepare(fresh),
        ):
            pass
    with submission.prepare(job) as prepared:
        names = [p.name for p in prepared.graph.parameters if p.trainable]
    built = models.build(job)
    plain = plain_name(built)
    trained = {plain(n): p for n, p in built.named_parameters() if p.requires_grad}
    assert sorted(names) == sorted(trained)
    base = namespace()["Net"]()
    state = {plain(n): t for n, t in built.state_dict().items() if plain(n) not in trained}
    base.load_state_dict(state)
    if weights_ != "init":
        files = load_file(tmp_path / weights_)
        assert all(torch.equal(state[name], tensor) for name, tensor in files.items())
    assert float(built(**numbers)) == pytest.approx(float(base(**numbers)), rel=1e-6)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in trained.values():
            p.add_(torch.randn(p.shape, generator=generator) * 0.1)
    wanted = float(built(**numbers))
    sidecars = tmp_path / "sidecars"
    sidecars.mkdir()
    _, kept = save_config(built, sidecars)
    exported = of_adapter(trained, json.loads(kept.read_text()))
    loaded = peft.PeftModel.from_pretrained(base, weights.write(exported, tmp_path, None, "peft"))
    assert float(loaded(**numbers)) == pytest.approx(wanted, rel=1e-6)
    assert float(merged(built)(**numbers)) == pytest.approx(wanted, rel=1e-5)


def namespace() -> dict[str, Any]:
    found: dict[str, Any] = {}
    exec(OWN, found)
    return found


def test_an_adapter_that_was_made_before_its_base_is_loaded_is_refused(tmp_path: Path) -> None:
    """Where it would begin elsewhere: a copy of the head begins as the head of the file."""

    def job(**args: Any) -> Job:
        return own_job(tmp_path, weights="base.safetensors", args={"r": 2, **args})

    for args in ({"use_dora": True}, {"init_lora_weights": "pissa"}):
        with pytest.raises(models.ModelError, match=r"use_dora|init_lora_weights = .pissa"):
            models.build(job(target_modules=["a"], **args))
    built = models.build(job(target_modules=["a"], modules_to_save=["b"]))
    files = load_file(tmp_path / "base.safetensors")
    for kind in ("original_module", "modules_to_save.default"):
        assert torch.equal(built.get_parameter(f"b.{kind}.weight"), files["b.weight"])


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
