"""One of two processes of test_large.py: sends or receives one tensor, prints what it took.

usage: python large_peer.py receive SIZE            prints PORT, then peak and final figures as JSON
       python large_peer.py send SIZE PORT
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import grpc
import torch

from shoal.compression.codec import RAW
from shoal.dag.ir.graph import TensorSpec
from shoal.dag.schedule.flow import Role
from shoal.net.links.frame import FrameKey, Payload
from shoal.net.links.transport import FrameAcknowledged, FrameArrived
from shoal.net.transports.grpc_transport import CHANNEL_OPTIONS, GrpcTransport


def peak_bytes() -> int:
    """The most memory that this process had resident so far."""
    status = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in status if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def numbered(size: int) -> torch.Tensor:
    """Every page of it differs from its neighbours; made in place, a little at a time."""
    tensor = torch.empty(size // 8, dtype=torch.int64)
    for start in range(0, tensor.numel(), 1 << 20):
        part = tensor[start : start + (1 << 20)]
        torch.arange(start, start + part.numel(), out=part)
    return tensor


async def send(size: int, port: int) -> None:
    done = asyncio.Event()
    before = peak_bytes()
    tensor = numbered(size)
    encoded = RAW.encode(tensor)
    spec = TensorSpec(tuple(tensor.shape), "int64")
    transport = GrpcTransport(
        "a", "1", lambda e: done.set() if isinstance(e, FrameAcknowledged) else None
    )
    async with transport:
        transport.dial("b", f"127.0.0.1:{port}", 1)
        key = FrameKey("run", 1, 0, Role.SNAPSHOT, 0, 0, "x", "a", "b")
        transport.send("b", key, Payload("raw/1", encoded.header, spec, encoded.buffers))
        await done.wait()
    print(json.dumps({"grown_bytes": peak_bytes() - before}))


async def receive(size: int) -> None:
    arrived = asyncio.get_running_loop().create_future()
    transport = GrpcTransport(
        "b", "1", lambda e: arrived.set_result(e.arrived) if isinstance(e, FrameArrived) else None
    )
    server = grpc.aio.server(options=CHANNEL_OPTIONS)
    transport.attach(server)
    port = server.add_insecure_port("127.0.0.1:0")
    async with transport:
        await server.start()
        transport.expect("a")
        transport.allow("a", Role.SNAPSHOT, 1)
        before = peak_bytes()
        print(port, flush=True)
        frame = await arrived
        tensor = RAW.decode(frame.spec, frame.codec_header, frame.data)
        grown = peak_bytes() - before
        right = all(
            torch.equal(
                tensor[start : start + (1 << 20)],
                torch.arange(start, min(start + (1 << 20), tensor.numel())),
            )
            for start in range(0, tensor.numel(), 1 << 20)
        )
        # The acknowledgement is on its way while the sender still listens.
        await server.stop(5)
    print(json.dumps({"grown_bytes": grown, "right": right}))


if __name__ == "__main__":
    if sys.argv[1] == "send":
        asyncio.run(send(int(sys.argv[2]), int(sys.argv[3])))
    else:
        asyncio.run(receive(int(sys.argv[2])))
