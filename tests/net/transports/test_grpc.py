"""What only gRPC has: real streams, which can be held up."""

from __future__ import annotations

import asyncio

import grpc
import torch

from shoal.dag.schedule.flow import Role
from shoal.net.links.messages import Hello, Refusal, record, seal
from shoal.net.transports.grpc_transport import CHANNEL_OPTIONS, GrpcTransport

ACT, SNAP = Role.ACTIVATION, Role.SNAPSHOT


async def test_one_who_stops_reading_stops_his_sender_and_nobody_else(grpc_world):
    world = grpc_world
    a, _ = await world.pair()
    c = await world.join("c")
    await world.connect(a, c)
    world.cables[frozenset("ab")].stall()
    big = torch.zeros(64 << 20, dtype=torch.uint8)
    key = a.send("b", big, SNAP)
    for m in range(20):
        a.send("c", 200_000, ACT, m)
    await world.until(lambda: len(c.arrived) == 20)
    frame = a.transport.board.link("b")._outbox._lanes[SNAP].queue[0]
    taken = frame.sent
    for m in range(20, 60):
        a.send("c", 200_000, ACT, m)
    await world.until(lambda: len(c.arrived) == 60)
    assert frame.sent - taken < 32 << 20
    assert frame.sent < big.numel()  # the rest waits in the tensor, not in a queue
    world.cables[frozenset("ab")].flow()
    await world.until(lambda: key in a.acknowledged)


async def test_a_stream_without_a_hello_is_closed(grpc_world, monkeypatch):
    monkeypatch.setattr("shoal.net.transports.grpc_transport._HELLO_S", 0.05)
    b = await grpc_world.join("b")
    outsider = await grpc_world.outsider(b)
    await grpc_world.until(lambda: outsider.ended)
    assert isinstance(outsider.heard[0], Refusal)
    assert "no hello" in outsider.heard[0].text


async def test_a_message_over_the_limit_ends_the_stream_and_nothing_else(grpc_world):
    a, b = await grpc_world.pair()
    b.transport.expect("out")
    outsider = await grpc_world.outsider(b)
    hello = Hello(source="out", destination="b", generation=1, attempt=1, session="s")
    outsider.say(b"".join(seal([record(hello)])), bytes(5 << 20))
    await grpc_world.until(lambda: outsider.ended)
    key = a.send("b", 1000)
    await grpc_world.until(lambda: key in a.acknowledged)
    assert a.downs("b") == 0


async def test_the_transport_leaves_no_task_behind():
    events = []
    async with (
        GrpcTransport("a", "1", events.append) as a,
        GrpcTransport("b", "1", events.append) as b,
    ):
        server = grpc.aio.server(options=CHANNEL_OPTIONS)
        b.attach(server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        b.expect("a")
        up = asyncio.Event()
        a.board._on_event = lambda event: up.set()
        a.dial("b", f"127.0.0.1:{port}", 1)
        a.dial("nobody", "127.0.0.1:9", 1)
        await up.wait()
        await server.stop(None)
    # gRPC's own tasks end in the turn after.
    while others := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(others, timeout=5)


async def test_an_error_of_the_owner_is_not_swallowed(grpc_world):
    told = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context))
    a, b = await grpc_world.pair()

    def fails(event):
        a.on_event = lambda event: None
        raise ArithmeticError("a bug of the owner")

    a.on_event = fails
    b.send("a", 10)
    await grpc_world.until(lambda: b.downs("a") == 1)
    assert [str(context["exception"]) for context in told] == ["a bug of the owner"]
