"""What runs need of the store, and that the rest makes room."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from shoal.broker.events import MakePlan, PlanReady
from shoal.broker.service.blobs import BlobLimits, BlobStore, BlobStoreError
from shoal.broker.service.needed import listed, needed
from shoal.broker.service.server import Broker, BrokerConfig
from shoal.job import Job
from shoal.net.blobs.client import BlobClient, BlobTransferError
from shoal.proto.broker_pb2 import Ready, RunSpec, StepReport, WeightFile
from shoal.proto.broker_pb2_grpc import RunsStub
from shoal.proto.common_pb2 import BlobRef

GRAPH, CORE, DATA, WEIGHTS, RECIPE = ("11" * 32, "22" * 32, "33" * 32, "44" * 32, "55" * 32)
EXPORTED = "ab" * 32
"""What the world's peers export."""


def make_spec(world: Any) -> RunSpec:
    spec: RunSpec = world.spec(steps=1)
    spec.graph.hash, spec.data.hash = GRAPH, DATA
    spec.core_graph.hash, spec.recipe.hash = CORE, RECIPE
    spec.weights.append(WeightFile(blob=BlobRef(hash=WEIGHTS)))
    return spec


def test_an_open_run_needs_what_it_was_submitted_with_an_ended_one_what_is_left(world) -> None:
    world.join("a")
    run, out = world.submit(make_spec(world))
    assert needed(world.machine.decided.runs.values()) == (
        {GRAPH, CORE, DATA, WEIGHTS, RECIPE},
        {DATA},
    )
    ask = world.only(out, MakePlan)
    world.handle(PlanReady(run, ask.version, world.plan("a")))
    world.say("a", ready=Ready(run=run, term=1))
    world.say("a", step=StepReport(run=run, term=1, step=0))
    world.export("a", run, 1)
    assert world.machine.runs[run].ended
    assert needed(world.machine.decided.runs.values()) == ({GRAPH, DATA, EXPORTED}, {DATA})


def test_a_manifest_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    name = "ab" * 32
    (tmp_path / "whole").mkdir()
    with (tmp_path / "whole" / name).open("wb") as file:
        file.truncate((64 << 20) + 1)  # zeros that take no place
    with (
        BlobStore(tmp_path) as store,
        pytest.raises(BlobStoreError, match=f"expected at most {64 << 20}"),
    ):
        listed(store, name)


def test_a_run_that_is_no_longer_kept_needs_nothing(make_world) -> None:
    world = make_world(kept_runs=1)
    for _ in range(3):
        world.cancel(world.submit(make_spec(world))[0])
    assert needed(world.machine.decided.runs.values()) == ({DATA}, {DATA})
    world.submit(world.spec())
    assert DATA in needed(world.machine.decided.runs.values())[0], "the newest ended one is kept"


@pytest.fixture
async def broker() -> AsyncIterator[Broker]:
    limits = BlobLimits(total_bytes=1000, grace_s=0.0)
    async with Broker(BrokerConfig(port=0, insecure=True, limits=limits)) as opened:
        yield opened


async def test_a_full_store_makes_room_with_what_no_run_needs(broker: Broker) -> None:
    async with grpc.aio.insecure_channel(broker.address) as channel:
        client = BlobClient(channel, attempts=0)
        graph, shard = await client.store(b"a graph"), await client.store(b"s" * 100)
        manifest = await client.store(json.dumps({"shards": [{"hash": shard.hash}]}).encode())
        old = await client.store(b"o" * 600)
        await RunsStub(channel).Submit(spec_of(graph, manifest))  # waits, as no peer is here
        new = await client.store(b"n" * 700)
        assert await client.have([graph, shard, manifest, new, old]) == [
            *(ref.size_bytes for ref in (graph, shard, manifest, new)),
            0,
        ]
        with pytest.raises(BlobTransferError, match=r"900 bytes; the broker holds .* of at most"):
            await client.store(b"m" * 900)
        assert await client.have([graph, shard, manifest]) == [
            ref.size_bytes for ref in (graph, shard, manifest)
        ]


async def test_a_manifest_that_is_none_keeps_nothing_and_breaks_nothing(broker: Broker) -> None:
    async with grpc.aio.insecure_channel(broker.address) as channel:
        client = BlobClient(channel, attempts=0)
        graph = await client.store(b"a graph")
        for text in (b"\xff", b"[]", b'{"shards": 3}', b'{"shards": [{"hash": 5}]}', b"[" * 9000):
            manifest = await client.store(text[:900])
            await RunsStub(channel).Submit(spec_of(graph, manifest))
            await broker.shell.sweeper.sweep()
            assert await client.have([graph]) == [graph.size_bytes]


def spec_of(graph: BlobRef, manifest: BlobRef) -> RunSpec:
    job = Job(model="m:f", steps=1, batch=1, microbatch=1, eval_every=0)
    return RunSpec(
        version=1, job=job.to_json(), graph=graph, data=manifest,
        microbatches=1, microbatch_size=1, steps=1,
    )  # fmt: skip
