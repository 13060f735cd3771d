"""Records, templates and packing, against the tokenizer's own words and a count by hand."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from shoal.client.chat.packing import best_fit, samples
from shoal.client.chat.record_files import RecordFiles
from shoal.client.chat.samples import _Reading, read_records
from shoal.client.chat.templates import IGNORED, Template, TemplateError
from shoal.client.models.losses import _of_packing
from shoal.job import Job, SettingsError
from shoal.peer.data import DataError

from .chats import CHATS, MARKED, PLAIN, messages, tokenizer, write_chats

SAID = messages([("user", "a"), ("assistant", "b")])
DOCUMENTS = st.lists(st.lists(st.integers(1, 99), min_size=2, max_size=14), max_size=12)


def laid(sizes: list[int], room: int) -> list[list[int]]:
    """Best-fit decreasing, all samples looked at for each document."""
    groups: list[list[int]] = []
    for number in sorted(range(len(sizes)), key=lambda n: (-sizes[n], n)):
        fits = [g for g in groups if sum(sizes[n] for n in g) + sizes[number] <= room]
        if not fits:
            fits = [[]]
            groups += fits
        min(fits, key=lambda g: room - sum(sizes[n] for n in g)).append(number)
    return sorted(sorted(g) for g in groups)


@example(found=[[1, 2, 3, 4], [1, 2, 3, 4]], length=6, pack=True, window=3)
@given(found=DOCUMENTS, length=st.integers(1, 12), pack=st.booleans(), window=st.integers(1, 40))
def test_each_document_lies_whole_in_a_sample_and_the_longest_lie_first(
    found: list[list[int]], length: int, pack: bool, window: int
) -> None:
    found = [[1000 * n + i for i in d] for n, d in enumerate(found, 1)]  # each its own
    wanted = [(d[:-1][:length], [-i for i in d[1:]][:length]) for d in found]
    made = list(samples(((d, [-i for i in d]) for d in found), length, 0, pack, window))
    back: list[list[int]] = []
    for sample in made:
        assert len(sample.inputs) == len(sample.targets) == len(sample.positions) == length
        back.append([])
        for number in range(sample.documents[-1] + 1):
            at = [i for i in range(length) if sample.documents[i] == number]
            assert [sample.positions[i] for i in at] == list(range(len(at)))
            pair = [sample.inputs[i] for i in at], [sample.targets[i] for i in at]
            if pair[0][0]:
                back[-1].append(wanted.index(pair))
            else:
                assert number == sample.documents[-1], "padding is behind all"
                assert set(pair[1]) == {IGNORED}
                assert len(at) == sample.padding
    groups, part = [], []
    for number in range(len(wanted)):
        part.append(number)
        if not pack or number + 1 == len(wanted) or sum(len(wanted[n][0]) for n in part) >= window:
            sizes = [len(wanted[n][0]) for n in part]
            groups += [[part[n] for n in g] for g in laid(sizes, length)]
            part = []
    assert back == groups


def test_little_of_packed_samples_is_padding() -> None:
    rng = random.Random(0)
    sizes = [min(96, max(4, int(rng.lognormvariate(3.5, 0.7)))) for _ in range(2000)]
    made = [*samples((([1] * (n + 1), [1] * (n + 1)) for n in sizes), 96, 0, True)]
    assert sum(s.padding for s in made) < 0.01 * 96 * len(made)
    assert len(made) == len(best_fit(sizes, 96))


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_labels_are_the_assistants_tokens(tmp_path: Path, template: str) -> None:
    tokenizer(template).save_pretrained(tmp_path)
    own, marked = Template(tmp_path, None, "assistant"), tokenizer(MARKED)
    for chat in CHATS:
        wanted = marked.apply_chat_template(
            messages(chat), return_dict=True, return_assistant_tokens_mask=True
        )
        ids, labels = own.ids(messages(chat))
        assert ids == wanted["input_ids"]
        assert [label != IGNORED for label in labels] == [
            bool(m) for m in wanted["assistant_masks"]
        ]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{not json", "no JSON"),
        ('{"prompt": "a", "completion": "b", "completion": "c"}', "stands in it twice"),
        ('{"messages": [{"content": "hello"}]}', 'no "role"'),
        ('{"text": "hello"}', "expected a chat"),
    ],
)
def test_a_bad_record_is_refused_by_file_and_line_or_left_out(
    tmp_path: Path, line: str, says: str
) -> None:
    path = write_chats(tmp_path / "c.jsonl", CHATS[:2])
    good = path.read_text()
    path.write_text(good + line + "\n" + good)
    with pytest.raises(DataError, match=rf"c\.jsonl:3: .*{says}"):
        list(RecordFiles(str(path), "chat", None))
    left_out: list[str] = []
    assert len(list(RecordFiles(str(path), "chat", left_out.append))) == 4
    assert len(left_out) == 1
    assert says in left_out[0]


def test_instructions_of_csv_and_json_are_the_same(tmp_path: Path) -> None:
    row = {"instruction": "Add,", "input": "1 and 2", "output": "3\nyes"}
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "a.csv").write_text('instruction,input,output\n"Add,",1 and 2,"3\nyes"\n')
    found = [
        [m for _, m in RecordFiles(str(tmp_path / name), "instructions", None)]
        for name in ("a.jsonl", "a.csv")
    ]
    said = [("user", "Add,\n\n1 and 2"), ("assistant", "3\nyes")]
    assert found[0] == found[1] == [messages(said)]


def job_of(folder: Path, vocabulary: int = 320, **data: Any) -> Job:
    (folder / "model").mkdir(exist_ok=True)
    tokenizer().save_pretrained(folder / "model")
    config = {"model_type": "llama", "vocab_size": vocabulary}
    (folder / "model" / "config.json").write_text(json.dumps(config))
    table = {"kind": "chat", "source": "c.jsonl", "length": 64} | data
    return Job(model={"factory": "hf:model"}, data=table, steps=1, folder=folder)


def test_a_tokenizer_that_the_model_does_not_know_is_refused(tmp_path: Path) -> None:
    write_chats(tmp_path / "c.jsonl")
    with pytest.raises(DataError, match=r"makes the id .* the model knows 60"):
        read_records(job_of(tmp_path, 60), tmp_path / "out", lambda line: None)


class Given:
    """Documents as they are, in place of records and their template."""

    folder = "here"

    def __init__(self, *documents: tuple[list[int], list[int]], pad: int | None = None) -> None:
        self.documents, self.refused = documents, list[str]()
        self.tokenizer = SimpleNamespace(pad_token_id=pad)

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return ((str(n), document) for n, document in enumerate(self.documents))

    def ids(self, document: tuple[list[int], list[int]]) -> tuple[list[int], list[int]]:
        return document

    def refuse(self, place: str, why: str) -> None:
        self.refused.append(place)


def test_what_is_learned_first_behind_a_sample_is_not_learned() -> None:
    none = [IGNORED] * 4
    given: Any = Given(
        ([1] * 4, [*none[:3], 7]),  # the label of the last position
        ([1] * 5, [*none, 7]),
        ([1] * 4, [7, *none[:3]]),  # which follows nothing
        ([1] * 5, [IGNORED, 7, 7, 7, 7]),
    )
    reading = _Reading(given, 3, None)
    assert len([*reading.documents(given)]) == 2
    assert given.refused == ["1", "2"]
    assert reading.cut == 1, "four ids are three positions, and nothing is lost"


@pytest.mark.parametrize(("pad", "found"), [(4, 4), (5, 0), (None, 0)])
def test_padding_is_an_id_that_the_model_knows(pad: int | None, found: int) -> None:
    given: Any = Given(pad=pad)
    assert _Reading(given, 3, 5).pad == found


def test_the_last_records_are_held_out(tmp_path: Path) -> None:
    write_chats(tmp_path / "c.jsonl")
    job = job_of(tmp_path, holdout=0.4, pack=False)
    manifest = read_records(job, tmp_path / "out", print)["manifest"]
    assert (manifest.train, manifest.held_out) == (4, 2)


def test_a_packed_token_sees_its_own_document_up_to_itself() -> None:
    documents, positions = [0, 0, 1, 1, 1, 2], [0, 1, 0, 1, 2, 0]
    batch = {"positions": torch.tensor([positions]), "documents": torch.tensor([documents])}
    found = _of_packing(nn.Linear(1, 1), batch)
    assert found["position_ids"].tolist() == [positions]
    seen = [[d == e and j <= i for j, e in enumerate(documents)] for i, d in enumerate(documents)]
    assert (found["attention_mask"] == 0).tolist() == [[seen]]
    assert {*found["attention_mask"].unique().tolist()} == {0.0, torch.finfo(torch.float32).min}


def test_validation_stands_in_place_of_holdout(tmp_path: Path) -> None:
    write_chats(tmp_path / "c.jsonl")
    write_chats(tmp_path / "v.jsonl", CHATS[:2])
    job = job_of(tmp_path, validation="v.jsonl", pack=False)
    said: list[str] = []
    manifest = read_records(job, tmp_path / "out", said.append)["manifest"]
    assert (manifest.train, manifest.held_out) == (len(CHATS), 2)
    words = Template(tmp_path / "model", None, "all")
    sizes = [len(words.ids(messages(chat))[0]) - 1 for chat in (*CHATS, *CHATS[:2])]
    share = 1 - sum(sizes) / (64 * len(sizes))
    assert said[-1] == f"samples of 64 positions: {len(sizes)}, {share:.1%} of it padding"
    with (tmp_path / "v.jsonl").open("a") as file:
        file.write("{}\n")
    said.clear()
    job = job_of(tmp_path, validation="v.jsonl", pack=False, bad_records="skip")
    assert read_records(job, tmp_path / "again", said.append)["manifest"].held_out == 2
    assert any("validation left out: 1; the first is" in line for line in said)


@pytest.mark.parametrize("there", ["c.jsonl", "*.jsonl", "[cl].jsonl"])
def test_validation_is_never_trained_on(tmp_path: Path, there: str) -> None:
    write_chats(tmp_path / "c.jsonl")
    (tmp_path / "l.jsonl").symlink_to("c.jsonl")
    with pytest.raises(DataError, match=r"data\.validation .* would be trained on"):
        read_records(job_of(tmp_path, source=there, validation="l.jsonl"), tmp_path / "out", print)


@pytest.mark.parametrize(
    ("kind", "said", "key"),
    [
        ("chat", {"messages": SAID, "tools": [{"name": "add"}]}, "tools"),
        ("chat", {"messages": SAID, "functions": "add"}, "functions"),
        ("chat", {"conversations": SAID, "system": "Be brief."}, "system"),
        ("chat", {"messages": [SAID[0], {**SAID[1], "weight": 0}]}, "weight"),
        ("chat", {"messages": [SAID[0], {**SAID[1], "train": False}]}, "train"),
        ("chat", {"messages": [SAID[0], {**SAID[1], "loss": False}]}, "loss"),
        ("chat", {"messages": [*SAID, {**SAID[1], "role": "Assistant"}]}, "role"),
        ("chat", {"conversations": [{"from": "bing", "value": "b"}], "messages": None}, "role"),
        ("chat", {"messages": SAID, "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
        ("chat", {"messages": SAID, "images": ["a.png"]}, "images"),
        ("instructions", {"prompt": "a", "completion": "b", "input": "c"}, "input"),
        ("instructions", {"prompt": "a", "completion": "b", "weight": 0.5}, "weight"),
        ("instructions", {"instruction": "a", "output": "b", "system": "c"}, "system"),
        ("instructions", {"prompt": "a", "completion": "b", "history": [["c", "d"]]}, "history"),
        ("instructions", {"instruction": "a", "output": "b", "input": ["c"]}, "input"),
    ],
)
def test_what_would_change_a_record_is_not_left_out_of_it(
    tmp_path: Path, kind: str, said: dict[str, Any], key: str
) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(said))
    with pytest.raises(DataError, match=rf'a\.jsonl:1: .*"{key}"'):
        list(RecordFiles(str(tmp_path / "a.jsonl"), kind, None))
    empty: Any = {"weight": 1, "input": ""}.get(key)
    kept = {k: v for k, v in said.items() if k != key} | {key: empty, "id": 3, "source": "x"}
    kept |= {"messages": SAID} if kind == "chat" and key not in ("system",) else {}
    (tmp_path / "a.jsonl").write_text(json.dumps(kept))
    assert len(list(RecordFiles(str(tmp_path / "a.jsonl"), kind, None))) == 1


def test_half_a_character_is_refused_by_its_line(tmp_path: Path) -> None:
    for said in (SAID[0], {**SAID[1], "content": "b\ud83d"}), (SAID[0], SAID[1]):
        (tmp_path / "a.jsonl").write_text(json.dumps({"messages": said}))
        if said[1] == SAID[1]:
            assert len(list(RecordFiles(str(tmp_path / "a.jsonl"), "chat", None))) == 1
            continue
        with pytest.raises(DataError, match=r"a\.jsonl:1: message 1 has half of a character"):
            list(RecordFiles(str(tmp_path / "a.jsonl"), "chat", None))


def test_a_chat_that_the_assistant_begins_needs_a_template_that_marks() -> None:
    chat = messages([("assistant", "a"), ("user", "b"), ("assistant", "c")])
    with pytest.raises(TemplateError, match="begins with the assistant"):
        Template(tokenizer(PLAIN), None, "assistant").ids(chat)
    ids, labels = Template(tokenizer(MARKED), None, "assistant").ids(chat)
    assert tokenizer(MARKED).decode([i for i in labels if i != IGNORED]) == "a<|end|>c<|end|>"
    assert len(ids) == len(labels)


@pytest.mark.parametrize("key", ["pack", "template", "loss_on", "bad_records"])
def test_keys_of_records_are_refused_for_other_kinds(key: str) -> None:
    value = {"pack": False, "loss_on": "all", "bad_records": "skip"}.get(key, "x")
    with pytest.raises(SettingsError, match=rf"data\.{key}"):
        Job(model={"factory": "m.py:f"}, data={key: value}, steps=1)
