"""Data: manifests, sampling and reading."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from shoal.dag.permutation import key, permute
from shoal.peer.data import DataError, Manifest, Reader
from shoal.peer.data.sampler import Sampler, steps_for
from shoal.peer.data.sources import resolve


def reader(manifest, paths, *, seed=3, microbatches=2):
    return Reader(manifest, paths.__getitem__, seed=seed, microbatches=microbatches)


@pytest.fixture
def text(tmp_path):
    """(manifest, paths, bytes) of a small text in two files."""
    data = bytes((i * 7 + i // 50) % 256 for i in range(3000))
    (tmp_path / "a.txt").write_bytes(data[:1000])
    (tmp_path / "b.txt").write_bytes(data[1000:])
    manifest, paths = resolve(
        tmp_path / "blobs", source=str(tmp_path / "*.txt"), holdout=0.1, length=16
    )
    return manifest, paths, data


@pytest.fixture
def arrays(tmp_path):
    x = np.arange(40 * 3, dtype=np.float32).reshape(40, 3)
    y = np.arange(40, dtype=np.int64)
    np.savez(tmp_path / "d.npz", x=x, y=y)
    return *resolve(
        tmp_path / "blobs", kind="arrays", source=str(tmp_path / "d.npz"), holdout=0.1
    ), x


def test_a_window_of_text_gives_inputs_and_the_bytes_that_follow(text):
    manifest, paths, data = text
    batch = reader(manifest, paths).batch(5, 1, 4)
    assert batch["x"].shape == batch["y"].shape == (4, 16)
    assert batch["x"].dtype == torch.int64
    for x, y in zip(batch["x"], batch["y"], strict=True):
        assert torch.equal(x[1:], y[:-1])
        assert bytes([*x.tolist(), int(y[-1])]) in data[: manifest.train]


def test_held_out_windows_lie_behind_the_training_text(text):
    manifest, paths, data = text
    assert manifest.held_out == 300
    for x in reader(manifest, paths).held_out(0, 8)["x"]:
        assert bytes(x.tolist()) in data[manifest.train :]


def test_samples_depend_on_seed_step_and_microbatch_only(text):
    manifest, paths, _ = text
    one, other = reader(manifest, paths), reader(manifest, paths)
    other.batch(9, 1, 4)
    assert torch.equal(one.batch(2, 1, 4)["x"], other.batch(2, 1, 4)["x"])
    assert not torch.equal(one.batch(2, 1, 4)["x"], one.batch(2, 0, 4)["x"])
    assert not torch.equal(one.batch(2, 1, 4)["x"], one.batch(3, 1, 4)["x"])
    assert not torch.equal(
        one.batch(2, 1, 4)["x"], reader(manifest, paths, seed=4).batch(2, 1, 4)["x"]
    )


@pytest.mark.parametrize("kind", ["text", "arrays"])
@settings(max_examples=20)
@given(batch=st.integers(1, 24), step=st.integers(0, 10**6), seed=st.integers(0, 2**32))
def test_a_step_has_the_same_samples_however_its_batch_is_divided(kind, batch, step, seed):
    manifest = Manifest(kind, (), (), 1000, 100, 16 if kind == "text" else 0, "x", "y")
    whole = Sampler(manifest, seed, 1)
    for size in (d for d in range(1, batch + 1) if batch % d == 0):
        count = batch // size
        parts = Sampler(manifest, seed, count)
        assert (
            np.concatenate([parts.train(step, m, size) for m in range(count)]).tolist()
            == whole.train(step, 0, batch).tolist()
        )
        assert (  # two batches of an evaluation
            np.concatenate([parts.held_out(m, size) for m in range(2 * count)]).tolist()
            == whole.held_out(0, 2 * batch).tolist()
        )


def test_windows_begin_where_the_documented_formula_says(text):
    manifest, _, _ = text
    found = Sampler(manifest, 7, 2).train(3, 1, 2)  # samples 14 and 15 of the run
    keys = key(7, 1, np.arange(14, 16, dtype=np.uint64))
    assert found.tolist() == (keys % np.uint64(manifest.train - manifest.length)).tolist()
    keys = key(7, 2, np.arange(2, 4, dtype=np.uint64))
    wanted = manifest.train + (keys % np.uint64(300 - 16)).astype(np.int64)
    assert Sampler(manifest, 7, 2).held_out(1, 2).tolist() == wanted.tolist()


def test_the_hash_has_its_documented_values():
    assert key(0).tolist() == [16294208416658607535]  # splitmix64's first output for state 0
    assert key(7, 1, 0, 0, np.arange(2, dtype=np.uint64)).tolist() == reference_keys(7, 1, 0, 0)


def reference_keys(*words):
    """The module's formula in Python integers, for last words 0 and 1."""
    found = []
    for last in (0, 1):
        h = 0
        for w in (*words, last):
            z = ((h ^ w) + 0x9E3779B97F4A7C15) % 2**64
            z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
            z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
            h = z ^ (z >> 31)
        found.append(h)
    return found


