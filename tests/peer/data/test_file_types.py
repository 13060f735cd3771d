"""Which files are taken for text or for bare ids, and which are refused by name."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import pickle
import sqlite3
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from shoal.peer.data import DataError, Manifest
from shoal.peer.data.array_files import matching
from shoal.peer.data.file_types import HEAD_BYTES, check_ids, check_text
from shoal.peer.data.sources import resolve

TEXT = b"It was the best of times, it was the worst of times.\n" * 40


def packed(kind: str) -> bytes:
    """A whole file of a kind."""
    made = io.BytesIO()
    match kind:
        case "gzip":
            return gzip.compress(TEXT)
        case "bzip2":
            return bz2.compress(TEXT)
        case "xz":
            return lzma.compress(TEXT)
        case "lzma":
            return lzma.compress(TEXT, format=lzma.FORMAT_ALONE)
        case "zip":
            with zipfile.ZipFile(made, "w") as file:
                file.writestr("book.txt", TEXT)
        case "tar":
            with tarfile.open(fileobj=made, mode="w") as tar:
                tar.addfile(tarfile.TarInfo("book.txt"))
        case "numpy":
            np.save(made, np.arange(9))
        case "npz":
            np.savez(made, x=np.arange(9))
        case "safetensors":
            return save({"x": np.arange(9)})
        case "torch":
            torch.save({"x": torch.arange(9)}, made)
        case "UTF-16":
            return TEXT.decode().encode("utf-16")
        case "UTF-16 without mark":
            return TEXT.decode().encode("utf-16-le")
        case "UTF-32":
            return TEXT.decode().encode("utf-32")
        case "pickle 2" | "pickle 4" | "pickle 5":
            return pickle.dumps({"x": TEXT}, int(kind[-1]))
    return made.getvalue()


KINDS = [
    *("gzip", "bzip2", "xz", "lzma", "zip", "tar", "numpy", "npz", "safetensors", "torch"),
    *("UTF-16", "UTF-16 without mark", "UTF-32", "pickle 2", "pickle 4", "pickle 5"),
]
MARKS = {
    "parquet": b"PAR1\x15\x04\x15\x10",
    "Arrow": b"ARROW1\0\0\xff\xff",
    "ORC": b"ORC\x0a\x03\x00",
    "HDF5": b"\x89HDF\r\n\x1a\n\0",
    "PNG": b"\x89PNG\r\n\x1a\n\0",
    "JPEG": b"\xff\xd8\xff\xe0\0\x10JFIF",
    "PDF": b"%PDF-1.7\n",
    "Zstandard": b"\x28\xb5\x2f\xfd\x04",
    "GGUF": b"GGUF\x03\0\0\0",
    "Megatron": b"MMIDIDX\0\0\x01",
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_no_text_is_trained_on_is_refused_whatever_its_name(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "book.txt"
    path.write_bytes(packed(kind))
    with pytest.raises(DataError, match=r"book\.txt is no text but "):
        resolve(tmp_path / "b", source=str(path), length=8)


def test_a_data_base_is_no_text(tmp_path: Path) -> None:
    base = sqlite3.connect(tmp_path / "book.txt")
    base.execute("create table t (x)")
    base.commit()
    base.close()
    with pytest.raises(DataError, match="is no text but SQLite"):
        resolve(tmp_path / "b", source=str(tmp_path / "*.txt"), length=8)


@pytest.mark.parametrize("kind", MARKS)
@pytest.mark.parametrize("form", ["txt", "bin"])
def test_marks_are_known_in_text_and_in_raw_ids(tmp_path: Path, kind: str, form: str) -> None:
    path = tmp_path / f"data.{form}"
    path.write_bytes(MARKS[kind] + bytes(range(256)) * 8 + b"\0" * (len(MARKS[kind]) % 2))
    if form == "bin" and kind in ("JPEG", "ORC"):
        return  # three bytes are ids, too
    with pytest.raises(DataError, match=kind):
        resolve(tmp_path / "b", kind={"txt": "text", "bin": "tokens"}[form], source=str(path))


@settings(max_examples=60)
@given(st.text(min_size=1, max_size=300))
def test_utf8_of_any_text_without_control_characters_is_text(text: str) -> None:
    text = "".join(c for c in text if c.isprintable() or c in "\n\t") or "x"
    check_text("book.txt", text.encode()[:HEAD_BYTES])


@pytest.mark.parametrize("text", ["ORCHARDS in bloom", "ID3 is an algorithm", "RIFF RAFF", "BZh"])
def test_a_text_may_begin_with_the_letters_of_a_mark(text: str) -> None:
    check_text("book.txt", text.encode())


@pytest.mark.parametrize("dtype", ["<u4", "<i4", "<i8", ">u2"])
@settings(max_examples=20)
@given(vocabulary=st.sampled_from([11, 300, 32000, 50257, 128256]), seed=st.integers(0, 99))
def test_ids_of_another_width_are_refused(dtype: str, vocabulary: int, seed: int) -> None:
    if dtype == ">u2":
        vocabulary = min(vocabulary, 256)
    ids = np.random.default_rng(seed).integers(0, vocabulary, 500).astype(dtype)
    raw = ids.tobytes()
    with pytest.raises(DataError, match="is read as"):
        check_ids("t.bin", np.frombuffer(raw, "<u2"), raw[:HEAD_BYTES])


@settings(max_examples=40)
@given(vocabulary=st.integers(2, 65536), seed=st.integers(0, 99))
def test_honest_ids_are_taken(vocabulary: int, seed: int) -> None:
    raw = np.random.default_rng(seed).integers(0, vocabulary, 500).astype("<u2").tobytes()
    check_ids("t.bin", np.frombuffer(raw, "<u2"), raw[:HEAD_BYTES])


def test_a_name_that_says_its_width_is_believed_and_a_header_is_refused(tmp_path: Path) -> None:
    ids = np.tile(np.array([70, 0], "<u2"), 100)
    ids[::6] = 90
    for name in ("t.bin", "t.uint16.bin"):
        ids.tofile(tmp_path / name)
    found, _ = resolve(
        tmp_path / "b", kind="tokens", source=str(tmp_path / "t.uint16.bin"), length=8
    )
    assert isinstance(found, Manifest)
    with_header = np.zeros(256, "<i4")
    with_header[:3] = 20240520, 1, 200
    (tmp_path / "h.bin").write_bytes(with_header.tobytes() + ids.tobytes())
    with pytest.raises(DataError, match=r"header of llm\.c"):
        resolve(tmp_path / "b", kind="tokens", source=str(tmp_path / "h.bin"), length=8)


NAMES = ["book[1].txt", "[v1]", "a*b.txt", "what?.txt", "data [v1] (2)", "[!x]", "[]", "a[b"]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from(NAMES), min_size=1, max_size=3), st.booleans())
def test_a_path_that_is_there_is_meant_whatever_its_name(
    tmp_path_factory: pytest.TempPathFactory, names: list[str], pattern: bool
) -> None:
    folder = tmp_path_factory.mktemp("paths[0]").joinpath(*names)
    folder.mkdir(parents=True)
    (folder / "1.txt").write_bytes(b"one")
    (folder / "2.txt").write_bytes(b"two")
    wanted = folder / ("*.txt" if pattern else "2.txt")
    found = [p.name for p in matching(str(wanted))]
    assert found == (["1.txt", "2.txt"] if pattern else ["2.txt"])
