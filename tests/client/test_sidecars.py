"""An export says its words by what made the ids of its training."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from shoal.client.sidecars import sidecars_of
from shoal.job import Job

from .chat.chats import MARKED, PLAIN, tokenizer, write_model

MINE = {"template": "mine.jinja"}
TEXT = "Where is the boat? It rains."


def exported(module: Any, job: Job, folder: Path) -> Any:
    """The tokenizer of what goes with the export."""
    (folder / "model").mkdir(parents=True)
    for path in sidecars_of(module, job, folder / "sidecars"):
        shutil.copyfile(path, folder / "model" / path.name)
    assert (folder / "model" / "config.json").is_file()
    return AutoTokenizer.from_pretrained(folder / "model")


@pytest.mark.parametrize(
    ("data", "own", "template"),
    [
        ({"kind": "tokens", "source": "t.npy"}, True, PLAIN),
        ({"kind": "text"}, True, PLAIN),
        ({"kind": "text", "tokenizer": "words"}, False, MARKED),
        ({"kind": "chat", "source": "c.jsonl", "tokenizer": "words"}, False, MARKED),
        ({"kind": "chat", "source": "c.jsonl"} | MINE, True, "mine"),
        ({"kind": "chat", "source": "c.jsonl", "tokenizer": "words"} | MINE, False, "mine"),
    ],
)  # fmt: skip
def test_the_tokenizer_and_template_of_the_data_go_with_the_export(
    tmp_path: Path, data: dict[str, Any], own: bool, template: str
) -> None:
    module = write_model(tmp_path / "model", "llama")
    words = tokenizer(MARKED)
    words.add_tokens(["boat"])  # other ids than those of the model's own
    words.save_pretrained(tmp_path / "words")
    (tmp_path / "mine.jinja").write_text("mine")
    job = Job(model={"factory": "hf:model"}, data=data, steps=1, folder=tmp_path)
    found = exported(module, job, tmp_path / "run")
    assert found(TEXT).input_ids == (tokenizer() if own else words)(TEXT).input_ids
    assert found.chat_template == template


def test_a_live_tokenizer_goes_with_the_export(tmp_path: Path) -> None:
    module, words = write_model(tmp_path / "model", "llama"), tokenizer(MARKED)
    words.add_tokens(["boat"])
    job = Job.from_hf(module, words, [{"text": TEXT}], {"length": 4}, steps=1)
    found = exported(module, job, tmp_path / "run")
    assert found(TEXT).input_ids == words(TEXT).input_ids
    assert found.chat_template == MARKED
