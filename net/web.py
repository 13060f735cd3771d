"""Byte ranges of files on the web (http and https), by the standard library's client.

    web = Web()
    file = web.look("https://example.org/model-00001-of-00002.safetensors")
    data = web.read(file, offset=8, length=4096)

An answer is believed as little as it can be checked: it has to be the range that was asked for, of
a file of the size that it had at first, with the entity tag that it had at first, and as many bytes
as it says. What passes (a broken connection, "busy") is tried again.

`allowed` is asked for every URL, those of redirects too, and `reachable` for every address that a
name leads to, right before that very address is dialled: so no name leads anywhere else meanwhile.
With it no proxy is used, as that would look names up itself. All methods block.
"""

from __future__ import annotations

import http.client
import re
import socket
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from .printable import printable

__all__ = ["Web", "WebError", "WebFile", "is_web"]

_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})")
_AGAIN = (408, 425, 429, 500, 502, 503, 504)
"""Statuses that may pass."""
_AGENT = "shoal"


class WebError(ValueError):
    """A URL that cannot be read, or that answers something else than what was asked for."""


@dataclass(frozen=True)
class WebFile:
    """As it was when it was looked at. tag: its strong entity tag; empty: it has none."""

    url: str
    size_bytes: int
    tag: str = ""


def is_web(name: str) -> bool:
    """Whether it is a URL that is read here."""
    return name.startswith(("http://", "https://"))


