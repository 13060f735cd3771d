"""The page through a real nginx, by the very lines of docs/deploy.md."""

from __future__ import annotations

import asyncio
import http.client
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from shoal.net.identity.names import Party, PartyRole
from shoal.net.local import free_port
from shoal.tests.broker.service.door.test_clear import running

PAGE = Path(__file__).resolve().parents[4] / "docs" / "deploy.md"
NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
CONFIG = """
daemon off; pid %(folder)s/pid; events {}
http {
    access_log off;
    client_body_temp_path %(folder)s; proxy_temp_path %(folder)s; fastcgi_temp_path %(folder)s;
    uwsgi_temp_path %(folder)s; scgi_temp_path %(folder)s;
    server { listen 127.0.0.1:%(port)d; %(location)s }
}
"""


def location() -> str:
    found = re.search(r"^ +location /shoal/ \{.*?\}$", PAGE.read_text("utf-8"), re.M | re.S)
    assert found, "docs/deploy.md shows a location of nginx"
    return found[0]


@contextmanager
def nginx(folder: Path, broker: str, location: str) -> Iterator[int]:
    port = free_port("127.0.0.1")
    said = location.replace("127.0.0.1:7077", broker)
    (folder / "nginx.conf").write_text(CONFIG % {"folder": folder, "port": port, "location": said})
    command = [str(NGINX), "-e", "stderr", "-c", str(folder / "nginx.conf")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield port
        finally:
            process.terminate()


def ask(port: int, path: str, key: str = "") -> tuple[int, bytes]:
    """Tried again until nginx listens."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    while True:
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=20)) as connection:
            try:
                connection.request("GET", path, headers=headers)
            except ConnectionRefusedError:
                continue
            found = connection.getresponse()
            return found.status, found.read1(1 << 20)


@pytest.mark.skipif(NGINX is None, reason="needs nginx")
@pytest.mark.parametrize("kept", [False, True])
async def test_the_lines_of_the_page_work(tmp_path: Path, kept: bool) -> None:
    async with running() as broker:
        assert broker.page is not None
        key = broker.page.key(Party(PartyRole.SUBMITTER, "ann"), 3600.0)[0]
        lines = location()
        if kept:  # without the slash at the end the prefix stays
            lines = lines.replace("7077/;", "7077;")
        with nginx(tmp_path, broker.address, lines) as port:
            for path, shown, status, says in (
                ("", "", 200, b"<title>Shoal</title>"),
                ("state.json", "", 401, b"A key is needed"),
                ("enter", key, 204, b""),
                ("state.json", key, 200, b'"broker"'),
                ("live", key, 200, b"data: {"),
                ("metrics", key, 200, b"shoal_peers"),
            ):
                found = await asyncio.to_thread(ask, port, f"/shoal/{path}", shown)
                assert (found[0], says in found[1]) == (status, True), path
