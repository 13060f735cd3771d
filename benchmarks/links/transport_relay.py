"""The relay of `transport.py`: the broker's own front and relay in a process of their own, and what
the far end does when it is told of a dial."""

from __future__ import annotations

import asyncio
from multiprocessing.connection import Connection as Pipe
from pathlib import Path

from shoal.broker.service.door.front import PortMultiplexer
from shoal.broker.service.door.relay import Relay
from shoal.peer.shell.relayed import answer

__all__ = ["answer_dials", "relaying"]


def relaying(to_near: Pipe, to_far: Pipe, far: str) -> None:
    """Says its port to both, and every ticket for the peer `far` to the far end; until `to_near`
    says anything."""
    asyncio.run(_relaying(to_near, to_far, far))


async def _relaying(to_near: Pipe, to_far: Pipe, far: str) -> None:
    def tell(ticket: str) -> bool:
        to_far.send(ticket)
        return True

    relay = Relay()
    relay.here(far, tell)
    nowhere = Path("/nonexistent")  # nobody joins or attaches here
    async with PortMultiplexer(
        "127.0.0.1", 0, main=nowhere, door=nowhere, authority=b"", relay=relay
    ) as front:
        for pipe in (to_near, to_far):
            pipe.send(front.port)
        await asyncio.get_running_loop().run_in_executor(None, to_near.recv)


def answer_dials(from_relay: Pipe, frames_port: int, tasks: set[asyncio.Task[None]]) -> None:
    """Answers every dial that the relay tells of; needs the running loop."""
    address, frames = f"127.0.0.1:{from_relay.recv()}", f"127.0.0.1:{frames_port}"

    def told() -> None:
        ticket = from_relay.recv()
        task = asyncio.create_task(answer(ticket, address, frames, lambda _: True))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    asyncio.get_running_loop().add_reader(from_relay.fileno(), told)
