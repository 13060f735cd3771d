"""The verbs. These files only read arguments, call what does the work, and say what came of it.

Nothing heavy is imported before a verb needs it: `shoal --help` stays fast, and lists the verbs in
the groups of `groups.py`.
"""

# ruff: noqa: E402 (signals are listened to before the rest is loaded)

from __future__ import annotations

from .early import leave_when_told

leave_when_told()  # before what takes a second to load

import os
import sys

from ..net.surroundings import fault_of
from . import admission, compare, daemons, init, owner, runs, sample, sim, status  # noqa: F401 (importing makes the verbs)
from .base import WRONG, app
from .output import give_up_output, lost_output, prepare_output, say, unread

__all__ = ["app", "main"]


def main() -> None:
    """The `shoal` command."""
    # gRPC's core reports to stderr what comes back as a status too, and is said there in words.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    prepare_output()
    try:
        app()
    except SystemExit as end:  # of --help and --version, say
        unread()
        if (lost := lost_output()) and not end.code:
            say(f"shoal: {lost}", err=True)
            sys.exit(WRONG)
        raise
    except OSError as error:
        if (fault := fault_of(error)) is None:
            raise
        give_up_output()
        say(f"shoal: {fault}", err=True)
        sys.exit(WRONG)
