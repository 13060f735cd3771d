"""A server that drips a source of data holds nobody without end."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from shoal.peer.data import DataError, paced
from shoal.peer.data.sources import resolve

from ...net.web.dripping import dripping

TEXT = b"all fish swim in one sea. " * 60
SIZED = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(TEXT)


@pytest.fixture(autouse=True)
def _small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    small = partial(paced.client_options, silent_s=0.2, head_s=0.3, floor=10_000)
    monkeypatch.setattr(paced, "client_options", small)
    monkeypatch.setenv("no_proxy", "*")


@pytest.mark.parametrize("kind", ["text", "arrays"])
@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ((b"HTTP/1.1 200 OK\r\nX: ", b"x", b"\r\n\r\n"), "no whole head of an answer in 0.3 s"),
        ((SIZED, b"a", TEXT[150:]), r"\d+ bytes in [\d.]+ s, given up"),
    ],
)
def test_a_source_that_drips_is_given_up(
    tmp_path: Path, kind: str, answer: tuple[bytes, bytes, bytes], says: str
) -> None:
    with dripping(answer) as address, pytest.raises(DataError, match=says):
        resolve(tmp_path, kind=kind, source=f"{address}/sea.npz", length=8)


def test_whoever_is_slow_and_comes_is_read(tmp_path: Path) -> None:
    with dripping((SIZED, TEXT[:400], b"")) as address:
        manifest, _ = resolve(tmp_path, source=f"{address}/sea.txt", length=8)
    assert manifest.total == len(TEXT)
