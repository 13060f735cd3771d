"""How `web.py` reaches a server: whom it dials, which redirects it follows, and how long it waits.

No server holds a reader without end. The head of an answer has a deadline, which dialling,
handshakes and redirects share; its body must come at a rate, on average, and has no more time than
its expected size takes at that rate. Each wait for bytes is cut to what is left of that: whoever
sends one byte every few seconds gains nothing by it.
"""

from __future__ import annotations

import http.client
import io
import socket
import ssl
import urllib.request
from collections.abc import Callable
from functools import partial
from typing import Any

__all__ = ["AnswerDeadline", "Asked", "Clock", "TooSlowError", "WebError", "is_web", "opener"]

Allowed = Callable[[str], str]
Reachable = Callable[[str, str], str]
Clock = Callable[[], float]


class WebError(ValueError):
    """A URL that cannot be read, or that answers something else than what was asked for."""


def is_web(name: str) -> bool:
    """Whether it is a URL that is read here."""
    return name.startswith(("http://", "https://"))


class TooSlowError(TimeoutError):
    """A server that sends, but too slowly."""


class AnswerDeadline:
    """How long one answer may take, from now on. silence_s: without a byte; head_s: for its head;
    floor: bytes per second of its body, which has `silence_s` at least; clock: seconds."""

    def __init__(self, silence_s: float, head_s: float, floor: float, clock: Clock) -> None:
        self._silence_s, self._head_s, self._floor = silence_s, head_s, floor
        self._clock, self._began_s = clock, clock()
        self._came, self._most_bytes = 0, -1  # of the body; it has not begun

    def body(self, most_bytes: int) -> None:
        """The head is here. Whatever comes beyond `most_bytes` gives no more time."""
        self._began_s, self._came, self._most_bytes = self._clock(), 0, most_bytes

    def came(self, size_bytes: int) -> None:
        self._came += size_bytes

    def left_s(self) -> float:
        """How long the next byte is waited for; above 0. Raises TooSlowError."""
        passed_s = self._clock() - self._began_s
        if self._most_bytes < 0:
            whole_s, what = self._head_s, "no whole head of an answer"
        else:
            whole_s = max(self._silence_s, min(self._came, self._most_bytes) / self._floor)
            what = f"{self._came} bytes"
        if passed_s >= whole_s:
            raise TooSlowError(f"{what} in {passed_s:.3g} s")
        return min(self._silence_s, whole_s - passed_s)


class Asked(urllib.request.Request):
    """A request with the pace of its answer, which redirects share."""

    def __init__(self, url: str, headers: dict[str, str], pace: AnswerDeadline) -> None:
        super().__init__(url, headers=headers)
        self.pace = pace


def opener(allowed: Allowed | None, reachable: Reachable | None) -> urllib.request.OpenerDirector:
    """For requests that are `Asked`; the two as in `web.Web`. Reads the system's certificates, and
    nothing but http and https: urllib's own list has files, FTP and data URLs, to which a server
    could redirect."""
    dial = partial(_dial, reachable or (lambda host, address: ""))
    context = ssl.create_default_context()
    made = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(None if reachable is None else {}),
        urllib.request.UnknownHandler(),
        _Http(dial),
        _Https(dial, context),
        urllib.request.HTTPDefaultErrorHandler(),
        _Redirects(allowed),
        urllib.request.HTTPErrorProcessor(),
    ):
        made.add_handler(handler)
    return made


class _Redirects(urllib.request.HTTPRedirectHandler):
    max_redirections = 5

    def __init__(self, allowed: Allowed | None) -> None:
        self._allowed = allowed

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        if not is_web(newurl):
            raise WebError(f"{req.full_url} leads to {newurl:.200}, which is no URL of http(s)")
        if self._allowed is not None and (why := self._allowed(newurl)):
            raise WebError(f"{req.full_url} leads to {newurl:.200}, which is not read: {why}")
        fp.close()  # what comes with it would be read to its end, however long it is
        found = super().redirect_request(req, fp, code, msg, headers, newurl)
        if found is not None:
            found.pace = req.pace  # type: ignore[attr-defined]
        return found


# ---------------------------------------------------------------- connections

Dial = Callable[..., socket.socket]


def _dial(
    reachable: Reachable,
    pace: AnswerDeadline,
    address: tuple[str, int],
    timeout: float | None = None,
    source_address: Any = None,
) -> socket.socket:
    """As socket.create_connection, to those addresses of a name that may be reached, in the time
    that the pace leaves. Raises WebError, OSError."""
    host, port = address
    problem: Exception = WebError(f"{host} leads to no address")
    for family, kind, protocol, _, there in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        if why := reachable(host, str(there[0])):
            problem = WebError(f"{host} leads to {there[0]}: {why}")
            continue
        left_s = pace.left_s()
        sock = socket.socket(family, kind, protocol)
        try:
            sock.settimeout(left_s)
            sock.connect(there)
            sock.settimeout(pace.left_s())  # for a handshake and the request
            return sock
        except OSError as error:
            sock.close()
            problem = error
    raise problem


class _Paced(io.RawIOBase):
    """The bytes of a socket, each waited for as long as the pace says."""

    def __init__(self, sock: socket.socket, raw: Any, pace: AnswerDeadline) -> None:
        self._sock, self._raw, self._pace = sock, raw, pace

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._sock.settimeout(self._pace.left_s())
        try:
            size: int | None = self._raw.readinto(buffer)
        except TimeoutError:
            self._pace.left_s()  # of two reasons to end, the better one to say
            raise
        self._pace.came(size or 0)
        return size

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Answer(http.client.HTTPResponse):
    def __init__(
        self, pace: AnswerDeadline, sock: socket.socket, *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(sock, *args, **kwargs)
        self.fp = io.BufferedReader(_Paced(sock, self.fp.detach(), pace))


def _made(
    of: Callable[..., Any], dial: Dial, pace: AnswerDeadline, *args: Any, **kwargs: Any
) -> Any:
    """A connection that dials so, and whose answers come so."""
    made = of(*args, **kwargs)
    made._create_connection = partial(dial, pace)  # its only way in
    made.response_class = partial(_Answer, pace)
    return made


class _Http(urllib.request.HTTPHandler):
    def __init__(self, dial: Dial) -> None:
        super().__init__()
        self._dial = dial

    def http_open(self, req: Any) -> Any:
        return self.do_open(partial(_made, http.client.HTTPConnection, self._dial, req.pace), req)


class _Https(urllib.request.HTTPSHandler):
    def __init__(self, dial: Dial, context: ssl.SSLContext) -> None:
        super().__init__(context=context)
        self._dial, self._tls = dial, context

    def https_open(self, req: Any) -> Any:
        made = partial(_made, http.client.HTTPSConnection, self._dial, req.pace)
        return self.do_open(made, req, context=self._tls)
