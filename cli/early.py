"""What a signal to end does before any verb runs: ends the program, without a traceback.

Loading the verbs takes a second, on a slow machine several. Process 1 of a container gets no signal
in that time that it has no handler for, so its stop would wait for a SIGKILL; and Ctrl-C would show
where the imports are.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import PurePath
from types import FrameType

__all__ = ["leave", "leave_when_told"]


def leave(number: int, frame: FrameType | None) -> None:
    """Ends the process at once, as a shell expects of one that was interrupted."""
    os._exit(130)


def leave_when_told() -> None:
    """Takes the signals that nothing handles yet, where this process is the `shoal` command and not
    a program that imports it."""
    if PurePath(sys.argv[0] if sys.argv else "").name not in ("shoal", "-m"):
        return
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, leave)
