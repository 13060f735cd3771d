"""Data that lies behind a URL: read over HTTP, through a proxy where the environment names one."""

from __future__ import annotations

import asyncio
import io
import os
import ssl
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from shoal.peer.data import DataError
from shoal.peer.data.sources import resolve
from shoal.tests.net.web.proxies import ConnectProxy

PROXIES = {
    *(f"{name}_proxy" for name in ("grpc", "https", "all", "http", "no")),
    *(f"{name}_PROXY" for name in ("GRPC", "HTTPS", "ALL", "HTTP", "NO")),
}
TEXT = b"all fish swim in one sea. " * 60
FILES = {"/sea.txt": TEXT}


def arrays() -> bytes:
    made = io.BytesIO()
    np.savez(made, x=np.arange(24, dtype=np.float32).reshape(8, 3), y=np.arange(8))
    return made.getvalue()


class _Answers(BaseHTTPRequestHandler):
    """A server of files, and a proxy that has those of a host that nobody else knows."""

    asked: list[str]

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.asked.append(self.path)
        data = FILES.get(urlsplit(self.path).path)
        self.send_response(404 if data is None else 500 if data == b"" else 200)
        self.send_header("Content-Length", str(len(data or b"")))
        self.end_headers()
        if data and self.command == "GET":
            self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def served() -> Iterator[tuple[str, list[str]]]:
    """HOST:PORT and what was asked for."""
    FILES["/a.npz"], FILES["/broken.txt"] = arrays(), b""
    asked: list[str] = []
    handler = type("Answers", (_Answers,), {"asked": asked})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}", asked
        finally:
            server.shutdown()
            thread.join()


def test_text_and_arrays_are_read_over_http(
    tmp_path: Path, served: tuple[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # not for this machine itself
    _, paths = resolve(tmp_path, source=f"http://{served[0]}/sea.txt?part=1", length=8)
    assert [path.read_bytes() for path in paths.values()] == [TEXT]
    for query in ("", "?file=a.npz"):
        source = f"http://{served[0]}/a.npz{query}"
        manifest, _ = resolve(tmp_path, kind="arrays", source=source)
    assert manifest.total == 8


def test_what_comes_over_http_comes_through_the_proxy(
    tmp_path: Path, served: tuple[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("all_proxy", f"http://{served[0]}")
    _, paths = resolve(tmp_path, source="http://data.invalid/sea.txt", length=8)
    assert [path.read_bytes() for path in paths.values()] == [TEXT]
    resolve(tmp_path, kind="arrays", source="http://data.invalid/a.npz")
    assert {"http://data.invalid/sea.txt", "http://data.invalid/a.npz"} <= set(served[1])


def test_https_goes_through_the_proxy_with_connect(
    tmp_path: Path, served: tuple[str, list[str]]
) -> None:
    """In a process of its own, which trusts the server's certificate."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "data.invalid")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("data.invalid")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    (tmp_path / "chain.pem").write_bytes(certificate.public_bytes(Encoding.PEM))
    (tmp_path / "key.pem").write_bytes(
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "chain.pem", tmp_path / "key.pem")

    async def read() -> tuple[int, list[str]]:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(TEXT) + TEXT)
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
        at = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        code = (
            "import sys; from pathlib import Path; from shoal.peer.data.sources import resolve\n"
            "_, paths = resolve(Path(sys.argv[1]), source='https://data.invalid/sea', length=8)\n"
            f"assert [p.read_bytes() for p in paths.values()] == [{TEXT!r}]"
        )
        async with server, ConnectProxy({"data.invalid:443": at}) as proxy:
            plain = {k: v for k, v in os.environ.items() if k not in PROXIES}
            trusting = {"SSL_CERT_FILE": str(tmp_path / "chain.pem"), "HTTPS_PROXY": proxy.url}
            reading = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", code, str(tmp_path / "shards")), env=plain | trusting
            )
            return await reading.wait(), proxy.asked

    code, asked = asyncio.run(read())
    assert code == 0
    assert asked == ["data.invalid:443"]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("http://{at}/nowhere.txt", "nowhere.txt cannot be read: nothing is there"),
        ("http://{at}/broken.txt", "broken.txt cannot be read: 500"),
        ("http://{at}/nowhere.npz", "nowhere.npz cannot be read: nothing is there"),
        ("http://127.0.0.1:1/sea.txt", "cannot be read: Cannot connect to host"),
        ("nowhere://sea.txt", "Protocol not known: nowhere"),
        ("nowhere://sea.npz", "Protocol not known: nowhere"),
    ],
)
def test_what_cannot_be_read_is_named(
    tmp_path: Path,
    served: tuple[str, list[str]],
    source: str,
    message: str,
) -> None:
    kind = "arrays" if source.endswith(".npz") else "text"
    with pytest.raises(DataError, match=message):
        resolve(tmp_path, kind=kind, source=source.format(at=served[0]))
