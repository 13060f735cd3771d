"""Models of published sizes, from their configurations alone: Llama 3.1 of 8B and 70B parameters
(Dubey et al. 2024, table 3) and a mixture of experts of 141B (Mixtral 8x22B), as jobs.

The 8B is trained whole. Of the others, whose optimizer state would be larger than the testbeds,
an adaptation of low rank is trained over a frozen base in bf16, as people do.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["CONFIGS", "LowRank", "adapted", "job"]

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128_256,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": False,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "8b": _LLAMA
    | {
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "70b": _LLAMA
    | {
        "hidden_size": 8192,
        "intermediate_size": 28_672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
    },
    "moe": {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "vocab_size": 32_768,
        "hidden_size": 6144,
        "intermediate_size": 16_384,
        "num_hidden_layers": 56,
        "num_attention_heads": 48,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 65_536,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": False,
    },
}
"""As `config.json` has them."""
LENGTH, BATCH, STEPS = 1024, 64, 3
_JOB = """version = 1

[model]
factory = {factory}
{args}

[data]
source = "text.txt"
length = {length}
holdout = 0.0

[train]
steps = {steps}
batch = {batch}
eval_every = 0
"""


class LowRank(nn.Module):
    """A frozen linear layer and, beside it, a trained one of low rank in fp32 (LoRA,
    arXiv:2106.09685): W·x + up·down·x · scale / rank."""

    def __init__(self, base: nn.Linear, rank: int, scale: float) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False, dtype=torch.float32)
        self.up = nn.Linear(rank, base.out_features, bias=False, dtype=torch.float32)
        nn.init.zeros_(self.up.weight)
        self._scale = scale / rank

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x)
        added: Tensor = (self.up(self.down(x.float())) * self._scale).to(y.dtype)
        return y + added


def adapted(config: str, rank: int = 16) -> nn.Module:
    """The causal language model of a folder with a `config.json`, in bf16 and frozen, with an
    adaptation of its queries and values."""
    from transformers import AutoConfig, AutoModelForCausalLM

    causal: Any = AutoModelForCausalLM
    model: nn.Module = causal.from_config(AutoConfig.from_pretrained(config), dtype=torch.bfloat16)
    model.requires_grad_(False)
    for part in list(model.modules()):
        for name in ("q_proj", "v_proj"):
            if isinstance(linear := getattr(part, name, None), nn.Linear):
                setattr(part, name, LowRank(linear, rank, 2.0 * rank))
    return model


def job(folder: Path, model: str, *, whole: bool) -> Path:
    """Writes the job of a model into a folder that is made, and returns its file. `whole`: all of
    it is trained, in fp32."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIGS[model], indent=1))
    (folder / "text.txt").write_text("All models are planned before anything runs.\n" * 4000)
    factory, args = f"hf:{folder}", ""
    if not whole:
        factory, args = f"{Path(__file__).resolve()}:adapted", f"args = {{ config = '{folder}' }}"
    text = _JOB.format(
        factory=json.dumps(factory), args=args, length=LENGTH, batch=BATCH, steps=STEPS
    )
    file = folder / "job.toml"
    file.write_text(text)
    return file
