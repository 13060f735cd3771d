"""Text and live objects as data of a job, against the tokenizer by hand and against files."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from shoal.client.job_data import JobData, read_data, resolved
from shoal.client.sidecars import tokenizer_files
from shoal.job import Job, SettingsError
from shoal.peer.data import DataError

from .chats import (
    CHATS,
    MARKED,
    messages,
    other_words,
    tokenizer,
    write_chats,
    write_model,
)

TEXT = "The boat lies at the quay; it rains, and nobody rows in the rain.\n" * 12


def read(job: Job, folder: Path) -> JobData:
    return read_data(job, folder, lambda line: None, None)


def ids_of(found: JobData) -> list[int]:
    dtype = found.manifest.columns[0].dtype
    content = b"".join(found.shards[s.hash].read_bytes() for s in found.manifest.shards)
    return list(np.frombuffer(content, dtype))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    tokenizer().save_pretrained(tmp_path / "model")
    write_config(tmp_path, 320)
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    return tmp_path


def write_config(folder: Path, vocabulary: int) -> None:
    config = {"model_type": "llama", "vocab_size": vocabulary}
    (folder / "model" / "config.json").write_text(json.dumps(config))


def text_job(folder: Path, factory: str = "hf:model", **data: Any) -> Job:
    table = {"source": "a.txt", "length": 16} | data
    return Job(model={"factory": factory}, data=table, steps=1, folder=folder)


@pytest.mark.parametrize(("factory", "named"), [("hf:model", "auto"), ("m.py:make", "model")])
def test_ids_of_text_are_those_of_the_tokenizer(folder: Path, factory: str, named: str) -> None:
    found = read(text_job(folder, factory, tokenizer=named), folder / "out")
    assert ids_of(found) == tokenizer()(TEXT)["input_ids"]
    assert found.manifest.kind == "tokens"


@pytest.mark.parametrize(("factory", "named"), [("hf:model", "bytes"), ("m.py:make", "auto")])
def test_text_without_a_tokenizer_is_bytes(folder: Path, factory: str, named: str) -> None:
    found = read(text_job(folder, factory, tokenizer=named), folder / "out")
    assert bytes(ids_of(found)) == TEXT.encode()


def test_text_that_the_model_or_the_tokenizer_does_not_take_is_refused(folder: Path) -> None:
    (folder / "b.txt").write_bytes(b"caf\xe9 " * 50)
    with pytest.raises(DataError, match="no UTF-8 at byte 3"):
        read(text_job(folder, source="b.txt"), folder / "out")
    write_config(folder, 60)
    with pytest.raises(DataError, match=r"makes the id \d+, and the model knows 60"):
        read(text_job(folder), folder / "out2")
    with pytest.raises(SettingsError, match=r"data\.tokenizer.*there is no folder"):
        read(text_job(folder, tokenizer="nowhere"), folder / "out3")


class Live:
    """A live model, as far as data goes."""

    class config:  # noqa: N801 (as transformers call it)
        @staticmethod
        def to_dict() -> dict[str, Any]:
            return {"model_type": "llama", "vocab_size": 320}


RECORDS = {
    "chat": [{"messages": messages(chat)} for chat in CHATS],
    "instructions": [{"prompt": f"say {i}", "completion": f"it is {i}"} for i in range(5)],
    "text": [{"text": TEXT}, {"text": "Now we row."}],
}


@pytest.mark.parametrize("kind", RECORDS)
def test_live_objects_are_the_same_data_as_files(folder: Path, kind: str) -> None:
    data = {"length": 64, "holdout": 0.2}
    live = Job.from_hf(Live(), tokenizer(), RECORDS[kind], data, steps=1)
    assert live.data.kind == kind
    if kind == "text":
        (folder / "d.txt").write_text("\n".join(r["text"] for r in RECORDS[kind]))
    else:
        (folder / "d.txt").rename(folder / "x") if (folder / "d.txt").exists() else None
        lines = "\n".join(map(json.dumps, RECORDS[kind]))
        (folder / "d.jsonl").write_text(lines + "\n")
    source = "d.txt" if kind == "text" else "d.jsonl"
    filed = text_job(folder, kind=kind, source=source, **data)
    one, other = read(live, folder / "out"), read(filed, folder / "out2")
    assert one.manifest == other.manifest
    assert one.shards.keys() == other.shards.keys()
    assert Job.from_json(live.to_json()).dataset is None


def test_a_dataset_of_the_library_is_a_sequence_too(folder: Path) -> None:
    datasets = pytest.importorskip("datasets")
    live = Job.from_hf(Live(), tokenizer(), datasets.Dataset.from_list(RECORDS["chat"]), steps=1)
    plain = Job.from_hf(Live(), tokenizer(), RECORDS["chat"], steps=1)
    assert read(live, folder / "a").manifest == read(plain, folder / "b").manifest


class Table:
    """As pandas has it: with a length, and columns by name."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, name: str) -> list[str]:
        return {"text": ["a", "b"]}[name]


