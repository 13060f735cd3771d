"""`data.validation`: a source of its own that is held out. The oracle is the arrays themselves."""

from __future__ import annotations

import csv
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.client.job_data import client_sizes, read_data, reader_of
from shoal.job import Job, SettingsError
from shoal.peer.data.manifest import DataError


def job_of(folder: Path, **data: Any) -> Job:
    return Job(model={"factory": "m.py:m"}, data=data, steps=1, folder=folder)


def held(job: Job, out: Path, batches: int, size: int) -> Any:
    """The manifest, and held-out batches of `size` samples."""
    out.mkdir()
    data = read_data(job, out, lambda line: None, None)
    reader = reader_of(job, data)
    return data.manifest, [reader.held_out(n, size) for n in range(batches)]


def test_text_is_held_out_from_files_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(bytes(range(97, 123)) * 20)
    (tmp_path / "v.txt").write_bytes(b"0123456789" * 4)
    job = job_of(tmp_path, source="a.txt", validation="v.txt", length=8)
    manifest, batches = held(job, tmp_path / "out", 3, 4)
    assert (manifest.train, manifest.held_out) == (520, 40)
    for batch in batches:
        assert bool((batch["x"] < 58).all() and (batch["y"] < 58).all())
    reader = reader_of(job, read_data(job, tmp_path / "out", lambda line: None, None))
    assert all(int(reader.batch(n, 0, 4)["y"].min()) >= 97 for n in range(20))


def test_ids_of_two_widths_are_those_of_the_files(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(100, dtype=np.uint16))
    np.save(tmp_path / "v.npy", np.arange(70_000, 70_030))
    job = job_of(tmp_path, kind="tokens", source="a.npy", validation="v.npy", length=8)
    manifest, batches = held(job, tmp_path / "out", 1, 4)
    assert (manifest.columns[0].dtype, manifest.held_out) == ("int32", 30)
    assert int(batches[0]["x"].min()) >= 70_000


def test_arrays_are_held_out_from_files_of_their_own(tmp_path: Path) -> None:
    for name, rows in (("a", [[1, 0], [2, 1], [3, 0]]), ("v", [[0.5, 1], [1.5, 0]])):
        with (tmp_path / f"{name}.csv").open("w", newline="") as file:
            csv.writer(file).writerows([["x", "y"], *rows])
    job = job_of(tmp_path, kind="arrays", source="a.csv", validation="v.csv")
    manifest, batches = held(job, tmp_path / "out", 1, 2)
    assert (manifest.total, manifest.held_out) == (5, 2)
    assert sorted(batches[0]["x"].tolist()) == [0.5, 1.5]
    assert str(batches[0]["x"].dtype) == "torch.float32"


def test_keys_are_of_samples_that_are_trained_on(tmp_path: Path) -> None:
    keys = np.array(["ann", "christopher", "ann"])
    np.savez(tmp_path / "a.npz", x=np.zeros((3, 2)), y=np.zeros(3), who=keys)
    np.savez(tmp_path / "v.npz", x=np.ones((2, 2)), y=np.zeros(2))
    job = Job(
        model={"factory": "m.py:m"},
        data={
            "kind": "arrays",
            "source": "a.npz",
            "validation": "v.npz",
            "partition": {"kind": "by-key", "key": "who"},
        },
        sync={"kind": "federated", "per_round": 1},
        rounds=2,
        folder=tmp_path,
    )
    manifest, batches = held(job, tmp_path / "out", 1, 2)
    assert (manifest.total, manifest.held_out) == (5, 2)
    assert batches[0]["x"].min() == 1
    found = read_data(job, tmp_path / "out", lambda line: None, None)
    assert sorted(client_sizes(job, found).trained) == [1, 2]


def test_validation_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"abcdefgh" * 40)
    os.link(tmp_path / "a.txt", tmp_path / "b.txt")
    (tmp_path / "link.txt").symlink_to(tmp_path / "a.txt")
    (tmp_path / "copy.txt").write_bytes(b"abcdefgh" * 40)
    (tmp_path / "short.txt").write_bytes(b"abc")
    np.savez(tmp_path / "a.npz", x=np.zeros((4, 3)), y=np.zeros(4))
    np.savez(tmp_path / "v.npz", x=np.zeros((4, 2)), y=np.zeros(4))
    for said, data in (
        ("would be trained on", {"source": "*.txt", "validation": "a.txt"}),
        ("would be trained on", {"source": "a.txt", "validation": "link.txt"}),
        ("would be trained on", {"source": "a.txt", "validation": "copy.txt"}),
        ("would be trained on", {"source": "http://a/b", "validation": "http://a/b"}),
        ("data.validation 3", {"source": "a.txt", "validation": "short.txt", "length": 8}),
        ("nothing is there|no file", {"source": "a.txt", "validation": "no.txt"}),
        ("expected the same in all", {"kind": "arrays", "source": "a.npz", "validation": "v.npz"}),
    ):
        with pytest.raises(DataError, match=said):
            read_data(job_of(tmp_path, **data), tmp_path / "o", lambda line: None, None)
    with pytest.raises(SettingsError, match="expected holdout"):
        job_of(tmp_path, source="mine", where="peer", validation="v.txt")
