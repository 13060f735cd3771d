"""A server of files with byte ranges, in a thread, that misbehaves as it is told."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

__all__ = ["Served", "serving"]


@dataclass
class Served:
    """files: by path, "/a/b"; spoil: changes (status, headers, body) of an answer; redirects: by
    path; beside: what comes with one; asked: what was asked for, each with its range."""

    files: dict[str, bytes] = field(default_factory=dict)
    redirects: dict[str, str] = field(default_factory=dict)
    beside: bytes = b""
    spoil: Callable[[int, dict[str, str], bytes], tuple[int, dict[str, str], bytes]] | None = None
    asked: list[tuple[str, str]] = field(default_factory=list)
    address: str = ""

    def bytes_given(self) -> int:
        """Of all ranges that were asked for."""
        spans = [r.removeprefix("bytes=").split("-") for _, r in self.asked if r]
        return sum(int(last) - int(first) + 1 for first, last in spans)


@contextmanager
def serving() -> Iterator[Served]:
    served = Served()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            wanted = self.headers.get("Range", "")
            served.asked.append((self.path, wanted))
            if self.path in served.redirects:
                self.answer(302, {"Location": served.redirects[self.path]}, served.beside)
                return
            data = served.files.get(self.path)
            if data is None:
                self.answer(404, {}, b"")
                return
            status, headers, body = 200, {"ETag": f'"{len(data)}"'}, data
            if wanted:
                first, last = (int(n) for n in wanted.removeprefix("bytes=").split("-"))
                last = min(last, len(data) - 1)
                status, body = 206, data[first : last + 1]
                headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
            if served.spoil is not None:
                status, headers, body = served.spoil(status, headers, body)
            self.answer(status, headers, body)

        def answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
            self.send_response(status)
            for name, value in ({"Content-Length": str(len(body))} | headers).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    served.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield served
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
