"""Folders as transformers writes them: which tensor of theirs is which parameter. The oracle is the
model that was saved."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

from shoal.client.files.weight_files import WeightFilesError, find
from shoal.client.models import models
from shoal.client.models.factories import ModelError
from shoal.client.models.fitting import Wanted, fit
from shoal.client.models.models import starting_files
from shoal.client.models.pretrained import _renamed_by
from shoal.job import Job

transformers = pytest.importorskip("transformers")

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
MIXED = {"num_local_experts": 3, "num_experts": 3, "num_experts_per_tok": 2}
DEEP = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 8,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
}

V4 = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
LFM2 = {"moe_intermediate_size": 8, "num_dense_layers": 1, "layer_types": ["conv", "conv"]}


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("gpt2", {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 64, "n_positions": 8}),
        ("llama", SMALL),
        ("llama", SMALL | {"tie_word_embeddings": True}),
        ("mixtral", SMALL | MIXED),
        ("qwen3_moe", SMALL | MIXED | {"moe_intermediate_size": 8, "head_dim": 8}),
        ("deepseek_v3", SMALL | DEEP),
        ("deepseek_v4", SMALL | V4),
        ("jamba", SMALL | MIXED | {"mamba_dt_rank": 4, "use_mamba_kernels": False}),
        ("lfm2_moe", SMALL | MIXED | LFM2),
    ],
)
def test_every_parameter_is_found_where_it_was_saved(
    tmp_path: Path, kind: str, sizes: dict[str, Any]
) -> None:
    config = transformers.AutoConfig.for_model(kind, **sizes)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    first: dict[int, str] = {}
    names: dict[str, list[str]] = {}
    state = model.state_dict(keep_vars=True)
    for name, tensor in state.items():
        names.setdefault(first.setdefault(id(tensor), name), []).append(name)
    wanted = [
        Wanted((*of,), tuple(state[n].shape), state[n].dtype, True) for n, of in names.items()
    ]
    said: list[str] = []
    prefix = str(getattr(model, "base_model_prefix", ""))
    how: dict[str, Any] = {"prefix": prefix, "renamed": _renamed_by(model)}
    found = dict(fit(find([str(tmp_path)]), wanted, **how, say=said.append).tensors())
    assert found.keys() == names.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, state[name]), name
    assert said == []


# ---------------------------------------------------------------- which files of a folder

FILES = ("alone", "shards", "pickled", "pickled shards", "other")


def job_of(at: Path, **args: Any) -> Job:
    return Job(model={"factory": f"hf:{at}", "args": args}, train={"steps": 1})


def test_two_values_of_a_tied_table_are_no_model(tmp_path: Path) -> None:
    """from_pretrained leaves such a table untied, whatever the config says."""
    config = transformers.AutoConfig.for_model("llama", **SMALL)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    said = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(said | {"tie_word_embeddings": True}))
    oracle = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(WeightFilesError, match="tie_word_embeddings = false"):
        models.build(job_of(tmp_path))
    built = models.build(job_of(tmp_path, tie_word_embeddings=False)).state_dict()
    assert all(torch.equal(built[n], t) for n, t in oracle.state_dict().items())


@pytest.mark.parametrize("kind", ["bert", "bart"])
def test_next_tokens_are_for_models_that_do_not_see_them(tmp_path: Path, kind: str) -> None:
    small = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "d_model": 16}
    small |= {"num_attention_heads": 2, "vocab_size": 64, "decoder_layers": 1}
    transformers.AutoConfig.for_model(kind, **small).save_pretrained(tmp_path)
    ids = torch.randint(0, 64, (1, 8), generator=torch.Generator().manual_seed(0))
    other = ids.clone()
    other[0, -1] += 1
    for args in ({"task": "causal-lm"}, {"is_decoder": True}):
        job = job_of(tmp_path, **args)
        module: Any = models.build(job).eval()
        first, second = (module(input_ids=x).logits[0, :-1] for x in (ids, other))
        sees = not torch.allclose(first, second)
        assert sees == (kind == "bert" and "task" in args)
        if sees:
            with pytest.raises(ModelError, match="is_decoder = true"), models.ready(module, job):
                pass
        else:
            with models.ready(module, job):
                pass


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder for each way to write a model, each with other weights."""
    made: dict[str, Path] = {}
    for i, way in enumerate(FILES):
        at = made[way] = tmp_path_factory.mktemp("of") / str(i)
        torch.manual_seed(i)
        config = transformers.AutoConfig.for_model("llama", **SMALL)
        model = transformers.AutoModelForCausalLM.from_config(config)
        model.save_pretrained(at, max_shard_size="20KB" if "shards" in way else "1GB")
        if way == "other":
            (at / "model.safetensors").rename(at / "before.safetensors")
        if "pickled" not in way:
            continue
        for path in at.glob("*.safetensors"):
            name = path.name.replace("model", "pytorch_model").replace("safetensors", "bin")
            torch.save(load_file(path), at / name)
            path.unlink()
        for index in at.glob("*.index.json"):
            text = index.read_text().replace('"model-', '"pytorch_model-')
            text = text.replace(".safetensors", ".bin")
            (at / "pytorch_model.bin.index.json").write_text(text)
            index.unlink()
    return made


