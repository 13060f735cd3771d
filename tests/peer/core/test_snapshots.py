"""Snapshots as they lie on a host: in memory, or as files that outlive the process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.compression.codec import RAW
from shoal.dag.execute.execute import TensorSpecError
from shoal.dag.ir.graph import TensorSpec
from shoal.dag.schedule.flow import Role
from shoal.net.links.frame import Arrived, FrameKey
from shoal.peer.core import snapshots
from shoal.peer.core.snapshots import SnapshotError, SnapshotId, SnapshotStore, in_parts
from shoal.proto import broker_pb2

SNAPSHOT = broker_pb2.Snapshot(
    run="r", term=2, step=7, holder="a", spans=[broker_pb2.Span(start=0, stop=4)]
)
NAME = SnapshotId.of(SNAPSHOT)
PARTS = (memoryview(b"first"), memoryview(b"second"), memoryview(b""))

Make = Callable[[], SnapshotStore]


@pytest.fixture(params=["memory", "folder"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    """Each call is another process's store, in the same folder."""
    return lambda: SnapshotStore(tmp_path / "s" if request.param == "folder" else None)


def came(i: int, of: int = 3, name: SnapshotId = NAME) -> Arrived:
    key = name.frame(4, i, of, "a", "c")
    data = memoryview(bytearray(PARTS[i]))
    return Arrived(key, RAW.name, b"", TensorSpec((data.nbytes,), "uint8"), data)


def test_what_was_put_comes_back_whole_and_part_by_part(make: Make) -> None:
    store = make()
    store.put(SNAPSHOT, PARTS)
    assert store.parts(NAME) == PARTS
    for i, part in enumerate(PARTS):
        payload = store.payload(NAME.frame(9, i, 3, "a", "b"))
        assert b"".join(payload.buffers) == bytes(part)
        assert payload.spec == TensorSpec((len(part),), "uint8")
    store.drop(NAME)
    store.drop(NAME)
    with pytest.raises(SnapshotError, match=r"of a after 7 steps of r .* does not lie here"):
        store.parts(NAME)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 1, 0, 2, 0)])
def test_parts_that_come_make_the_same_bytes_in_any_order(
    make: Make, order: tuple[int, ...]
) -> None:
    store = make()
    for i in order:
        store.accept(came(i))
    store.whole(SNAPSHOT, 3)
    assert store.parts(NAME) == PARTS


def test_a_frame_that_is_no_part_is_refused_and_not_kept(make: Make) -> None:
    store, good = make(), came(0)
    bad = [
        replace(good, codec="int8/1"),
        replace(good, spec=TensorSpec((4,), "uint8")),
        replace(good, spec=TensorSpec((5,), "int8")),
        replace(good, absent=True),
        replace(good, key=good.key._replace(role=Role.SYNC)),
        replace(good, key=good.key._replace(port="x/a")),
        replace(good, key=good.key._replace(port="2/")),
        replace(good, key=good.key._replace(microbatch=3)),
        replace(good, key=good.key._replace(hop=1 << 17)),
    ]
    for one in bad:
        with pytest.raises(TensorSpecError):
            store.accept(one)
    with pytest.raises(SnapshotError):
        store.parts(NAME)


def test_parts_of_other_counts_are_refused(make: Make) -> None:
    store = make()
    store.accept(came(0))
    with pytest.raises(TensorSpecError, match="a part of 2, the first that came was of 3"):
        store.accept(came(1, of=2))
    store.drop(NAME)
    store.accept(came(1, of=2))


def test_the_next_process_finds_what_was_whole(tmp_path: Path) -> None:
    first = SnapshotStore(tmp_path)
    first.put(SNAPSHOT, PARTS)
    other = NAME._replace(step=8)
    first.accept(came(0, name=other))
    second = SnapshotStore(tmp_path)
    assert second.found() == ((SNAPSHOT, 3),)
    assert second.parts(NAME) == PARTS
    assert len([*tmp_path.iterdir()]) == 1, "what was not whole is gone"
    second.accept(came(1, of=2, name=other))


def test_memory_forgets_what_was_not_whole() -> None:
    """A store of the simulated world outlives the processes of its peer."""
    store = SnapshotStore()
    store.put(SNAPSHOT, PARTS)
    store.accept(came(0, name=NAME._replace(step=8)))
    assert store.found() == ((SNAPSHOT, 3),)
    with pytest.raises(SnapshotError):
        store.parts(NAME._replace(step=8))


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "1").unlink(),
        lambda folder: (folder / "snapshot.json").unlink(),
        lambda folder: (folder / "snapshot.json").write_text("{"),
        lambda folder: (folder / "snapshot.json").write_text("[]"),
        lambda folder: (folder / "snapshot.json").write_text('{"snapshot": "zz", "parts": 3}'),
        lambda folder: (folder / "snapshot.json").write_text('{"snapshot": "ff", "parts": 3}'),
        lambda folder: note(folder, '"parts": 3', '"parts": 0'),
        lambda folder: note(folder, '"parts": 3', '"parts": -1'),
        lambda folder: note(folder, '"parts": 3', '"parts": null'),
        lambda folder: folder.rename(folder.with_name("0" * 32)),
    ],
)
def test_a_damaged_folder_is_removed(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    SnapshotStore(tmp_path).put(SNAPSHOT, PARTS)
    damage(next(tmp_path.iterdir()))
    again = SnapshotStore(tmp_path)
    assert again.found() == ()
    assert not [*tmp_path.iterdir()]


def note(folder: Path, old: str, new: str) -> None:
    path = folder / "snapshot.json"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


def test_it_is_read_part_by_part_for_whoever_uploads_it(make: Make) -> None:
    store = make()
    store.put(SNAPSHOT, PARTS)
    whole, streamed = b"".join(PARTS), store.streamed(NAME)
    for offset in range(len(whole) + 1):
        for most in (1, 4, 100):
            pieces = list(streamed.pieces(offset, most))
            assert b"".join(pieces) == whole[offset:]
            assert all(0 < len(piece) <= most for piece in pieces)
    store.drop(NAME)
    with pytest.raises(SnapshotError, match="does not lie here"):
        store.streamed(NAME)


def test_a_part_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path)
    store.put(SNAPSHOT, PARTS)
    (next(tmp_path.iterdir()) / "1").unlink()
    with pytest.raises(SnapshotError, match=r"of a after 7 steps .* cannot be read"):
        store.parts(NAME)


@settings(max_examples=20)
@given(
    st.builds(
        SnapshotId,
        *(st.text(), st.integers(0, 9), st.integers(0), st.text(min_size=1), st.integers(0)),
    ),
    st.integers(1, 1 << 16),
    st.data(),
)
def test_a_part_says_whose_it_is(name: SnapshotId, parts: int, data: st.DataObject) -> None:
    key = name.frame(3, data.draw(st.integers(0, parts - 1)), parts, "a", "b")
    assert SnapshotId.of_frame(key) == name
    assert isinstance(key, FrameKey)


@given(st.binary(max_size=40))
def test_bytes_are_cut_into_parts_of_a_size(data: bytes) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshots, "PART_BYTES", 7)
        parts = in_parts(data)
    assert b"".join(parts) == data
    assert len(parts) == max(1, -(-len(data) // 7))
    assert all(len(p) == 7 for p in parts[:-1])
