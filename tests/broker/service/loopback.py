"""A broker over real gRPC on loopback, and peers that are scripts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from shoal.broker.membership.member import PROTOCOL
from shoal.broker.options import BrokerOptions
from shoal.broker.service.server import Broker, BrokerConfig
from shoal.net.blobs.client import BlobClient
from shoal.proto.broker_pb2 import Hello, PeerMessage, Profile, RunSpec
from shoal.proto.broker_pb2_grpc import AttachStub, RunsStub


class Peer:
    """A scripted peer on a real stream."""

    def __init__(self, channel: grpc.aio.Channel, name: str) -> None:
        self.name = name
        self.call = AttachStub(channel).Attach()

    async def join(self, counter: int = 1, version: int = PROTOCOL) -> Any:
        profile = Profile(name=self.name, operator_set=1, device_memory_bytes=2**30)
        hello = Hello(
            version=version,
            peer=self.name,
            boot=f"b{counter}",
            counter=counter,
            profile=profile,
            address="127.0.0.1:1",
        )
        await self.say(hello=hello)
        return await self.read()

    async def say(self, **kind: Any) -> None:
        await self.call.write(PeerMessage(**kind))

    async def read(self) -> Any:
        message = await self.call.read()
        return None if message == grpc.aio.EOF else message


@asynccontextmanager
async def running(**config: Any) -> AsyncIterator[tuple[Broker, grpc.aio.Channel]]:
    # The peers of these tests are scripts and answer no probes.
    config = {"insecure": True, "port": 0, "options": BrokerOptions(probe_s=0.0), **config}
    async with (
        Broker(BrokerConfig(**config)) as broker,
        grpc.aio.insecure_channel(broker.address) as channel,
    ):
        yield broker, channel


async def until(holds: Callable[[], bool]) -> None:
    """Lets everything else run until something holds; the test's timeout ends it otherwise."""
    while not holds():  # noqa: ASYNC110 (what it waits for has no event of its own)
        await asyncio.sleep(0)


async def status(call: Any) -> tuple[str, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code().name, caught.value.details() or ""


async def submit(channel: grpc.aio.Channel, spec: RunSpec | None = None) -> str:
    if spec is None:
        spec = await stored_spec(channel)
    return (await RunsStub(channel).Submit(spec)).run


async def stored_spec(channel: grpc.aio.Channel, graph: bytes = b"graph") -> RunSpec:
    from shoal.job import Job

    client = BlobClient(channel)
    plan = {"scheduler": "uniform"}  # a graph this small is best run by one peer
    job = Job(model="m.py:f", steps=1, batch=4, microbatch=2, eval_every=0, plan=plan)
    return RunSpec(
        version=1,
        name="test",
        job=job.to_json(),
        graph=await client.store(graph),
        data=await client.store(b"{}"),
        microbatches=2,
        microbatch_size=2,
        steps=1,
    )


def tiny_graph() -> bytes:
    from shoal.dag.ir.convert import graph_to_bytes
    from shoal.dag.ir.graph import Graph, Input, Operator, Output, Parameter, Ref, Size, TensorSpec

    batch = Size(1)
    hidden = Output(TensorSpec((batch, 3), "float32"), True)
    loss = Output(TensorSpec((), "float32"), True)
    args = (Ref("in:x"), Ref("param:w"))
    return graph_to_bytes(
        Graph(
            inputs=(Input("x", TensorSpec((batch, 3), "float32")),),
            parameters=(Parameter("w", TensorSpec((3, 3), "float32")),),
            buffers=(),
            operators=(
                Operator("linear", "aten.linear.default", args, (), (hidden,)),
                Operator("relu", "aten.relu.default", (Ref("linear"),), (), (hidden,)),
                Operator("loss", "aten.sum.default", (Ref("relu"),), (), (loss,)),
            ),
            loss="loss",
        )
    )
