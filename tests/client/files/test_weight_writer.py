"""Weights are written as others read them, one tensor at a time, and in several files where one
would be too large."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from shoal.client.files import weight_writer
from shoal.client.files.exported import ExportedTensors
from shoal.client.files.shards import Pretrained
from shoal.client.files.weight_files import WeightFilesError, find
from shoal.client.files.weight_writer import files_of, item_of, items_of, write_files
from shoal.dag.ir.recipe import Initial, Recipe, RecipeStep, make

from .test_weight_files import TENSORS, folder, same


def read(written: Path) -> dict[str, Tensor]:
    """By the library, as Hugging Face reads an index."""
    found: dict[str, Tensor] = {}
    for path in files_of(written):
        if path.suffix == ".safetensors":
            found |= load_file(path)
    return found


@pytest.mark.parametrize("most", [10**9, 100, 1])
def test_what_was_written_is_what_others_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr(weight_writer, "FILE_BYTES", most)
    stored = find([str(folder(tmp_path / "from"))])
    items = items_of(stored, stored.entries) | {"t": item_of(torch.randn(3, 4).t())}
    at = tmp_path / "to"
    written = write_files(items, at / "model.safetensors")
    found = read(written)
    assert all(same(found[name], tensor) for name, tensor in TENSORS.items())
    assert found["t"].shape == (4, 3)
    assert len(found) == len(items)
    if most == 10**9:
        assert [p.name for p in at.iterdir()] == ["model.safetensors"]
        with safe_open(written, "pt") as file:
            assert file.metadata() == {"format": "pt"}
    else:
        table = json.loads(written.read_text())
        assert table["weight_map"].keys() == items.keys()
        assert table["metadata"]["total_size"] == sum(i.size_bytes for i in items.values())
        again = find([str(at)])
        assert {*again.entries} == {*items}
        count = len(set(table["weight_map"].values()))
        assert sorted(table["weight_map"].values())[-1].endswith(f"-of-{count:05}.safetensors")


def test_who_may_read_an_export_is_as_the_umask_has_it(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    written = write_files({"a": item_of(torch.zeros(3))}, tmp_path / "model.safetensors")
    assert written.stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_an_index_of_other_files_is_not_left_in_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = find([str(folder(tmp_path / "from"))])
    items = items_of(stored, stored.entries)
    with pytest.raises(WeightFilesError, match="is of other files than would be written"):
        write_files(items, tmp_path / "from" / "model.safetensors")
    assert len([*(tmp_path / "from").iterdir()]) == 3
    monkeypatch.setattr(weight_writer, "FILE_BYTES", 100)
    first = write_files(items, tmp_path / "to" / "model.safetensors")
    assert write_files(items, tmp_path / "to" / "model.safetensors") == first  # the same files


def test_no_more_than_a_piece_is_in_memory(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.zeros(4 << 20) for i in range(4)}  # 16 MiB each
    stored = find([str(folder(tmp_path / "from", 2, tensors))])
    items = items_of(stored, Pretrained(stored, stored.entries).entries)
    tracemalloc.start()
    try:
        write_files(items, tmp_path / "to" / "model.safetensors")
        assert tracemalloc.get_traced_memory()[1] < 20 << 20
    finally:
        tracemalloc.stop()


def test_what_a_recipe_makes_is_written_some_rows_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.client.files.exported._MADE_BYTES", 100)
    stored = find([str(folder(tmp_path / "from"))])
    draws = (RecipeStep("normal", 0, 70, (0.0, 1.0), "stream"),)
    recipe = Recipe(3, {"made": Initial((10, 7), "float32", draws)})
    found = ExportedTensors(stored, {"a.bias": stored.entries["a.bias"]}, recipe)
    assert {*found} == {"a.bias", "made"}
    written = read(write_files(found.items_to_write(), tmp_path / "to" / "model.safetensors"))
    assert same(written["made"], make(recipe.tensors["made"], 3))
    assert same(found.rows("made", 2, 5), written["made"][2:5])
    assert same(written["a.bias"], TENSORS["a.bias"])
