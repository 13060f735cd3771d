"""A small model of transformers with a tokenizer and a chat template, made here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
)

CHATS = [
    [("user", "Where is the boat?"), ("assistant", "At the quay."), ("user", "Why?"),
     ("assistant", "It rains, and nobody rows in the rain; ask tomorrow.")],
    [("system", "Be brief."), ("user", "One plus one?"), ("assistant", "2")],
    [("user", "Say when."), ("assistant", "When.")],
    [("user", "What is a shoal, and does it sleep?"), ("assistant", "Fish together; it rests.")],
    [("user", "And now?"), ("assistant", "Now we row.")],
    [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")],
]  # fmt: skip
MARKED = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|end|>{% endgeneration %}{% else %}{{ m.content }}<|end|>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
PLAIN = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def messages(chat: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in chat]


def tokenizer(template: str = PLAIN) -> Any:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special = ["<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator((text for chat in CHATS for _, text in chat), trainer)
    whole = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|end|>")
    whole.chat_template = template
    return whole


def other_words() -> Any:
    """A tokenizer whose ids are others than those of `tokenizer`, with another template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = {c: n for n, c in enumerate(["<|end|>", *alphabet])}
    made = Tokenizer(models.BPE(ids, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|end|>")


def write_model(folder: Path, kind: str, template: str = PLAIN, vocabulary: int = 320) -> Any:
    """Save a model of this kind and its tokenizer into a folder; return the model."""
    small = {
        "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 128}
        | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    }.get(
        kind,
        {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
        | {"num_key_value_heads": 1, "intermediate_size": 24, "head_dim": 8},
    )
    torch.manual_seed(1)
    config = AutoConfig.for_model(kind, vocab_size=vocabulary, **small)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    tokenizer(template).save_pretrained(folder)
    return model


def write_chats(path: Path, chats: list[list[tuple[str, str]]] = CHATS) -> Path:
    lines = [json.dumps({"messages": messages(chat)}) for chat in chats]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path
