"""A folder of files on the web that a user named, read by `net/web` alone: its server may redirect
to public addresses and to itself, and nowhere else on this machine's networks."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ...net.web.places import origin_of, reachable
from ...net.web.web import Web, WebError

__all__ = ["WebFolder"]

_MOST_TEXT = 64 << 20
"""Bytes of a small file, or of the page that lists a folder."""
_MOST_LISTED = 1000


class WebFolder:
    """The part of an fsspec filesystem that reading a checkpoint takes. Paths are URLs."""

    def __init__(self, url: str) -> None:
        """Raises WebError for a URL with a user in it, say."""
        if (origin := origin_of(url)) is None:
            raise WebError(f"{url:.200} is no URL of http(s)://HOST/… without a user in it")
        self._web = Web(reachable=reachable((str(origin),)))

    def exists(self, url: str) -> bool:
        return self._web.small(url, _MOST_TEXT) is not None

    def cat_file(self, url: str) -> bytes:
        """A small file. Raises WebError, FileNotFoundError."""
        if (data := self._web.small(url, _MOST_TEXT)) is None:
            raise FileNotFoundError(url)
        return data

    def glob(self, pattern: str) -> list[str]:
        """What the page of a folder links to and matches "FOLDER/NAME-*/FILE"."""
        folder, names, file = pattern.rsplit("/", 2)
        page = self._web.small(f"{folder}/", _MOST_TEXT) or b""
        wanted = re.escape(names.removesuffix("*").encode())
        found = sorted({*re.findall(rb'href="(?:\./)?(' + wanted + rb'\d{1,18})/?"', page)})
        paths = [f"{folder}/{name.decode()}/{file}" for name in found[-_MOST_LISTED:]]
        return [path for path in paths if self.exists(path)]

    def unstrip_protocol(self, url: str) -> str:
        return url

    def pieces(self, url: str, most_bytes: int) -> Iterator[bytes]:
        """All of a file, and at most one byte beyond `most_bytes`. Raises WebError."""
        return self._web.pieces(url, most_bytes)
