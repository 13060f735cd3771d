"""Snapshots as they lie on a host: own ones, and copies of others'.

A snapshot is what a holder needs to go on after a step (docs/architecture.md, "Words"), as bytes
that only devices read. Here it is a few parts, so that neither a frame nor a buffer has to hold all
of it. With a folder the parts are files, and outlive the process; without one they lie in memory.

On a link a part is a frame of role `snapshot`: its step is the snapshot's, its microbatch the
number of the part, its hop the number of all parts, and its port says under which term and in which
round it was taken, and whose it is. Safe to use from several threads.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from google.protobuf.message import DecodeError

from ...compression.codec import RAW
from ...dag.execute.execute import TensorSpecError
from ...dag.ir.graph import TensorSpec
from ...dag.schedule.flow import Role
from ...net.blobs.client import Streamed
from ...net.links.frame import Arrived, FrameKey, Payload
from ...proto import broker_pb2

__all__ = ["BLOCKS", "PART_BYTES", "SnapshotError", "SnapshotId", "SnapshotStore", "in_parts"]

BLOCKS = 0
"""In place of a term: what a holder gives of its stages, so that lost ones are made from it."""
PART_BYTES = 64 << 20
_MOST_PARTS = 1 << 16
_LISTED = "snapshot.json"


class SnapshotError(ValueError):
    """Nobody can go on from a snapshot: it is damaged, or lacks what is needed."""


class SnapshotId(NamedTuple):
    """One snapshot, wherever copies of it lie. `step`: updates that are in it; `term`: of the plan
    under which `holder` took it. `round`: of a run with rounds, whose version is in it: behind the
    last step of a round there is another one before the exchange than behind it."""

    run: str
    term: int
    step: int
    holder: str
    round: int = 0

    def __str__(self) -> str:
        return f"snapshot of {self.holder} after {self.step} steps of {self.run} (term {self.term})"

    @classmethod
    def of(cls, message: broker_pb2.Snapshot) -> SnapshotId:
        return cls(message.run, message.term, message.step, message.holder, message.round)

    def frame(self, term: int, part: int, parts: int, source: str, destination: str) -> FrameKey:
        """A part of it on its way, in an assignment's term."""
        port = f"{self.term}/{self.round}/{self.holder}"
        return FrameKey(
            self.run, term, self.step, Role.SNAPSHOT, part, parts, port, source, destination
        )

    @classmethod
    def of_frame(cls, key: FrameKey) -> SnapshotId:
        """Raises TensorSpecError for a frame that is no part of a snapshot."""
        term, round_, holder = (*key.port.split("/", 2), "", "")[:3]
        numbers = term.isascii() and term.isdigit() and round_.isascii() and round_.isdigit()
        if key.role is not Role.SNAPSHOT or not (numbers and holder):
            raise TensorSpecError(f"{key}: expected a snapshot with the port TERM/ROUND/HOLDER")
        if not 0 <= key.microbatch < key.hop <= _MOST_PARTS:
            raise TensorSpecError(
                f"{key}: part {key.microbatch} of {key.hop}, at most {_MOST_PARTS}"
            )
        return cls(key.run, int(term), key.step, holder, int(round_))


def in_parts(data: bytes | bytearray | memoryview) -> tuple[memoryview, ...]:
    """The parts of a snapshot's bytes; at least one."""
    view = memoryview(data)
    return tuple(view[at : at + PART_BYTES] for at in range(0, max(1, len(view)), PART_BYTES))


