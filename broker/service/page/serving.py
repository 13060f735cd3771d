"""HTTP on two Unix sockets behind the front, with TLS and without: starlette's app, spoken to by
uvicorn's HTTP protocol on the broker's own loop, without uvicorn's server, which is a process's
only one: it takes its signals and looks ten times a second whether it shall end.

Bounded here: a handshake and a request must be whole within REQUEST_S each, and the request within
REQUEST_BYTES. How many connections there may be, and how long each may last, is the front's
(`MultiplexerLimits`).
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from uvicorn import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from ..door.front import PageSockets

__all__ = ["REQUEST_BYTES", "Serving"]

log = logging.getLogger(__name__)

REQUEST_S = 10.0
"""From the begin of a connection to the end of its request; slow drips end here."""
REQUEST_BYTES = 16 * 1024
"""Of a request's head; a browser's has one to two thousand, with the key in its cookie."""
_END_S = 2.0
"""For requests to end when the broker does."""
_RELOAD_S = 3600.0
"""How often the owner's certificate is read again: certbot renews it in its place."""


class Serving:
    """`async with Serving(app, folder, certificate) as serving:` answers on `serving.sockets` until
    the block ends. `certificate`: files of chain and key. Raises OSError and ssl.SSLError where
    they cannot be used."""

    def __init__(self, app: Starlette, folder: Path, certificate: tuple[Path, Path]) -> None:
        self._certificate = certificate
        self.sockets = PageSockets(folder / "page-tls", folder / "page-plain")
        self._config = Config(
            app,
            http=_Once,
            ws="none",
            lifespan="off",
            interface="asgi3",
            proxy_headers=False,
            access_log=False,
            log_config=None,
            log_level="error",
            h11_max_incomplete_event_size=REQUEST_BYTES,
        )
        self._state = ServerState()

    async def __aenter__(self) -> Serving:
        self._config.load()
        self._context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._context.minimum_version = ssl.TLSVersion.TLSv1_3
        self._context.set_alpn_protocols(["http/1.1"])
        self._context.load_cert_chain(*self._certificate)
        listen = asyncio.get_running_loop().create_unix_server
        self._servers = [
            await listen(
                self._connected,
                self.sockets.tls,
                ssl=self._context,
                ssl_handshake_timeout=REQUEST_S,
                ssl_shutdown_timeout=1.0,
            ),
            await listen(self._connected, self.sockets.plain),
        ]
        self._reloading = asyncio.create_task(self._reload())
        return self

    def _connected(self) -> _Once:
        return _Once(config=self._config, server_state=self._state, app_state={})

    async def __aexit__(self, *exc: object) -> None:
        self._reloading.cancel()
        for server in self._servers:
            server.close()
        for connection in list(self._state.connections):
            connection.transport.abort()
        if self._state.tasks:  # each ends with its connection
            await asyncio.wait(list(self._state.tasks), timeout=_END_S)
        for task in self._state.tasks:
            task.cancel()

    async def _reload(self) -> None:
        while True:
            await asyncio.sleep(_RELOAD_S)
            try:
                self._context.load_cert_chain(*self._certificate)
            except (OSError, ssl.SSLError) as error:
                log.warning("page_certificate_not_read path=%s why=%s", self._certificate[0], error)


class _Once(H11Protocol):
    """A connection that ends when its request is not whole in time, or when more comes than one
    request has."""

    transport: Any
    cycle: Any  # None before a request is whole

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        self._late = self.loop.call_later(REQUEST_S, self._too_late)
        self._came = 0

    def data_received(self, data: bytes) -> None:
        self._came += len(data)
        if self._came > REQUEST_BYTES:
            self.transport.abort()
        else:
            super().data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._late.cancel()
        super().connection_lost(exc)

    def _too_late(self) -> None:
        if self.cycle is None:
            self.transport.abort()
