"""Members that end a handshake with a peer behind the relay, and have no business with it: whatever
they send, their connections end, and those that a link uses stay."""

from __future__ import annotations

import asyncio
import ssl
import struct
from pathlib import Path

import pytest

from shoal.dag.schedule.flow import Role
from shoal.net.identity.names import PartyRole, dns_name
from shoal.net.links.transport import FrameAcknowledged, FrameArrived, LinkDown, LinkUp
from shoal.peer.shell import relayed
from shoal.tests.broker.service.door.test_relay import Member, network

from .test_links import Streams, changed, ended, joined

SETTINGS, WINDOW_UPDATE, HEADERS = 4, 8, 1
CALL = (  # POST https://x/x/y of application/grpc: HPACK without Huffman
    b"\x83\x87\x44\x04/x/y\x41\x01x\x5f\x10application/grpc\x40\x02te\x08trailers"
)


def frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
    """One of HTTP/2."""
    return struct.pack("!I", len(body))[1:] + struct.pack("!BBI", kind, flags, stream) + body


def more(way: str, number: int) -> bytes:
    """What keeps a connection busy without a stream that anybody takes."""
    if way == "windows":
        return frame(WINDOW_UPDATE, 0, 0, struct.pack("!I", 1))
    return frame(HEADERS, 5, 2 * number + 1, CALL)  # a call that there is not


async def handshake(mallory: Member, address: str, name: str, folder: Path) -> Streams:
    """TLS as the member that it is, to the end, and the greeting of HTTP/2."""
    (folder / "key.pem").write_bytes(mallory.credential.key)
    (folder / "chain.pem").write_bytes(mallory.credential.certificate)
    context = ssl.create_default_context(cadata=mallory.credential.authority.decode())
    context.load_cert_chain(folder / "chain.pem", folder / "key.pem")
    context.set_alpn_protocols(["h2"])
    host, _, port = address.rpartition(":")
    to = dns_name(PartyRole.PEER, name)
    reader, writer = await asyncio.open_connection(host, int(port), ssl=context, server_hostname=to)
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS, 0, 0, b""))
    return reader, writer


async def keeps_busy(stream: Streams, way: str) -> int:
    """Answers whatever comes with something more, until the other side has enough of it; returns
    how often it did."""
    reader, writer = stream
    number = 0
    try:
        while True:
            try:
                async with asyncio.timeout(0.02):
                    if not await reader.read(4096):
                        return number
            except TimeoutError:
                pass
            writer.write(more(way, number))
            number += 1
    except OSError:
        return number
    finally:
        writer.close()


@pytest.mark.parametrize("way", ["windows", "calls"])
async def test_a_member_that_no_link_expects_is_ended_and_a_partner_stays(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relayed, "_UNUSED_S", 0.3)
    async with network("a", "b", "mallory") as (broker, (a, b, mallory)):
        b.expect("a")
        a.transport.dial("b", broker.address, 1)
        a.transport.allow("b", Role.ACTIVATION, 10)
        await a.heard(LinkUp)
        held = [await handshake(mallory, broker.address, "b", tmp_path) for _ in range(3)]
        busy = asyncio.gather(*(keeps_busy(stream, way) for stream in held))
        sent = 0
        async with asyncio.timeout(20):
            while not busy.done():
                a.send("b", 1 << 10, sent)
                sent += 1
                await a.heard(FrameAcknowledged, sent)
                (come,) = (e for e in b.events if isinstance(e, FrameArrived))
                b.events.remove(come)
                b.transport.release("a", come.arrived.key)
        assert all(count > 2 for count in await busy), "each was ended while it was busy"
        assert not any(isinstance(event, LinkDown) for event in a.events)


async def test_a_real_peer_ends_them_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its own way in, a socket without a file where there are such."""
    monkeypatch.setattr(relayed, "_UNUSED_S", 0.3)
    async with network("mallory") as (broker, (mallory,)), joined(broker, tmp_path, "b") as b:
        stream = await handshake(mallory, broker.address, b.me.peer, tmp_path)
        async with asyncio.timeout(20):
            assert await keeps_busy(stream, "windows") > 2


async def test_a_connection_without_a_stream_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the peer's own port. With a shorter limit than the real one: that gRPC keeps it counts."""
    few = changed(max_connection_idle_ms=300)
    monkeypatch.setattr("shoal.peer.shell.opening.SERVER_OPTIONS", few)
    async with network("mallory") as (broker, (mallory,)), joined(broker, tmp_path, "b") as b:
        stream = await handshake(mallory, b.listens, b.me.peer, tmp_path)
        assert await ended(stream)
