"""A worker's side towards its broker: where that is, who asks, the stream of messages, the blobs.

The broker may move: each attempt to attach looks it up beside dialling, where there is a swarm.
Certificates are renewed while it runs; then the channel for blobs is another one, and transfers
that break go on there.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine

import grpc.aio

from ...net.blobs.client import BlobClient
from ...net.cap import Cap
from ...net.identity.credential import Credential
from ...net.identity.diagnosis import why_no_tls
from ...net.identity.enroll import channel_to
from ...net.local import is_loopback, split
from ...net.transports.grpc_transport import CHANNEL_OPTIONS
from ...proto import broker_pb2
from ...proto.admission_pb2 import PageRequest
from ...proto.admission_pb2_grpc import AdmissionStub
from ..core import events as e
from ..host.addresses import to_dial
from ..host.config import PeerConfig
from ..logs import note
from .attempt import Attempt, attempt, finder_of
from .control import ControlStream
from .credentials import Credentials
from .event_log import note_told

__all__ = ["Upstream"]

_log = logging.getLogger(__name__)
_OLD_CHANNEL_S = 600.0
"""What a channel gets to finish once a certificate was renewed."""

_PAGE_S, _PAGE_WITHIN_S = 30 * 86400.0, 30.0
"""How long a link to the page opens it, and how long its key is waited for."""
_LOOK_S = 60.0
"""Between two looks at what keeps it from the broker."""

Start = Callable[[Coroutine[None, None, None]], "asyncio.Task[None]"]
"""Makes a task of the worker's."""


class Upstream:
    """A worker's connection to its broker: address, credential, the stream of messages, the blobs.
    `post` hears of attaching and detaching, `heard` of each message; tasks are made by `start`.
    Without credentials nothing is encrypted."""

    def __init__(
        self,
        config: PeerConfig,
        peer: str,
        credentials: Credentials | None,
        up: Cap,
        down: Cap,
        *,
        post: Callable[[e.Event], None],
        heard: Callable[[broker_pb2.BrokerMessage], None],
        start: Start,
    ) -> None:
        self._config, self._peer, self._up, self._down = config, peer, up, down
        self._post, self._heard, self._start = post, heard, start
        self._named = config.broker  # HOST:PORT at which it is, as far as this peer knows
        self.credentials = credentials
        self._finder = (
            None if credentials is None else finder_of(config, credentials.now.fingerprint)
        )
        self._looked_at = -math.inf
        self._stream: ControlStream | None = None
        self._streaming: asyncio.Task[None] | None = None
        self._channel: grpc.aio.Channel | None = None
        self._blobs: BlobClient | None = None

    @property
    def address(self) -> str:
        """What to dial for the broker."""
        return to_dial(self._config.via, self._named)

    @property
    def credential(self) -> Credential | None:
        """Return the newest credential."""
        return None if self.credentials is None else self.credentials.now

    @property
    def blobs(self) -> BlobClient:
        assert self._blobs is not None, "it is open"
        return self._blobs

    # ------------------------------------------------------------ the channel for blobs

    def open(self) -> None:
        self._channel = channel_to(self.address, self.credential, CHANNEL_OPTIONS)
        self._blobs = BlobClient(self._channel, up=self._up, down=self._down)

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close()

    def _open_again(self) -> None:
        """Another channel in the place of the one that is open; what is on its way there may
        end."""

        async def closing(old: grpc.aio.Channel) -> None:
            await old.close(grace=_OLD_CHANNEL_S)

        assert self._channel is not None, "it is open"
        old = self._channel
        self._channel = channel_to(self.address, self.credential, CHANNEL_OPTIONS)
        self.blobs.use(self._channel)
        self._start(closing(old))

    async def keep_credential(self) -> None:
        """Renews the credential for as long as it is let; without one, nothing is to be done.
        Raises NoCredentialError when it is too late."""
        if self.credentials is not None:  # an open channel would dial again with the old one
            await self.credentials.keep(lambda: self._named, self._open_again)

    async def page_link(self) -> str:
        """Ask for a link to the part of the broker's page that this peer may see; empty where there
        is none."""
        if self._channel is None or self.credential is None:
            return ""
        stub = AdmissionStub(self._channel)  # type: ignore[no-untyped-call]
        try:
            made = await stub.Page(PageRequest(lasts_s=_PAGE_S), timeout=_PAGE_WITHIN_S)
        except grpc.aio.AioRpcError:  # it has none, or is gone again
            return ""
        if is_loopback(split(self.address)[0]):
            return f"http://{self.address}/#{made.key}"
        return f"https://{made.address}/#{made.key}"

    def _moved(self, address: str) -> None:
        note(_log, logging.INFO, "looks for the broker", peer=self._peer, at=address)
        self._named = address
        self._open_again()

    # ------------------------------------------------------------ the stream

    def connect(self) -> None:
        """Attaches anew, once; Detached follows in the end."""
        if self._streaming is not None:
            self._streaming.cancel()
        self._streaming = self._start(self._attach())

    def tell(self, message: broker_pb2.PeerMessage) -> None:
        """Nobody hears it while there is no stream."""
        note_told(_log, self._peer, message)
        self._up.count(message.ByteSize())
        if self._stream is not None:
            self._stream.tell(message)

    async def finish(self, patience_s: float) -> None:
        """Lets leave what was told."""
        if self._stream is not None and self._streaming is not None:
            self._stream.finish()
            await asyncio.wait((self._streaming,), timeout=patience_s)

    async def _attach(self) -> None:
        tried = await self._attempt()
        if tried.elsewhere:
            self._moved(tried.elsewhere)
            tried = await self._attempt()
        why = tried.why
        if not tried.reached:
            if found := await self._why_not():
                why = f"{why}; {found}"
            if self._named != self._config.broker:
                # What was found may be old: both are tried in turn.
                self._moved(self._config.broker)
        self._post(e.Detached(why))

    async def _why_not(self) -> str:
        """What keeps it from the broker, looked for now and then; empty: nothing is found."""
        now = time.monotonic()
        if self.credential is None or now - self._looked_at < _LOOK_S:
            return ""
        self._looked_at = now
        found = await asyncio.to_thread(why_no_tls, self.address, self.credential)
        if found:
            note(_log, logging.WARNING, "no connection to the broker", peer=self._peer, why=found)
        return found

    async def _attempt(self) -> Attempt:
        opened = asyncio.Event()

        def attached() -> None:
            opened.set()
            self._post(e.Attached())

        stream = ControlStream(self.address, attached, self._said, self.credential)
        self._stream = stream
        try:
            return await attempt(stream, opened, self._finder, self._named)
        finally:
            if self._stream is stream:
                self._stream = None

    def _said(self, message: broker_pb2.BrokerMessage) -> None:
        self._down.count(message.ByteSize())
        self._heard(message)
