"""The store on disk: what it keeps, what it refuses, what it goes on from."""

from __future__ import annotations

import hashlib
import os
import random
import threading
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal.broker.service.blobs import BlobLimits, BlobStore, BlobStoreError


def name_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def store(tmp_path: Path):
    with BlobStore(tmp_path / "blobs") as opened:
        yield opened


def files(store: BlobStore) -> list[str]:
    return sorted(str(p.relative_to(store.folder)) for p in store.folder.rglob("*") if p.is_file())


def test_what_was_put_can_be_read_in_ranges_and_pieces(store) -> None:
    data = bytes(range(256)) * 10
    name = store.put(data)
    assert store.get(name) == data
    assert b"".join(store.read(name, 100, 50)) == data[100:150]
    assert b"".join(store.read(name, 2000)) == data[2000:]
    assert [len(p) for p in store.read(name, 0, 250, piece_bytes=100)] == [100, 100, 50]
    assert list(store.read(name, len(data))) == []
    assert files(store) == [f"whole/{name}"]


@pytest.mark.parametrize("data", [b"", b"x"])
def test_empty_and_tiny_blobs(store, data) -> None:
    assert store.get(store.put(data)) == data


def test_a_blob_that_is_here_needs_no_upload(store) -> None:
    name = store.put(b"abc")
    assert store.begin(name, 3) is None
    with pytest.raises(BlobStoreError, match="has 3 bytes, the upload announces 4"):
        store.begin(name, 4)


@pytest.mark.parametrize("name", ["", "../../etc/passwd", "AB" * 32, "ab" * 33, "a/" * 32])
def test_a_name_that_is_no_hash_never_reaches_the_disk(store, name) -> None:
    with pytest.raises(BlobStoreError, match="is no blob hash") as caught:
        store.begin(name, 3)
    assert caught.value.code == "INVALID_ARGUMENT"
    with pytest.raises(BlobStoreError, match="there is no blob") as caught:
        store.read(name)
    assert caught.value.code == "NOT_FOUND"
    assert store.size_of(name) == 0


def test_bytes_that_are_not_what_the_name_says_are_not_kept(store) -> None:
    upload = store.begin(name_of(b"abc"), 3)
    upload.write(b"abd")
    with pytest.raises(BlobStoreError, match="have SHA-256"):
        upload.finish()
    assert files(store) == []
    assert store.size_of(name_of(b"abc")) == 0


def test_more_bytes_than_announced_are_refused(store) -> None:
    upload = store.begin(name_of(b"abc"), 3)
    with pytest.raises(BlobStoreError, match="4 bytes came, 3 were announced"):
        upload.write(b"abcd")
    upload.stop()


def test_ranges_outside_of_a_blob_are_refused(store) -> None:
    name = store.put(b"abc")
    for offset, length in ((4, 0), (0, 4), (2, 2), (-1, 1)):
        with pytest.raises(BlobStoreError, match="it has 3 bytes") as caught:
            store.read(name, offset, length)
        assert caught.value.code == "OUT_OF_RANGE"


def test_an_upload_that_broke_goes_on_where_it_ended(store) -> None:
    data = b"0123456789"
    upload = store.begin(name_of(data), 10)
    upload.write(data[:6])
    upload.stop()
    assert store.size_of(name_of(data)) == 6
    with pytest.raises(
        BlobStoreError, match="would go on at byte 4, the part that is here ends at 6"
    ):
        store.begin(name_of(data), 10, offset=4)
    upload = store.begin(name_of(data), 10, offset=6)
    upload.write(data[6:])
    upload.finish()
    assert store.get(name_of(data)) == data
    upload.stop()  # nothing happens
    assert store.whole(name_of(data))


