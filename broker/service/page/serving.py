"""HTTP on two Unix sockets behind the front, with TLS and without: starlette's app, spoken to by
uvicorn's HTTP protocol on the broker's own loop, without uvicorn's server, which is a process's
only one: it takes its signals and looks ten times a second whether it shall end.

Bounded here: a handshake and a request must be whole within REQUEST_S each, and the request within
REQUEST_BYTES. How many connections there may be, and how long each may last, is the front's
(`MultiplexerLimits`).
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import ssl
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from starlette.applications import Starlette
from uvicorn import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from ....net.identity.authority import SLACK
from ....net.identity.credential import new_key, pem_of, write_private
from ..door.front import PageSockets

__all__ = ["REQUEST_BYTES", "Serving", "fingerprint", "own_certificate", "owners_certificate"]

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


# What the page proves itself with: the owner's certificate, or one of its own.
#
# A browser believes neither the broker's authority nor, most of them, an Ed25519 signature: so the
# page has a self-signed P-256 certificate, which browsers warn about once; `shoal page` prints its
# fingerprint to compare. An owner who has one that browsers know names its folder.

_LASTS = timedelta(days=3650)
_LEAST_LEFT = timedelta(days=30)
_LOCAL = ("localhost", "127.0.0.1", "::1")


def owners_certificate(folder: Path) -> tuple[Path, Path]:
    """Chain and key under the names that certbot gives them. Raises FileNotFoundError."""
    pair = folder / "fullchain.pem", folder / "privkey.pem"
    for path in pair:
        if not path.is_file():
            raise FileNotFoundError(2, "expected the page's certificate here", str(path))
    return pair


def own_certificate(folder: Path, host: str, now: datetime) -> tuple[Path, Path]:
    """The page's own in the folder, for `host` and this machine; made where there is none that
    still holds, or one is damaged, which the log says. Raises OSError."""
    pair = folder / "certificate.pem", folder / "key.pem"
    names = [host, *(n for n in _LOCAL if n != host)]
    if not _holds(pair, names, now):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        key = new_key()
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "shoal page")])
        made = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - SLACK)
            .not_valid_after(now + _LASTS)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(x509.SubjectAlternativeName(list(map(_name, names))), critical=False)
            .sign(key, hashes.SHA256())
        )
        write_private(pair[1], pem_of(key))
        write_private(pair[0], made.public_bytes(serialization.Encoding.PEM))
    return pair


def _holds(pair: tuple[Path, Path], names: Sequence[str], now: datetime) -> bool:
    path = pair[0]
    try:
        found = x509.load_pem_x509_certificate(pair[0].read_bytes())
        path = pair[1]
        key = serialization.load_pem_private_key(pair[1].read_bytes(), None)
    except FileNotFoundError:
        return False
    except ValueError:
        log.warning(
            "page_certificate_damaged path=%s: a new one takes its place, which browsers warn "
            "about once more",
            path,
        )
        return False
    try:
        of = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (ValueError, x509.ExtensionNotFound):
        return False
    return (
        found.public_key() == key.public_key()
        and list(of) == list(map(_name, names))
        and found.not_valid_before_utc <= now  # the clock was ahead then
        and found.not_valid_after_utc - now > _LEAST_LEFT
    )


def _name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def fingerprint(certificate: Path) -> str:
    """SHA-256 of the first certificate in the file, as browsers show it."""
    digest = x509.load_pem_x509_certificate(certificate.read_bytes()).fingerprint(hashes.SHA256())
    return digest.hex(":").upper()