class SnapshotStore:
    """Stores snapshots on a host: its own, and copies of others'."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._held: dict[SnapshotId, dict[int, memoryview | Path]] = {}
        self._counts: dict[SnapshotId, int] = {}
        """By snapshot that comes: how many parts the first of them named."""
        self._whole: dict[SnapshotId, tuple[broker_pb2.Snapshot, int]] = {}

    # ------------------------------------------------------------ putting and reading

    def put(self, snapshot: broker_pb2.Snapshot, parts: Sequence[memoryview]) -> None:
        """Keeps a whole one that was taken here. Raises OSError when the disk does not take it."""
        found = SnapshotId.of(snapshot)
        for i, data in enumerate(parts):
            self._keep(found, i, data)
        if snapshot.term != BLOCKS:  # a later process has no use for those
            self.whole(snapshot, len(parts))

    def accept(self, arrived: Arrived) -> None:
        """Keeps a part that came. Raises TensorSpecError, with nothing kept, for a frame that is
        none, and OSError."""
        key = arrived.key
        found = SnapshotId.of_frame(key)
        size = arrived.data.nbytes
        if arrived.absent or arrived.codec != RAW.name or arrived.spec != _spec(size):
            raise TensorSpecError(
                f"{key}: expected {_spec(size)!r} by {RAW.name}, got {arrived.spec!r} by "
                f"{arrived.codec!r}"
            )
        with self._lock:
            parts = self._counts.setdefault(found, key.hop)
        if key.hop != parts:
            raise TensorSpecError(f"{key}: a part of {key.hop}, the first that came was of {parts}")
        self._keep(found, key.microbatch, arrived.data)

    def whole(self, snapshot: broker_pb2.Snapshot, parts: int) -> None:
        """All parts of it are here: what a later process finds."""
        self._whole[SnapshotId.of(snapshot)] = snapshot, parts
        if self._folder is not None:
            folder = self._of(SnapshotId.of(snapshot))
            note = {"snapshot": snapshot.SerializeToString().hex(), "parts": parts}
            (folder / _LISTED).write_text(json.dumps(note))

    def parts(self, snapshot: SnapshotId) -> tuple[memoryview, ...]:
        """Return a snapshot's bytes. Raises SnapshotError when it does not lie here, or cannot be
        read."""
        try:
            return tuple(map(_read, self._parts(snapshot)))
        except OSError as error:
            raise SnapshotError(f"the {snapshot} cannot be read: {error}") from None

    def streamed(self, snapshot: SnapshotId) -> Streamed:
        """Yield a snapshot's bytes, read part by part when they are asked for; OSError where it was
        dropped by then. Raises SnapshotError when it does not lie here."""
        return _Parts(self._parts(snapshot))

    def _parts(self, snapshot: SnapshotId) -> tuple[memoryview | Path, ...]:
        with self._lock:
            found = dict(self._held.get(snapshot, {}))
        if not found:
            raise SnapshotError(f"the {snapshot} does not lie here")
        return tuple(found[i] for i in sorted(found))

    def payload(self, key: FrameKey) -> Payload:
        """A part as a frame. Raises KeyError when it does not lie here."""
        with self._lock:
            data = self._held[SnapshotId.of_frame(key)][key.microbatch]
        part = _read(data)
        return Payload(RAW.name, b"", _spec(part.nbytes), (part,))

    def drop(self, snapshot: SnapshotId) -> None:
        """Forgets it; one that is not here is no mistake."""
        with self._lock:
            self._held.pop(snapshot, None)
            self._whole.pop(snapshot, None)
            self._counts.pop(snapshot, None)
        if self._folder is not None:
            shutil.rmtree(self._of(snapshot), ignore_errors=True)

    def found(self) -> tuple[tuple[broker_pb2.Snapshot, int], ...]:
        """What an earlier process left here whole, with its number of parts. The rest goes."""
        for folder in sorted(self._folder.glob("*")) if self._folder else ():
            try:
                note = json.loads((folder / _LISTED).read_text())
                message = broker_pb2.Snapshot.FromString(bytes.fromhex(note["snapshot"]))
                parts = [folder / str(i) for i in range(int(note["parts"]))]
                named = folder == self._of(SnapshotId.of(message))
                if not (parts and named and all(p.is_file() for p in parts)):
                    raise ValueError(folder)
            except (OSError, ValueError, KeyError, TypeError, DecodeError):
                shutil.rmtree(folder, ignore_errors=True)
                continue
            found = SnapshotId.of(message)
            self._held[found] = dict(enumerate(parts))
            self._whole[found] = message, len(parts)
        for left in self._held.keys() - self._whole.keys():
            del self._held[left]
        self._counts.clear()
        return tuple(self._whole.values())

    def _keep(self, snapshot: SnapshotId, part: int, data: memoryview) -> None:
        kept: memoryview | Path = data
        if self._folder is not None:
            folder = self._of(snapshot)
            folder.mkdir(parents=True, exist_ok=True)
            kept = folder / str(part)
            kept.write_bytes(data)
        with self._lock:
            self._held.setdefault(snapshot, {})[part] = kept

    def _of(self, snapshot: SnapshotId) -> Path:
        assert self._folder is not None
        name = hashlib.sha256("\0".join(map(str, snapshot)).encode()).hexdigest()[:32]
        return self._folder / name

    def __repr__(self) -> str:
        return f"<SnapshotStore {len(self._held)} in {self._folder or 'memory'}>"


@dataclass(frozen=True)
class _Parts:
    parts: tuple[memoryview | Path, ...]

    def pieces(self, offset: int, most: int) -> Iterator[memoryview]:
        at = 0
        for part in self.parts:
            size = part.stat().st_size if isinstance(part, Path) else len(part)
            if at + size > offset:
                data = _read(part)
                for start in range(max(0, offset - at), size, most):
                    yield data[start : start + most]
            at += size


def _read(data: memoryview | Path) -> memoryview:
    return memoryview(data.read_bytes()) if isinstance(data, Path) else data


def _spec(size: int) -> TensorSpec:
    return TensorSpec((size,), "uint8")
