"""Keys of samples: in shards, in a manifest, and as what clients are told apart by."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.job import Job, SettingsError
from shoal.job.clients.partitioning import Partitioning
from shoal.peer.data.manifest import DataError, Manifest
from shoal.peer.data.partition import partition_of
from shoal.peer.data.reader import Reader
from shoal.peer.data.sample_keys import as_keys, stored
from shoal.peer.data.sources import resolve

NAMES = ["ann", "Björn", "ann", "", "李", "Björn", "ann", "late"]


def read(folder: Path, keys: Any, key: str = "who", **settings: Any) -> tuple[Manifest, Reader]:
    x = np.arange(len(keys), dtype=np.float32)
    np.savez(folder / "d.npz", x=x, y=np.zeros(len(keys), np.int64), who=np.array(keys))
    source = str(folder / "d.npz")
    manifest, paths = resolve(
        folder / "b", kind="arrays", source=source, key=key, **{"holdout": 0.1} | settings
    )
    again = Manifest.from_json(manifest.to_json())
    assert again == manifest
    return again, Reader(again, paths.__getitem__, seed=0, microbatches=1)


@given(st.lists(st.text(st.characters(exclude_characters="\0", codec="utf-8")), min_size=1))
def test_text_comes_back_as_it_was(names: list[str]) -> None:
    assert as_keys(stored(np.array(names))).tolist() == names


@pytest.mark.parametrize("keys", [NAMES, [7, -1, 7, 0, 5, -1, 7, 9]])
def test_a_client_has_the_samples_of_its_key(tmp_path: Path, keys: list[Any]) -> None:
    manifest, reader = read(tmp_path, keys)
    assert set(manifest.fields) == {"x", "y"}, "the key is no input of the model"
    assert set(reader.batch(0, 0, 2)) == {"x", "y"}
    found = partition_of(Partitioning(kind="by-key", key="who"), "y", reader)
    trained = keys[:-1]  # the last sample is held out, and nobody else has its key
    assert found.keys is not None
    assert found.keys.tolist() == sorted({*trained})
    for client, name in enumerate(found.keys.tolist()):
        assert found.train(client).tolist() == [i for i, k in enumerate(trained) if k == name]


def test_a_manifest_without_keys_is_what_it_was(tmp_path: Path) -> None:
    manifest, _ = read(tmp_path, NAMES, key="")
    assert '"key"' not in manifest.to_json()
    with pytest.raises(DataError, match="has '' as its keys"):
        partition_of(Partitioning(kind="by-key", key="who"), "y", read(tmp_path, NAMES, key="")[1])


@pytest.mark.parametrize(
    ("keys", "key", "says"),
    [
        (NAMES, "whose", "no array 'whose'"),
        (NAMES, "x", "an array of its own"),
        ([0.5] * 8, "who", "expected a key for each sample"),
        ([[1, 2]] * 8, "who", "expected a key for each sample"),
        (NAMES[:3], "who", "'who' has 3 samples"),
    ],
)
def test_keys_that_cannot_be_used_are_named(
    tmp_path: Path, keys: list[Any], key: str, says: str
) -> None:
    np.savez(tmp_path / "d.npz", x=np.ones(8), y=np.ones(8), who=np.array(keys))
    with pytest.raises(DataError, match=says):
        resolve(tmp_path / "b", kind="arrays", source=str(tmp_path / "d.npz"), key=key)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"key": "gone"}, "has the key 'gone'"),
        ({"kind": "text"}, "has the key 'who'"),
        ({"key": 3}, "expected a short text"),
    ],
)
def test_a_manifest_whose_key_is_no_column_is_refused(
    tmp_path: Path, change: dict[str, Any], says: str
) -> None:
    manifest, _ = read(tmp_path, NAMES)
    with pytest.raises(DataError, match=says):
        Manifest.from_json(json.dumps(json.loads(manifest.to_json()) | change))


@pytest.mark.parametrize(
    ("partition", "says"),
    [
        ({"kind": "by-key"}, r"data.partition.key. is missing"),
        ({"kind": "by-key", "key": "x"}, "which the model takes"),
        ({"kind": "by-key", "key": "k" * 201}, "201 characters"),
        ({"kind": "iid", "clients": 4, "key": "who"}, 'of kind "by-key"'),
    ],
)
def test_a_job_names_the_array_of_keys(partition: dict[str, Any], says: str) -> None:
    data = {"kind": "arrays", "source": "d.npz", "partition": partition}
    with pytest.raises(SettingsError, match=says):
        Job(model="m.py:f", data=data, sync={"kind": "federated"}, train={"rounds": 2, "batch": 4})