@given(ways=st.sets(st.sampled_from(FILES)), safe=st.sampled_from([None, True, False]))
@settings(max_examples=20)
def test_the_files_of_a_folder_are_those_that_from_pretrained_takes(
    written: dict[str, Path], ways: set[str], safe: bool | None
) -> None:
    """Whatever lies there together; or the refusal names what lies there. Without any, weights are
    random, as documented."""
    with TemporaryDirectory() as name:
        at = Path(name)
        for way in ways:
            shutil.copytree(written[way], at, dirs_exist_ok=True)
        if not ways:
            transformers.AutoConfig.for_model("llama", **SMALL).save_pretrained(at)
        args = {} if safe is None else {"use_safetensors": safe}
        job = job_of(at, **args)
        try:
            oracle = transformers.AutoModelForCausalLM.from_pretrained(at, **args)
        except OSError:
            if ways:
                with pytest.raises(ModelError, match=r"none of the files that from_pretrained"):
                    starting_files(job)
            else:
                assert starting_files(job) is None
            return
        stored = starting_files(job)
        assert stored is not None
        for tensor, wanted in oracle.state_dict().items():
            assert torch.equal(stored.weights[tensor], wanted), tensor


def test_variants_are_files_of_their_own(written: dict[str, Path], tmp_path: Path) -> None:
    at = shutil.copytree(written["alone"], tmp_path / "m")
    shutil.copyfile(written["other"] / "before.safetensors", at / "model.fp16.safetensors")
    oracle = transformers.AutoModelForCausalLM.from_pretrained(at, variant="fp16")
    built = models.build(job_of(at, variant="fp16")).state_dict()
    for name, wanted in oracle.state_dict().items():
        assert torch.equal(built[name], wanted), name


@pytest.mark.parametrize(
    ("change", "args", "says"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, {}, r"quantised \(fp8, by quantiz"),
        ({}, {"gguf_file": "m.gguf"}, r"args\.gguf_file. is of quantised weights"),
        ({}, {"load_in_8bit": True}, r"args\.load_in_8bit. is of quantised weights"),
        ({}, {"hidden_sise": 3}, r"has hidden_sise, which neither the config nor Shoal knows"),
        ({}, {"dtype": "float32", "torch_dtype": "float16"}, r"dtype and torch_dtype: expected"),
    ],
)
def test_what_would_be_another_model_is_refused(
    written: dict[str, Path],
    tmp_path: Path,
    change: dict[str, Any],
    args: dict[str, Any],
    says: str,
) -> None:
    at = shutil.copytree(written["alone"], tmp_path / "m")
    config = json.loads((at / "config.json").read_text()) | change
    (at / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=says):
        models.build(job_of(at, **args))


def test_an_adapter_in_the_folder_is_refused(written: dict[str, Path], tmp_path: Path) -> None:
    at = shutil.copytree(written["alone"], tmp_path / "m")
    (at / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"has an adapter_config\.json"):
        starting_files(job_of(at))


def test_a_pickle_of_more_than_tensors_is_refused_and_runs_nothing(tmp_path: Path) -> None:
    class Opens:
        def __reduce__(self) -> Any:
            return (open, (str(tmp_path / "ran"), "w"))

    for i, held in enumerate([{"a": torch.ones(2), "b": Opens()}, {"a": 3}, [torch.ones(2)]]):
        path = tmp_path / f"{i}.bin"
        torch.save(held, path)
        with pytest.raises(WeightFilesError, match=r"is no file of tensors alone"):
            find([str(path)])
    (tmp_path / "cut.bin").write_bytes((tmp_path / "1.bin").read_bytes()[:-40])
    with pytest.raises(WeightFilesError, match=r"is no file of tensors alone"):
        find([str(tmp_path / "cut.bin")])
    assert not (tmp_path / "ran").exists()


def test_two_files_with_one_name_and_no_index_are_refused(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "x.safetensors")
    save_file({"a": torch.zeros(2)}, tmp_path / "y.safetensors")
    with pytest.raises(WeightFilesError, match=r'x\.safetensors and .* both have "a", and no'):
        find([str(tmp_path)])
