"""Files of a hub and of s3, fetched by their own libraries from servers of the test."""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import unquote, urlsplit

import fsspec
import pytest

from shoal.client.chat.fetched_files import fetched
from shoal.peer.data import DataError
from shoal.peer.data.array_files import matching

FILES = {"data/a.jsonl": b'{"text": "one"}\n', "data/b.jsonl": b'{"text": "two"}\n', "c.txt": b"c"}
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(BaseHTTPRequestHandler):
    """As much of a hub as has one data set, org/said."""

    def log_message(self, *parts: object) -> None: ...

    def answer(self, content: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if path.startswith("/datasets/org/said/resolve/"):
            content = FILES[path.split("/", 6)[6]]
            etag = '"' + hashlib.sha1(content).hexdigest() + '"'
            self.answer(content, ETag=etag, X_Repo_Commit=COMMIT)
        elif path.startswith("/api/datasets/org/said/tree/"):
            under = path.split("/", 7)[7] if path.count("/") > 6 else ""
            self.answer(json.dumps(entries(under)).encode(), Content_Type="application/json")
        elif path.startswith("/api/datasets/org/said"):
            about = {"id": "org/said", "sha": COMMIT, "private": False, "tags": [], "siblings": []}
            self.answer(json.dumps(about).encode(), Content_Type="application/json")
        else:
            self.answer(b"{}", 404, X_Error_Code="RepoNotFound")

    def do_POST(self) -> None:
        asked = self.rfile.read(int(self.headers["Content-Length"])).decode()
        there = [e for e in [*entries(""), *entries("data")] if e["path"] in unquote(asked)]
        self.answer(json.dumps(there).encode(), Content_Type="application/json")


def entries(under: str) -> list[dict[str, object]]:
    if not under:
        return [{"type": "directory", "path": "data", "oid": COMMIT, "size": 0}, *of("c.txt")]
    return [entry for name in FILES if name.startswith(under + "/") for entry in of(name)]


def of(name: str) -> list[dict[str, object]]:
    oid = hashlib.sha1(FILES[name]).hexdigest()
    return [{"type": "file", "path": name, "oid": oid, "size": len(FILES[name])}]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    yield
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.slow
@pytest.mark.parametrize(("path", "wanted"), [("data/*.jsonl", 2), ("c.txt", 1)])
def test_files_of_a_hub_are_fetched(hub: None, tmp_path: Path, path: str, wanted: int) -> None:
    there = Path(fetched(f"hf://datasets/org/said/{path}", tmp_path / "f"))
    got = [p.read_bytes() for p in sorted(there.parent.glob(there.name))]
    assert got == (sorted(FILES.values())[-2:] if wanted == 2 else [b"c"])


@pytest.mark.slow
def test_what_is_not_at_the_hub_is_said(hub: None, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"hf://datasets/org/none/a\.txt"):
        fetched("hf://datasets/org/none/a.txt", tmp_path / "f")


@pytest.mark.slow
def test_a_hub_that_does_not_answer_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound, and listening to nobody
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{closed.getsockname()[1]}")
        with pytest.raises(
            DataError, match=r"cannot be fetched from http.*network.*HF_ENDPOINT"
        ) as e:
            fetched("hf://datasets/org/said/c.txt", tmp_path / "f")
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [("*", "abc"), ("*.txt", "ab"), ("a[[]1].txt", "a"), ("a[1].txt", "a"), ("c.jsonl", "c")],
)
def test_all_files_that_are_asked_for_are_fetched(tmp_path: Path, asked: str, wanted: str) -> None:
    """Whatever their endings and names are."""
    memory = fsspec.filesystem("memory")
    for name in ("a[1].txt", "b.txt", "c.jsonl"):
        memory.pipe_file(f"/said/{name}", name[0].encode())
    got = [p.read_text() for p in matching(fetched(f"memory://said/{asked}", tmp_path / "f"))]
    assert "".join(got) == wanted


def test_without_the_library_the_error_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "s3fs", None)
    with pytest.raises(DataError, match=r"library s3fs, which is not installed.*shoal\[data\]"):
        fetched("s3://bucket/a.txt", tmp_path / "f")


@pytest.mark.slow
def test_files_of_s3_are_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = pytest.importorskip("moto.server").ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        for key in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(key, "test")
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        import s3fs

        files = s3fs.S3FileSystem(skip_instance_cache=True)
        files.mkdir("said")
        for name, content in FILES.items():
            files.pipe_file(f"said/{name}", content)
        there = Path(fetched("s3://said/data/*.jsonl", tmp_path / "f"))
        got = [p.read_bytes() for p in sorted(there.parent.glob(there.name))]
        assert got == sorted(FILES.values())[-2:]
        with pytest.raises(DataError, match=r"s3://said/nothing\.txt"):
            fetched("s3://said/nothing.txt", tmp_path / "g")
    finally:
        server.stop()