def test_parts_and_blobs_survive_a_restart_and_second_uploads_do_not(tmp_path) -> None:
    data = b"0123456789"
    with BlobStore(tmp_path) as store:
        whole = store.put(b"whole")
        first = store.begin(name_of(data), 10)
        first.write(data[:4])
        second = store.begin(name_of(data), 10)
        second.write(data[:2])
        assert store.size_of(name_of(data)) == 0  # it is being written: begin at 0
    (tmp_path / "part" / "junk").write_bytes(b"junk")
    with BlobStore(tmp_path) as store:
        assert store.get(whole) == b"whole"
        assert store.size_of(name_of(data)) == 4
        assert files(store) == [f"part/{name_of(data)}", f"whole/{whole}"]


def test_an_upload_may_start_over(store) -> None:
    upload = store.begin(name_of(b"abc"), 3)
    upload.write(b"ab")
    upload.stop()
    upload = store.begin(name_of(b"abc"), 3, offset=0)
    upload.write(b"abc")
    upload.finish()
    assert store.get(name_of(b"abc")) == b"abc"


def test_a_temporary_store_leaves_nothing() -> None:
    with BlobStore() as store:
        store.put(b"abc")
        folder = store.folder
        store.begin(name_of(b"xyz"), 3)
    assert not folder.exists()


def test_sizes_are_bounded(tmp_path) -> None:
    limits = BlobLimits(blob_bytes=10, total_bytes=16, blobs=3)
    with BlobStore(tmp_path, limits) as store:
        with pytest.raises(BlobStoreError, match="has 11 bytes: expected at most 10"):
            store.begin(name_of(b"a"), 11)
        store.put(b"0123456789")
        running = store.begin(name_of(b"abcd"), 4)
        with pytest.raises(BlobStoreError, match="holds 14 of at most 16, 1 too many"):
            store.put(b"xyz")
        running.stop()
        store.put(b"xyz")
        store.put(b"x")
        with pytest.raises(BlobStoreError, match="holds 3 blobs"):
            store.put(b"y")


def test_what_has_come_of_an_upload_takes_its_place(tmp_path) -> None:
    with BlobStore(tmp_path, BlobLimits(total_bytes=16)) as store:
        store.put(b"x" * 10)
        upload = store.begin("ab" * 32, 4, by="eve")
        upload.write(b"1234")
        for end in (lambda: None, upload.stop):  # its part stays for a while
            end()
            with pytest.raises(
                BlobStoreError, match="the broker holds 14 of at most 16, 2 too many"
            ):
                store.begin("cd" * 32, 4, by="ann")


def test_a_disk_that_is_nearly_full_is_said_before_and_one_that_is_full_at_once(tmp_path) -> None:
    left = [100]
    limits = BlobLimits(spare_bytes=20)
    with BlobStore(tmp_path, limits, free=lambda _: left[0]) as store:
        running = store.begin(name_of(b"x" * 50), 50)
        with pytest.raises(
            BlobStoreError, match="the broker's disk has room for 30 more"
        ) as caught:
            store.begin(name_of(b"y" * 31), 31)
        assert caught.value.code == "RESOURCE_EXHAUSTED"
        running.write(b"x" * 40)
        left[0] = 60
        assert store.begin(name_of(b"y" * 30), 30) is not None, "what is written is not promised"
    with BlobStore(tmp_path / "full", free=lambda _: 1 << 40) as store:
        upload = store.begin(name_of(b"abc"), 3)
        os.close(upload._fd)
        upload._fd = os.open("/dev/full", os.O_WRONLY)
        with pytest.raises(BlobStoreError, match=r"disk is full: blob .* ends at byte 0 of 3"):
            upload.write(b"abc")


