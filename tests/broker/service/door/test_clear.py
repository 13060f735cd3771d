"""The front of a real broker answers whatever a proxy, a probe or a person tries on its port."""

from __future__ import annotations

import asyncio
import http.client
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.broker.options import BrokerOptions
from shoal.broker.service.door.clear import (
    FULL_SIZE_BYTES,
    answer,
    begins_http,
    whole_request,
)
from shoal.broker.service.door.front import MultiplexerLimits
from shoal.broker.service.door.hello import HelloError, read_hello
from shoal.broker.service.server import Broker, BrokerConfig
from shoal.net.identity.names import Party, PartyRole

METHODS = ("GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE", "TRACE", "CONNECT", "PRI")


@asynccontextmanager
async def running(**config: Any) -> AsyncIterator[Broker]:
    options = BrokerOptions(probe_s=0.0)
    async with Broker(BrokerConfig(port=0, options=options, **config)) as broker:
        broker.shell.warm_up = lambda: None  # nothing is planned here
        yield broker


def raw(broker: Broker, *parts: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", broker.port), timeout=20) as stream:
        for part in parts:
            stream.sendall(part)
        stream.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: stream.recv(65536), b""))


def over_tls(broker: Broker, *protocols: str, name: str = "proxy") -> ssl.SSLSocket:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if protocols:
        context.set_alpn_protocols(list(protocols))
    connection = socket.create_connection(("127.0.0.1", broker.port), timeout=20)
    return context.wrap_socket(connection, server_hostname=name)


