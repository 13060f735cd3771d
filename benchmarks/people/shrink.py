"""Configs of transformers with all sizes made small: hidden 64, two to four layers, four heads, a
vocabulary of 128, few experts; what a family does stays as it is.

Sizes are known by their keys (`_SIZES`), layer by layer lists are cut to one layer of each kind,
and `_EXCEPTIONS` has what that does not fit. Dropout is off.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["FIRST_WORD", "WORDS", "shrunk"]

FIRST_WORD, WORDS = 4, 100
"""Ids of ordinary tokens; below and above are special ones."""
VOCABULARY = 128
MOST_LAYERS = 4


def _at_most(size: int) -> Callable[[int], int]:
    return lambda value: min(value, size)


def _is(size: int) -> Callable[[int], int]:
    return lambda value: size if value > 0 else value


_SIZES: tuple[tuple[str, Callable[[int], int]], ...] = (
    (r"type_vocab_size|segment_types|prompt_types", _at_most(4)),
    (r"encoder_hash_byte_group_vocab|ngram_vocab_size_base", _is(200)),
    (r"vocab_size_per_layer_input|.*vocab_size|vocab_size.*|num_embeddings", _is(VOCABULARY)),
    (r"pad_token_id|pad_index", _at_most(0)),
    (r"(decoder_start|bos|forced_bos)_token_id|bos_index", _at_most(1)),
    (r"(eos|forced_eos|eod)_token_id|eos_index", _at_most(2)),
    (r".*num_(key_value|kv)_heads|kv_n_heads|num_query_groups", _at_most(2)),
    (r"mamba_(n|num)_heads|n_mamba_heads", _is(4)),
    (r"linear_num_key_heads|index_n_heads", _at_most(2)),
    (r".*(attention|num|value|n)_heads?|attention_heads|linear_num_heads", _is(4)),
    (r"linear_(key|value)_head_dim|rotary_dim", _is(8)),
    (r"qk_head_dim", _is(32)),
    (r"mamba_(d_head|head_dim|headdim)", _is(32)),
    (r".*head_dim|head_dim.*|kv_channels|d_kv|d_head|dim_head|.*head_size", _is(16)),
    (r"query_pre_attn_scalar", _is(16)),
    (r"hidden_size_per_layer_input|laurel_rank|codebook_dim", _is(16)),
    (r".*(moe|expert|shared).*(intermediate|ffn|hidden).*size.*", _is(32)),
    (r".*(intermediate_size|ffn_dim|ffn_hidden_size).*|dff|d_ff|dim_ff|d_inner|n_inner", _is(64)),
    (r"feed_forward_size|mlp_dim", _is(64)),
    (r".*hidden_size(_global)?|d_model|n_embd|emb(edding)?_dim|embedding_size|lru_width", _is(64)),
    (r"word_embed_proj_dim|.*_embedding_size|router_hidden_size|.*_embed_dim", _is(64)),
    (r"first_k_dense_replace|num_dense_layers", _at_most(1)),
    (r"num_(hidden_)?layers|n_layers?|.*_layers|.*_hidden_layers|num_blocks|depth", _at_most(2)),
    (r"num_experts_per_tok(en)?|moe_(topk|top_k|k)|top_k", _at_most(2)),
    (r"(num|n|num_local|n_routed|moe_num)_(routed_)?experts", _at_most(4)),
    (r"n_group|num_expert_group", _at_most(2)),
    (r"topk_group", _at_most(1)),
    (r".*_lora_rank|.*_rank|time_step_rank", _at_most(8)),
    (r"mamba_d_state|state_size|ssm_state_size", _at_most(8)),
    (r"mamba_chunk_size|chunk_size|block_size", _at_most(8)),
    (r"n_positions|n_ctx|max_.*(position|seq|length).*|.*max_length|context_length", _at_most(128)),
    (r"sliding_window(_size)?|attention_chunk_size|.*window_size|local_attention", _at_most(8)),
    (r".*(period|pattern|every_n_layers|layer_interval|group_size)", _at_most(2)),
    (r"(attn|expert)_layer_offset", _at_most(1)),
    (r"index_topk", _at_most(8)),
)  # fmt: skip
"""Keys → what becomes of a number."""

_DROPOUT = re.compile(r".*(drop|pdrop|jitter|mask_time_prob|mask_feature_prob).*")

_EXCEPTIONS: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
            for kind in ("full_attention", "sliding_attention")
        }
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 32, "moe_top_k": 2},
    },
    "bamba": {"attn_layer_indices": [1]},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 2, "topk_group": 1},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note_text": {"num_key_value_heads": 4},
    "falcon_h1": {"mamba_d_ssm": 128},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"head_dim": 32, "n_groups": 2},
    "ministral": {"head_dim": 16},
    "nemotron": {"head_dim": 16, "num_key_value_heads": 2},
    "nemotron_h": {"n_groups": 2},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {
        "is_decoder": True,
        "attn_layers": ["local", "lsh"],
        "axial_pos_shape": [4, 4],
        "axial_pos_embds_dim": [32, 32],
        "local_attn_chunk_length": 8,
        "lsh_attn_chunk_length": 8,
    },
    "xlstm": {"chunk_size": 16, "qk_dim_factor": 1.0},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
    },
    "zamba2": {
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
    },
}
"""By model type (that of a part of a config, too): values in place of those by key."""


def shrunk(kind: type, exceptions: Mapping[str, Mapping[str, Any]] = _EXCEPTIONS) -> Any:
    """A small config of a class of configs; what is made of parts has small parts."""
    own = dict(exceptions.get(kind.model_type, {}))  # type: ignore[attr-defined]
    default = kind(**own.pop("needs", {}))
    found: dict[str, Any] = {}
    special = VOCABULARY - 1
    for key, value in vars(default).items():
        if key.startswith("_") or key in ("transformers_version", "dtype"):
            continue
        if hasattr(value, "to_dict"):
            found[key] = shrunk(type(value), exceptions)
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            if _DROPOUT.fullmatch(key):
                found[key] = type(value)(0)
                continue
            if isinstance(value, float):
                continue
            rule = next((size for known, size in _SIZES if re.fullmatch(known, key)), None)
            if rule is not None:
                found[key] = rule(value)
                if key == "num_key_value_heads" and value == vars(default).get(
                    "num_attention_heads"
                ):
                    found[key] = found["num_attention_heads"] = 4
            elif re.fullmatch(r".*_token_(id|index)", key) and value >= 0:
                found[key], special = special, special - 1
        elif key.endswith("_token_id") and isinstance(value, list):
            found[key] = 2
    found |= _layers(default, found)
    return kind(**(found | own))


def _layers(default: Any, found: Mapping[str, Any]) -> dict[str, Any]:
    """The lists that have an entry per layer, cut to a layer of each kind; and their length."""
    names = [k for k in ("num_hidden_layers", "n_layer", "num_layers", "n_layers") if k in found]
    if not names:
        return {}
    count = getattr(default, names[0])
    lists = {
        k: v for k, v in vars(default).items() if isinstance(v, list) and len(v) == count and count
    }
    kinds: dict[str, int] = {}
    for place in range(count):
        kinds.setdefault(str([_kind(v[place]) for v in lists.values()]), place)
    chosen = sorted(kinds.values())[:MOST_LAYERS]
    chosen += [n for n in range(count) if n not in chosen][: max(0, 2 - len(chosen))]
    cut = {k: [_small(v[n]) for n in sorted(chosen)] for k, v in lists.items()}
    return cut | {names[0]: len(chosen)}


def _kind(entry: Any) -> Any:
    """What tells layers apart; their widths do not."""
    return "" if isinstance(entry, int) and entry > 1 else entry


def _small(entry: Any) -> Any:
    return 64 if isinstance(entry, int) and entry > 64 else entry
