"""Byte ranges of files on the web (http and https), by the standard library's client.

    web = Web()
    file = web.look("https://example.org/model-00001-of-00002.safetensors")
    data = web.read(file, offset=8, length=4096)

An answer is believed as little as it can be checked: it has to be the range that was asked for, of
a file of the size that it had at first, with the entity tag that it had at first, and as many bytes
as it says. What passes (a broken connection, "busy") is tried again.

`allowed` is asked for every URL, those of redirects too, and `reachable` for every address that a
name leads to, right before that very address is dialled: so no name leads anywhere else meanwhile.
With it no proxy is used, as that would look names up itself. All methods block, none without end:
the head of an answer has a deadline, and its body a rate that it must reach (`dial.py`).
"""

from __future__ import annotations

import http.client
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..printable import printable
from .dial import AnswerDeadline, Asked, Clock, TooSlowError, WebError, is_web, opener

__all__ = ["HEAD_S", "SLOW", "Web", "WebError", "WebFile", "is_web"]

HEAD_S = 60.0
"""For the head of an answer, with dialling and redirects: as long as one silence is waited for."""
SLOW = 16 << 10
"""Bytes per second that a body has at least, on average: a line of 128 kbit/s, over which a billion
parameters would take a day and a half. A range of 64 MiB ends within 69 minutes."""

_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})")
_AGAIN = (408, 425, 429, 500, 502, 503, 504)
"""Statuses that may pass."""
_AGENT = "shoal"


@dataclass(frozen=True)
class WebFile:
    """As it was when it was looked at. tag: its strong entity tag; empty: it has none."""

    url: str
    size_bytes: int
    tag: str = ""


class Web:
    """Reads byte ranges of files on the web. `allowed` and `reachable` say why not; empty: it is.
    timeout_s: without a byte; head_s: for the head of an answer, with redirects; floor: bytes per
    second of a body, after `timeout_s`, or it is given up; attempts: tries of each call; pause:
    waits so many seconds between two; clock: seconds."""

    def __init__(
        self,
        *,
        allowed: Callable[[str], str] | None = None,
        reachable: Callable[[str, str], str] | None = None,
        timeout_s: float = 60.0,
        head_s: float = HEAD_S,
        floor: float = SLOW,
        attempts: int = 5,
        pause: Callable[[float], None] = time.sleep,
        clock: Clock = time.monotonic,
    ) -> None:
        self._allowed, self._reachable = allowed, reachable
        self._timeout_s, self._head_s, self._floor = timeout_s, head_s, floor
        self._attempts, self._pause, self._clock = attempts, pause, clock

    @cached_property
    def _opener(self) -> urllib.request.OpenerDirector:
        """Made when it is needed: it reads the system's certificates."""
        return opener(self._allowed, self._reachable)

    def look(self, url: str) -> WebFile:
        """Size and tag of a file. Raises WebError, also where it is empty or the server does not
        give ranges."""
        with self._asked(url, 0, 1)[0] as answer:
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
                answer, pace = self._asked(file.url, offset, length)
                with answer:
                    pace.body(length)
                    return self._body(file, answer, offset, length)
            except TooSlowError as error:
                raise WebError(f"{file.url} is too slow: {error}, given up") from None
            except (OSError, http.client.HTTPException) as error:  # the connection broke
                problem = error
        raise WebError(f"{file.url}: {self._attempts} tries broke, the last: {problem}")

    def small(self, url: str, most_bytes: int) -> bytes | None:
        """All of a small file; None where there is none. Raises WebError."""
        try:
            answer, pace = self._open(url, {})
            with answer:
                pace.body(most_bytes)
                data: bytes = answer.read(most_bytes + 1)
        except _AbsentError:
            return None
        except (OSError, http.client.HTTPException) as error:
            raise WebError(f"{url} cannot be read: {error}") from None
        if len(data) > most_bytes:
            raise WebError(f"{url} has more than the {most_bytes} bytes that are read of it")
        return data

    def pieces(self, url: str, most_bytes: int) -> Iterator[bytes]:
        """All of a file, and at most one byte beyond `most_bytes`, in pieces. Raises WebError."""
        try:
            answer, pace = self._open(url, {"Accept-Encoding": "identity"})
            with answer:
                pace.body(most_bytes)
                left = most_bytes + 1
                while left and (piece := answer.read(min(1 << 20, left))):
                    left -= len(piece)
                    yield piece
        except _AbsentError as error:
            raise WebError(f"{url}: {error}") from None
        except (OSError, http.client.HTTPException) as error:
            raise WebError(f"{url} cannot be read: {error}") from None

    def _body(self, file: WebFile, answer: Any, offset: int, length: int) -> bytes:
        total = _total(file.url, answer, offset, length)
        tag = answer.headers.get("ETag", "")
        if total != file.size_bytes or (file.tag and tag != file.tag):
            raise WebError(
                f"{file.url} has {total} bytes and the tag {tag!r:.80}: expected "
                f"{file.size_bytes} and {file.tag!r:.80}, as it had before. It was changed"
            )
        data = bytearray()
        while piece := answer.read(min(1 << 20, length + 1 - len(data))):
            data += piece
        if len(data) < length:
            raise ConnectionError(f"{len(data)} of {length} bytes came")
        if len(data) > length:
            raise WebError(f"{file.url} gave more than the {length} bytes from {offset} on")
        return bytes(data)

    def _asked(self, url: str, offset: int, length: int) -> tuple[Any, AnswerDeadline]:
        headers = {
            "Range": f"bytes={offset}-{offset + length - 1}",
            "Accept-Encoding": "identity",
        }
        try:
            return self._open(url, headers)
        except _AbsentError as error:
            raise WebError(f"{url}: {error}") from None

    def _open(self, url: str, headers: Mapping[str, str]) -> tuple[Any, AnswerDeadline]:
        """The answer, whose head is here, and its pace. Raises WebError, _AbsentError."""
        if not is_web(url):
            raise WebError(f"{url:.200} is no URL of http or https")
        if self._allowed is not None and (why := self._allowed(url)):
            raise WebError(f"{url} is not read: {why}")
        problem: object = ""
        for attempt in range(self._attempts):
            if attempt:
                self._pause(min(5.0, 0.1 * 2.0**attempt))
            pace = AnswerDeadline(self._timeout_s, self._head_s, self._floor, self._clock)
            request = Asked(url, {**headers, "User-Agent": _AGENT}, pace)
            try:
                return self._opener.open(request, timeout=self._timeout_s), pace
            except urllib.error.HTTPError as error:
                code = error.code
                error.close()
                if code in (404, 410):
                    raise _AbsentError(f"there is no such file ({code})") from None
                if code not in _AGAIN:
                    raise WebError(f"{url} answers {code} {printable(error.reason)}") from None
                problem = f"{code} {printable(error.reason)}"
            except TooSlowError as error:
                raise WebError(f"{url} is too slow: {error}, given up") from None
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