@given(st.integers(1, 300), st.integers(0, 2**64 - 1))
def test_permute_is_a_permutation(count, seed):
    found = permute(np.arange(count), count, key(seed))
    assert sorted(found.tolist()) == list(range(count))


def test_a_pass_over_arrays_takes_every_sample_once(arrays):
    manifest, paths, x = arrays
    read = reader(manifest, paths, microbatches=3)
    assert manifest.train == 36
    seen = [read.batch(s, m, 4)["y"] for s in range(3) for m in range(3)]  # 3 · 3 · 4 = 36
    assert sorted(torch.cat(seen).tolist()) == list(range(36))
    again = [read.batch(s, m, 4)["y"] for s in range(3, 6) for m in range(3)]
    assert sorted(torch.cat(again).tolist()) == list(range(36))
    assert torch.cat(seen).tolist() != torch.cat(again).tolist()
    batch = read.batch(0, 1, 4)
    assert np.array_equal(batch["x"].numpy(), x[batch["y"].numpy()])
    assert batch["x"].dtype == torch.float32
    assert sorted(read.held_out(0, 4)["y"].tolist()) == [36, 37, 38, 39]


def test_windows_and_rows_cross_shards(text, arrays, monkeypatch, tmp_path):
    import shoal.peer.data.sources as sources

    monkeypatch.setattr(sources, "TEXT_SHARD_BYTES", 10)
    whole, paths, _ = text
    cut, cut_paths = resolve(
        tmp_path / "cut", source=str(tmp_path / "*.txt"), holdout=0.1, length=16
    )
    assert len(cut.shards) == 300
    read = reader(cut, cut_paths)
    assert torch.equal(read.batch(1, 0, 5)["y"], reader(whole, paths).batch(1, 0, 5)["y"])
    needed = read.needs(1, [0], 5)
    assert len(needed) < 20
    assert needed[0] in cut_paths
    only = {h: cut_paths[h] for h in needed}
    assert torch.equal(reader(cut, only).batch(1, 0, 5)["x"], read.batch(1, 0, 5)["x"])


def test_needs_can_be_limited_to_the_tensors_that_a_stage_reads(arrays):
    manifest, paths, _ = arrays
    read = reader(manifest, paths)
    (mine,) = read.needs(0, [0, 1], 4, names=["y"])
    assert mine == next(s.hash for s in manifest.shards if s.column == "y")
    assert set(read.samples(read.sampler.train(0, 0, 4), names=["y"])) == {"y"}


def test_the_standard_library_is_text_on_every_machine(tmp_path):
    one, _ = resolve(tmp_path / "one", length=32)
    two, _ = resolve(tmp_path / "two", length=32)
    assert one.to_json() == two.to_json()
    assert one.total > 2**20
    assert all(s.size_bytes <= 4 * 2**20 for s in one.shards)


@pytest.mark.parametrize("form", ["npy", "npz", "safetensors", "bin", "int32.bin"])
def test_tokens_come_from_every_documented_form(tmp_path, form):
    ids = np.arange(100, dtype=np.int32) + (70000 if form == "int32.bin" else 0)
    path = tmp_path / f"t.{form}"
    if form == "npy":
        np.save(path, ids)
    elif form == "npz":
        np.savez(path, ids=ids)
    elif form == "safetensors":
        save_file({"ids": ids}, path)
    else:
        ids.astype("<i4" if form == "int32.bin" else "<u2").tofile(path)
    manifest, paths = resolve(
        tmp_path / "b",
        kind="tokens",
        source=str(path),
        length=4,
        holdout=0.0,
        inputs="input_ids",
        targets="",
    )
    x = reader(manifest, paths).batch(0, 0, 2)
    assert list(x) == ["input_ids"]
    assert int(x["input_ids"][0, 1] - x["input_ids"][0, 0]) == 1
    assert int(x["input_ids"].min()) >= int(ids[0])


