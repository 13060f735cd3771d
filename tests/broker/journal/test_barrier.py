"""Nothing passes a record before it is on disk, and everything passes in its order."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from shoal.broker.events import Log, Persist
from shoal.broker.journal.barrier import Barrier
from shoal.broker.journal.journal import FullError, Journal, JournalError
from shoal.broker.service.server import Broker, BrokerConfig
from shoal.proto.journal_pb2 import BrokerStarted, Decision, Record
from shoal.tests.broker.service.test_daemon_process import PROGRAM

SNAPSHOT = [Record(decisions=[Decision(started=BrokerStarted(number=99))])]


def persist(n: int) -> Persist:
    return Persist(Record(decisions=[Decision(started=BrokerStarted(number=n))]))


class Disk:
    """A journal whose writes end when the test lets them."""

    def __init__(self) -> None:
        self.writes: list[tuple[str, int]] = []
        self.crowded = False
        self.error: Exception | None = None
        self.full_for = ""
        self.allowed = threading.Semaphore(0)

    def append(self, records: Sequence[Record]) -> None:
        self._write("append", records)

    def replace(self, records: Sequence[Record]) -> None:
        self._write("replace", records)

    def _write(self, how: str, records: Sequence[Record]) -> None:
        assert self.allowed.acquire(timeout=30)
        if self.error is not None:
            raise self.error
        if how == self.full_for:
            raise FullError("no place for that")
        self.writes.append((how, len(records)))


class Rig:
    def __init__(self) -> None:
        self.disk = Disk()
        self.passed: list[str] = []
        self.moved = asyncio.Event()
        self.barrier = Barrier(self.disk, lambda: SNAPSHOT, self._moved)  # type: ignore[arg-type]

    def add(self, *items: Any) -> None:
        self.barrier.add([Log(i) if isinstance(i, str) else i for i in items])
        self._take()

    def _take(self) -> None:
        self.passed += [i.name for i in self.barrier.passing()]  # type: ignore[union-attr]

    def _moved(self) -> None:
        self._take()
        self.moved.set()

    async def write(self) -> None:
        """Lets one write end."""
        self.moved.clear()
        self.disk.allowed.release()
        await self.moved.wait()


@pytest_asyncio.fixture
async def rig() -> AsyncIterator[Rig]:
    made = Rig()
    yield made
    made.disk.allowed.release(9)
    made.barrier.close()


async def test_what_comes_before_a_record_passes_and_what_comes_after_waits(rig: Rig) -> None:
    rig.add("a", persist(1), "b")
    rig.add("c")
    assert rig.passed == ["a"]
    assert rig.barrier
    await rig.write()
    assert rig.passed == ["a", "b", "c"]
    assert not rig.barrier
    rig.add("d")
    assert rig.passed[-1] == "d", "nothing waits, so nothing is held back"


async def test_records_that_wait_together_share_a_write(rig: Rig) -> None:
    rig.add(persist(1), "a")
    for n in range(2, 6):
        rig.add(persist(n), f"b{n}")
    await rig.write()
    assert rig.passed == ["a"]
    await rig.write()
    assert rig.passed == ["a", "b2", "b3", "b4", "b5"]
    assert rig.disk.writes == [("append", 1), ("append", 4)]


async def test_a_crowded_journal_gets_a_snapshot_instead_of_the_records(rig: Rig) -> None:
    rig.disk.crowded = True
    rig.add(persist(1), "a")
    await rig.write()
    assert rig.passed == ["a"]
    assert rig.disk.writes == [("replace", 1)]


@pytest.mark.parametrize("error", [JournalError("no space"), RuntimeError("a bug")])
async def test_after_an_error_nothing_passes_any_more(rig: Rig, error: Exception) -> None:
    rig.disk.error = error
    rig.add(persist(1), "a")
    await rig.write()
    rig.add("b")
    rig.add(persist(2), "c")
    assert rig.passed == []
    assert str(error) in str(rig.barrier.error)
    assert not rig.barrier, "and nobody waits for it"


# -------------------------------------------------------------------- the daemon


async def test_two_brokers_cannot_share_a_state_folder(tmp_path: Path) -> None:
    config = BrokerConfig(insecure=True, port=0, state=tmp_path)
    async with Broker(config):
        with pytest.raises(JournalError, match="another broker uses it"):
            async with Broker(config):
                pass
    async with Broker(config) as again:
        assert again.shell.machine.decided.starts == 2


async def test_a_journal_that_fails_later_ends_the_daemon_and_tells_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Broker(BrokerConfig(insecure=True, port=0, state=tmp_path)) as broker:
        await broker.shell.settled()

        def full(self: Journal, records: Any) -> None:
            raise JournalError("cannot write the journal: is the disk full?")

        monkeypatch.setattr(Journal, "append", full)
        broker.shell._barrier.add([persist(7), Log("never")])
        broker.shell._pump()
        await broker.shell.stopped.wait()
        assert "disk full" in str(broker.shell.error)


@pytest.mark.process
def test_a_journal_that_cannot_be_used_is_one_line_for_people(tmp_path: Path) -> None:
    (tmp_path / "journal.sqlite").write_bytes(b"no database at all, but somebody's notes " * 50)
    program = PROGRAM.replace(
        "port=0", f"port=0, state=__import__('pathlib').Path({str(tmp_path)!r})"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "JournalError: cannot open the journal" in last
    assert "the file is damaged: put a copy in its place" in last


async def test_a_full_disk_is_asked_again_and_nothing_is_lost(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.broker.journal.barrier.AGAIN_S", 0.0)
    rig.disk.error = FullError("no place")
    rig.add(persist(1), "a")
    await rig.write()
    assert rig.barrier.full is not None
    rig.add(persist(2), "b")
    assert rig.passed == []
    assert rig.barrier.error is None
    rig.disk.error = None
    await rig.write()
    await rig.write()
    assert rig.passed == ["a", "b"]
    assert rig.barrier.full is None


async def test_a_full_disk_is_not_waited_for_with_ever_more_in_memory(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.broker.journal.barrier.MOST_HELD", 4)
    rig.disk.error = FullError("no place")
    rig.add(persist(1), "a", persist(2), "b")
    await rig.write()
    assert isinstance(rig.barrier.error, FullError)
    assert rig.passed == []


async def test_a_snapshot_that_finds_no_place_gives_way_to_the_records(rig: Rig) -> None:
    rig.disk.crowded, rig.disk.full_for = True, "replace"
    rig.add(persist(1), "a")
    rig.disk.allowed.release()
    await rig.write()
    assert rig.passed == ["a"]
    assert rig.disk.writes == [("append", 1)]
