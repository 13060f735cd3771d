"""The verbs. These files only read arguments, call what does the work, and say what came of it.

Nothing heavy is imported before a verb needs it: `shoal --help` stays fast, and lists the verbs in
the order of the imports below.
"""

from __future__ import annotations

import os

from . import admission, daemons, owner, runs, sim, status  # noqa: F401 (importing makes the verbs)
from .base import app

__all__ = ["app", "main"]


def main() -> None:
    """The `shoal` command."""
    # gRPC's core reports to stderr what comes back as a status too, and is said there in words.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    app()
