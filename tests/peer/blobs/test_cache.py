"""The cache of blobs: checked, bounded, fetched once."""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.peer.blobs.cache import KEPT_S, BlobCache, BlobMismatchError, take_over
from shoal.proto import common_pb2


def name_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Store:
    """Blobs of somebody else, and how often each was asked for."""

    def __init__(self, *blobs: bytes) -> None:
        self.blobs = {name_of(b): b for b in blobs}
        self.asked: list[tuple[str, int, int]] = []

    def fetch(self, name: str, offset: int, length: int) -> Iterator[bytes]:
        self.asked.append((name, offset, length))
        data = self.blobs[name][offset : offset + length if length else None]
        for at in range(0, len(data), 3):
            yield data[at : at + 3]


def test_a_blob_is_fetched_once_and_checked(tmp_path: Path) -> None:
    store = Store(b"hello fish")
    cache = BlobCache(tmp_path, store.fetch)
    name = name_of(b"hello fish")
    assert cache.path(name).read_bytes() == b"hello fish"
    assert cache.whole(common_pb2.BlobRef(hash=name, size_bytes=10)) == b"hello fish"
    assert store.asked == [(name, 0, 0)]


def test_a_damaged_blob_is_refused_and_not_kept(tmp_path: Path) -> None:
    store = Store(b"good")
    name = name_of(b"good")
    store.blobs[name] = b"evil"
    with pytest.raises(BlobMismatchError, match=name[:12]):
        BlobCache(tmp_path, store.fetch).path(name)
    assert list(tmp_path.iterdir()) == []


def test_a_part_is_read_without_the_rest(tmp_path: Path) -> None:
    store = Store(b"0123456789")
    cache = BlobCache(tmp_path, store.fetch)
    name = name_of(b"0123456789")
    assert cache.read(name, 2, 5) == b"23456"
    assert cache.read(name, 4, 0) == b""
    assert store.asked == [(name, 2, 5)]
    cache.path(name)
    assert cache.read(name, 2, 5) == b"23456"
    assert len(store.asked) == 2
    with pytest.raises(BlobMismatchError, match="expected 5"):
        cache.read(name, 8, 5)


def test_what_is_longer_than_it_may_be_is_stopped(tmp_path: Path) -> None:
    store = Store(b"x" * 100)
    cache = BlobCache(tmp_path, store.fetch, limit_bytes=10)
    for most in (None, 50):  # what somebody says of it makes it no more
        with pytest.raises(BlobMismatchError, match="more than 10"):
            cache.path(name_of(b"x" * 100), most)


def test_a_part_that_never_ends_is_stopped(tmp_path: Path) -> None:
    given: list[int] = []

    def fetch(_: str, offset: int, length: int) -> Iterator[bytes]:
        for i in range(1000):
            given.append(i)
            yield b"x" * length

    with pytest.raises(BlobMismatchError, match="sends more than 5 bytes"):
        BlobCache(tmp_path, fetch).read("ab" * 32, 0, 5)
    assert len(given) == 2


def test_the_least_recently_used_makes_room(tmp_path: Path) -> None:
    blobs = [bytes([i]) * 4 for i in range(3)]
    store = Store(*blobs)
    cache = BlobCache(tmp_path, store.fetch, limit_bytes=8, settle_s=0.0)
    first = cache.path(name_of(blobs[0]))
    with open(first, "rb") as file:
        cache.path(name_of(blobs[1]))
        cache.path(name_of(blobs[2]))
        assert not first.exists()
        assert file.read() == blobs[0], "who has it open can read on"
    assert len(list(tmp_path.iterdir())) == 2


def test_a_name_that_is_no_hash_never_becomes_a_path(tmp_path: Path) -> None:
    cache = BlobCache(tmp_path, Store().fetch)
    for name in ("../../etc/passwd", "", "A" * 64):
        with pytest.raises(BlobMismatchError, match="hash"):
            cache.path(name)
        with pytest.raises(BlobMismatchError, match="hash"):
            cache.read(name, 0, 1)


def test_two_threads_that_want_one_blob_cause_one_fetch(tmp_path: Path) -> None:
    store, gate = Store(b"shared"), threading.Event()

    def slow(name: str, offset: int, length: int) -> Iterator[bytes]:
        gate.wait()
        yield from store.fetch(name, offset, length)

    cache = BlobCache(tmp_path, slow)
    threads = [threading.Thread(target=cache.path, args=(name_of(b"shared"),)) for _ in range(2)]
    for thread in threads:
        thread.start()
    gate.set()
    for thread in threads:
        thread.join()
    assert len(store.asked) == 1


