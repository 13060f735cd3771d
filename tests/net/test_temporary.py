"""Folders of one process: nothing of them is left, and sockets in them can be had anywhere."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from shoal.net.temporary import SocketFolder, TemporaryFolder


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_the_next_one_removes_what_nobody_holds(temporary: Path) -> None:
    alive, other = TemporaryFolder("shoal-x-"), TemporaryFolder("shoal-y-")
    (alive.path / "a").touch()
    (temporary / "shoal-x-dead" / "b").mkdir(parents=True)
    mine = TemporaryFolder("shoal-x-")
    assert {p.name for p in temporary.iterdir()} == {
        folder.path.name for folder in (alive, other, mine)
    }
    assert (alive.path / "a").exists()
    for folder in (alive, other, mine):
        folder.close()
        folder.close()
    assert not list(temporary.iterdir())


def test_what_leads_elsewhere_is_left_alone(temporary: Path) -> None:
    (temporary / "kept").mkdir()
    (temporary / "shoal-x-link").symlink_to(temporary / "kept")
    (temporary / "shoal-x-file").touch()
    TemporaryFolder("shoal-x-").close()
    assert len(list(temporary.iterdir())) == 3


@pytest.mark.process
def test_a_killed_process_leaves_nothing_for_long(temporary: Path) -> None:
    code = (
        "import os, signal, tempfile; from shoal.net.temporary import TemporaryFolder\n"
        f"tempfile.tempdir = {str(temporary)!r}\n"
        "TemporaryFolder('shoal-x-'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False)
    assert done.returncode == -signal.SIGKILL
    assert len(list(temporary.iterdir())) == 1
    TemporaryFolder("shoal-x-").close()
    assert not list(temporary.iterdir())


@pytest.mark.skipif(sys.platform != "linux", reason="names through /proc")
@pytest.mark.parametrize("depth", [1, 10])
def test_sockets_lie_in_the_state_folder_however_long_its_path_is(
    tmp_path: Path, temporary: Path, depth: int
) -> None:
    state = tmp_path.joinpath(*(["a" * 60] * depth))
    (state / "sockets" / "of-one-that-was-killed").mkdir(parents=True)
    folder = SocketFolder(state)
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
        server.bind(str(folder.path / "main"))
        server.listen()
        client.connect(str(folder.path / "main"))
    assert os.listdir(state / "sockets") == ["main"]
    assert (state / "sockets").stat().st_mode & 0o077 == 0
    folder.close()
    assert os.listdir(state) == []


def test_where_a_file_system_has_no_sockets_that_is_said(
    temporary: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refusing(socket.socket):
        def bind(self, address: object) -> None:
            raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(socket, "socket", Refusing)
    with caplog.at_level(logging.WARNING):
        folder = SocketFolder(temporary / "state")
    assert "sockets_elsewhere" in caplog.text
    assert folder.folder.parent == temporary
    folder.close()
    assert os.listdir(temporary) == ["state"]
