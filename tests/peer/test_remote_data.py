"""Data that lies behind a URL: read over HTTP, through a proxy where the environment names one."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest

from shoal.peer.data import DataError
from shoal.peer.data.sources import resolve

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
    monkeypatch.setenv("no_proxy", "*")
    _, paths = resolve(tmp_path, source=f"http://{served[0]}/sea.txt", length=8)
    assert [path.read_bytes() for path in paths.values()] == [TEXT]
    manifest, _ = resolve(tmp_path, kind="arrays", source=f"http://{served[0]}/a.npz")
    assert manifest.total == 8


def test_what_comes_over_http_comes_through_the_proxy(
    tmp_path: Path, served: tuple[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("no_proxy", "NO_PROXY", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", f"http://{served[0]}")
    _, paths = resolve(tmp_path, source="http://data.invalid/sea.txt", length=8)
    assert [path.read_bytes() for path in paths.values()] == [TEXT]
    resolve(tmp_path, kind="arrays", source="http://data.invalid/a.npz")
    assert {"http://data.invalid/sea.txt", "http://data.invalid/a.npz"} <= set(served[1])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("http://{at}/nowhere.txt", "nowhere.txt"),
        ("http://{at}/broken.txt", "broken.txt"),
        ("http://{at}/nowhere.npz", "nowhere.npz cannot be read"),
        ("http://127.0.0.1:1/sea.txt", "127.0.0.1:1/sea.txt"),
        ("nowhere://sea.txt", "Protocol not known: nowhere"),
        ("nowhere://sea.npz", "Protocol not known: nowhere"),
    ],
)
def test_what_cannot_be_read_is_named(
    tmp_path: Path,
    served: tuple[str, list[str]],
    monkeypatch: pytest.MonkeyPatch,
    source: str,
    message: str,
) -> None:
    monkeypatch.setenv("no_proxy", "*")
    kind = "arrays" if source.endswith(".npz") else "text"
    with pytest.raises(DataError, match=message):
        resolve(tmp_path, kind=kind, source=source.format(at=served[0]))
