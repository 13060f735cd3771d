"""The store on disk: what it keeps, what it refuses, what it goes on from."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path

import pytest

from shoal.broker.blobs import BlobError, BlobLimits, BlobStore


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
    with pytest.raises(BlobError, match="has 3 bytes, the upload announces 4"):
        store.begin(name, 4)


@pytest.mark.parametrize("name", ["", "../../etc/passwd", "AB" * 32, "ab" * 33, "a/" * 32])
def test_a_name_that_is_no_hash_never_reaches_the_disk(store, name) -> None:
    with pytest.raises(BlobError, match="is no blob hash") as caught:
        store.begin(name, 3)
    assert caught.value.code == "INVALID_ARGUMENT"
    with pytest.raises(BlobError, match="there is no blob") as caught:
        store.read(name)
    assert caught.value.code == "NOT_FOUND"
    assert store.size_of(name) == 0


def test_bytes_that_are_not_what_the_name_says_are_not_kept(store) -> None:
    upload = store.begin(name_of(b"abc"), 3)
    upload.write(b"abd")
    with pytest.raises(BlobError, match="have SHA-256"):
        upload.finish()
    assert files(store) == []
    assert store.size_of(name_of(b"abc")) == 0


def test_more_bytes_than_announced_are_refused(store) -> None:
    upload = store.begin(name_of(b"abc"), 3)
    with pytest.raises(BlobError, match="4 bytes came, 3 were announced"):
        upload.write(b"abcd")
    upload.stop()


def test_ranges_outside_of_a_blob_are_refused(store) -> None:
    name = store.put(b"abc")
    for offset, length in ((4, 0), (0, 4), (2, 2), (-1, 1)):
        with pytest.raises(BlobError, match="it has 3 bytes") as caught:
            store.read(name, offset, length)
        assert caught.value.code == "OUT_OF_RANGE"


def test_an_upload_that_broke_goes_on_where_it_ended(store) -> None:
    data = b"0123456789"
    upload = store.begin(name_of(data), 10)
    upload.write(data[:6])
    upload.stop()
    assert store.size_of(name_of(data)) == 6
    with pytest.raises(BlobError, match="would go on at byte 4, the part that is here ends at 6"):
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
        with pytest.raises(BlobError, match="has 11 bytes: expected at most 10"):
            store.begin(name_of(b"a"), 11)
        store.put(b"0123456789")
        running = store.begin(name_of(b"abcd"), 4)
        with pytest.raises(BlobError, match="holds 14 of at most 16, 1 too many"):
            store.put(b"xyz")
        running.stop()
        store.put(b"xyz")
        store.put(b"x")
        with pytest.raises(BlobError, match="holds 3 blobs"):
            store.put(b"y")


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