class Web:
    """See the module. `allowed` and `reachable` say why not; empty: it is. timeout_s: without a
    byte; floor: bytes per second of a range, or it is given up; attempts: tries of each call;
    pause: waits so many seconds between two."""

    def __init__(
        self,
        *,
        allowed: Callable[[str], str] | None = None,
        reachable: Callable[[str, str], str] | None = None,
        timeout_s: float = 60.0,
        floor: float = 0.0,
        attempts: int = 5,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._allowed, self._timeout_s, self._floor = allowed, timeout_s, floor
        self._reachable = reachable
        self._attempts, self._pause = attempts, pause

    @cached_property
    def _opener(self) -> urllib.request.OpenerDirector:
        """Made when it is needed: it reads the system's certificates."""
        handlers: list[urllib.request.BaseHandler] = [_Redirects(self._allowed)]
        if self._reachable is not None:
            dial = partial(_dial, self._reachable)
            context = ssl.create_default_context()
            handlers += [urllib.request.ProxyHandler({}), _Http(dial), _Https(dial, context)]
        return urllib.request.build_opener(*handlers)

    def look(self, url: str) -> WebFile:
        """Size and tag of a file. Raises WebError, also where it is empty or the server does not
        give ranges."""
        with self._asked(url, 0, 1) as answer:
            tag = answer.headers.get("ETag", "")
            return WebFile(url, _total(url, answer, 0, 1), "" if tag.startswith("W/") else tag)

    def read(self, file: WebFile, offset: int, length: int) -> bytes:
        """Exactly these bytes of a file that was looked at. Raises WebError, also where it has
        another size or tag now."""
        problem: Exception | None = None
        for attempt in range(self._attempts):
            if attempt:
                self._pause(min(5.0, 0.1 * 2.0**attempt))
            try:
                with self._asked(file.url, offset, length) as answer:
                    return self._body(file, answer, offset, length)
            except (OSError, http.client.HTTPException) as error:  # the connection broke
                problem = error
        raise WebError(f"{file.url}: {self._attempts} tries broke, the last: {problem}")

    def small(self, url: str, most_bytes: int) -> bytes | None:
        """All of a small file; None where there is none. Raises WebError."""
        try:
            with self._open(url, {}) as answer:
                data: bytes = answer.read(most_bytes + 1)
        except _AbsentError:
            return None
        except (OSError, http.client.HTTPException) as error:
            raise WebError(f"{url} cannot be read: {error}") from None
        if len(data) > most_bytes:
            raise WebError(f"{url} has more than the {most_bytes} bytes that are read of it")
        return data

    def _body(self, file: WebFile, answer: Any, offset: int, length: int) -> bytes:
        total = _total(file.url, answer, offset, length)
        tag = answer.headers.get("ETag", "")
        if total != file.size_bytes or (file.tag and tag != file.tag):
            raise WebError(
                f"{file.url} has {total} bytes and the tag {tag!r:.80}: expected "
                f"{file.size_bytes} and {file.tag!r:.80}, as it had before. It was changed"
            )
        data, began_s = bytearray(), time.monotonic()
        while piece := answer.read(min(1 << 20, length + 1 - len(data))):
            data += piece
            waited_s = time.monotonic() - began_s
            if waited_s > self._timeout_s and len(data) < self._floor * waited_s:
                raise WebError(f"{file.url}: {len(data)} bytes in {waited_s:.0f} s, given up")
        if len(data) < length:
            raise ConnectionError(f"{len(data)} of {length} bytes came")
        if len(data) > length:
            raise WebError(f"{file.url} gave more than the {length} bytes from {offset} on")
        return bytes(data)

    def _asked(self, url: str, offset: int, length: int) -> Any:
        headers = {
            "Range": f"bytes={offset}-{offset + length - 1}",
            "Accept-Encoding": "identity",
        }
        try:
            return self._open(url, headers)
        except _AbsentError as error:
            raise WebError(f"{url}: {error}") from None

    def _open(self, url: str, headers: Mapping[str, str]) -> Any:
        """The answer. Raises WebError, _AbsentError."""
        if not is_web(url):
            raise WebError(f"{url:.200} is no URL of http or https")
        if self._allowed is not None and (why := self._allowed(url)):
            raise WebError(f"{url} is not read: {why}")
        request = urllib.request.Request(url, headers={**headers, "User-Agent": _AGENT})
        problem: object = ""
        for attempt in range(self._attempts):
            if attempt:
                self._pause(min(5.0, 0.1 * 2.0**attempt))
            try:
                return self._opener.open(request, timeout=self._timeout_s)
            except urllib.error.HTTPError as error:
                code = error.code
                error.close()
                if code in (404, 410):
                    raise _AbsentError(f"there is no such file ({code})") from None
                if code not in _AGAIN:
                    raise WebError(f"{url} answers {code} {printable(error.reason)}") from None
                problem = f"{code} {printable(error.reason)}"
            except (OSError, http.client.HTTPException) as error:
                problem = error
        raise WebError(f"{url} cannot be reached: {problem}")


class _AbsentError(Exception):
    """The server says that there is no such file."""


def _total(url: str, answer: Any, offset: int, length: int) -> int:
    """The size of the file that an answer is a range of. Raises WebError for another range."""
    if answer.status != 206:
        raise WebError(
            f"{url} answers {answer.status} to a range of bytes: expected 206, a server that gives "
            "ranges"
        )
    said = answer.headers.get("Content-Range", "")
    found = _RANGE.fullmatch(said.strip())
    if found is None or (int(found[1]), int(found[2])) != (offset, offset + length - 1):
        raise WebError(
            f"{url} answers with the range {said!r:.80}: expected bytes {offset} to "
            f"{offset + length - 1}"
        )
    own = answer.headers.get("Content-Length")
    if own is not None and own != str(length):
        raise WebError(f"{url} answers {own} bytes: expected {length}")
    return int(found[3])


# ---------------------------------------------------------------- whom it dials


class _Redirects(urllib.request.HTTPRedirectHandler):
    max_redirections = 5

    def __init__(self, allowed: Callable[[str], str] | None) -> None:
        self._allowed = allowed

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        if self._allowed is not None and (why := self._allowed(newurl)):
            raise WebError(f"{req.full_url} leads to {newurl:.200}, which is not read: {why}")
        fp.close()  # what comes with it would be read to its end, however long it is
        return super().redirect_request(req, fp, code, msg, headers, newurl)


Dial = Callable[..., socket.socket]


def _dial(
    reachable: Callable[[str, str], str],
    address: tuple[str, int],
    timeout: float | None = None,
    source_address: Any = None,
) -> socket.socket:
    """As socket.create_connection, to those addresses of a name that may be reached."""
    host, port = address
    problem: Exception = WebError(f"{host} leads to no address")
    for family, kind, protocol, _, there in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        if why := reachable(host, str(there[0])):
            problem = WebError(f"{host} leads to {there[0]}: {why}")
            continue
        sock = socket.socket(family, kind, protocol)
        try:
            sock.settimeout(timeout)
            sock.connect(there)
            return sock
        except OSError as error:
            sock.close()
            problem = error
    raise problem


def _http(dial: Dial, *args: Any, **kwargs: Any) -> http.client.HTTPConnection:
    made = http.client.HTTPConnection(*args, **kwargs)
    made._create_connection = dial  # type: ignore[attr-defined]  # its only way in
    return made


def _https(dial: Dial, *args: Any, **kwargs: Any) -> http.client.HTTPSConnection:
    made = http.client.HTTPSConnection(*args, **kwargs)
    made._create_connection = dial  # type: ignore[attr-defined]
    return made


class _Http(urllib.request.HTTPHandler):
    def __init__(self, dial: Dial) -> None:
        super().__init__()
        self._dial = dial

    def http_open(self, req: urllib.request.Request) -> Any:
        return self.do_open(partial(_http, self._dial), req)


class _Https(urllib.request.HTTPSHandler):
    def __init__(self, dial: Dial, context: ssl.SSLContext) -> None:
        super().__init__(context=context)
        self._dial, self._tls = dial, context

    def https_open(self, req: urllib.request.Request) -> Any:
        made = partial(_https, self._dial)
        return self.do_open(made, req, context=self._tls)
