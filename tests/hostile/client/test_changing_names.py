"""Names whose answers change, redirects of a stranger's server: in a network of its own with a real
DNS server, where 93.184.216.34 is a public host, and 127.0.0.1 and 10.0.0.7 are the house's.

    python -m shoal.tests.hostile.client.test_changing_names    what runs in there
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from shoal.net.web.places import reachable
from shoal.net.web.web import Web, WebError

PUBLIC, LOOPBACK, HOUSE = "93.184.216.34", "127.0.0.1", "10.0.0.7"
INSIDE = (
    *("localhost", LOOPBACK, HOUSE, "127.1", "2130706433", "0x7f.1", "0.0.0.0", "0", "[::1]"),
    *("[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "[64:ff9b::7f00:1]", "inside.example"),
)
"""Ways to write what lies in the house."""
REDIRECTS = [f"http://{host}/secret" for host in INSIDE] + [
    f"//{LOOPBACK}/secret",
    f"http://public.example@{LOOPBACK}/secret",
    f"http://{LOOPBACK}\\@public.example/secret",
    f"https://{LOOPBACK}/secret",
    "file:///etc/hostname",
    "file:/etc/hostname",
    "FILE:///etc/hostname",
    "ftp://inside.example/secret",
    "data:,secret",
    "gopher://inside.example/secret",
    "simplecache::http://inside.example/secret",
]
ANSWERS = {
    "public.example": [[PUBLIC]],
    "inside.example": [[LOOPBACK]],
    "private.example": [[HOUSE]],
    "changes.example": [[PUBLIC], [LOOPBACK]],
    "returns.example": [[LOOPBACK], [PUBLIC]],
    "both.example": [[LOOPBACK, PUBLIC]],
    "closed.example": [["93.184.216.35", LOOPBACK, HOUSE]],
}
"""By name, what is answered one time after the other; the last one from then on."""


def may_unshare() -> bool:
    if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    tried = subprocess.run(["unshare", "-nm", "true"], capture_output=True, check=False)
    return tried.returncode == 0


@pytest.mark.skipif(not may_unshare(), reason="needs rights for a network of its own")
def test_no_name_and_no_redirect_leads_a_reader_into_the_house(tmp_path: Path) -> None:
    (tmp_path / "resolv.conf").write_text(f"nameserver {LOOPBACK}\noptions attempts:1 timeout:2\n")
    (tmp_path / "hosts").write_text(f"{LOOPBACK} localhost\n")
    setup = [
        f"mount --bind {tmp_path}/resolv.conf /etc/resolv.conf",
        f"mount --bind {tmp_path}/hosts /etc/hosts",
        "ip link set lo up",
        *(f"ip addr add {a}/32 dev lo" for a in (PUBLIC, HOUSE)),
        f"exec {sys.executable} -m {__spec__.name}",
    ]
    said = subprocess.run(
        ["unshare", "-nm", "sh", "-c", " && ".join(setup)],
        capture_output=True, check=True, text=True, timeout=60,
    )  # fmt: skip
    found = json.loads(said.stdout)
    assert found["public"] == "public", "the network is as it should be"
    assert found["returns"] == "no public address, then public"
    assert found["both"] == "public"
    assert "no public address" in found["private"]
    assert "no public address" in found["changes"]
    assert "cannot be reached" in found["closed"] or "no public address" in found["closed"]
    assert {to: why for to, why in found["redirects"].items() if "WebError" not in why} == {}
    assert found["inside"] == [], "something was asked of the house"


# ---------------------------------------------------------------- in there


def name_server(answers: dict[str, list[list[str]]]) -> None:
    """Answers A by what is listed, and nothing for AAAA."""
    left = {
        name: itertools.chain(rows, itertools.repeat(rows[-1])) for name, rows in answers.items()
    }
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.bind((LOOPBACK, 53))
    while True:
        query, who = server.recvfrom(512)
        end = query.index(b"\0", 12)
        labels, at = [], 12
        while at < end:
            labels.append(query[at + 1 : at + 1 + query[at]].decode())
            at += 1 + query[at]
        (kind,) = struct.unpack_from("!H", query, end + 1)
        name = ".".join(labels).lower()
        found = next(left[name]) if kind == 1 and name in left else []
        code = 0x8180 if name in left else 0x8183
        head = query[:2] + struct.pack("!HHHHH", code, 1, len(found), 0, 0) + query[12 : end + 5]
        rows = (b"\xc0\x0c" + struct.pack("!HHIH", 1, 1, 0, 4) + socket.inet_aton(a) for a in found)
        server.sendto(head + b"".join(rows), who)


def serve(address: str, asked: list[str], text: str) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(f"{address} {self.path}")
            number = self.path.removeprefix("/to/")
            self.send_response(307 if number != self.path else 206)
            if number != self.path:
                self.send_header("Location", REDIRECTS[int(number)])
            self.send_header("Content-Range", f"bytes 0-{len(text) - 1}/{len(text)}")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *args: object) -> None:
            pass

    ThreadingHTTPServer.address_family = socket.AF_INET
    threading.Thread(
        target=ThreadingHTTPServer((address, 80), Handler).serve_forever, daemon=True
    ).start()


def outcome(read: Callable[[], bytes | None]) -> str:
    try:
        return (read() or b"").decode()
    except WebError as error:
        return f"WebError: {error}"


def main() -> None:
    inside: list[str] = []
    serve(PUBLIC, [], "public")
    serve(LOOPBACK, inside, "secret")
    serve(HOUSE, inside, "secret")
    threading.Thread(target=name_server, args=(ANSWERS,), daemon=True).start()
    web = Web(reachable=reachable(()), attempts=1)

    def small(name: str) -> str:
        return outcome(lambda: web.small(f"http://{name}.example/w", 100))

    found: dict[str, object] = {n: small(n) for n in ("public", "private", "both", "closed")}
    found["returns"] = ", then ".join(
        "no public address" if "no public address" in said else said
        for said in (small("returns"), small("returns"))
    )
    assert small("changes") == "public"  # what a check has seen, if it were one before the use
    found["changes"] = small("changes")
    found["redirects"] = {
        to: outcome(lambda i=i: web.small(f"http://public.example/to/{i}", 100))  # type: ignore[misc]
        for i, to in enumerate(REDIRECTS)
    }
    print(json.dumps(found | {"inside": inside}))


if __name__ == "__main__":
    main()
