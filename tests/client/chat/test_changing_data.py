"""Data that changes: what is trained on is what was there when the job was submitted, and what
changes while it is read is refused in one line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

from shoal.client.chat.record_files import RecordFiles
from shoal.client.job_data import read_data, reader_of
from shoal.job import Job
from shoal.peer.data import DataError

from .chats import CHATS, write_chats
from .test_texts import folder, read, text_job  # noqa: F401 (a fixture)

X = np.arange(80, dtype=np.float32).reshape(40, 2)
Y = np.arange(40, dtype=np.int64)
IDS = np.arange(800, dtype=np.uint16) % 300


def write_parquet(path: Path) -> None:
    parquet.write_table(pa.table({"x": X.tolist(), "y": Y}), path)


def write_rows(path: Path) -> None:
    path.write_text("x,y\n" + "".join(f"{a},{y}\n" for (a, _), y in zip(X, Y, strict=True)))


KINDS: dict[str, tuple[str, str, Callable[[Path], Any]]] = {
    "text": ("text", "t.txt", lambda p: p.write_text("row, row, " * 90)),
    "tokens": ("tokens", "t.npy", lambda p: np.save(p, IDS)),
    "raw tokens": ("tokens", "t.uint16.bin", lambda p: p.write_bytes(IDS.tobytes())),
    "npz": ("arrays", "a.npz", lambda p: np.savez(p, x=X, y=Y)),
    "parquet": ("arrays", "a.parquet", write_parquet),
    "csv": ("arrays", "a.csv", write_rows),
    "chat": ("chat", "c.jsonl", write_chats),
}


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("cut", ["shrinks", "other bytes"])
def test_what_becomes_of_a_file_later_changes_no_sample(
    folder: Path,  # noqa: F811
    name: str,
    cut: str,
) -> None:
    kind, source, write = KINDS[name]
    write(folder / source)
    data = {"kind": kind, "source": source, "holdout": 0.2} | (
        {} if kind == "arrays" else {"length": 64 if kind == "chat" else 16}
    )
    job = Job(model={"factory": "hf:model"}, data=data, steps=1, folder=folder)
    found = read(job, folder / "out")
    assert found.manifest == read(job, folder / "before").manifest
    before = reader_of(job, found).batch(0, 0, 4)
    size = (folder / source).stat().st_size
    (folder / source).write_bytes(b"" if cut == "shrinks" else b"\1" * size)
    after = reader_of(job, found).batch(0, 0, 4)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[k], after[k]) for k in before)


class Changing(RecordFiles):
    """Files that have other records at each walk but the first."""

    then = CHATS
    walks = 0

    def rows(self) -> Iterator[tuple[str, Any]]:
        Changing.walks += 1
        if Changing.walks == 2:
            write_chats(self.paths[0], Changing.then)
        return super().rows()


@pytest.mark.parametrize("then", [CHATS[:3], CHATS * 2], ids=["fewer", "more"])
@pytest.mark.parametrize("validation", ["", "v.jsonl"])
def test_files_that_get_other_records_while_they_are_read_are_refused(
    folder: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    then: Any,
    validation: str,
) -> None:
    write_chats(folder / "c.jsonl")
    write_chats(folder / "v.jsonl", CHATS[:2])
    monkeypatch.setattr("shoal.client.chat.samples.RecordFiles", Changing)
    monkeypatch.setattr(Changing, "then", then)
    monkeypatch.setattr(Changing, "walks", 0)
    job = text_job(folder, kind="chat", source="c.jsonl", length=64, validation=validation)
    says = rf"c\.jsonl changed while it was read: 6 records at first, {len(then)} then"
    with pytest.raises(DataError, match=says) as raised:
        read_data(job, folder / "out", lambda line: None, None)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["tokens", "raw tokens", "npz", "parquet"])
def test_a_file_that_is_cut_off_is_refused_in_a_line_that_names_it(
    folder: Path,  # noqa: F811
    name: str,
) -> None:
    kind, source, write = KINDS[name]
    write(folder / source)
    whole = (folder / source).read_bytes()
    (folder / source).write_bytes(whole[: len(whole) // 2 + 1])
    data = {"kind": kind, "source": source} | ({} if kind == "arrays" else {"length": 16})
    job = Job(model={"factory": "hf:model"}, data=data, steps=1, folder=folder)
    with pytest.raises(DataError, match=source.replace(".", r"\.")) as raised:
        read(job, folder / "out")
    assert "\n" not in str(raised.value)
