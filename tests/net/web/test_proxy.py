"""The way out through a proxy of the environment: which one, and what is said to it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from shoal.net.local import split
from shoal.net.web.proxy import (
    Proxy,
    ProxyError,
    ProxyRefusedError,
    dial,
    open_stream,
    proxy_for,
    proxy_options,
)
from shoal.tests.net.web.proxies import ConnectProxy

FAR = "far.invalid:7077"
"""A name that only the test's proxy knows."""


@pytest.fixture(autouse=True)
def _no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("grpc", "https", "all", "http", "no"):
        monkeypatch.delenv(f"{name}_proxy", raising=False)
        monkeypatch.delenv(f"{name}_proxy".upper(), raising=False)


UNI = Proxy("proxy.uni.example", 3128)


@pytest.mark.parametrize(
    ("environment", "address", "expected"),
    [
        ({}, FAR, None),
        ({"https_proxy": "http://proxy.uni.example:3128"}, FAR, UNI),
        ({"HTTPS_PROXY": "http://proxy.uni.example:3128"}, FAR, UNI),
        ({"https_proxy": "proxy.uni.example:3128"}, FAR, UNI),
        ({"http_proxy": "http://proxy.uni.example:3128"}, FAR, UNI),
        ({"https_proxy": "http://proxy.uni.example:3128", "http_proxy": "http://x:1"}, FAR, UNI),
        ({"https_proxy": "http://p"}, FAR, Proxy("p", 80)),
        ({"https_proxy": "http://[2001:db8::1]:3"}, FAR, Proxy("2001:db8::1", 3)),
        ({"https_proxy": "http://ann:a%40b@p:3"}, FAR, Proxy("p", 3, "ann:a@b")),
        ({"https_proxy": "http://p:3"}, "127.0.0.1:7077", None),
        ({"https_proxy": "http://p:3"}, "localhost:7077", None),
        ({"https_proxy": "http://p:3", "no_proxy": "far.invalid"}, FAR, None),
        ({"https_proxy": "http://p:3", "NO_PROXY": "other, .invalid"}, FAR, None),
        ({"https_proxy": "http://p:3", "no_proxy": "far.invalid:7077"}, FAR, None),
        ({"https_proxy": "http://p:3", "no_proxy": "*"}, FAR, None),
        ({"https_proxy": "http://p:3", "no_proxy": "invalid.example"}, FAR, Proxy("p", 3)),
        ({"https_proxy": "http://p:3", "no_proxy": "x,10.0.0.0/8"}, "10.9.8.7:1", None),
        ({"https_proxy": "http://p:3", "no_proxy": "10.0.0.0/8"}, "11.9.8.7:1", Proxy("p", 3)),
        ({"https_proxy": "http://p:3", "no_proxy": "2001:db8::/32"}, "[2001:db8::5]:1", None),
    ],
)
def test_the_environment_names_the_proxy_and_its_exceptions(
    environment: dict[str, str],
    address: str,
    expected: Proxy | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert proxy_for(address) == expected
    [(option, _)] = proxy_options(address)
    assert option == ("grpc.enable_http_proxy" if expected is None else "grpc.http_proxy")


@pytest.mark.parametrize("text", ["socks5://p:1", "https://p:1", "http://", "http://p:port"])
def test_a_proxy_that_cannot_be_used_is_refused_without_its_password(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("https_proxy", text.replace("//", "//ann:secret@"))
    with pytest.raises(ProxyError) as refused:
        proxy_for(FAR)
    assert "secret" not in str(refused.value)


def test_a_password_is_in_no_text_but_that_for_the_proxy() -> None:
    proxy = Proxy("p", 3, "ann:s@:crêt")
    assert str(proxy) == "p:3"
    with pytest.raises(ProxyRefusedError) as refused:
        proxy.check(b"HTTP/1.1 407 Who are you\r\n\r\n", FAR)
    assert "crêt" not in str(refused.value)
    assert "NAME:PASSWORD" in str(refused.value)


@asynccontextmanager
async def greeter() -> AsyncIterator[str]:
    """A server that speaks first, then says everything back."""

    async def served(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"welcome ")
        writer.write(await reader.readexactly(5))
        writer.close()

    server = await asyncio.start_server(served, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


def _say(host: str, port: int) -> bytes:
    with dial(host, port, 5.0) as found:
        found.sendall(b"hello")
        return b"".join(iter(lambda: found.recv(100), b""))


async def test_both_ways_of_dialling_go_through_and_lose_no_byte(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with greeter() as there, ConnectProxy({FAR: there}, user="ann:a b@") as proxy:
        proxy.answer = b"HTTP/1.1 200 fine\r\nVia: x\r\n\r\n"
        monkeypatch.setenv("HTTPS_PROXY", proxy.url.replace("a b@", "a%20b%40"))
        assert await asyncio.to_thread(_say, *split(FAR)) == b"welcome hello"
        reader, writer = await open_stream(*split(FAR))
        writer.write(b"hello")
        assert await reader.read() == b"welcome hello"
        writer.close()
        assert proxy.asked == [FAR, FAR]
        # This machine itself, and what no_proxy names, is reached without it.
        assert await asyncio.to_thread(_say, *split(there)) == b"welcome hello"
        assert proxy.asked == [FAR, FAR]


@pytest.mark.parametrize(
    ("answer", "user", "expected"),
    [
        (b"", "", "no whole answer"),
        (b"HTTP/1.1 200 fine\r\n" + b"x: y\r\n" * 50_000, "", "no whole answer"),
        (b"SSH-2.0\r\n\r\n", "", "does not let through"),
        (b"HTTP/1.1 200 fine\r\n\r\n", "ann:a", "wants a name and a password"),
    ],
)
async def test_a_proxy_that_does_not_let_through_is_named(
    answer: bytes, user: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with greeter() as there, ConnectProxy({FAR: there}, user=user) as proxy:
        proxy.answer = answer
        if not answer:
            proxy.targets[FAR] = "127.0.0.1:9"  # nobody is there: it hangs up
        monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{proxy.port}")
        for way in (asyncio.to_thread(dial, *split(FAR), 5.0), open_stream(*split(FAR))):
            with pytest.raises(ProxyRefusedError, match=expected):
                await way
        if user:
            return
        for way in (asyncio.to_thread(dial, "x.invalid", 1, 5.0), open_stream("x.invalid", 1)):
            with pytest.raises(ProxyRefusedError, match="403 Forbidden"):
                await way


async def test_a_proxy_that_is_away_is_told_from_a_broker_that_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        port = nobody.getsockname()[1]
    monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{port}")
    for way in (asyncio.to_thread(dial, *split(FAR), 5.0), open_stream(*split(FAR))):
        with pytest.raises(ProxyRefusedError, match="https_proxy right"):
            await way
