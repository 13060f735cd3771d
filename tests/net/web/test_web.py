"""Byte ranges from the web, against a real server: what is read, and what is not believed."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator

import pytest

from shoal.net.web.web import Web, WebError

from .web_files import Served, serving

DATA = bytes(range(256)) * 40


@pytest.fixture
def served() -> Iterator[Served]:
    with serving() as found:
        found.files["/w"] = DATA
        yield found


def web(**settings: object) -> Web:
    return Web(pause=lambda seconds: None, **settings)  # type: ignore[arg-type]


def test_ranges_are_the_files_bytes(served: Served) -> None:
    file = web().look(f"{served.address}/w")
    assert (file.size_bytes, file.tag) == (len(DATA), f'"{len(DATA)}"')
    for offset, length in ((0, 1), (100, 5000), (len(DATA) - 3, 3)):
        assert web().read(file, offset, length) == DATA[offset : offset + length]


def test_a_small_file_is_read_whole_and_no_larger_one(served: Served) -> None:
    assert web().small(f"{served.address}/w", len(DATA)) == DATA
    assert web().small(f"{served.address}/none", 10) is None
    with pytest.raises(WebError, match="has more than the 10 bytes"):
        web().small(f"{served.address}/w", 10)


@pytest.mark.parametrize(
    ("status", "headers", "body", "says"),
    [
        (200, {}, DATA, "answers 200 to a range of bytes"),
        (206, {"Content-Range": "bytes 1-4/10240"}, b"1234", "answers with the range 'bytes 1-4"),
        (206, {"Content-Range": "bytes 0-3/9999"}, b"1234", "has 9999 bytes.*It was changed"),
        (206, {"Content-Range": "bytes 0-3/10240", "ETag": '"2"'}, b"1234", "It was changed"),
        (206, {"Content-Range": "bytes 0-3/10240"}, b"12345", "answers 5 bytes: expected 4"),
        (206, {"Content-Range": "four"}, b"1234", "answers with the range 'four'"),
        (403, {}, b"", "answers 403"),
        (404, {}, b"", "no such file"),
    ],
)
def test_another_answer_than_was_asked_for_is_an_error(
    served: Served, status: int, headers: dict[str, str], body: bytes, says: str
) -> None:
    file = web().look(f"{served.address}/w")
    served.spoil = lambda *_: (status, headers, body)
    with pytest.raises(WebError, match=says):
        web().read(file, 0, 4)


def test_what_passes_is_tried_again(served: Served) -> None:
    file = web().look(f"{served.address}/w")
    answers = iter([503, 429, 0])

    def busy(
        status: int, headers: dict[str, str], body: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        return (code, {}, b"") if (code := next(answers)) else (status, headers, body)

    served.spoil = busy
    assert web().read(file, 7, 9) == DATA[7:16]
    # A connection that breaks in the middle of a body.
    cut = iter([True, False])

    def broken(
        status: int, headers: dict[str, str], body: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        if next(cut):
            return status, headers | {"Content-Length": str(len(body))}, body[:2]
        return status, headers, body

    served.spoil = broken
    web_of_one_s = web(timeout_s=1.0)
    assert web_of_one_s.read(file, 7, 9) == DATA[7:16]


def test_a_server_that_is_busy_for_good_is_given_up(served: Served) -> None:
    file = web().look(f"{served.address}/w")
    served.spoil = lambda *_: (503, {}, b"")
    served.asked.clear()
    with pytest.raises(WebError, match="cannot be reached: 503"):
        web(attempts=3).read(file, 0, 4)
    assert len(served.asked) == 3


def test_nobody_is_dialled_who_may_not_be_reached(served: Served) -> None:
    told: list[tuple[str, str]] = []

    def reachable(host: str, address: str) -> str:
        told.append((host, address))
        return "it is this very host"

    with pytest.raises(WebError, match=r"leads to 127\.0\.0\.1: it is this very host"):
        web(reachable=reachable).look(f"{served.address}/w")
    assert told == [("127.0.0.1", "127.0.0.1")]
    assert served.asked == []
    open_to_all = web(reachable=lambda host, address: "")
    assert open_to_all.look(f"{served.address}/w").size_bytes == len(DATA)


def test_redirects_are_asked_about_too(served: Served) -> None:
    served.redirects["/there"] = f"{served.address}/w"
    assert web().look(f"{served.address}/there").size_bytes == len(DATA)
    served.asked.clear()
    picky = web(allowed=lambda url: "" if url.endswith("/there") else "it is not on the list")
    with pytest.raises(WebError, match=r"leads to .*/w, which is not read: it is not on the list"):
        picky.look(f"{served.address}/there")
    assert [path for path, _ in served.asked] == ["/there"]
    served.redirects["/file"] = "file:///etc/passwd"
    with pytest.raises(WebError, match="is not allowed"):
        web().look(f"{served.address}/file")
    for other in ("file:///etc/passwd", "ftp://x/y", "data:,x"):
        with pytest.raises(WebError, match="no URL of http or https"):
            web().look(other)
    served.redirects["/round"] = f"{served.address}/round"
    with pytest.raises(WebError, match="answers 302"):
        web().look(f"{served.address}/round")


def test_five_redirects_are_followed_and_no_sixth(served: Served) -> None:
    for i in range(1, 7):
        served.redirects[f"/{i}"] = f"{served.address}/{i - 1 if i > 1 else 'w'}"
    assert web().look(f"{served.address}/5").size_bytes == len(DATA)
    with pytest.raises(WebError, match="answers 302"):
        web().look(f"{served.address}/6")


def test_what_comes_with_a_redirect_is_not_read(served: Served) -> None:
    served.redirects["/there"] = f"{served.address}/w"
    served.beside = bytes(64 << 20)
    tracemalloc.start()
    try:
        assert web().look(f"{served.address}/there").size_bytes == len(DATA)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
