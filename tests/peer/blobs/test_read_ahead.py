"""Shards are fetched ahead of whoever reads them: the same bytes, a bounded number on their way,
and in the order in which a stage reads them."""

from __future__ import annotations

import hashlib
import queue
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shoal.dag.ir.recipe import Recipe
from shoal.peer.blobs.cache import BlobCache, BlobMismatchError
from shoal.peer.blobs.read_ahead import ReadAhead, _Order
from shoal.peer.blobs.starting import Starting
from shoal.peer.blobs.weight_shards import StoredTensor, WeightManifest, WeightShard
from shoal.peer.blobs.weights import DTYPE_NAMES, Weights, WeightsFile, bytes_of
from shoal.peer.compute.device import TorchDevice
from shoal.peer.compute.records import Records

SECONDS = 20.0
"""Nothing takes so long; a test that would stand still ends."""


def named(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Far:
    """Blobs of somebody else; each fetch waits until it is let go. asked: in their order."""

    def __init__(self, count: int) -> None:
        self.blobs = {named(d): d for d in (bytes([i]) * 1000 for i in range(count))}
        self.shards = [WeightShard(name, 1000) for name in self.blobs]
        self.asked: queue.Queue[int] = queue.Queue()
        self.may = [threading.Event() for _ in range(count)]

    def fetch(self, name: str, offset: int, length: int) -> Iterator[bytes]:
        i = list(self.blobs).index(name)
        self.asked.put(i)
        assert self.may[i].wait(SECONDS)
        yield self.blobs[name][offset:]


def reader(far: Far, folder: Path, most_bytes: int) -> ReadAhead:
    cache = BlobCache(folder, far.fetch)
    return ReadAhead(
        lambda shard: cache.shard(shard, None),  # type: ignore[arg-type]  # nothing has a URL
        lambda shard: cache.bring(shard, None),  # type: ignore[arg-type]
        most_bytes,
    )


def test_two_behind_the_one_that_is_read_are_on_their_way(tmp_path: Path) -> None:
    far = Far(6)
    ahead = reader(far, tmp_path, 10_000)
    found: list[bytes] = []
    with ahead.reading(far.shards):
        reading = threading.Thread(target=lambda: found.append(ahead.whole(far.shards[0])))
        reading.start()
        assert {far.asked.get(timeout=SECONDS) for _ in range(3)} == {0, 1, 2}
        assert far.asked.empty()
        for may in far.may:
            may.set()
        reading.join()
        found += [ahead.whole(shard) for shard in far.shards[1:]]
    assert found == list(far.blobs.values())
    assert sorted(far.asked.get(timeout=SECONDS) for _ in range(3)) == [3, 4, 5]
    assert far.asked.empty(), "each is fetched once"


def test_what_is_on_its_way_is_within_the_limit(tmp_path: Path) -> None:
    far = Far(4)
    ahead = reader(far, tmp_path, 2000)
    with ahead.reading(far.shards):
        assert far.asked.get(timeout=SECONDS) == 1  # the first is the reader's own
        far.may[1].set()
        for i, shard in enumerate(far.shards):
            far.may[i].set()
            assert ahead.whole(shard) == far.blobs[shard.hash]
    assert len(list(tmp_path.iterdir())) == 4


@given(
    sizes=st.lists(st.integers(1, 100), min_size=1, max_size=20),
    most=st.integers(1, 300),
    moves=st.lists(st.integers(-1, 19), max_size=60),
)
def test_whatever_the_reader_does_each_is_taken_once_within_the_limit(
    sizes: list[int], most: int, moves: list[int]
) -> None:
    """moves: -1: one is taken; else the reader is there."""
    shards = [WeightShard(f"{i}", size) for i, size in enumerate(sizes)]
    order, at, taken = _Order(shards, most), 0, list[int]()
    for move in moves:
        if 0 <= move < len(shards):
            order.reach(shards[move])
            at = max(at, move)
        elif move < 0 and order.near:
            i = shards.index(order.take())
            assert i > at
            assert sum(sizes[at : i + 1]) <= most
            taken.append(i)
    assert taken == sorted(set(taken))


def test_a_fetch_that_fails_is_the_readers_to_meet(tmp_path: Path) -> None:
    far = Far(5)
    for may in far.may:
        may.set()
    bad = far.shards[2]
    far.blobs[bad.hash] = b"else"
    ahead = reader(far, tmp_path, 10_000)
    with ahead.reading(far.shards):
        assert ahead.whole(far.shards[0]) == far.blobs[far.shards[0].hash]
        assert ahead.whole(far.shards[1]) == far.blobs[far.shards[1].hash]
        with pytest.raises(BlobMismatchError, match="came with the content of"):
            ahead.whole(bad)
        assert ahead.whole(far.shards[3]) == far.blobs[far.shards[3].hash]


# ---------------------------------------------------------------- what a stage reads


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))

    def forward(self, x: Any, y: Any) -> Any:
        return ((self.layers(x) - y) ** 2).mean()


