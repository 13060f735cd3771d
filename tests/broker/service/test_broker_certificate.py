"""What the broker shows where it can be reached."""

from __future__ import annotations

import asyncio
import socket
import ssl
from pathlib import Path

import grpc

from shoal.broker.service.secured import Secured
from shoal.net.identity.names import PartyRole


def shown_at(path: Path) -> str:
    """The certificate, in PEM, that a TLS server on a Unix socket shows."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    with socket.socket(socket.AF_UNIX) as plain:
        plain.connect(str(path))
        with context.wrap_socket(plain) as tls:
            return ssl.DER_cert_to_PEM_cert(tls.getpeercert(binary_form=True))


async def test_both_ways_in_show_the_newest_certificate_and_none_keeps_the_old():
    async with Secured(None) as secured:
        server, door = grpc.aio.server(), grpc.aio.server()
        secured.listen(server, door)
        await server.start()
        await door.start()
        for _ in range(2):
            for name in ("main", "door", "main"):
                shown = await asyncio.to_thread(shown_at, secured.sockets / name)
                assert shown == secured.credential().certificate.decode()
            secured._own = secured._signed(PartyRole.BROKER, "broker")
        await server.stop(None)
        await door.stop(None)
