"""What the window of rounds' bytes (`net/links/patience.py`) does to links that share an uplink:
one host sends rounds to several over it, with the window and without, and something urgent to the
first of them twice a second. Hosts are network namespaces; `tc` shapes what the sender sends.

    python benchmarks/links/round_window.py [--json FILE]                    1 Mbit/s, four minutes
    python benchmarks/links/round_window.py --mbit 50 --links 6 --mb 24      a fast one

    round_window_breaks       links that broke, with the window
    round_window_breaks_off   and without it
    round_window_urgent       seconds of an urgent frame of 1 KB in the median, over those without
    round_window_seconds      seconds until all is there, over those without

Needs Linux and root.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import grpc
import numpy as np

from shoal.benchmarks.links.namespaces import PYTHON, Hosts, usable
from shoal.benchmarks.table import Figure, arguments, report
from shoal.dag.ir.graph import TensorSpec
from shoal.dag.schedule.flow import Role
from shoal.net.links.frame import FrameKey, Payload
from shoal.net.links.outbox import Outbox
from shoal.net.links.transport import (
    FrameAcknowledged,
    FrameArrived,
    LinkDown,
    LinkUp,
    TransportEvent,
)
from shoal.net.transports.grpc_transport import SERVER_OPTIONS, GrpcTransport

PORT, SENDER, SLOTS = 7100, "s", 4
FRAME_BYTES, URGENT_BYTES, URGENT_EVERY_S = 256 * 1024, 1000, 0.5
PATIENCE_S = 900.0


class Sent(NamedTuple):
    """What came of one exchange. urgent_s: the median."""

    seconds: float
    breaks: int
    urgent_s: float


async def receive(count: int) -> None:
    """Take all that comes, as `count` peers."""
    servers = []
    for number in range(count):

        def heard(event: TransportEvent) -> None:
            if isinstance(event, FrameArrived):
                transports[event.arrived.key.destination].release(SENDER, event.arrived.key)

        transport = GrpcTransport(f"r{number}", "boot", heard)
        servers.append(await _served(transport, PORT + number))
        transports[f"r{number}"] = transport
    print("ready", flush=True)
    await asyncio.gather(*(server.wait_for_termination() for server in servers))


transports: dict[str, GrpcTransport] = {}
"""Of the receiving process, by peer."""


async def _served(transport: GrpcTransport, port: int) -> grpc.aio.Server:
    await transport.__aenter__()
    server = grpc.aio.server(options=SERVER_OPTIONS)
    transport.attach(server)
    server.add_insecure_port(f"0.0.0.0:{port}")
    await server.start()
    transport.expect(SENDER)
    for role in Role:
        transport.allow(SENDER, role, SLOTS)
    return server


class _Sender:
    """Gives each peer as many frames, and the first one something urgent meanwhile."""

    def __init__(self, count: int, frames: int) -> None:
        self.left, self.up, self.breaks = count * frames, count, 0
        self.count, self.frames = count, frames
        self.began, self.took = dict[FrameKey, float](), list[float]()
        self.ready, self.done = asyncio.Event(), asyncio.Event()

    def heard(self, event: TransportEvent) -> None:
        if isinstance(event, LinkUp):
            self.up -= 1
            if not self.up:
                self.ready.set()
        elif isinstance(event, LinkDown):
            self.breaks += 1
        elif isinstance(event, FrameAcknowledged) and event.key.role is Role.ROUND:
            self.left -= 1
            if not self.left:
                self.done.set()
        elif isinstance(event, FrameAcknowledged):
            self.took.append(time.monotonic() - self.began.pop(event.key))

    async def run(self, host: str) -> Sent:
        async with GrpcTransport(SENDER, "boot", self.heard) as transport:
            for number in range(self.count):
                transport.dial(f"r{number}", f"{host}:{PORT + number}", 1)
                for role in Role:
                    transport.allow(f"r{number}", role, SLOTS)
            await self.ready.wait()
            self.breaks, began = 0, time.monotonic()
            for frame in range(self.frames):
                for number in range(self.count):
                    _give(transport, Role.ROUND, frame, f"r{number}", FRAME_BYTES)
            urgent = asyncio.create_task(self._urgent(transport))
            async with asyncio.timeout(PATIENCE_S):
                await self.done.wait()
            urgent.cancel()
            seconds = time.monotonic() - began
            return Sent(seconds, self.breaks, statistics.median(self.took or [seconds]))

    async def _urgent(self, transport: GrpcTransport) -> None:
        number = 0
        while True:
            await asyncio.sleep(URGENT_EVERY_S)
            number += 1
            now = time.monotonic()
            self.began[_give(transport, Role.ACTIVATION, number, "r0", URGENT_BYTES)] = now


def _give(transport: GrpcTransport, role: Role, number: int, peer: str, size: int) -> FrameKey:
    key = FrameKey("r", 1, number, role, 0, 0, "x", SENDER, peer)
    data = np.random.default_rng(number).integers(0, 255, size, dtype=np.uint8)
    transport.send(peer, key, Payload("raw/1", b"", TensorSpec((size,), "uint8"), (data.data,)))
    return key


def _without_window() -> None:
    """Have links of this process give a round's pieces as fast as gRPC takes them."""
    outbox: Any = Outbox
    begin = outbox.__init__

    def without(self: Any, *given: Any) -> None:
        begin(self, *given)
        self._lanes[Role.ROUND].window = None

    outbox.__init__ = without


def measured(options: argparse.Namespace, window: str) -> Sent:
    """Return what an exchange came to, with hosts of its own. window: "on", "off"."""
    with Hosts(("a", "b")) as hosts:
        rate = f"qdisc add dev eth root tbf rate {options.mbit}mbit burst 32kb latency 400ms"
        hosts.shape("a", rate)
        receiving = hosts.start("b", PYTHON, __file__, "receive", str(options.links))
        assert receiving.stdout is not None
        receiving.stdout.readline()
        frames = max(1, round(options.mb * 1e6 / FRAME_BYTES / options.links))
        given = ("send", window, str(options.links), str(frames), hosts.address("b"))
        sending = hosts.start("a", PYTHON, __file__, *given)
        assert sending.stdout is not None
        return Sent(*json.loads(sending.stdout.readline()))


def main(given: Sequence[str]) -> None:
    if given[:1] == ["receive"]:
        return asyncio.run(receive(int(given[1])))
    if given[:1] == ["send"]:
        if given[1] == "off":
            _without_window()
        sender = _Sender(int(given[2]), int(given[3]))
        return print(json.dumps(asyncio.run(sender.run(given[4]))), flush=True)
    parser = arguments(__doc__)
    parser.add_argument("--links", type=int, default=6, metavar="N")
    parser.add_argument("--mbit", type=float, default=1.0, help="of the uplink (1)")
    parser.add_argument("--mb", type=float, default=12.6, help="sent in all, in megabytes (12.6)")
    options = parser.parse_args(given)
    if why := usable():
        sys.exit(why)
    found = {}
    for window in ("off", "on"):
        found[window] = sent = measured(options, window)
        print(f"window {window}: {sent}", flush=True)
    off, on = found["off"], found["on"]
    report(
        "round window",
        [
            Figure("round_window_breaks", on.breaks, "links", "lower"),
            Figure("round_window_breaks_off", off.breaks, "links", "lower"),
            Figure("round_window_urgent", on.urgent_s / off.urgent_s, "ratio", "lower"),
            Figure("round_window_seconds", on.seconds / off.seconds, "ratio", "lower"),
        ],
        options.json,
    )


if __name__ == "__main__":
    main(sys.argv[1:])
