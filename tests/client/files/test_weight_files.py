"""Weights in files: found, fitted to a model, cut into shards, and read again as a peer does."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from shoal.client.files import shards as shards_module
from shoal.client.files.exported import opened
from shoal.client.files.shards import Pretrained
from shoal.client.files.weight_files import WeightFilesError, find
from shoal.client.models import fitting
from shoal.client.models.fitting import FileNames, Wanted, fit
from shoal.dag.transforms.split_weights import blocks
from shoal.net.web.web import Web
from shoal.peer.blobs.weight_shards import WeightManifest, WeightShard
from shoal.peer.blobs.weights import (
    TensorLocation,
    WeightError,
    Weights,
    WeightsFile,
    merged_entries,
)

from ...net.web.web_files import serving

TENSORS = {
    "a.weight": torch.randn(7, 5),
    "a.bias": torch.randn(7),
    "b.weight": torch.randn(3, 7).bfloat16(),
    "b.bias": torch.randn(3).half(),
    "c": torch.tensor(2.5),
    "ids": torch.arange(6),
}


def folder(at: Path, files: int = 2, tensors: dict[str, Tensor] = TENSORS) -> Path:
    """As Hugging Face writes a large model."""
    at.mkdir(exist_ok=True)
    of = {
        f"model-{i + 1:05}-of-{files:05}.safetensors": list(tensors)[i::files] for i in range(files)
    }
    for file, names in of.items():
        save_file({n: tensors[n] for n in names}, at / file)
    listed = {n: file for file, names in of.items() for n in names}
    (at / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))
    return at


def wanted(tensors: dict[str, Tensor] = TENSORS) -> list[Wanted]:
    return [Wanted((n,), tuple(t.shape), t.dtype, True) for n, t in tensors.items()]


def as_a_peer(found: Pretrained) -> Weights:
    """The same weights through shards and manifest, with nothing else in hand."""
    held = {hashlib.sha256(d).hexdigest(): d for d in map(found.read, found.cuts)}
    hashes = {c: hashlib.sha256(found.read(c)).hexdigest() for c in found.cuts}
    text = found.manifest(hashes).to_json().encode()

    def read(name: str, offset: int, length: int) -> bytes:
        assert name == "m"
        return text[offset : offset + length]

    files = [WeightsFile("m", len(text), sharded=True)]
    return Weights(files, read, lambda shard: held[shard.hash])


def same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)


@given(
    shapes=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 40)), min_size=1, max_size=8),
    files=st.integers(1, 3),
    shard=st.integers(64, 2000),
    large=st.integers(16, 900),
)
def test_what_a_peer_reads_is_what_was_in_the_files(
    tmp_path_factory: pytest.TempPathFactory,
    shapes: list[tuple[int, int]],
    files: int,
    shard: int,
    large: int,
) -> None:
    tensors = {f"t{i}": torch.randn(shape) for i, shape in enumerate(shapes)}
    at = folder(tmp_path_factory.mktemp("w"), files, tensors)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards_module, "SHARD_BYTES", shard)
        patch.setattr(shards_module, "LARGE_BYTES", min(large, shard))
        found = fit(find([str(at)]), wanted(tensors))
        assert all(cut.length <= shard for cut in found.cuts)
        peer = as_a_peer(found)
    assert found.size_bytes == sum(t.nbytes for t in tensors.values())  # each byte once
    assert list(peer) == list(tensors)
    for name, tensor in tensors.items():
        assert same(peer[name], tensor)
        if len(tensor) > 1:
            assert same(peer.rows(name, 1, len(tensor)), tensor[1:])


def test_a_large_tensor_is_the_same_shards_in_whichever_file(tmp_path: Path) -> None:
    big = torch.randn(3 << 20)
    one = folder(tmp_path / "one", 1, {"a": torch.randn(9), "big": big, "z": torch.randn(3)})
    two = folder(tmp_path / "two", 2, {"big": big, "z": torch.randn(99)})
    kept = []
    for at in (one, two):
        stored = find([str(at)])
        found = fit(stored, wanted({"big": big}))
        kept.append([hashlib.sha256(found.read(c)).hexdigest() for c in found.cuts])
    assert kept[0] == kept[1]


@pytest.mark.parametrize("place", ["folder", "index", "files", "one"])
def test_weights_are_named_in_several_ways(tmp_path: Path, place: str) -> None:
    at = folder(tmp_path / "w", 1 if place == "one" else 2)
    names = {
        "folder": [str(at)],
        "index": [str(at / "model.safetensors.index.json")],
        "files": [str(p) for p in sorted(at.glob("*.safetensors"))],
        "one": [str(at / "model-00001-of-00001.safetensors")],
    }[place]
    peer = as_a_peer(fit(find(names), wanted()))
    assert all(same(peer[name], tensor) for name, tensor in TENSORS.items())


@pytest.mark.parametrize("named", ["/w", "/w/model.safetensors.index.json", "/alone"])
def test_weights_are_read_from_the_web(tmp_path: Path, named: str) -> None:
    at = folder(tmp_path / "w")
    save_file(TENSORS, tmp_path / "alone")
    with serving() as served:
        served.files = {f"/w/{p.name}": p.read_bytes() for p in at.iterdir()}
        served.files["/alone/model.safetensors"] = (tmp_path / "alone").read_bytes()
        found = fit(find([served.address + named]), wanted())
        peer = as_a_peer(found)
        assert all(same(peer[name], tensor) for name, tensor in TENSORS.items())
        hashes = {c: "ab" * 32 for c in found.cuts}
        told = found.manifest(hashes, urls=True).shards
        assert {s.url for s in told} == {c.file for c in found.cuts}
        assert not any(s.url for s in found.manifest(hashes).shards)


# ---------------------------------------------------------------- bad input


def cut_off(at: Path) -> str:
    file = at / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    return r"model-00002-of-00002\.safetensors: the entry of .* it was cut off"


def without_a_file(at: Path) -> str:
    (at / "model-00002-of-00002.safetensors").unlink()
    return r"model-00002-of-00002\.safetensors, which .*index\.json names, is not there"


def index_of(at: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = at / "model.safetensors.index.json"
    table = json.loads(path.read_text())
    path.write_text(json.dumps(change(table)))


def names_what_is_not_there(at: Path) -> str:
    def added(table: dict[str, Any]) -> dict[str, Any]:
        listed = table["weight_map"]
        return {"weight_map": listed | {"d": listed["a.weight"]}}

    index_of(at, added)
    return '"d" is in .*which does not have it'


def names_another_file(at: Path) -> str:
    def swapped(table: dict[str, Any]) -> dict[str, Any]:
        files = sorted(set(table["weight_map"].values()))
        return {"weight_map": table["weight_map"] | {"a.weight": files[1]}}

    index_of(at, swapped)
    return '"a.weight" is in .*00002-of-00002.*which does not have it'


def leads_elsewhere(at: Path) -> str:
    index_of(at, lambda t: {"weight_map": {"a.weight": "../../secret"}})
    return "expected `weight_map` to name files beside it"


def no_index(at: Path) -> str:
    index_of(at, lambda t: [1, 2])
    return "is no index of safetensors files"


def no_header(at: Path) -> str:
    (at / "model-00001-of-00002.safetensors").write_bytes(b"\xff" * 50)
    return "a header of .* bytes in 50 bytes: it was cut off"


def emptied(at: Path) -> str:
    (at / "model-00001-of-00002.safetensors").write_bytes(b"")
    return r"has 0 bytes: no safetensors file"


def nothing(at: Path) -> str:
    for path in at.iterdir():
        path.unlink()
    return r"has no \*\.safetensors"


@pytest.mark.parametrize(
    "spoil",
    [
        cut_off,
        without_a_file,
        names_what_is_not_there,
        names_another_file,
        leads_elsewhere,
        no_index,
        no_header,
        emptied,
        nothing,
    ],
)
def test_files_that_are_not_whole_are_named(tmp_path: Path, spoil: Callable[[Path], str]) -> None:
    at = folder(tmp_path / "w")
    says = spoil(at)
    with pytest.raises(WeightFilesError, match=says):
        _ = find([str(at)]).entries


def test_a_url_of_another_length_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "w"
    save_file(TENSORS, path)
    with serving() as served:
        served.files["/w.safetensors"] = path.read_bytes()
        found = fit(find([f"{served.address}/w.safetensors"], Web(attempts=1)), wanted())
        served.files["/w.safetensors"] += b"more"
        with pytest.raises(WeightFilesError, match=r"as it had before\. It was changed"):
            found.read(found.cuts[0])
        served.files["/w.safetensors"] = path.read_bytes()[:-8]
        with pytest.raises(WeightFilesError, match="it was cut off"):
            _ = find([f"{served.address}/w.safetensors"], Web(attempts=1)).entries


def test_weights_that_do_not_fit_are_named(tmp_path: Path) -> None:
    stored = find([str(folder(tmp_path / "w"))])
    more = [*wanted(), Wanted(("d", "e"), (2,), torch.float32, True)]
    with pytest.raises(WeightFilesError, match=r"1 of its parameters are missing \(d\), and 0"):
        fit(stored, more)
    fewer = [w for w in more if w.names[0] != "c"]
    with pytest.raises(WeightFilesError, match=r"missing \(d\), and 1 .* unknown to it \(c\)"):
        fit(stored, fewer)
    assert "d" not in fit(stored, more, fresh=("d*",)).entries
    other = [w._replace(shape=(9,)) if w.names[0] == "a.bias" else w for w in wanted()]
    with pytest.raises(WeightFilesError, match=r'"a.bias" of .* is float32\[7\], and .*\[9\]'):
        fit(stored, other)
    whole = [w._replace(dtype=torch.int32) if w.names[0] == "ids" else w for w in wanted()]
    with pytest.raises(WeightFilesError, match=r"is int64\[6\], and .* int32\[6\]"):
        fit(stored, whole)
    half = [w._replace(dtype=torch.bfloat16) if w.names[0] == "a.bias" else w for w in wanted()]
    assert len(fit(stored, half).entries) == len(TENSORS)  # whoever reads it rounds


def test_what_is_left_out_is_said(tmp_path: Path) -> None:
    stored, said = find([str(folder(tmp_path / "w"))]), list[str]()
    some = [w for w in wanted() if w.names[0] not in ("c", "ids")]
    found = fit(stored, some, say=said.append)
    assert "2 tensors of the files are not the model's, and left out (c, ids)" in said
    assert found.size_bytes == sum(t.nbytes for n, t in TENSORS.items() if n not in ("c", "ids"))


@pytest.mark.parametrize(
    ("names", "options"),
    [
        (("x.a.bias",), {"prefix": "x"}),
        (("z", "a.bias"), {}),  # by another name of a tied one
        (("outer.a.bias",), {"rename": {"outer.": ""}}),
    ],
)
def test_names_may_differ(tmp_path: Path, names: tuple[str, ...], options: dict[str, Any]) -> None:
    stored = find([str(folder(tmp_path / "w"))])
    found = fit(stored, [Wanted(names, (7,), torch.float32, True)], **options)
    assert same(dict(found.tensors())[names[0]], TENSORS["a.bias"])


@pytest.mark.parametrize("shape", [(), (5,), (3, 2)])
def test_a_tied_parameter_with_two_values_is_refused(
    tmp_path: Path, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fitting, "_COMPARED_BYTES", 8)
    one = [Wanted(("embed", "head"), shape, torch.float32, True)]
    value = torch.rand(shape)
    other = value.clone()
    other.view(-1)[-1] += 1
    for name, head in (("equal", value.clone()), ("other", other)):
        save_file({"embed": value, "head": head}, tmp_path / f"{name}.safetensors")
    found = fit(find([str(tmp_path / "equal.safetensors")]), one)
    assert torch.equal(dict(found.tensors())["embed"], value)
    with pytest.raises(WeightFilesError, match='"embed" and "head" are one parameter'):
        fit(find([str(tmp_path / "other.safetensors")]), one)


def test_experts_in_files_of_their_own_become_one_tensor(tmp_path: Path) -> None:
    """Which they are transformers says, in its own tests; what is made of them is torch's stack and
    cat. Another number of them is another model."""
    names = [(f"{e}.gate", f"{e}.up") for e in range(3)]
    one = {name: torch.randn(4, 6) for each in names for name in each}
    stored = find([str(folder(tmp_path / "w", 2, one))])
    both = torch.stack([torch.cat([one[gate], one[up]]) for gate, up in names])
    told = FileNames(experts={"both": names})
    peer = as_a_peer(fit(stored, wanted({"both": both}), renamed=lambda names: told))
    assert same(peer["both"], both)
    assert same(peer.rows("both", 1, 3), both[1:])
    for shape in ((2, 12, 6), (4, 6, 6), (3, 6, 8)):
        with pytest.raises(WeightFilesError, match=r"are missing \(both\)|shape|\[3, 8, 6\]"):
            fit(stored, wanted({"both": torch.zeros(shape)}), renamed=lambda names: told)


# ---------------------------------------------------------------- manifests from the network


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"version": 2}, "version 2"),
        ({"shards": [{"hash": "../x", "size_bytes": 3}]}, "expected a SHA-256"),
        ({"shards": [{"hash": "ab" * 32, "size_bytes": 2**40}]}, "1 to"),
        ({"shards": [{"hash": "ab" * 32, "size_bytes": True}]}, "1 to"),
        ({"shards": [{"hash": "ab" * 32, "size_bytes": 8, "url": 1}]}, "0 URLs"),
        ({"urls": ["http://x\n"]}, "names the URL"),
        ({"tensors": {"a": ["F32", [2], [[1, 0, 8]]]}}, "which is not there"),
        ({"tensors": {"a": ["F32", [2], [[0, 1, 8]]]}}, "which is not there"),
        ({"tensors": {"a": ["F32", [2], [[0, -1, 8]]]}}, "for 'a'"),
        ({"tensors": {"a": ["F32", [1] * 65, [[0, 0, 4]]]}}, "for 'a'"),
        ({"tensors": {"a": ["F32"]}}, "no manifest of weights"),
        ({"tensors": []}, "no manifest of weights"),
        ({"tensors": {"a": ["F32", [3], [[0, 0, 8]]]}}, "the entry of 'a'"),
        ({"tensors": {"a": ["F3", [2], [[0, 0, 8]]]}}, "the entry of 'a'"),
    ],
)
def test_a_manifest_of_a_stranger_is_not_believed(change: dict[str, Any], says: str) -> None:
    table = {
        "version": 1,
        "shards": [{"hash": "ab" * 32, "size_bytes": 8}],
        "tensors": {"a": ["F32", [2], [[0, 0, 8]]]},
        "urls": [],
    }
    text = json.dumps(table | change).encode()
    weights = Weights(
        [WeightsFile("m", len(text), sharded=True)],
        lambda _, offset, length: text[offset : offset + length],
        lambda shard: bytes(8),
    )
    with pytest.raises(WeightError, match=says):
        _ = weights["a"]


def test_a_manifest_that_is_too_large_is_not_read() -> None:
    def read(*_: Any) -> bytes:
        raise AssertionError("nothing of it is read")

    weights = Weights([WeightsFile("m", (64 << 20) + 1, sharded=True)], read, read)
    with pytest.raises(WeightError, match=f"expected at most {64 << 20}"):
        _ = weights["a"]


def test_a_manifest_round_trips() -> None:
    shards = (WeightShard("ab" * 32, 8), WeightShard("cd" * 32, 9, "https://x/y", 7))
    made = WeightManifest(shards, {})
    assert WeightManifest.from_json(made.to_json()) == made


@given(rows=st.integers(1, 7), parts=st.integers(1, 4), own=st.sets(st.integers(0, 3)))
def test_blocks_become_whole_tensors_whoever_holds_them(
    rows: int, parts: int, own: set[int]
) -> None:
    """One peer that has all blocks, or some each: `own` are those of the first."""
    whole = torch.arange(3.0 * rows).view(rows, 3)
    made = {str(b): whole[slice(*b.rows(rows))].contiguous() for b in blocks("w", parts)}
    files: list[dict[str, Tensor]] = [{}, {"b": torch.ones(2)}]
    for i, (name, tensor) in enumerate(made.items()):
        files[i not in own][name] = tensor
    with TemporaryDirectory() as at:
        found: dict[str, TensorLocation] = {}
        for i, tensors in enumerate(files):
            save_file(tensors, f"{at}/{i}")
            found |= opened([Path(at, str(i))]).entries
        once = merged_entries(found)
        assert once.keys() == {"w", "b"}
        assert merged_entries(found | once) == once
        read = opened([Path(at, "0"), Path(at, "1")]).weights.read(once["w"])
        assert torch.equal(read, whole)