def sharded(tensors: dict[str, torch.Tensor], read: list[WeightShard]) -> Weights:
    """Each tensor in two shards of its own, but for the first two, which share one."""
    blobs: dict[WeightShard, bytes] = {}
    stored: dict[str, tuple[tuple[WeightShard, int, int], ...]] = {}

    def shard(data: bytes) -> WeightShard:
        made = WeightShard(named(data), len(data))
        blobs[made] = data
        return made

    plain = {name: bytes_of(t).tobytes() for name, t in tensors.items()}
    one, two, *rest = tensors
    both = shard(plain[one] + plain[two])
    stored[one] = ((both, 0, len(plain[one])),)
    stored[two] = ((both, len(plain[one]), len(plain[two])),)
    for name in rest:
        half = len(plain[name]) // 2
        parts = plain[name][:half], plain[name][half:]
        stored[name] = tuple((shard(part), 0, len(part)) for part in parts)
    shards = tuple(blobs)
    manifest = WeightManifest(
        shards,
        {
            name: StoredTensor(
                DTYPE_NAMES[tensors[name].dtype],
                tuple(tensors[name].shape),
                tuple((shards.index(s), at, size) for s, at, size in parts),
            )
            for name, parts in stored.items()
        },
    )
    text = manifest.to_json().encode()

    def whole(wanted: WeightShard) -> bytes:
        read.append(wanted)
        return blobs[wanted]

    files = [WeightsFile("m", len(text), sharded=True)]
    return Weights(files, lambda _, at, length: text[at : at + length], whole)


@pytest.mark.parametrize("over", ["files", "a recipe", "a snapshot"])
def test_a_stage_says_before_what_it_will_read_and_is_the_same(make_case: Any, over: str) -> None:
    """Of a snapshot's parameters nothing is read in the files."""
    x = np.random.default_rng(0).normal(size=(40, 4)).astype("f4")
    case = make_case(Net(), x=x, y=x)
    read: list[WeightShard] = []
    said: list[list[WeightShard]] = []

    @contextmanager
    def reading(shards: Sequence[WeightShard]) -> Iterator[None]:
        said.append(list(shards))
        assert not read, "before any is read"
        yield
        assert list(dict.fromkeys(shards)) == list(dict.fromkeys(read))

    weights: Any = sharded(case.captured.tensors, read)
    if over == "a recipe":
        weights = Starting(weights, Recipe(0))
    if over == "a snapshot":
        here = {f"param:{n}": t for n, t in list(case.captured.tensors.items())[2:5]}
        weights = Records(here).over(weights)
    world = case.world(case.plan(2, ["a", "b"]))
    for plain in world.devices.values():
        read.clear()
        device = TorchDevice("cpu")
        device.build(replace(plain._work.order, weights=weights, reading=reading))
        assert device._work is not None
        for k, held in plain._work.held.items():
            own = device._work.held[k].parameters()
            assert all(torch.equal(own[name], tensor) for name, tensor in held.parameters().items())
    assert len(said) == 2
    assert all(said)
