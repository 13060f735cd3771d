"""The journal's file: what was appended is there again, and what is wrong is said in one line."""

from __future__ import annotations

import os
import shutil
import sqlite3
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.broker.journal import journal as module
from shoal.broker.journal.journal import VERSION, Journal, JournalError
from shoal.proto.journal_pb2 import BrokerStarted, Decision, Record, RunForgotten


def record(n: int, size: int = 0) -> Record:
    """Any record; no two of them are equal."""
    run = Decision(forgotten=RunForgotten(run="r" * size))
    return Record(decisions=[Decision(started=BrokerStarted(number=n)), *([run] if size else [])])


def filled(path: Path, count: int = 5) -> list[Record]:
    records = [record(n) for n in range(count)]
    with Journal(path) as journal:
        journal.append(records[:2])
        journal.append(records[2:])
    return records


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.sqlite"


def problem(path: Path) -> str:
    """What is said of a journal that cannot be opened or read: one line."""
    with pytest.raises(JournalError) as caught, Journal(path) as journal:
        list(journal.records())
    text = str(caught.value)
    assert "\n" not in text
    assert str(path) in text
    return text


@pytest.mark.parametrize("closed", [True, False])
def test_what_was_appended_is_there_again(path: Path, tmp_path: Path, closed: bool) -> None:
    """Closed in good order, or copied from under a process that never did."""
    journal = Journal(path)
    journal.append([record(n) for n in range(3)])
    journal.append([record(3)])
    if closed:
        journal.close()
    else:
        copies = tmp_path / "copies"
        shutil.copytree(tmp_path, copies)
        journal.close()
        path = copies / path.name
    with Journal(path) as again:
        assert list(again.records()) == [record(n) for n in range(4)]
        assert again.count == 4


def test_one_in_memory_works_the_same() -> None:
    with Journal() as journal:
        journal.append([record(1), record(2)])
        assert list(journal.records()) == [record(1), record(2)]
        journal.replace([record(3)])
        assert list(journal.records()) == [record(3)]


def test_a_snapshot_takes_the_place_of_all_before_it(path: Path) -> None:
    filled(path)
    with Journal(path) as journal:
        journal.replace([record(7), record(8)])
        journal.append([record(9)])
    with Journal(path) as journal:
        assert list(journal.records()) == [record(7), record(8), record(9)]


