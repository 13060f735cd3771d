"""A small Hub for tests: what huggingface_hub asks of one to read a repository and to commit."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

__all__ = ["Hub", "serving_hub"]

REVISION = "0" * 39 + "1"
TOKEN = "hf_right"


class Hub:
    """Its repositories: files by name. asked: paths of requests. role: of the token."""

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.asked: list[str] = []
        self.address = ""
        self.role = "write"


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: Any) -> None: ...

        def say(self, status: int, body: Any = b"", **headers: str) -> None:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        def body(self) -> bytes:
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))

        @property
        def known(self) -> bool:
            return self.headers.get("Authorization") == f"Bearer {TOKEN}"

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            hub.asked.append(path)
            if path == "/api/whoami-v2":
                who = {"name": "ann", "type": "user", "orgs": [{"name": "sea"}]}
                who["auth"] = {"accessToken": {"role": hub.role}}
                return self.say(200, who) if self.known else self.say(401, {"error": "no"})
            if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/(revision|tree)/([^/]+)", path):
                repo, what, revision = found.groups()
                files = hub.repositories.get(repo)
                if files is None:
                    return self.say(404, {"error": "none"}, X_Error_Code="RepoNotFound")
                if revision not in ("main", REVISION):
                    return self.say(404, {"error": "none"}, X_Error_Code="RevisionNotFound")
                if what == "tree":
                    rows = [
                        {"type": "file", "path": n, "size": len(b), "oid": etag(b)}
                        for n, b in files.items()
                    ]
                    return self.say(200, rows)
                siblings = [{"rfilename": name} for name in files]
                return self.say(200, {"id": repo, "sha": REVISION, "siblings": siblings})
            if found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
                data = hub.repositories[found[1]][found[3]]
                return self.say(200, data, ETag=f'"{etag(data)}"', X_Repo_Commit=REVISION)
            return self.say(404, {"error": f"a path that this Hub does not have: {path}"})

        def do_POST(self) -> None:
            path = self.path.partition("?")[0]
            hub.asked.append(path)
            data = self.body()
            if not self.known:
                return self.say(401, {"error": "who are you?"})
            if path == "/api/repos/create":
                asked = json.loads(data)
                repo = f"{asked.get('organization') or 'ann'}/{asked['name']}"
                hub.repositories.setdefault(repo, {})
                return self.say(200, {"url": f"{hub.address}/{repo}"})
            if found := re.fullmatch(r"/api/models/(.+)/preupload/main", path):
                files = json.loads(data)["files"]
                rows = [
                    {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False}
                    for f in files
                ]
                return self.say(200, {"files": rows})
            if found := re.fullmatch(r"/api/models/(.+)/commit/main", path):
                for row in map(json.loads, data.splitlines()):
                    if row["key"] == "file":
                        value = row["value"]
                        hub.repositories[found[1]][value["path"]] = base64.b64decode(
                            value["content"]
                        )
                url = f"{hub.address}/{found[1]}/commit/{REVISION}"
                return self.say(200, {"commitUrl": url, "commitOid": REVISION, "success": True})
            return self.say(404, {"error": f"a path that this Hub does not have: {path}"})

    return Handler


def etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


@contextmanager
def serving_hub() -> Iterator[Hub]:
    hub = Hub()
    with ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub)) as server:
        hub.address = f"http://127.0.0.1:{server.server_address[1]}"
        thread = Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()
