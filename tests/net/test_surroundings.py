"""What the machine does not give is one class of error, with file, cause and what to do."""

from __future__ import annotations

import errno
import fcntl
import io
import os
import ssl
from pathlib import Path
from typing import IO, Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.net.surroundings import (
    SurroundingsError,
    config_home,
    fault_of,
    naming,
    try_lock,
    user_path,
    write_whole,
)


@given(number=st.sampled_from(sorted(errno.errorcode)), path=st.text("abé/. ", min_size=1))
def test_an_error_with_a_file_is_the_machines_and_names_it(number: int, path: str) -> None:
    fault = fault_of(OSError(number, os.strerror(number), path))
    assert fault is not None
    assert str(fault).startswith(f"{path}: {os.strerror(number)}")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "make room"),
        (OSError(errno.EMFILE, "Too many open files"), "LimitNOFILE"),
        (MemoryError(), "memory"),
        (RuntimeError("can't start new thread"), "TasksMax"),
        (ImportError("libcudart.so.12: cannot open", name="torch"), "install"),
        (RuntimeError('I/O: Os { code: 28, kind: StorageFull, message: "No" }'), "make room"),
        (ExceptionGroup("of tasks", [ValueError(), OSError(errno.EROFS, "ro")]), "written to"),
        (FileNotFoundError(2, "No usable temporary directory found in ['/tmp']"), "TMPDIR"),
    ],
)
def test_of_others_those_that_cannot_be_ours(error: Exception, words: str) -> None:
    assert words in str(fault_of(error))


@pytest.mark.parametrize(
    "error",
    [
        ValueError("x"),
        ConnectionResetError(errno.ECONNRESET, "reset"),
        ImportError("no name", name="shoal.net"),
        KeyError("x"),
    ],
)
def test_bugs_of_ours_are_not(error: Exception) -> None:
    assert fault_of(error) is None


def test_a_full_disk_gets_the_files_name() -> None:
    with (
        pytest.raises(OSError, match="space") as caught,
        naming("/dev/full"),
        open("/dev/full", "w") as file,
    ):
        file.write("x")
    assert "/dev/full: No space" in str(fault_of(caught.value))


class Short(io.RawIOBase):
    """A file that takes a part of what it is given, as one on a disk that is nearly full."""

    def __init__(self, most: int, room: int) -> None:
        super().__init__()
        self.most, self.room, self.got = most, room, b""

    def write(self, data: Any) -> int:
        if len(self.got) == self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = min(self.most, self.room - len(self.got), len(data))
        self.got += bytes(data[:taken])
        return taken


@given(data=st.binary(max_size=50), most=st.integers(1, 9), room=st.integers(0, 50))
def test_what_is_written_without_a_buffer_is_whole_or_an_error(
    data: bytes, most: int, room: int
) -> None:
    file = Short(most, room)
    if len(data) <= room:
        write_whole(cast(IO[bytes], file), data, Path("blob"))
        assert file.got == data
    else:
        with pytest.raises(OSError, match="space") as caught:
            write_whole(cast(IO[bytes], file), data, Path("blob"))
        assert caught.value.filename == "blob"


def test_a_lock_is_had_once_and_its_lack_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lock"
    with open(path, "a") as one, open(path, "a") as other:
        assert try_lock(one, path)
        assert not try_lock(other, path)

        def none(*_: object) -> None:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

        monkeypatch.setattr(fcntl, "flock", none)
        with pytest.raises(SurroundingsError, match=r"lock cannot be locked.*--state"):
            try_lock(other, path)


@given(st.integers(0, 200))
def test_numbers_of_openssl_are_none_of_the_system(number: int) -> None:
    """116 is ESTALE, and two halves of different certificates."""
    assert fault_of(ssl.SSLError(number, "[X509: KEY_VALUES_MISMATCH] key values mismatch")) is None


def test_a_tilde_is_the_home_wherever_it_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert user_path("~/x") == Path("/home/me/x")
    assert user_path("~") == Path("/home/me")
    assert user_path("a/~") == Path("a/~")
    with pytest.raises(SurroundingsError, match="no user"):
        user_path("~nobody-here/x")


@pytest.mark.parametrize("value", ["", None])
def test_without_a_home_it_is_said_which_variable_to_set(
    value: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    monkeypatch.delenv("HOME", raising=False)
    if value is not None:
        monkeypatch.setenv("HOME", value)
    for find in (lambda: user_path("~/x"), config_home):
        monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
        with pytest.raises(SurroundingsError, match=r"54321.*HOME"):
            find()
    monkeypatch.setenv("XDG_CONFIG_HOME", "/etc/x")
    assert config_home() == Path("/etc/x")