def test_a_manifest_survives_json(text):
    manifest, _, _ = text
    assert Manifest.from_json(manifest.to_json()) == manifest


def broken(manifest, **changes):
    return json.dumps({**json.loads(manifest.to_json()), **changes})


def test_a_manifest_from_the_network_is_checked(text):
    manifest, _, _ = text
    shard = json.loads(manifest.to_json())["shards"][0]
    for wrong in (
        {"version": 2}, {"kind": "pickle"}, {"total": -1}, {"total": True}, {"total": 10**30},
        {"held_out": 3000}, {"held_out": 2990}, {"held_out": 3}, {"length": 0}, {"length": "16"},
        {"extra": 1}, {"columns": []}, {"columns": [{"name": "t", "dtype": "object", "shape": []}]},
        {"shards": []}, {"shards": [{**shard, "hash": "../../etc/passwd"}]},
        {"shards": [{**shard, "size_bytes": 1}]}, {"shards": [shard, {**shard, "column": "z"}]},
        {"targets": "x"}, {"inputs": None}, {"shards": {"a": 1}},
    ):  # fmt: skip
        with pytest.raises(DataError):
            Manifest.from_json(broken(manifest, **wrong))
    for text_ in ("", "[]", "nul", "[" * 100000, b"\xff"):
        with pytest.raises(DataError):
            Manifest.from_json(text_)


@given(st.recursive(st.none() | st.integers() | st.text(), lambda c: st.lists(c) | st.dictionaries(
    st.sampled_from(["version", "kind", "columns", "shards", "total"]), c)))  # fmt: skip
def test_random_json_is_refused_cleanly(raw):
    with pytest.raises(DataError):
        Manifest.from_json(json.dumps(raw))


def test_a_shard_of_another_size_is_refused(text):
    manifest, paths, _ = text
    (name, path), *_ = paths.items()
    path.write_bytes(b"short")
    with pytest.raises(DataError, match=f"{name[:12]} has 5 bytes .* expected 3000"):
        reader(manifest, paths).batch(0, 0, 2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"source": "nowhere/*.txt"}, "no file matches"),
        ({"source": "{dir}"}, "is a folder"),
        ({"source": "{dir}/t.txt", "length": 500}, "length \\+ 1 = 501"),
        ({"source": "{dir}/t.txt", "holdout": 1.5}, "holdout is 1.5"),
        ({"kind": "module"}, "not supported"),
        ({"kind": "tokens", "source": "{dir}/t.txt"}, "ends in .npz"),
        ({"kind": "tokens", "source": "{dir}/f.npy"}, "expected token ids"),
        ({"kind": "tokens", "source": "{dir}/t.npy"}, "no file"),
        ({"kind": "tokens", "source": "{dir}/rows.npy"}, "shape \\(4, 9\\): expected one row"),
        ({"kind": "tokens", "source": "{dir}/neg.npy"}, "2 of 50 items are no ids.* is item 48:"),
        ({"kind": "tokens", "source": "{dir}/most.npy"}, "1 of 50 items are no ids.* is item 9:"),
        ({"kind": "tokens", "source": "{dir}/several.npy"}, "is not what its name says"),
        ({"kind": "arrays", "source": "{dir}/none.npz"}, "'x' has shape \\(4, 0\\): samples"),
        (
            {"kind": "arrays", "source": "{dir}/??.npz"},
            "file 2 .* 'x' is .*\\[3\\].* the same in all",
        ),
        ({"kind": "arrays", "source": "{dir}/a.npz"}, "no array 'y', it has \\['o', 'x', 'z'\\]"),
        ({"kind": "arrays", "source": "{dir}/a.npz", "targets": "z"}, "'z' has 3 samples"),
        ({"kind": "arrays", "source": "{dir}/a.npz", "targets": "o"}, "dtype <?U?|no numpy file"),
        ({"kind": "arrays", "source": "{dir}/t.npz"}, "no numpy file"),
        ({"kind": "arrays", "source": "{dir}/t.safetensors"}, "no arrays"),
    ],
)
def test_unusable_data_is_named(tmp_path, settings, message):
    for name in ("t.txt", "t.npz", "t.safetensors"):
        (tmp_path / name).write_bytes(b"not numpy at all " * 20)
    np.save(tmp_path / "f.npy", np.ones(50))
    np.save(tmp_path / "rows.npy", np.ones((4, 9), np.int64))
    np.save(tmp_path / "neg.npy", np.where(np.arange(50) < 48, 7, -1))
    np.save(tmp_path / "most.npy", np.where(np.arange(50) == 9, 2**31, 7))
    np.savez(tmp_path / "none.npz", x=np.ones((4, 0)), y=np.ones(4))
    for name, wide in (("p1", 2), ("p2", 3)):
        np.savez(tmp_path / f"{name}.npz", x=np.ones((4, wide)), y=np.ones(4))
    (tmp_path / "several.npy").write_bytes((tmp_path / "p1.npz").read_bytes())
    np.savez(tmp_path / "a.npz", x=np.ones((4, 2)), z=np.ones(3), o=np.array(["a"] * 4))
    settings = {
        k: v.replace("{dir}", str(tmp_path)) if isinstance(v, str) else v
        for k, v in settings.items()
    }
    with pytest.raises(DataError, match=message):
        resolve(tmp_path / "b", **settings)


