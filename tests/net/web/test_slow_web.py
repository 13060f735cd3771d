"""A server that drips holds nobody without end, in whatever part of an answer it does."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shoal.net.web.dial import AnswerDeadline, TooSlowError
from shoal.net.web.web import Web, WebError, WebFile

from .dripping import dripping

BODY = bytes(1000)
RANGE = b"HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 0-999/1000\r\n"
LOOKED = b"HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 0-0/1000\r\n\r\n0"
SIZED = RANGE + b"Content-Length: 1000\r\n\r\n"
CHUNKED = RANGE + b"Transfer-Encoding: chunked\r\n\r\n"


def web() -> Web:
    return Web(timeout_s=0.2, head_s=0.3, floor=10_000, attempts=1)


def look(url: str) -> None:
    web().look(url)


def read(url: str) -> None:
    web().read(WebFile(url, 1000), 0, 1000)


def small(url: str) -> None:
    web().small(url, 1000)


@pytest.mark.parametrize("use", [look, read, small])
@pytest.mark.parametrize(
    "head",
    [
        (b"", b"H", b""),
        (b"HTTP/1.1 206 Partial Content\r\nX: ", b"x", b"\r\n\r\n"),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n", LOOKED),
    ],
)
def test_a_head_that_drips_is_given_up(
    use: Callable[[str], None], head: tuple[bytes, bytes, bytes]
) -> None:
    with dripping(head) as address, pytest.raises(WebError, match="no whole head of an answer in"):
        use(f"{address}/w")


def test_the_heads_of_redirects_share_one_deadline() -> None:
    on = (b"HTTP/1.1 302 Found\r\nLocation: {address}/w\r\nX: ", b"x", b"")
    quick = (b"HTTP/1.1 302 Found\r\nLocation: {address}/w\r\n\r\n", b"x", b"")
    for hops in ((on,), (quick, quick, on)):
        with dripping(*hops) as address, pytest.raises(WebError, match="no whole head"):
            look(f"{address}/w")


@pytest.mark.parametrize(
    "body",
    [
        (SIZED, b"0", BODY),
        (RANGE + b"\r\n", b"0", BODY[150:]),
        (CHUNKED, b"1;" + b"x" * 300 + b"\r\n0\r\n", b"352\r\n" + BODY[150:] + b"\r\n0\r\n\r\n"),
        (CHUNKED + b"3e8\r\n" + BODY + b"\r\n0\r\n", b"X: " + b"x" * 300 + b"\r\n", b"\r\n"),
    ],
    ids=["sized", "to its end", "chunks with extensions", "trailers without end"],
)
def test_a_body_that_drips_is_given_up(body: tuple[bytes, bytes, bytes]) -> None:
    with dripping(body) as address, pytest.raises(WebError, match=r"is too slow: \d+ bytes in"):
        read(f"{address}/w")


def test_a_small_file_that_drips_is_given_up() -> None:
    drip = (b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n", b"0", BODY)
    with dripping(drip) as address, pytest.raises(WebError, match=r"\d+ bytes in"):
        small(f"{address}/w")


def test_whoever_is_slow_and_comes_is_read() -> None:
    """As many bytes a second as the floor."""
    with dripping((SIZED, b"0" * 400, b"")) as address:
        assert web().read(WebFile(f"{address}/w", 1000), 0, 1000) == b"0" * 1000


def test_a_pace_is_of_the_mean_and_gives_no_time_for_more_than_was_asked_for() -> None:
    now = 0.0
    pace = AnswerDeadline(10.0, 60.0, 100.0, lambda: now)
    assert pace.left_s() == 10.0  # of silence
    now = 55.0
    assert pace.left_s() == 5.0
    pace.body(2000)
    pace.came(1500)
    now += 9.0
    assert pace.left_s() == 6.0
    pace.came(10**9)
    now += 10.9
    assert pace.left_s() == pytest.approx(0.1)
    now += 0.2
    with pytest.raises(TooSlowError, match=r"1000001500 bytes in 20\.1 s"):
        pace.left_s()
