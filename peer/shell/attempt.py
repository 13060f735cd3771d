"""One attempt to attach: to where the broker was, while it is looked up whether it has moved."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from ...proto import broker_pb2
from .control import ControlStream
from .finder import Finder

__all__ = ["Attempt", "attempt"]

_HEAD_START_S = 1.0
"""For the broker where it was, before what was found elsewhere counts."""
_SEEK_S = 3.0
"""For the broker to be looked up, when nobody is where it was."""


class Attempt(NamedTuple):
    """How it ended."""

    why: str
    """Why there is no stream any more."""
    reached: bool
    """Whether there was one."""
    elsewhere: str
    """HOST:PORT where the broker turned out to be before it was reached; empty: nowhere."""


async def attempt(
    stream: ControlStream, opened: asyncio.Event, finder: Finder | None, address: str
) -> Attempt:
    """Runs the stream to the broker at HOST:PORT to its end; `opened` is set once it is up, and
    gives it up when the broker is found elsewhere before that."""
    running = asyncio.ensure_future(stream.run())
    seeking = asyncio.ensure_future(_seek(stream, running, opened, finder, address))
    try:
        await asyncio.wait((running, seeking), return_when=asyncio.FIRST_COMPLETED)
        if not running.done() and not seeking.result():
            await asyncio.wait((running,))
        if running.done() and not opened.is_set():
            await asyncio.wait((seeking,), timeout=_SEEK_S)
        elsewhere = seeking.result() if seeking.done() else ""
        why = running.result() if running.done() else f"the broker is at {elsewhere} now"
        return Attempt(why, opened.is_set(), elsewhere)
    finally:
        for task in (running, seeking):
            task.cancel()
        await asyncio.gather(running, seeking, return_exceptions=True)


async def _seek(
    stream: ControlStream,
    running: asyncio.Future[str],
    opened: asyncio.Event,
    finder: Finder | None,
    address: str,
) -> str:
    """Where else the broker is, if it is not reached soon where it was. Once it is, the stream is
    told of this host's node of the swarm. Empty: nothing was found, or needed."""
    if finder is None:
        return ""
    elsewhere = asyncio.ensure_future(finder.elsewhere(address))
    reached = asyncio.ensure_future(opened.wait())
    first = asyncio.FIRST_COMPLETED
    try:
        await asyncio.wait((reached, running), timeout=_HEAD_START_S, return_when=first)
        await asyncio.wait((reached, elsewhere), return_when=first)
        if not reached.done():
            return elsewhere.result()
    finally:
        for task in (reached, elsewhere):
            task.cancel()
        await asyncio.gather(reached, elsewhere, return_exceptions=True)
    way = broker_pb2.Way(multiaddr=await finder.way())
    stream.tell(broker_pb2.PeerMessage(way=way))
    return ""
