"""A warm peer has what is frozen in the stages whose copies it keeps, before it takes one over."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shoal.dag.plan.plan import PeerId, SnapshotKeeper
from shoal.dag.plan.plan_slice import PlanSlice
from shoal.peer.blobs.weight_shards import WeightShard
from shoal.peer.compute.device import TorchDevice
from shoal.peer.compute.warming import frozen_shards, warm
from shoal.tests.peer.blobs.test_read_ahead import sharded

STOP = 2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.top = nn.Linear(6, 8)
        self.below = nn.Linear(8, 8).requires_grad_(False)
        self.middle = nn.Linear(8, 8)
        self.beside = nn.Linear(8, 4, bias=False).requires_grad_(False)
        self.last = nn.Linear(8, 4, bias=False)
        self.register_buffer("scale", torch.full((8,), 1.5))

    def forward(self, x: Any, y: Any) -> Any:
        h = torch.tanh(self.below(torch.tanh(self.top(x))))
        h = torch.tanh(self.middle(h)) * self.scale
        return F.cross_entropy(self.beside(h) + self.last(h), y)


@pytest.fixture
def made(make_case: Any) -> Any:
    rng = np.random.default_rng(0)
    data = {"x": rng.normal(size=(90, 6)).astype("f4"), "y": rng.integers(0, 4, 90)}
    return make_case(Net(), **data, steps=4)


def test_what_it_fetches_is_what_a_stage_reads_that_goes_on_from_a_snapshot(made: Any) -> None:
    world = made.world(made.plan(2, ["a", "b"]))
    for step in range(STOP):
        for device in world.devices.values():
            device.prefetch(step)
        world._pass(step, {p: b.flow.actions(p) for p, b in world.built.items()})
    read: list[WeightShard] = []
    weights = sharded(made.captured.tensors, read)
    every = 0
    for holder, device in world.devices.items():
        order = device._work.order
        keeper = (SnapshotKeeper(PeerId(holder), PeerId("w")),)
        kept = replace(order.plan, keepers=keeper)
        mine = PlanSlice(PeerId("w"), kept, (), (), (), 0)
        wanted = frozen_shards(replace(order, peer=PeerId("w"), slice=mine, weights=weights))
        assert not read, "none of it is read"
        every += len(wanted)
        on = replace(order, weights=weights, first_step=STOP, resumed=(device.snapshot(STOP)(),))
        TorchDevice("cpu").build(on)
        assert set(wanted) == set(read)
        read.clear()
    assert every > 2


def test_the_stages_of_all_holders_but_those_that_are_too_large_for_the_owner(made: Any) -> None:
    world = made.world(made.plan(2, ["a", "b"]))
    read: list[WeightShard] = []
    weights = sharded(made.captured.tensors, read)
    order = replace(world.devices["a"]._work.order, peer=PeerId("w"), weights=weights)

    def found(*holders: str, memory_bytes: int = 0) -> list[WeightShard]:
        keepers = tuple(SnapshotKeeper(PeerId(h), PeerId("w")) for h in holders)
        mine = PlanSlice(PeerId("w"), replace(order.plan, keepers=keepers), (), (), (), 0)
        return frozen_shards(replace(order, slice=mine, memory_bytes=memory_bytes))

    def size(shards: list[WeightShard]) -> int:
        return sum(shard.size_bytes for shard in shards)

    a, b = found("a"), found("b")
    assert size(a) != size(b)
    assert found("a", "b") == list(dict.fromkeys([*a, *b]))
    smaller, larger = sorted((a, b), key=size)
    assert found("a", "b", memory_bytes=size(larger) - 1) == smaller
    assert found() == []


def test_it_pauses_as_long_as_each_took_and_stops_within_the_limit() -> None:
    shards = [WeightShard(f"{i}", 10 * (i + 1)) for i in range(5)]
    now, brought, paused, stopped = 0.0, list[str](), list[float](), threading.Event()

    def bring(shard: WeightShard) -> None:
        nonlocal now
        now += shard.size_bytes
        brought.append(shard.hash)

    def pause(event: threading.Event, seconds: float) -> None:
        assert event is stopped
        paused.append(seconds)

    def fetched(most_bytes: int) -> int:
        return warm(shards, bring, most_bytes, stopped, clock=lambda: now, pause=pause)

    assert fetched(99) == 60
    assert brought == ["0", "1", "2"]
    assert paused == [10.0, 20.0, 30.0]
    stopped.set()
    assert fetched(99) == 0
