"""Folders as transformers writes them: which tensor of theirs is which parameter. The oracle is the
model that was saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shoal.client.files.weight_files import find
from shoal.client.models.fitting import Wanted, fit

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


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("gpt2", {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 64, "n_positions": 8}),
        ("llama", SMALL),
        ("llama", SMALL | {"tie_word_embeddings": True}),
        ("mixtral", SMALL | MIXED),
        ("qwen3_moe", SMALL | MIXED | {"moe_intermediate_size": 8, "head_dim": 8}),
        ("deepseek_v3", SMALL | DEEP),
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
    found = dict(fit(find([str(tmp_path)]), wanted, prefix=prefix, say=said.append).tensors())
    assert found.keys() == names.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, state[name]), name
    assert said == []
