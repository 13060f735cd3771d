"""Probes between real workers over gRPC on loopback, ordered by the real broker's daemon."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc.aio

from shoal.broker.service.server import Broker, BrokerConfig
from shoal.peer.entry.worker import work
from shoal.peer.host.config import PeerConfig
from shoal.peer.shell.daemon import Worker
from shoal.proto import broker_pb2, broker_pb2_grpc


async def test_two_workers_measure_their_link_and_hang_up(tmp_path: Path) -> None:
    async with (
        Broker(BrokerConfig(port=0, insecure=True)) as broker,
        grpc.aio.insecure_channel(broker.address) as channel,
    ):
        workers: list[Worker] = []
        ends = [
            asyncio.create_task(
                work(
                    PeerConfig(
                        insecure=True,
                        broker=broker.address,
                        state=tmp_path / name,
                        name=name,
                        threads=1,
                    ),
                    workers.append,
                )
            )
            for name in ("p0", "p1")
        ]
        stub: Any = broker_pb2_grpc.RunsStub(channel)
        links: list[broker_pb2.LinkState] = []
        while len(links) < 2:  # the broker has no call that waits for links
            links = (await stub.Describe(broker_pb2.DescribeRequest())).links
        names = {worker.me.peer for worker in workers}
        assert {link.source for link in links} == {link.destination for link in links} == names
        for link in links:
            assert 0 <= link.latency_s < 10
            assert 1e4 < link.bytes_per_s < 1e12
        while any(len(worker.machine.probes) for worker in workers):
            await stub.Describe(broker_pb2.DescribeRequest())
        for worker in workers:
            assert "0 of 0 links" in repr(worker.links.transport.board), "nothing stays dialled"
            worker.stop(now=True)
        assert await asyncio.gather(*ends) == [0, 0]
