"""Random damage to a journal's files: what comes of it is the right state, or one line that says
what to do. Never an older state, and never a traceback."""

from __future__ import annotations

import random
import shutil
import sqlite3
from pathlib import Path

import pytest

from shoal.broker.journal.journal import Journal, JournalError, _checksum, open_journal
from shoal.broker.options import BrokerOptions
from shoal.proto.journal_pb2 import BrokerStarted, Decision, Record


def record(n: int, size: int) -> Record:
    return Record(
        decisions=[Decision(started=BrokerStarted(number=n, at_s=float(i))) for i in range(size)]
    )


RECORDS = [record(n, 1 + 37 * n % 90) for n in range(60)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A journal closed in good order, and one copied from under a process that was killed: most of
    it is in SQLite's log."""
    here = tmp_path_factory.mktemp("journals")
    path = here / "live" / "journal.sqlite"
    path.parent.mkdir()
    with Journal(path) as journal:
        for one in RECORDS[:30]:
            journal.append([one])
        journal.append(RECORDS[30:40])
        for one in RECORDS[40:]:
            journal.append([one])
        shutil.copytree(path.parent, here / "killed")
    shutil.copytree(path.parent, here / "closed")
    assert (here / "killed" / "journal.sqlite-wal").stat().st_size > 100_000
    return {"closed": here / "closed", "killed": here / "killed"}


def damaged(data: bytearray, dice: random.Random) -> bytearray:
    at = dice.randrange(len(data))
    match dice.randrange(5):
        case 0:
            data[at] ^= 1 << dice.randrange(8)
        case 1:
            data[at : at + 64] = dice.randbytes(len(data[at : at + 64]))
        case 2:
            del data[at:]
        case 3:
            data[at : at + 4096] = bytes(len(data[at : at + 4096]))
        case 4:
            data += dice.randbytes(dice.randrange(1, 8192))
    return data


def outcome(path: Path) -> str:
    found: list[Record] = []
    try:
        with Journal(path) as journal:
            found = list(journal.records())
    except JournalError as error:
        return "refused" if str(path) in str(error) and "\n" not in str(error) else str(error)
    assert found == RECORDS
    return "right"


@pytest.mark.parametrize("state", ["closed", "killed"])
@pytest.mark.parametrize("name", ["journal.sqlite", "journal.sqlite-wal", "journal.sqlite.last"])
def test_damage_is_refused_or_harmless(
    state: str, name: str, folders: dict[str, Path], tmp_path: Path
):
    if not (folders[state] / name).exists():
        pytest.skip("a journal that was closed has no log")
    whole = bytearray((folders[state] / name).read_bytes())
    seen = set()
    for seed in range(60):
        folder = tmp_path / f"{seed}"
        shutil.copytree(folders[state], folder)
        (folder / name).write_bytes(damaged(bytearray(whole), random.Random(f"{name}{seed}")))
        seen.add(outcome(folder / "journal.sqlite"))
        shutil.rmtree(folder)
    assert seen <= {"right", "refused"}
    assert "right" in seen if name.endswith("last") else "refused" in seen


def test_a_flipped_bit_of_the_log_is_no_older_state(folders: dict[str, Path], tmp_path: Path):
    folder = tmp_path / "here"
    shutil.copytree(folders["killed"], folder)
    log = folder / "journal.sqlite-wal"
    data = bytearray(log.read_bytes())
    data[len(data) * 3 // 4] ^= 1
    log.write_bytes(data)
    with pytest.raises(JournalError, match=r"ends at record \d+, and journal\.sqlite\.last"):
        Journal(folder / "journal.sqlite")
    (folder / "journal.sqlite.last").unlink()  # as it says, for whoever wants the older state
    with Journal(folder / "journal.sqlite") as journal:
        assert 0 < len(list(journal.records())) < len(RECORDS)


def test_one_that_was_emptied_or_removed_is_refused_and_moved_away_with_its_note_begins_anew(
    folders: dict[str, Path], tmp_path: Path
):
    folder = tmp_path / "here"
    shutil.copytree(folders["closed"], folder)
    path = folder / "journal.sqlite"
    path.write_bytes(b"")
    with pytest.raises(JournalError, match="is empty, and"):
        Journal(path)
    path.unlink()
    with pytest.raises(
        JournalError, match=r"is gone, and .* move journal\.sqlite and journal\.sqli"
    ):
        Journal(path)
    path.unlink()
    path.with_name("journal.sqlite.last").unlink()
    with Journal(path) as journal:
        assert journal.count == 0
        journal.append(RECORDS[:1])
    with Journal(path) as journal:
        assert list(journal.records()) == RECORDS[:1]


def test_a_note_of_another_journal_of_the_same_length_is_noticed(tmp_path: Path):
    for name, first in (("mine", 0), ("other", 1)):
        (tmp_path / name).mkdir()
        with Journal(tmp_path / name / "journal.sqlite") as journal:
            journal.append(RECORDS[first : first + 3])
    note = "journal.sqlite.last"
    shutil.copy(tmp_path / "other" / note, tmp_path / "mine" / note)
    with pytest.raises(JournalError, match=r"has another record 3, and journal\.sqlite\.last"):
        Journal(tmp_path / "mine" / "journal.sqlite")


def test_one_whose_beginning_is_gone_is_refused(tmp_path: Path):
    path = tmp_path / "journal.sqlite"
    with Journal(path) as journal:
        journal.append(RECORDS[:3])
        journal._db.execute("DELETE FROM record WHERE number = 1")
    with pytest.raises(JournalError, match="begins at record 2, not 1"):
        Journal(path)


@pytest.mark.parametrize("number", [-5, 0])
def test_a_row_with_an_odd_number_is_damage_and_no_traceback(number: int, tmp_path: Path):
    path = tmp_path / "journal.sqlite"
    with Journal(path) as journal:
        journal.append(RECORDS[:3])
        journal._db.execute(f"UPDATE record SET number = {number} WHERE number = 1")
    path.with_name("journal.sqlite.last").unlink()  # else it is seen even before
    with pytest.raises(JournalError, match="is damaged at record"):
        open_journal(path, BrokerOptions())


def test_a_row_that_is_no_record_is_damage_and_no_traceback(tmp_path: Path):
    """With a right checksum: an older broker's bug, say."""
    path, data = tmp_path / "journal.sqlite", b"\xff"
    with Journal(path) as journal:
        journal.append(RECORDS[:3])
        values = (data, _checksum(2, data))
        journal._db.execute("UPDATE record SET data = ?, checksum = ? WHERE number = 2", values)
    with pytest.raises(JournalError, match="is damaged at record 2; the 1 before it are whole"):
        open_journal(path, BrokerOptions())


def test_a_page_that_cannot_be_read_is_damage_and_no_traceback():
    """Of a large record: to open the journal, its length is enough."""

    class Broken:
        def execute(self, *_: object) -> object:
            raise sqlite3.DatabaseError("database disk image is malformed")

    with Journal() as journal:
        real, journal._db = journal._db, Broken()
        with pytest.raises(JournalError, match=r"damaged at record 1 \(database disk image is"):
            list(journal.records())
        journal._db = real
