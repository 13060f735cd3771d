"""An emptied, cut, older or removed list of admissions lets nobody in again."""

from __future__ import annotations

import shutil
import time
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.broker.access.admission import Admission, AdmissionError
from shoal.net.identity.authority import Authority, utc
from shoal.net.identity.credential import new_key, request_of
from shoal.net.identity.names import Party, PartyRole
from shoal.net.surroundings import SurroundingsError
from shoal.proto.admission_pb2 import JoinRequest

AUTHORITY = Authority.new(utc(time.time()))
REQUEST = request_of(new_key())
NOW = time.time()


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose list says that a peer was kicked, and in `before` one of when it was not."""
    folder = tmp_path_factory.mktemp("kept")
    path = folder / "admissions.sqlite"
    admission = Admission(AUTHORITY, path)
    token = admission.invite(PartyRole.PEER, 9, timedelta(hours=1), "test", NOW)
    request = JoinRequest(
        version=1, invitation=token.id, secret=token.secret, request=REQUEST, name="home"
    )
    subject = admission.join(request, NOW).subject
    admission.close()
    shutil.copy(path, folder / "before")
    admission = Admission(AUTHORITY, path)
    admission.kick(subject, NOW)
    admission.close()
    (folder / "subject").write_text(subject)
    return folder


def opened(folder: Path, subject: str) -> str:
    """What opening the list comes to: "refused", or whether the peer is still "kicked"."""
    try:
        admission = Admission(AUTHORITY, folder / "admissions.sqlite")
    except SurroundingsError as error:
        named = "admissions.sqlite" in str(error) and "backup" in str(error)
        return "refused" if named else str(error)
    try:
        admission.check(Party(PartyRole.PEER, subject))
        return "a member again"
    except AdmissionError:
        return "kicked"
    finally:
        admission.close()


@settings(max_examples=60)
@given(data=st.data())
def test_no_damage_lets_a_kicked_peer_in(
    kept: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("damaged") / "broker"
    shutil.copytree(kept, folder)
    path, note = folder / "admissions.sqlite", folder / "admissions.sqlite.last"
    how = data.draw(st.sampled_from(["cut", "older", "removed", "zeros", "noise"]))
    size = path.stat().st_size
    if how == "cut":
        path.write_bytes(path.read_bytes()[: data.draw(st.integers(0, size - 1))])
    elif how == "older":
        shutil.copy(folder / "before", path)
    elif how == "removed":
        path.unlink()
    elif how == "zeros":
        at = data.draw(st.integers(0, size - 1))
        path.write_bytes(path.read_bytes()[:at] + b"\0" * (size - at))
    else:
        path.write_bytes(data.draw(st.binary(min_size=1, max_size=4096)))
    if how not in ("older",) and data.draw(st.booleans()):  # the same power loss took this one
        note.write_bytes(note.read_bytes()[: data.draw(st.integers(0, 11))])
    assert opened(folder, (kept / "subject").read_text()) in ("refused", "kicked")


def test_whole_files_open_and_a_note_that_was_removed_is_made_again(
    kept: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "broker"
    shutil.copytree(kept, folder)
    subject = (kept / "subject").read_text()
    for _ in range(2):
        assert opened(folder, subject) == "kicked"
        (folder / "admissions.sqlite.last").unlink()


@pytest.mark.parametrize("what", ["invite", "join"])
def test_a_disk_that_is_full_is_said_and_changes_nothing(tmp_path: Path, what: str) -> None:
    admission = Admission(AUTHORITY, tmp_path / "admissions.sqlite")
    run = admission._db.execute
    token = admission.invite(PartyRole.PEER, 999, timedelta(hours=1), "test", NOW)
    run(f"PRAGMA max_page_count = {run('PRAGMA page_count').fetchone()[0]}")
    before: list[str] = []

    def fill() -> None:
        for number in range(999):
            before[:] = admission._db.iterdump()
            if what == "invite":
                admission.invite(PartyRole.PEER, 1, timedelta(hours=1), "x" * 500, NOW)
            else:
                request = JoinRequest(version=1, invitation=token.id, secret=token.secret)
                request.request, request.name = request_of(new_key()), f"peer{number}"
                admission.join(request, NOW)

    with pytest.raises(SurroundingsError, match=r"admissions\.sqlite: .*full: nothing was changed"):
        fill()
    assert list(admission._db.iterdump()) == before
    run("PRAGMA max_page_count = 100000")
    admission.invite(PartyRole.PEER, 1, timedelta(hours=1), "test", NOW)
    admission.close()