def test_after_a_fetch_that_failed_those_who_waited_take_turns(tmp_path: Path) -> None:
    """Two in a row that fail, and a third that comes later: one writes the part at a time."""
    store, gate = Store(b"shared blob"), threading.Event()
    writing, failures = threading.Lock(), [2]

    def flaky(name: str, offset: int, length: int) -> Iterator[bytes]:
        gate.wait()
        assert writing.acquire(blocking=False), "two at once"
        try:
            for n, piece in enumerate(store.fetch(name, offset, length)):
                yield piece
                if failures[0] and n == 1:
                    failures[0] -= 1
                    raise OSError("the link broke")
        finally:
            writing.release()

    cache, ends = BlobCache(tmp_path, flaky), []

    def want() -> None:
        while True:
            try:
                ends.append(cache.path(name_of(b"shared blob")).read_bytes())
            except OSError:
                continue
            return

    threads = [threading.Thread(target=want) for _ in range(6)]
    for thread in threads:
        thread.start()
    gate.set()
    for thread in threads:
        thread.join()
    assert ends == [b"shared blob"] * 6
    assert [offset for _, offset, _ in store.asked] == [0, 6], "each goes on; the third has all"
    assert [p.name for p in tmp_path.iterdir()] == [name_of(b"shared blob")]


FETCH = """
import sys
from pathlib import Path
from shoal.peer.blobs.cache import BlobCache

folder, name = sys.argv[1:]
data, asked = bytes(range(256)) * 4000, 0

def fetch(name, offset, length):
    global asked
    asked += 1
    yield data[offset:]

sys.stdin.readline()
print(BlobCache(Path(folder), fetch).path(name).read_bytes() == data, asked)
"""


def test_processes_on_one_folder_share_a_fetch(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FETCH, str(tmp_path), name_of(bytes(range(256)) * 4000)]
    workers = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write("go\n")
        worker.stdin.flush()
    reports = [worker.communicate()[0].split() for worker in workers]
    assert [right for right, _ in reports] == ["True"] * 3
    assert sorted(asked for _, asked in reports) == ["0", "0", "1"]


def test_a_fetch_goes_on_where_the_last_one_broke_also_in_another_process(tmp_path: Path) -> None:
    store = Store(b"0123456789")
    name = name_of(b"0123456789")
    (tmp_path / f"{name}.part").write_bytes(b"0123")
    assert BlobCache(tmp_path, store.fetch).path(name).read_bytes() == b"0123456789"
    assert store.asked == [(name, 4, 0)]


@pytest.mark.parametrize("there", [b"x123", b"0123456789abc"])
def test_a_part_that_is_none_of_it_is_fetched_anew(tmp_path: Path, there: bytes) -> None:
    store = Store(b"0123456789")
    name = name_of(b"0123456789")
    (tmp_path / f"{name}.part").write_bytes(there)
    assert BlobCache(tmp_path, store.fetch).path(name).read_bytes() == b"0123456789"
    assert store.asked == [(name, len(there), 0), (name, 0, 0)]


def test_wrong_content_of_several_is_fetched_once_more_from_one(tmp_path: Path) -> None:
    store, liars = Store(b"good"), Store(b"good")
    name = name_of(b"good")
    liars.blobs[name] = b"evil"
    cache = BlobCache(tmp_path, liars.fetch, alone=store.fetch)
    assert cache.path(name).read_bytes() == b"good"
    assert [len(s.asked) for s in (liars, store)] == [1, 1]


def test_what_a_killed_process_left_is_used_once_its_hash_was_seen_again(tmp_path: Path) -> None:
    blobs = [bytes([i]) * 7 for i in range(5)]
    names = [name_of(b) for b in blobs]
    _, torn, damaged, longer, old = names
    for name, data in zip(names, blobs, strict=True):
        (tmp_path / name).write_bytes(data)
    (tmp_path / torn).write_bytes(blobs[1][:4])  # as by a power cut
    (tmp_path / damaged).write_bytes(b"evil!!!")
    (tmp_path / longer).write_bytes(blobs[3] + b"more")
    os.utime(tmp_path / old, (0, time.time() - KEPT_S - 60))
    store = Store(*blobs)
    take_over(tmp_path)
    cache = BlobCache(tmp_path, store.fetch)
    assert not any(cache.has(name) for name in names), "others are given nothing of it"
    assert [cache.path(name).read_bytes() for name in names] == blobs
    assert store.asked == [
        *((torn, 4, 0), (damaged, 7, 0), (damaged, 0, 0), (longer, 11, 0), (longer, 0, 0)),
        (old, 0, 0),
    ]
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(names)


def test_what_was_left_is_within_the_limit_and_the_oldest_go(tmp_path: Path) -> None:
    blobs = [bytes([i]) * 4 for i in range(4)]
    for age, data in enumerate(blobs):
        (tmp_path / name_of(data)).write_bytes(data)
        os.utime(tmp_path / name_of(data), (0, time.time() - 600 - age))
    take_over(tmp_path)
    cache = BlobCache(tmp_path, Store(*blobs, b"new1").fetch, limit_bytes=12)
    left = {name_of(data) + ".part" for data in blobs}
    assert {p.name for p in tmp_path.iterdir()} == left
    with open(tmp_path / f"{name_of(blobs[2])}.part", "ab") as fetched:
        fcntl.flock(fetched, fcntl.LOCK_EX)
        cache.path(name_of(b"new1"))
    gone = {name_of(data) + ".part" for data in (blobs[1], blobs[3])}
    assert {p.name for p in tmp_path.iterdir()} == left - gone | {name_of(b"new1")}