@pytest.mark.parametrize(
    ("dataset", "says"),
    [
        ([], "no record"),
        ({"train": []}, "one split"),
        (iter(RECORDS["chat"]), "one split"),
        ({"a", "b"}, "is a set: expected a sequence"),
        (Table(), "is a Table: expected a sequence"),
    ],
)
def test_what_is_no_sequence_of_records_is_refused(dataset: Any, says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        Job.from_hf(Live(), tokenizer(), dataset, steps=1)


def test_what_live_objects_leave_no_place_for_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"`data.source` is given beside a dataset"):
        Job.from_hf(Live(), tokenizer(), RECORDS["chat"], {"source": "more.jsonl"}, steps=1)
    with pytest.raises(SettingsError, match=r"`data.tokenizer` is a Live: expected a tokenizer"):
        Job.from_hf(tokenizer(), Live(), RECORDS["chat"], steps=1)


class Shrinking(list):  # type: ignore[type-arg]
    """Records of which one is gone at each walk but the first."""

    walks = 0

    def __len__(self) -> int:
        self.walks += 1
        return super().__len__() - (self.walks > 2)


def test_a_dataset_that_shrinks_while_it_is_read_is_refused(folder: Path) -> None:
    job = Job.from_hf(Live(), tokenizer(), Shrinking(RECORDS["chat"]), steps=1)
    with pytest.raises(DataError, match="changed while it was read: 6 records at first, 5 then"):
        read(job, folder / "out")


def test_tokens_of_chats_are_positions_of_samples(folder: Path) -> None:
    write_chats(folder / "c.jsonl")
    table = {"kind": "chat", "source": "c.jsonl", "length": 64}
    train = {"tokens": 64 * 4 * 3 - 1, "batch": 4}
    job = Job(model={"factory": "hf:model"}, data=table, train=train, folder=folder)
    assert resolved(job, read(job, folder / "out").manifest).train.steps == 3


@pytest.mark.slow
def test_a_live_model_learns_as_its_files_do(tmp_path: Path) -> None:
    from shoal.client.submission import prepare

    model = write_model(tmp_path / "model", "llama")
    write_chats(tmp_path / "c.jsonl")
    table = {"length": 64, "holdout": 0.0}
    live = Job.from_hf(model, tokenizer(), RECORDS["chat"], table, steps=1, batch=2)
    filed = text_job(tmp_path, kind="chat", source="c.jsonl", **table)
    filed = filed.with_changes(["train.batch=2"])
    with prepare(live) as one, prepare(filed) as other:
        assert one.manifest == other.manifest
        assert one.graph == other.graph


def kept_by(job: Job, folder: Path) -> Path:
    """A folder with what is kept of a job's tokenizer."""
    (beside := folder / "beside").mkdir()
    home = job.folder / "model" if job.model.factory == "hf:model" else None
    (target := folder / "kept").mkdir()
    for path in tokenizer_files(job, beside, home):
        shutil.copyfile(path, target / path.name)
    return target


@pytest.mark.parametrize(("factory", "named"), [("hf:model", "other"), ("m.py:make", "other")])
def test_what_goes_with_an_export_is_the_tokenizer_that_made_the_ids(
    folder: Path, factory: str, named: str
) -> None:
    other_words().save_pretrained(folder / "other")
    job = text_job(folder, factory, tokenizer=named)
    found = read(job, folder / "out")
    assert ids_of(found) == AutoTokenizer.from_pretrained(kept_by(job, folder))(TEXT)["input_ids"]
    assert ids_of(found) != tokenizer()(TEXT)["input_ids"]


def test_a_live_tokenizer_and_a_template_of_the_job_go_with_an_export(folder: Path) -> None:
    live = Job.from_hf(Live(), tokenizer(), RECORDS["chat"], {"length": 64}, steps=1)
    (folder / "t.jinja").write_text(MARKED)
    job = replace(live, data=replace(live.data, template=str(folder / "t.jinja")))
    kept: Any = AutoTokenizer.from_pretrained(kept_by(job, folder))
    assert kept(TEXT)["input_ids"] == tokenizer()(TEXT)["input_ids"]
    assert kept.chat_template == MARKED != tokenizer().chat_template


def test_bytes_have_no_tokenizer_to_go_with_them(folder: Path) -> None:
    assert not [*kept_by(text_job(folder, tokenizer="bytes"), folder).iterdir()]
