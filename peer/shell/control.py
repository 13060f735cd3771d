"""The stream to the broker: carries messages both ways until either side ends it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc
import grpc.aio

from ...net.grpc_quirks import is_reached
from ...net.identity.credential import Credential
from ...net.identity.enroll import channel_to
from ...net.transports.grpc_transport import CHANNEL_OPTIONS
from ...net.web.proxy import through
from ...proto import broker_pb2, broker_pb2_grpc
from ...proto.common_pb2 import Reason

__all__ = ["ControlStream", "reaches"]

_REACH_S = 10.0
"""For a connection to come up; a host that is off answers nothing at all."""
_LONGEST_MESSAGE = 16 * 1024**2
"""Bytes; as much as the broker sends: the plan of a run with very many microbatches."""
_OPTIONS = tuple(
    (dict(CHANNEL_OPTIONS) | {"grpc.max_receive_message_length": _LONGEST_MESSAGE}).items()
)
_WAITING = 4096
"""Messages that wait for a broker that does not read. More: the stream counts as broken."""


class ControlStream:
    """One attempt. `run` opens the stream, calls `opened`, then `heard` for each message, and
    returns why it ended; it never raises for what the network does."""

    def __init__(
        self,
        address: str,
        opened: Callable[[], None],
        heard: Callable[[broker_pb2.BrokerMessage], None],
        credential: Credential | None = None,
    ) -> None:
        self.address = address
        self._credential = credential
        self._opened = opened
        self._heard = heard
        self._out: asyncio.Queue[broker_pb2.PeerMessage | None] = asyncio.Queue()
        self._overrun = asyncio.Event()

    def tell(self, message: broker_pb2.PeerMessage) -> None:
        """Queues a message; after too many the stream ends."""
        if self._out.qsize() >= _WAITING:
            self._overrun.set()
        else:
            self._out.put_nowait(message)

    def finish(self) -> None:
        """Ends the stream from this side when everything told has left."""
        self._out.put_nowait(None)

    async def run(self) -> str:
        async with channel_to(self.address, self._credential, _OPTIONS) as channel:
            if not await is_reached(channel, _REACH_S):
                way = f"{self.address}{through(self.address)}"
                return f"no broker answers at {way}; is `shoal broker` running there?"
            stub = broker_pb2_grpc.AttachStub(channel)  # type: ignore[no-untyped-call]  # generated
            call = stub.Attach()
            self._opened()
            try:
                return await self._carry(call)
            except grpc.RpcError as error:
                if error.code() is grpc.StatusCode.PERMISSION_DENIED:
                    # Kicked, and the message that said so was lost with the stream before.
                    reason = Reason(code="denied", text=_why(error))
                    refused = broker_pb2.Refused(reason=reason)
                    self._heard(broker_pb2.BrokerMessage(refused=refused))
                return f"the stream to the broker at {self.address} broke: {_why(error)}"
            finally:
                call.cancel()

    async def _carry(self, call: grpc.aio.StreamStreamCall) -> str:
        """Both directions until one ends. The reader decides: after the last message told, the
        broker ends the stream, and what it still said is heard."""
        reader = asyncio.create_task(self._read(call))
        writer = asyncio.create_task(self._write(call))
        overrun = asyncio.create_task(self._overrun.wait())
        tasks = (reader, writer, overrun)
        try:
            await asyncio.wait((reader, overrun), return_when=asyncio.FIRST_COMPLETED)
            if reader.done():
                reader.result()
                return f"the broker at {self.address} ended the stream"
            return f"the broker at {self.address} does not read: {_WAITING} messages wait"
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, call: grpc.aio.StreamStreamCall) -> None:
        while (message := await call.read()) is not grpc.aio.EOF:
            self._heard(message)

    async def _write(self, call: grpc.aio.StreamStreamCall) -> None:
        while (message := await self._out.get()) is not None:
            await call.write(message)
        await call.done_writing()


async def reaches(address: str, credential: Credential) -> bool:
    """Whether who answers at HOST:PORT proves to be the broker of the credential."""
    async with channel_to(address, credential, CHANNEL_OPTIONS) as channel:
        return await is_reached(channel, _REACH_S)


def _why(error: grpc.RpcError) -> str:
    details = error.details() if isinstance(error, grpc.aio.AioRpcError) else None
    return details or type(error).__name__