@pytest.mark.parametrize("shape", [(50,), (50, 1), (1, 50)])
def test_one_row_of_ids_is_taken_however_it_lies(tmp_path, shape):
    np.save(tmp_path / "t.npy", np.ones(shape, np.int64))
    manifest, _ = resolve(tmp_path / "b", kind="tokens", source=str(tmp_path / "t.npy"), length=8)
    assert manifest.total == 50


@pytest.mark.parametrize("largest", [2**16 - 1, 2**16, 2**31 - 1])
def test_large_ids_stay_what_they_are(tmp_path, largest):
    np.save(tmp_path / "t.npy", np.array([1, largest] * 20))
    found = resolve(tmp_path / "b", kind="tokens", source=str(tmp_path / "t.npy"), length=8)
    assert {*reader(*found).batch(0, 0, 4)["x"].unique().tolist()} == {1, largest}


def test_a_file_counts_once_however_many_links_lead_to_it(tmp_path):
    folder = tmp_path / "books"
    (folder / "more").mkdir(parents=True)
    (folder / "a.txt").write_bytes(b"a" * 40)
    (folder / "more" / "b.txt").write_bytes(b"b" * 30)
    (folder / "again").symlink_to(".")  # a circle
    (folder / "copy.txt").symlink_to("a.txt")
    manifest, paths = resolve(tmp_path / "b", source=str(folder / "**/*.txt"), length=8)
    content = b"".join(paths[shard.hash].read_bytes() for shard in manifest.shards)
    assert sorted(content) == sorted(b"a" * 40 + b"b" * 30)


def test_arrays_of_several_files_are_there_once_and_none_is_in_the_place_of_another(tmp_path):
    for part in ("a", "b"):
        (tmp_path / part).mkdir()
        np.savez(tmp_path / part / "d.npz", x=np.ones((4, 2)), y=np.ones(4, np.int64))
        np.save(tmp_path / part / "x.npy", np.ones((4, 2)))
        np.save(tmp_path / part / "y.npy", np.ones(4, np.int64))
        np.save(tmp_path / part / "z.npy", np.ones(4))
    (tmp_path / "a" / "link.npz").symlink_to("d.npz")
    several = {"kind": "arrays", "holdout": 0.0}
    manifest, _ = resolve(tmp_path / "out", source=str(tmp_path / "*" / "*.npz"), **several)
    assert manifest.total == 8
    with pytest.raises(DataError, match=r"files 1 and 4 of .* have one name"):
        resolve(tmp_path / "out", source=str(tmp_path / "*" / "*.npy"), **several)
    (tmp_path / "b" / "x.npy").unlink()
    (tmp_path / "b" / "y.npy").unlink()
    manifest, _ = resolve(tmp_path / "out", source=str(tmp_path / "*" / "*.npy"), **several)
    assert manifest.total == 4  # nobody asks for the two of another name


def test_passes_and_tokens_become_steps(text, arrays):
    manifest, _, _ = text
    assert steps_for(manifest, 8, tokens=1280) == 10
    assert steps_for(manifest, 8, passes=1) == 22  # 2700 / (8 · 16) = 21.1
    assert steps_for(arrays[0], 12, passes=2) == 6
    with pytest.raises(DataError, match="tokens counts"):
        steps_for(arrays[0], 12, tokens=5)
