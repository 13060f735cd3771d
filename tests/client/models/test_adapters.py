"""Adapters of peft: names, what is trained, and what peft reads of an export."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

peft = pytest.importorskip("peft")

from safetensors.torch import load_file  # noqa: E402

from shoal.client import submission  # noqa: E402
from shoal.client.matrices import round_base  # noqa: E402
from shoal.client.models import models  # noqa: E402
from shoal.client.models.adapters import (  # noqa: E402
    AdapterError,
    adapted,
    of_adapter,
    plain_name,
    save_config,
)
from shoal.client.models.state_dicts import load_named  # noqa: E402
from shoal.client.runs import weights  # noqa: E402
from shoal.job import Job, SettingsError  # noqa: E402
from shoal.job.settings import plain  # noqa: E402
from shoal.job.tables import Output  # noqa: E402

# peft asks transformers by a name that goes away.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning"),
    pytest.mark.usefixtures("captures_once"),
]

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
SMALL = {"vocab_size": 9, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2} | {
    "num_attention_heads": 2
}
LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}


def job(**model: object) -> Job:
    table = {
        "version": 1,
        "model": {"factory": "hf:hf_llama", "lora": LORA, **model},
        "data": {"length": 16, "source": str(EXAMPLES / "*.py")},
        "train": {"steps": 2, "batch": 4, "microbatch": 2, "eval_every": 0},
        "output": {"format": "peft"},
    }
    made = Job.from_table(table)
    return Job(**{**vars(made), "folder": EXAMPLES})


@pytest.fixture(scope="module")
def built() -> nn.Module:
    return models.build(job(args={"dtype": "bfloat16"}))


def test_the_base_is_frozen_in_its_dtype_and_the_adapter_trained_in_fp32(built: nn.Module) -> None:
    for name, p in built.named_parameters():
        adapter = ".lora_" in name
        assert p.requires_grad == adapter, name
        assert p.dtype is (torch.float32 if adapter else torch.bfloat16), name


def test_names_are_those_without_the_adapter(built: nn.Module) -> None:
    name_of = plain_name(built)
    base = models.build(job(lora={}, args={"dtype": "bfloat16"}))
    mine = {name_of(n) for n in built.state_dict() if ".lora_" not in n}
    assert mine == set(base.state_dict())
    whole = peft.get_peft_model(base, peft.LoraConfig(**LORA))
    assert {plain_name(whole)(n) for n in whole.state_dict()} == {
        name_of(n) for n in built.state_dict()
    }


def test_a_model_without_one_keeps_its_names() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base_layer = nn.Linear(2, 2)

    assert plain_name(nn.Sequential(Own()))("0.base_layer.weight") == "0.base_layer.weight"


def test_a_submission_sends_no_gradient_of_the_base() -> None:
    with submission.prepare(job(args={"dtype": "bfloat16"})) as prepared:
        specs = {p.name: p for p in prepared.graph.parameters}
        assert specs["model.layers.0.self_attn.q_proj.weight"].spec.dtype == "bfloat16"
        assert not specs["model.layers.0.self_attn.q_proj.weight"].trainable
        assert specs["model.layers.0.self_attn.q_proj.lora_A.default.weight"].trainable
        assert "adapter_config.json" in {path.name for path in prepared.sidecars}


def test_an_export_is_what_peft_reads(built: nn.Module, tmp_path: Path) -> None:
    """Its logits are those of the module that was trained."""
    generator = torch.Generator().manual_seed(1)
    name_of = plain_name(built)
    with torch.no_grad():
        for p in built.parameters():
            if p.requires_grad:
                p.normal_(0.0, 0.1, generator=generator)
    (tmp_path / "sidecars").mkdir()
    _, names = save_config(built, tmp_path / "sidecars")
    trained = {name_of(n): p.detach() for n, p in built.named_parameters() if p.requires_grad}
    exported = of_adapter(trained, json.loads(names.read_text()))
    folder = weights.write(exported, tmp_path, None, "peft")
    assert sorted(p.name for p in folder.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    base = models.build(job(lora={}, args={"dtype": "bfloat16"}))
    loaded = peft.PeftModel.from_pretrained(base, folder)
    x = torch.arange(32).view(2, 16)
    with torch.no_grad():
        wanted = built(input_ids=x, use_cache=False).logits
        assert torch.equal(loaded(input_ids=x, use_cache=False).logits, wanted)


def test_weights_of_a_run_are_loaded_by_the_names_of_its_module(built: nn.Module) -> None:
    found = {n: t + 1 for n, t in built.state_dict().items()}
    other = models.build(job(args={"dtype": "bfloat16"}))
    load_named(other, found)
    for name, tensor in other.state_dict().items():
        assert torch.equal(tensor, found[name]), name


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(AdapterError, match=r"rank is none of LoraConfig's arguments"):
        models.build(job(lora={"rank": 4}))
    with pytest.raises(AdapterError, match="nothing"):
        models.build(job(lora={**LORA, "target_modules": ["nothing"]}))
    said = r'no module is called so; did you mean "q_proj"\? \(modules that take one: .*v_proj'
    with pytest.raises(AdapterError, match=said):
        models.build(job(lora={**LORA, "target_modules": ["q_prj"]}))
    with pytest.raises(SettingsError, match="no adapter"), submission.prepare(job(lora={})):
        pass
    with pytest.raises(models.ModelError, match=r"args\.dtype.*int8.*float32"):
        models.build(job(args={"dtype": "int8"}))


def test_more_than_the_adapter_is_no_adapter(tmp_path: Path) -> None:
    module = models.build(job())
    module.get_parameter("model.norm.weight").requires_grad_(True)
    with pytest.raises(AdapterError, match=r"model\.norm\.weight.*belongs to no adapter"):
        save_config(module, tmp_path)


def test_weights_in_bf16_need_products_in_bf16() -> None:
    for key in ("frozen_dtype", "trained_dtype"):
        with pytest.raises(SettingsError, match=rf'{key}.*expected dtype = "bf16"|Expected dtype'):
            job(**{key: "bf16"})


def test_frozen_weights_are_kept_narrow_only_where_some_are_frozen() -> None:
    narrow = {"dtype": "bf16", "frozen_dtype": "bf16"}
    with (
        pytest.raises(SettingsError, match=r"frozen_dtype.*nothing is frozen"),
        submission.prepare(replace(job(lora={}, **narrow), output=Output())),
    ):
        pass
    with submission.prepare(job(**narrow)) as prepared:
        kept = {p.trainable: p.spec.dtype for p in prepared.graph.parameters}
    assert kept == {True: "float32", False: "bfloat16"}


def test_a_base_in_8_bits_is_said_and_a_plain_loop_can_take_its_values() -> None:
    said: list[str] = []
    made = job(frozen_dtype="int8")
    with submission.prepare(made, said.append) as prepared:
        graph = prepared.graph
        (line,) = (text for text in said if text.startswith("frozen_dtype: weights of"))
        assert "stay" not in line
        uploaded = {n for n in load_file(prepared.weights) if ".." in n}
        assert not uploaded, "peers make the scales"
    module, before = models.build(made), models.build(made)
    round_base(module, graph)
    narrow = [p.name for p in graph.parameters if p.spec.dtype == "int8"]
    assert "model.embed_tokens.weight" in narrow
    name_of = plain_name(module)
    for (name, new), old in zip(module.named_parameters(), before.parameters(), strict=True):
        wanted = old
        if name_of(name) in narrow:
            scale = old.abs().amax(1, keepdim=True) / 127
            wanted = (old / scale).round() * scale
        assert torch.equal(new, wanted), name


def test_8_bits_of_nothing_are_refused() -> None:
    refused = pytest.raises(SettingsError, match=r"frozen_dtype.*no frozen matrix.*model\.lora")
    with refused, submission.prepare(replace(job(lora={}, frozen_dtype="int8"), output=Output())):
        pass


def test_who_steps_ahead_needs_fp32() -> None:
    """What its codec holds back is less than the digits of a bf16 weight."""
    made = job(lora={}, dtype="bf16", trained_dtype="bf16")
    table = {**plain(made), "codec": {"grad": "int8", "feedback": "ahead"}, "output": {}}
    ahead = Job(**{**vars(Job.from_table(table)), "folder": EXAMPLES})
    wanted = pytest.raises(SettingsError, match=r"codec\.feedback.*bfloat16.*weights in fp32")
    with wanted, submission.prepare(ahead):
        pass


@pytest.mark.parametrize(
    ("model", "wanted"),
    [
        (lambda: LlamaForCausalLM(LlamaConfig(**SMALL)), {"q_proj", "v_proj"}),
        (
            lambda: GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=2, n_head=2, vocab_size=9)),
            {"c_attn"},
        ),
    ],
)
def test_auto_is_what_peft_takes_for_the_architecture(
    model: Callable[[], nn.Module], wanted: set[str]
) -> None:
    """peft itself chooses for a config that names no layers."""
    said: list[str] = []
    mine = adapted(model(), {"r": 2, "target_modules": "auto"}, "", said.append)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of GPT-2's layers, which peft finds out by itself
        theirs = peft.get_peft_model(model(), peft.LoraConfig(r=2))
    wrapped = {n for n, p in theirs.named_parameters() if p.requires_grad}
    own = {n for n, _ in mine.named_parameters() if ".lora_" in n}
    assert own == {n.removeprefix("base_model.model.") for n in wrapped}
    assert {n.split(".lora_")[0].rpartition(".")[2] for n in own} == wanted
    assert len(said) == 1
    assert all(name in said[0] for name in wanted)


def test_auto_of_an_unknown_architecture_is_every_linear_layer_of_its_blocks() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.blocks = nn.ModuleList(
                nn.ModuleDict({"a": nn.Linear(4, 4), "n": nn.LayerNorm(4)}) for _ in range(2)
            )
            self.head = nn.Linear(4, 9)

    made = adapted(Net(), {"r": 2, "target_modules": "auto"}, "")
    own = {n.split(".lora_")[0] for n, _ in made.named_parameters() if ".lora_" in n}
    assert own == {"blocks.0.a", "blocks.1.a"}
    with pytest.raises(AdapterError, match="no blocks with linear layers"):
        adapted(nn.ModuleDict({"only": nn.Linear(4, 4)}), {"target_modules": "auto"}, "")
