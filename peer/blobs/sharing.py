"""Blobs among the peers of a run: each gives the others what it has fetched, over its own port.

A peer that has all of a blob serves it to those whom its plan names; data that stays with its host
is never among them (peer/host/own_data.py). Who fetches asks the broker and, at the same time,
those peers of the run whose address it was given: the graph, the manifest and shards that others
read already need not come over the broker's uplink again.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import grpc.aio
from google.protobuf.message import DecodeError

from ...net.blobs.client import BlobClient
from ...net.cap import Cap
from ...net.identity.credential import Credential, shown_end
from ...net.identity.enroll import channel_to
from ...net.identity.names import PartyRole, dns_name, party_of
from ...net.transports.grpc_transport import CHANNEL_OPTIONS
from ...proto.broker_pb2 import BlobPiece, BlobRange
from .cache import BlobCache

__all__ = ["Fellows", "serve_blobs"]

_MOST_STREAMS, _MOST_OF_ONE = 16, 4
"""Fetches of others at once, and of one of them; they ask elsewhere then."""
_STALL_S = 5.0
_FLOOR = 16 << 10
"""Bytes per second that a fellow gives at least, or others are asked instead: a range of 1 MiB
would take it a minute."""
_OPTIONS = (*CHANNEL_OPTIONS, ("grpc.client_idle_timeout_ms", 10_000))
"""Blobs are fetched now and then."""


def serve_blobs(
    server: grpc.aio.Server, cache: BlobCache, may: Callable[[str | None], bool], up: Cap
) -> None:
    """Adds `Blobs.Fetch` to a server that was not started. `may` says whether a peer, by its id as
    its certificate proves it (None: nobody has one), gets anything; `up`: the owner's cap."""
    busy: Counter[str | None] = Counter()

    async def fetch(_: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        party = party_of(context.auth_context())
        who = party.subject if party is not None and party.role is PartyRole.PEER else None
        if not may(who):
            await context.abort(
                grpc.StatusCode.PERMISSION_DENIED, "only peers of a run share blobs"
            )
        if shown_end(context.auth_context()) <= time.time() and who is not None:
            why = f"the certificate of {who} has ended: dial with a newer one"
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, why)
        one_has_all = who is not None and busy[who] >= _MOST_OF_ONE
        if one_has_all or busy.total() >= _MOST_STREAMS:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many fetch here now")
        busy[who] += 1
        try:
            await give(context)
        finally:
            busy[who] -= 1

    async def give(context: grpc.aio.ServicerContext[Any, Any]) -> None:
        try:
            async with asyncio.timeout(_STALL_S):
                wanted = BlobRange.FromString(await context.read())
        except (DecodeError, TypeError, TimeoutError):  # TypeError: the end of the stream
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "expected a BlobRange")
            return
        size = cache.size_of(wanted.hash)
        if size is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "it is not here")
            return
        at, left = wanted.offset, wanted.length or size - wanted.offset
        if not 0 <= left <= size - at:
            text = f"{wanted.length} bytes (0: to the end) from {at} of {size}"
            await context.abort(grpc.StatusCode.OUT_OF_RANGE, text)
        try:
            while data := await asyncio.to_thread(cache.peek, wanted.hash, at, left):
                await up.take_in_turns(len(data))
                await context.write(BlobPiece(offset=at, data=data))
                at, left = at + len(data), left - len(data)
        except FileNotFoundError:  # it was pushed out meanwhile
            await context.abort(grpc.StatusCode.NOT_FOUND, "it is here no longer")

    # Raw bytes: who asks is known before anything of it is read.
    handler = grpc.stream_stream_rpc_method_handler(fetch, None, BlobPiece.SerializeToString)
    handlers = grpc.method_handlers_generic_handler("shoal.v1.Blobs", {"Fetch": handler})
    server.add_generic_rpc_handlers((handlers,))


class Fellows:
    """Peers of the present run that can be asked for blobs."""

    def __init__(self, credential: Callable[[], Credential | None], down: Cap) -> None:
        self._credential, self._down = credential, down
        self._channels: list[grpc.aio.Channel] = []
        self.clients: tuple[BlobClient, ...] = ()

    def become(self, addresses: Mapping[str, str]) -> list[grpc.aio.Channel]:
        """The run has others now: HOST:PORT by peer. Returns the channels to close."""
        old, credential = self._channels, self._credential()
        self._channels = [
            channel_to(address, credential, _OPTIONS, dns_name(PartyRole.PEER, peer))
            for peer, address in addresses.items()
        ]
        self.clients = tuple(
            BlobClient(channel, attempts=0, stall_s=_STALL_S, floor=_FLOOR, down=self._down)
            for channel in self._channels
        )
        return old
