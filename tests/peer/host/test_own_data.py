"""The owner's data: which of it leaves, who may use it, and what its manifest tells."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.job.settings import plain
from shoal.job.tables import Data
from shoal.peer.data.manifest import DataError
from shoal.peer.data.reader import Reader
from shoal.peer.data.sources import resolve
from shoal.peer.host.own_data import Catalogue, Made, host_secret, offers

SECRET = b"s" * 32


@pytest.fixture
def arrays(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "d.npz", x=rng.normal(size=(20, 3)), y=np.arange(20), z=np.ones(20))
    return tmp_path / "d.npz"


def catalogue(folder: Path, secret: bytes = SECRET, **own: Any) -> Catalogue:
    return Catalogue(folder / "own", {"set": own}, secret)


def options(**data: Any) -> str:
    return json.dumps(plain(Data(**{"where": "peer", "source": "set", "kind": "arrays"} | data)))


def leaving(made: Made) -> set[str]:
    names = {path.name for _, path in made.leaving}
    found = {s.column for s in made.manifest.shards if s.hash in names}
    assert found == {column for column, _ in made.leaving}
    return found


@pytest.mark.parametrize(
    ("leaves", "keep", "local"),
    [
        ((), "none", ("x", "y")),
        ((), "inputs", ("x", "y")),
        ((), "labels", ("x", "y")),
        (("y",), "inputs", ("x",)),
        (("y",), "labels", ("x", "y")),
        (("x",), "labels", ("y",)),
        (("x", "z"), "none", ("y",)),
        (("x", "y"), "none", ()),
        (("x", "y"), "inputs", ("x",)),
    ],
)
def test_what_leaves_is_what_both_the_owner_and_the_job_let_go(
    tmp_path: Path, arrays: Path, leaves: tuple[str, ...], keep: str, local: tuple[str, ...]
) -> None:
    made = catalogue(tmp_path, path=str(arrays), leaves=leaves).make(
        "set", options(keep_local=keep), ""
    )
    assert made.local == local
    assert leaving(made) == {"x", "y"} - set(local)


def test_what_a_job_calls_labels_does_not_leave_for_that(tmp_path: Path, arrays: Path) -> None:
    """A submitter who takes what the owner keeps for labels, and what may leave for inputs."""
    made = catalogue(tmp_path, path=str(arrays), leaves=("y",)).make(
        "set", options(inputs="y", targets="x"), ""
    )
    assert made.local == ("x",)
    assert leaving(made) == {"y"}


@pytest.mark.parametrize(
    ("leaves", "keep", "stays"),
    [((), "none", True), (("tokens",), "none", False), (("tokens",), "labels", True)],
)
def test_of_text_inputs_and_labels_are_the_same(
    tmp_path: Path, leaves: tuple[str, ...], keep: str, stays: bool
) -> None:
    (tmp_path / "t.txt").write_text("hello fish " * 50)
    made = catalogue(tmp_path, path=str(tmp_path / "*.txt"), leaves=leaves).make(
        "set", options(kind="text", length=8, keep_local=keep), ""
    )
    assert made.local == (("x", "y") if stays else ())
    assert leaving(made) == (set() if stays else {"tokens"})


def test_samples_are_those_of_data_that_is_handed_over(tmp_path: Path, arrays: Path) -> None:
    mine = catalogue(tmp_path, path=str(arrays))
    made = mine.make("set", options(holdout=0.2), "")
    manifest, paths = resolve(tmp_path / "b", kind="arrays", source=str(arrays), holdout=0.2)
    own = Reader(made.manifest, lambda h: mine.path(made.hash, h), seed=3, microbatches=2)
    plainly = Reader(manifest, paths.__getitem__, seed=3, microbatches=2)
    for step in range(3):
        for name, tensor in plainly.batch(step, 1, 4).items():
            assert own.batch(step, 1, 4)[name].equal(tensor)


def test_a_manifest_confirms_no_guess_at_the_data(tmp_path: Path, arrays: Path) -> None:
    made = catalogue(tmp_path, path=str(arrays)).make("set", options(), "")
    with np.load(arrays) as file:
        contents = {hashlib.sha256(file[name].tobytes()).hexdigest() for name in ("x", "y")}
    text = made.manifest.to_json()
    assert not any(name in text for name in contents)
    # Peers of one host make the same manifest; others make another one of the same data.
    again = catalogue(tmp_path / "other", path=str(arrays)).make("set", options(), "")
    assert again.manifest == made.manifest
    other = catalogue(tmp_path / "third", b"t" * 32, path=str(arrays)).make("set", options(), "")
    assert other.manifest != made.manifest


def test_the_secret_of_a_host_is_made_once_and_its_owners_alone(tmp_path: Path) -> None:
    secret = host_secret(tmp_path / "host")
    assert len(secret) == 32
    assert host_secret(tmp_path / "host") == secret
    assert host_secret(tmp_path / "other") != secret
    (path,) = (tmp_path / "host").iterdir()
    assert path.stat().st_mode & 0o777 == 0o600


def test_copies_of_private_data_are_the_owners_alone(tmp_path: Path, arrays: Path) -> None:
    mine = catalogue(tmp_path, path=str(arrays))
    mine.make("set", options(), "")
    assert mine.folder.stat().st_mode & 0o777 == 0o700


def test_equal_columns_have_names_that_differ(tmp_path: Path) -> None:
    """Who trains on a data set learns no equality of its columns, nor of two data sets."""
    np.savez(tmp_path / "d.npz", x=np.ones(20), y=np.ones(20))
    table = {"path": str(tmp_path / "d.npz")}
    mine = Catalogue(tmp_path / "own", {"set": table, "other": table}, SECRET)
    shards = [s.hash for n in ("set", "other") for s in mine.make(n, options(), "").manifest.shards]
    assert len(set(shards)) == 4


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ({"inputs": ","}, "`inputs` is ',', where '' cannot be an argument"),
        ({"inputs": "x,"}, "where '' cannot be"),
        ({"targets": "a b"}, "`targets` is 'a b'"),
        ({"inputs": "x, x"}, "expected each name once"),
        ({"inputs": "x,y", "targets": "y "}, "as inputs is"),
        ({"inputs": "x,z", "kind": "text"}, "expected one name"),
        ({"inputs": "x" * 201}, "has 201 characters: expected at most 200"),
    ],
)
def test_names_are_refused_where_they_cannot_be_arguments(names: dict[str, str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        options(**names)
    assert Data(inputs=" x ,\tz", targets=" y", kind="arrays").input_names == ("x", "z")
    assert Data(targets=" y").targets == "y"


def test_only_whom_the_owner_names_gets_a_manifest_or_a_sample(
    tmp_path: Path, arrays: Path
) -> None:
    mine = catalogue(tmp_path, path=str(arrays), users=["ann-k3xq"])
    for who in ("", "bob-aaaa", "ann"):
        with pytest.raises(DataError, match="does not let"):
            mine.make("set", options(), who)
    made = mine.make("set", options(), "ann-k3xq")
    mine.check(made.hash, "ann-k3xq", ["x", "y"])
    with pytest.raises(DataError, match="does not let bob use"):
        mine.check(made.hash, "bob", ["x", "y"])
    mine.check("ab" * 32, "bob", [])  # somebody else's
    (offer,) = offers({"set": {"path": "x", "users": ["ann-k3xq"]}})
    assert (offer.name, list(offer.users)) == ("set", ["ann-k3xq"])


@pytest.mark.parametrize(
    ("name", "wanted", "said"),
    [
        ("sets", options(), "no data called 'sets'; it has: set"),
        ("set", options(inputs="w"), "set has no array 'w', it has"),
        ("set", options(kind="tokens"), "set has the arrays"),
        ("set", "nonsense", "JSON"),
        ("set", '{"kindd": "text"}', "`kindd` is not a known key"),
    ],
)
def test_what_is_wrong_is_said_without_a_path_of_the_host(
    tmp_path: Path, arrays: Path, name: str, wanted: str, said: str
) -> None:
    with pytest.raises(ValueError, match=said) as wrong:
        catalogue(tmp_path, path=str(arrays)).make(name, wanted, "")
    assert str(tmp_path) not in str(wrong.value)


def test_a_shard_is_read_by_its_own_manifest_and_under_plans_that_keep_it(
    tmp_path: Path, arrays: Path
) -> None:
    """Who has seen a manifest can write another one around the names of its shards."""
    mine = catalogue(tmp_path, path=str(arrays))
    made = mine.make("set", options(), "")
    shard = made.manifest.shards[0].hash
    assert mine.path(made.hash, shard) is not None
    forged = made.manifest.to_json().replace('"inputs":"x"', '"inputs":"z"')
    assert mine.path(hashlib.sha256(forged.encode()).hexdigest(), shard) is None
    assert mine.path(made.hash, "ab" * 32) is None
    for local in ([], ["x"]):
        with pytest.raises(DataError, match=r"does not keep .* beside the data 'set'"):
            mine.check(made.hash, "", local)


def test_a_file_that_changed_is_read_anew(tmp_path: Path, arrays: Path) -> None:
    mine = catalogue(tmp_path, path=str(arrays))
    made = mine.make("set", options(), "")
    assert mine.make("set", options(), "") is made
    np.savez(arrays, x=np.zeros((9, 3)), y=np.arange(9))
    assert mine.make("set", options(), "").manifest.total == 9


def test_so_is_one_of_the_same_size_whose_time_was_set_back(tmp_path: Path, arrays: Path) -> None:
    mine = catalogue(tmp_path, path=str(arrays))
    made, was = mine.make("set", options(), ""), arrays.stat()
    np.savez(arrays, x=np.zeros((20, 3)), y=np.arange(20), z=np.ones(20))
    os.utime(arrays, ns=(was.st_atime_ns, was.st_mtime_ns))
    now = arrays.stat()
    assert (now.st_size, now.st_mtime_ns) == (was.st_size, was.st_mtime_ns)
    assert mine.make("set", options(), "").hash != made.hash
    assert mine.path(made.hash, made.manifest.shards[0].hash) is not None, "runs that have it go on"
