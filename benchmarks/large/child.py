"""A command in a process of its own: how long it took, and the most memory that it had.

    ran = run([SHOAL, "plan", "job.toml"])
    ran.seconds, ran.gib, ran.output

The peak is that of the resident set of the command's process, as the kernel counts it
(`ru_maxrss` of `wait4`); of its children each counts for itself, and none is looked at.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["SHOAL", "Ran", "run"]

SHOAL = str(Path(sys.executable).with_name("shoal"))
"""The command beside the Python that runs this."""


@dataclass(frozen=True, slots=True)
class Ran:
    """What a command came to. `output`: of both streams."""

    status: int
    seconds: float
    gib: float
    output: str


def run(
    command: Sequence[str], env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> Ran:
    """Runs it to its end, whatever its exit status is; Ctrl-C here ends it."""
    with tempfile.TemporaryFile("w+") as output:
        began = time.perf_counter()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(env or {})},
            cwd=cwd,
        )
        try:
            _, status, used = os.wait4(process.pid, 0)
        except BaseException:
            process.kill()
            process.wait()
            raise
        seconds = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        return Ran(process.returncode, seconds, used.ru_maxrss / 2**20, output.read())