def ask(
    broker: Broker, method: str, path: str, stream: socket.socket | None = None, **headers: str
) -> tuple[int, http.client.HTTPMessage, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", broker.port, timeout=20)
    if stream is not None:
        connection.sock = stream
    with closing(connection):
        connection.request(method, path, headers=headers)
        found = connection.getresponse()
        return found.status, found.headers, found.read()


@given(st.sampled_from(METHODS), st.integers(1, 5), st.binary(min_size=5, max_size=5))
def test_what_begins_as_a_method_is_http_and_nothing_else(
    method: str, size: int, noise: bytes
) -> None:
    assert begins_http(f"{method} /x".encode()[:size])
    known = noise.startswith(tuple(m.encode()[:5] for m in METHODS))
    assert known or not begins_http(noise)


@given(st.lists(st.integers(1, 40), max_size=8), st.sampled_from([b"\r\n", b"\n"]))
def test_a_request_may_come_in_pieces_with_either_end_of_line(cuts: list[int], end: bytes) -> None:
    whole = end.join([b"HEAD /authority.pem HTTP/1.1", b"Host: x", b"", b""])

    async def read() -> Any:
        reader = asyncio.StreamReader()
        at = 5
        for cut in (*cuts, len(whole)):
            reader.feed_data(whole[at : at + cut])
            at = min(len(whole), at + cut)
        reader.feed_eof()
        return await whole_request(whole[:5], reader, 4096)

    found = asyncio.run(read())
    assert (found.method, found.path, found.asks_authority) == ("HEAD", "/authority.pem", True)
    assert answer(found, b"PEM", page=True).endswith(b"\r\n\r\n")


async def test_every_method_is_answered_in_the_clear() -> None:
    async with running(page=False) as broker:
        found = {
            m: await asyncio.to_thread(raw, broker, f"{m} /authority.pem HTTP/1.1\r\n\r\n".encode())
            for m in METHODS
        }
        assert {m: int(a.split()[1]) for m, a in found.items()} == {
            **dict.fromkeys(METHODS, 405),
            **{"GET": 200, "HEAD": 200, "OPTIONS": 204},
        }
        assert b"BEGIN CERTIFICATE" in found["GET"]
        assert b"BEGIN CERTIFICATE" not in found["HEAD"]
        assert all(b"Allow: GET, HEAD, OPTIONS" in a for a in found.values())
        full = await asyncio.to_thread(raw, broker, b"GET /full-size HTTP/1.1\r\n\r\n")
        assert len(full) > FULL_SIZE_BYTES
        other = await asyncio.to_thread(raw, broker, b"GET / HTTP/1.0\n\n")
        assert b"All else here is over TLS" in other
        greeted = await asyncio.to_thread(raw, broker, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        assert b"over TLS" in greeted


@pytest.mark.parametrize("tls", [True, False])
async def test_the_page_answers_head_and_options(tls: bool) -> None:
    async with running() as broker:
        for path in ("/", "/live", "/state.json"):
            stream = await asyncio.to_thread(over_tls, broker) if tls else None
            status, _, body = await asyncio.to_thread(ask, broker, "HEAD", path, stream)
            assert (status, body) == (200 if path == "/" else 401, b"")
            stream = await asyncio.to_thread(over_tls, broker) if tls else None
            status, headers, _ = await asyncio.to_thread(ask, broker, "OPTIONS", path, stream)
            assert (status, headers["Allow"]) == (204, "GET, HEAD, OPTIONS")


async def test_a_client_without_protocols_sees_the_page_and_one_too_old_hears_so() -> None:
    async with running() as broker:
        for protocols in ((), ("http/1.0", "http/1.1")):
            stream = await asyncio.to_thread(over_tls, broker, *protocols)
            status, _, body = await asyncio.to_thread(ask, broker, "GET", "/", stream)
            assert status == 200
            assert b"<title>Shoal</title>" in body
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        connection = socket.create_connection(("127.0.0.1", broker.port), timeout=20)
        with pytest.raises(ssl.SSLError, match="PROTOCOL_VERSION"):
            await asyncio.to_thread(context.wrap_socket, connection, server_hostname="x")


@pytest.mark.parametrize("prefix", ["", "/shoal", "/deep/inside"])
@pytest.mark.parametrize("kept", [True, False])
async def test_the_page_works_behind_a_proxy_that_keeps_or_takes_its_prefix(
    prefix: str, kept: bool
) -> None:
    async with running() as broker:
        assert broker.page is not None
        key = broker.page.key(Party(PartyRole.SUBMITTER, "ann"), 3600.0)[0]
        may = {"Authorization": f"Bearer {key}"}
        at = prefix if kept else ""
        for path, wanted in (("/", 200), ("/enter", 204), ("/state.json", 200), ("/nothing", 404)):
            found = await asyncio.to_thread(ask, broker, "GET", at + path, **may)
            assert found[0] == wanted, path
        status, _, body = await asyncio.to_thread(
            ask, broker, "GET", prefix or "/", **{"X-Forwarded-Prefix": prefix}
        )
        assert status == 200
        # What it asks for is beside it, whatever the prefix.
        assert b'fetch("/' not in body
        assert b'EventSource("/' not in body


async def test_what_begins_in_no_known_way_or_never_ends_is_closed() -> None:
    limits = MultiplexerLimits(hello_s=0.3)
    async with running() as broker:
        assert broker.secured is not None
        assert broker.secured._front is not None
        broker.secured._front.limits = limits
        for said in (b"\x00\x01\x02\x03\x04", b"SSH-2.0-x\r\n", b"GETS /x", b"HELO x\r\n"):
            assert await asyncio.to_thread(raw, broker, said) == b""

        def slow() -> bytes:
            with socket.create_connection(("127.0.0.1", broker.port), timeout=20) as stream:
                stream.sendall(b"GET / HT")  # and nothing more
                return stream.recv(100)

        assert await asyncio.to_thread(slow) == b""
        assert broker.secured.refused["time"] == 1


async def test_sockets_that_are_gone_are_named_in_the_log(caplog: Any) -> None:
    async with running(page=False) as broker:
        assert broker.secured is not None
        for path in broker.secured.sockets.iterdir():
            path.unlink()
        with pytest.raises((OSError, ssl.SSLError)):
            await asyncio.to_thread(over_tls, broker, "h2", name="broker.shoal")
        assert "sockets_gone" in caplog.text
        assert "start the broker again" in caplog.text


def test_a_name_with_an_underscore_is_a_host() -> None:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.create_default_context()
    stream = context.wrap_bio(incoming, outgoing, server_hostname="my_broker.lan")
    with pytest.raises(ssl.SSLWantReadError):
        stream.do_handshake()
    assert read_hello(outgoing.read()) == ("my_broker.lan", True)
    with pytest.raises(HelloError):
        read_hello(b"\x16\x03\x01\x00\x01\x02")