def test_its_size_stays_bounded_however_much_is_written(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LEAST_RECORDS", 20)
    sizes, due = [], 0
    with Journal(path) as journal:
        for n in range(600):
            journal.append([record(n, 20_000)])
            if journal.crowded:
                due += 1
                journal.replace([record(n, 20_000)] * 3)
            sizes.append(sum(p.stat().st_size for p in path.parent.iterdir()))
    assert due > 20
    assert max(sizes[300:]) <= 1.1 * max(sizes[:300])


# -------------------------------------------------------------------- what is wrong with it


def test_a_second_broker_is_told_that_there_is_another_one(path: Path) -> None:
    with Journal(path):
        assert "another broker uses it" in problem(path)
    assert list(Journal(path).records()) == []


def test_a_broker_in_another_process_is_noticed_too_and_its_end_frees_the_file(path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from shoal.broker.journal.journal import Journal\n"
        "journal = Journal(Path(sys.argv[1])); print('here', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"here\n"
        assert "another broker uses it" in problem(path)
        other.kill()
        other.wait()
    Journal(path).close()


@pytest.mark.parametrize("version", [VERSION - 1, VERSION + 1])
def test_a_journal_of_another_version_is_not_read(path: Path, version: int) -> None:
    filled(path)
    with sqlite3.connect(path) as db:
        db.execute(f"PRAGMA user_version = {version}")
    db.close()
    assert f"has version {version}, this broker reads {VERSION}: install the" in problem(path)


def test_a_database_of_another_program_is_left_alone(path: Path) -> None:
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE theirs (x)")
    db.close()
    assert "another program" in problem(path)


def test_a_file_that_is_no_database_is_refused(path: Path) -> None:
    path.write_bytes(b"these are the notes of somebody, and no database at all. " * 100)
    assert "damaged" in problem(path)


def test_a_folder_that_cannot_be_had_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "must be able to write" in problem(tmp_path / "file" / "journal.sqlite")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_named(tmp_path: Path) -> None:
    filled(tmp_path / "journal.sqlite")
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        assert "must be able to write" in problem(tmp_path / "journal.sqlite")
    finally:
        tmp_path.chmod(stat.S_IRWXU)


def test_a_full_disk_keeps_what_was_there_and_says_so(path: Path) -> None:
    records = filled(path)
    with Journal(path) as journal:
        pages = journal._db.execute("PRAGMA page_count").fetchone()[0]
        journal._db.execute(f"PRAGMA max_page_count = {pages + 2}")
        with pytest.raises(JournalError, match="the disk is full") as caught:
            journal.append([record(9), record(10, 100_000)])
        assert "\n" not in str(caught.value)
        journal._db.execute("PRAGMA max_page_count = 1000000")
        journal.append([record(11)])
    with Journal(path) as journal:
        assert list(journal.records()) == [*records, record(11)]


@pytest.mark.parametrize(
    ("damage", "at"),
    [
        ("UPDATE record SET data = x'00ff' WHERE number = 5", 5),
        ("UPDATE record SET checksum = checksum + 1 WHERE number = 3", 3),
        ("DELETE FROM record WHERE number = 2", 2),
        ("UPDATE record SET number = 9 WHERE number = 5", 5),
    ],
)
def test_a_record_that_is_not_whole_is_found(path: Path, damage: str, at: int) -> None:
    filled(path)
    with sqlite3.connect(path) as db:
        db.execute(damage)
    db.close()
    text = problem(path)
    assert f"damaged at record {at}" in text
    assert f"the {at - 1} before it are whole" in text


def test_a_truncated_file_is_refused(path: Path) -> None:
    with Journal(path) as journal:
        journal.append([record(n, 5000) for n in range(50)])
    os.truncate(path, path.stat().st_size // 2)
    assert "damaged" in problem(path)


def test_a_torn_write_at_the_end_leaves_what_had_been_confirmed(path: Path, tmp_path: Path) -> None:
    """The last transaction of the WAL is torn, as by a power cut before its fsync came back."""
    journal = Journal(path)
    journal.append([record(n) for n in range(3)])
    copies = tmp_path / "copies"
    wal = path.with_name(path.name + "-wal")
    confirmed = wal.stat().st_size
    note = path.with_name(path.name + ".last").read_bytes()
    journal.append([record(3, 10_000)])
    shutil.copytree(tmp_path, copies)
    (copies / f"{path.name}.last").write_bytes(note)  # it is written when the fsync came back
    journal.close()
    os.truncate(copies / wal.name, confirmed + 6000)
    with Journal(copies / path.name) as again:
        assert list(again.records()) == [record(n) for n in range(3)]


def test_a_journal_of_few_large_records_is_crowded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEAST_BYTES", 100_000)
    with Journal() as journal:
        journal.append([record(n, 40_000) for n in range(2)])
        assert not journal.crowded
        journal.append([record(3, 40_000)])
        assert journal.crowded
        assert journal.size_bytes > 120_000
        journal.replace([record(4, 90_000)])
        assert not journal.crowded
        journal.append([record(5, 100_000)])
        assert journal.crowded


def test_the_size_of_a_journal_is_known_again(path: Path) -> None:
    filled(path)
    with Journal(path) as journal:
        assert journal.size_bytes == sum(record(n).ByteSize() for n in range(5))


def test_what_the_disk_has_left_keeps_a_reserve(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(path)
    usage = shutil.disk_usage(path.parent)._replace(free=module.RESERVE_BYTES + 7)
    with Journal(path) as journal:
        monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
        assert journal.free() == 7
        monkeypatch.undo()
    with Journal() as journal:
        assert journal.free() is None
