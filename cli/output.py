"""What this process prints on, and what becomes of it when that cannot be written any more.

Three kinds: a pipe whose reader has left (`| head`), a stream that was closed before the start, and
one that takes nothing (a full disk, a terminal that is gone). None of them may end a daemon, and
none is a bug of ours.
"""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import TextIO

import typer

from ..net.printable import printable_lines
from ..net.surroundings import naming

__all__ = ["complain", "echo", "give_up_output", "lost_output", "prepare_output", "say", "unread"]


def prepare_output() -> None:
    """Makes the three standard streams usable; once, at the start. A closed one becomes /dev/null:
    else the next file that is opened takes its number, and gets what a library prints. Letters that
    a terminal does not have are shown as "?"."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            if os.open(os.devnull, os.O_RDWR) != number:
                continue  # it took a lower one, which was closed too
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # not where a test captures
            stream.reconfigure(errors="replace")


def _streams() -> Iterator[tuple[str, TextIO, int]]:
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        with suppress(OSError, ValueError, AttributeError):  # captured, by a test say
            yield name, stream, stream.fileno()


def unread() -> bool:
    """Whether stdout or stderr is a pipe that nobody reads any more; what is still to be said to it
    is said to nobody then."""
    found = False
    for _, _, number in _streams():
        poll = select.poll()
        poll.register(number, 0)
        if any(event & select.POLLERR for _, event in poll.poll(0)):
            _to_nobody(number)
            found = True
    return found


def lost_output() -> str:
    """Which stream takes nothing more of what was printed, and why; empty where both do. What is
    still to be said to it is said to nobody then, and the interpreter's own flush at the end has no
    error."""
    lost = ""
    for name, stream, number in _streams():
        try:
            stream.flush()
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else str(error)
            lost = lost or f"{name} cannot be written: {why}"
            _to_nobody(number)
            with suppress(OSError, ValueError):
                stream.flush()
    return lost


def give_up_output() -> None:
    """Has nothing that is left to be printed cause an error at the end of the process."""
    unread()
    lost_output()


def _to_nobody(number: int) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, number)
    os.close(nowhere)


def complain(line: str) -> None:
    """Says what is wrong, on stderr. Raises OSError where it cannot be written."""
    echo(f"shoal: {line}", err=True)


def echo(text: str, *, err: bool = False) -> None:
    """What a verb says to people; whoever puts a stranger's text into one line of it makes that
    `printable` first, lest it become several. Raises OSError where it cannot be written."""
    with naming("stderr" if err else "stdout"):
        typer.echo(printable_lines(text), err=err)


def say(text: str, *, err: bool = False) -> bool:
    """Prints what a daemon says, or the last words of a verb; False where nobody can hear it any
    more, which is no reason for either to end otherwise."""
    try:
        echo(text, err=err)
        (sys.stderr if err else sys.stdout).flush()
    except (OSError, ValueError):
        give_up_output()
        return False
    return True
