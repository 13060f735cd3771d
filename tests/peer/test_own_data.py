"""The owner's data: which of it leaves, who may use it, and what its manifest tells."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.job.settings import plain
from shoal.job.tables import Data
from shoal.peer.data.manifest import DataError
from shoal.peer.data.reader import Reader
from shoal.peer.data.sources import resolve
from shoal.peer.own_data import Catalogue, Made, host_secret, offers

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
    names = {p.name for p in made.leaving}
    return {s.column for s in made.manifest.shards if s.hash in names}


@pytest.mark.parametrize(
    ("leaves", "keep", "local", "gone"),
    [
        ("nothing", "none", ("x", "y"), set()),
        ("nothing", "inputs", ("x", "y"), set()),
        ("nothing", "labels", ("x", "y"), set()),
        ("labels", "inputs", ("x",), {"y"}),
        ("labels", "labels", ("x", "y"), set()),
        ("inputs", "labels", ("y",), {"x"}),
        ("inputs", "none", ("y",), {"x"}),
        ("all", "none", (), {"x", "y"}),
        ("all", "inputs", ("x",), {"y"}),
    ],
)
def test_what_leaves_is_what_both_the_owner_and_the_job_let_go(
    tmp_path: Path, arrays: Path, leaves: str, keep: str, local: tuple[str, ...], gone: set[str]
) -> None:
    made = catalogue(tmp_path, path=str(arrays), leaves=leaves).make(
        "set", options(keep_local=keep), ""
    )
    assert made.local == local
    assert leaving(made) == gone


@pytest.mark.parametrize(("leaves", "stays"), [("labels", True), ("inputs", True), ("all", False)])
def test_of_text_inputs_and_labels_are_the_same(tmp_path: Path, leaves: str, stays: bool) -> None:
    (tmp_path / "t.txt").write_text("hello fish " * 50)
    made = catalogue(tmp_path, path=str(tmp_path / "*.txt"), leaves=leaves).make(
        "set", options(kind="text", length=8), ""
    )
    assert made.local == (("x", "y") if stays else ())
    assert leaving(made) == (set() if stays else {"tokens"})


def test_samples_are_those_of_data_that_is_handed_over(tmp_path: Path, arrays: Path) -> None:
    mine = catalogue(tmp_path, path=str(arrays))
    made = mine.make("set", options(holdout=0.2), "")
    manifest, paths = resolve(tmp_path / "b", kind="arrays", source=str(arrays), holdout=0.2)
    own = Reader(made.manifest, lambda h: mine.path(h, ""), seed=3, microbatches=2)
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


def test_only_whom_the_owner_names_gets_a_manifest_or_a_sample(
    tmp_path: Path, arrays: Path
) -> None:
    mine = catalogue(tmp_path, path=str(arrays), users=["ann-k3xq"])
    for who in ("", "bob-aaaa", "ann"):
        with pytest.raises(DataError, match="does not let"):
            mine.make("set", options(), who)
    made = mine.make("set", options(), "ann-k3xq")
    shard = made.manifest.shards[0].hash
    assert mine.path(shard, "ann-k3xq") is not None
    with pytest.raises(DataError, match="does not let bob use"):
        mine.path(shard, "bob")
    assert mine.path("ab" * 32, "bob") is None, "somebody else's"
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


def test_a_file_that_changed_is_read_anew(tmp_path: Path, arrays: Path) -> None:
    mine = catalogue(tmp_path, path=str(arrays))
    made = mine.make("set", options(), "")
    assert mine.make("set", options(), "") is made
    np.savez(arrays, x=np.zeros((9, 3)), y=np.arange(9))
    assert mine.make("set", options(), "").manifest.total == 9