class Files:
    """What a store should hold, the plain way: by name, bytes and when each was used."""

    def __init__(self) -> None:
        self.now = 1e9
        self.used: dict[str, float] = {}


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32))
def test_what_is_needed_or_in_use_is_never_removed_and_the_rest_goes(
    tmp_path_factory, seed: int
) -> None:
    """Random uses, restarts and collections against a plain list of times."""
    rng, model = random.Random(seed), Files()
    blobs = [bytes([i]) * (i + 1) for i in range(6)]
    names = [name_of(b) for b in blobs]
    limits = BlobLimits(grace_s=1000.0)
    folder = tmp_path_factory.mktemp("blobs")

    def opened() -> BlobStore:
        store = BlobStore(folder, limits, clock=lambda: model.now)
        store.open()
        return store

    store = opened()
    for _ in range(40):
        i = rng.randrange(6)
        model.now += rng.choice((0.0, 300.0, 900.0))
        match rng.choice(("put", "ask", "read", "collect", "restart")):
            case "put":
                store.put(blobs[i])
                os.utime(folder / "whole" / names[i], (model.now, model.now))
                model.used[names[i]] = model.now
            case "ask" if names[i] in model.used:
                assert store.whole(names[i])
                model.used[names[i]] = model.now
            case "read" if names[i] in model.used:
                assert store.get(names[i]) == blobs[i]
                model.used[names[i]] = model.now
            case "collect":
                needed = set(rng.sample(names, rng.randrange(4)))
                gone = {
                    n
                    for n, used in model.used.items()
                    if n not in needed and used < model.now - limits.grace_s
                }
                assert store.collect(needed)[0] == len(gone)
                model.used = {n: t for n, t in model.used.items() if n not in gone}
            case "restart":
                store.close()
                store = opened()
        assert files(store) == sorted(f"whole/{n}" for n in model.used)
    store.close()


def test_a_part_that_nobody_goes_on_with_goes_too_and_one_being_written_stays(tmp_path) -> None:
    now = [1e9]
    with BlobStore(tmp_path, BlobLimits(grace_s=10.0), clock=lambda: now[0]) as store:
        for data, stop in ((b"abc", True), (b"xyz", False)):
            upload = store.begin(name_of(data), 3)
            upload.write(data[:2])
            if stop:
                upload.stop()
        now[0] += 11
        assert store.collect(()) == (1, 2)
        assert files(store) == [f"part/{name_of(b'xyz')}"]
        assert store.size_of(name_of(b"abc")) == 0
        upload.write(b"z")
        upload.finish()
        assert store.get(name_of(b"xyz")) == b"xyz"


def test_who_asks_for_a_blob_while_others_are_removed_still_finds_it(tmp_path) -> None:
    """Whoever waits for the store gets at it between two files."""
    now = [1e9]

    class Lock:
        def __init__(self) -> None:
            self.lock, self.left = threading.Lock(), 0

        def __enter__(self) -> None:
            self.lock.acquire()

        def __exit__(self, *_: object) -> None:
            self.lock.release()
            self.left += 1
            if self.left == 2:  # the list is made, and one of the three is gone
                assert store.whole(names[2])

    with BlobStore(tmp_path, BlobLimits(grace_s=9000.0), clock=lambda: now[0]) as store:
        names = [store.put(bytes([i])) for i in range(3)]
        now[0] += 9001
        store._lock = Lock()  # type: ignore[assignment]
        assert store.collect(()) == (2, 2)
        assert store.lacks(names) == names[:2]
        assert files(store) == [f"whole/{names[2]}"]


def test_who_reads_a_blob_that_goes_reads_on(tmp_path) -> None:
    now = [1e9]
    with BlobStore(tmp_path, BlobLimits(grace_s=10.0), clock=lambda: now[0]) as store:
        name = store.put(b"0123456789")
        pieces = store.read(name, piece_bytes=4)
        assert next(pieces) == b"0123"
        now[0] += 11
        store.collect(())
        assert b"".join(pieces) == b"456789"
        assert not store.whole(name)


def test_uploads_of_one_blob_at_once_all_end_well(store) -> None:
    data = bytes(range(256)) * 64
    name = name_of(data)
    barrier = threading.Barrier(6)
    failures: list[BaseException] = []

    def upload() -> None:
        try:
            mine = store.begin(name, len(data))
            barrier.wait()
            assert mine is not None
            for at in range(0, len(data), 1000):
                mine.write(data[at : at + 1000])
            barrier.wait()
            mine.finish()
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=upload) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert store.get(name) == data
    assert files(store) == [f"whole/{name}"]
    assert repr(store) == f"<BlobStore 1 blobs, {len(data)} bytes, 0 uploads>"
