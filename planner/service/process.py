"""The processes that plan, outside of the broker's own: one that is warm, and one for each graph.

    broker --start--> warm process (has imported torch, has never seen a graph)
                        |--fork--> process of one graph <--request, answer--> broker

Planning runs a stranger's operators on tensors without memory, and torch is not made for that: some
kernels read what they were not given, some never end, some take all memory. So it happens here.

- The warm process only forks, and says how a child ended. It sees no byte of a request.
- A child plans for one graph and never for two: what one stranger's graph did to it is nobody
  else's. It lives on, so that a graph is read and its costs are found once for many requests.
- A child has limits: address space, CPU seconds of a request, no core dump; it is the first
  that a machine without memory ends, and ends with its parent. How long a request may take on the
  clock is the broker's to say (`planner.py`). It is no nicer than the broker: one plans at a time,
  so it takes one core, and on a busy machine who waits for a plan would wait longer.
- What a child says is bytes to be parsed (`wire.py`), never code. It is no sandbox: a
  graph that made its process do as it likes has the rights of the broker's user.

Sockets carry frames of four bytes of length and as many bytes. The warm process takes orders of
nine bytes and answers each with as many: `F` with MiB and CPU seconds (fork a child with these
limits), `E` with a process and milliseconds (how did it end? end it after that).
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import resource
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

__all__ = [
    "FAILED",
    "MOST_ANSWER_BYTES",
    "ORDER",
    "OVER_ANSWER",
    "OVER_MEMORY",
    "LargeError",
    "exactly",
    "receive",
    "send",
]

ORDER = struct.Struct(">cII")
_LENGTH = struct.Struct(">I")

MOST_ANSWER_BYTES = 16 << 20
"""The largest message that leaves the broker, too: a plan of 65,536 microbatches. A longer one
would reach nobody."""
OVER_ANSWER = 76
"""Exit status of a child whose answer is longer."""
OVER_MEMORY = 77
"""Exit status of a child that came to the end of its address space, and could still say so."""
FAILED = 78
"""Of one that met a bug of ours outside of planning."""
_MOST_REQUEST_BYTES = 2**32 - 1
"""The broker's: it has what it says in memory, and bounded by what it takes from others."""


class LargeError(Exception):
    """A frame is longer than who receives it takes."""


def send(to: socket.socket, data: bytes) -> None:
    """One frame. Raises OSError."""
    to.sendall(_LENGTH.pack(len(data)))
    to.sendall(data)


def receive(
    where: socket.socket, most: int, wait: Callable[[], None] = lambda: None
) -> bytes | None:
    """One frame; None at the end of the stream. `wait` comes before each part of it. Raises what
    `wait` raises, OSError, and LargeError for more than `most` bytes, of which none is read."""
    head = exactly(where, _LENGTH.size, wait)
    if head is None:
        return None
    (size,) = _LENGTH.unpack(head)
    if size > most:
        raise LargeError(f"a frame of {size} bytes: expected at most {most}")
    return exactly(where, size, wait)


def exactly(
    where: socket.socket, count: int, wait: Callable[[], None] = lambda: None
) -> bytes | None:
    """Read so many bytes; None when the stream ends before."""
    data = bytearray()
    while len(data) < count:
        wait()
        part = where.recv(min(count - len(data), 1 << 20))
        if not part:
            return None
        data += part
    return bytes(data)


# ---------------------------------------------------------------- the warm process


def main(arguments: list[str]) -> None:
    """`process SOCKET`: the broker has the other end."""
    control = socket.socket(fileno=int(arguments[0]))
    # What ends a terminal or a whole unit is for the broker, which ends this one: a plan that
    # breaks off before that would be a run's failure.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _load()
    control.sendall(ORDER.pack(b"R", os.getpid(), 0))
    while (order := exactly(control, ORDER.size)) is not None:
        kind, first, second = ORDER.unpack(order)
        if kind == b"E":
            control.sendall(ORDER.pack(b"E", first, _ended(first, second / 1e3)))
            continue
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if not pid:
            control.close()
            theirs.close()
            _plan(ours, first << 20, second)
        ours.close()
        socket.send_fds(control, [ORDER.pack(b"F", pid, 0)], [theirs.fileno()])
        theirs.close()


def _load() -> None:
    """Load all that planning needs into memory, and what garbage collection would touch in a child
    is left alone."""
    from ..answers import planning
    from . import answer_bytes

    planning.warm_up()
    assert answer_bytes
    gc.collect()
    gc.freeze()


def _ended(pid: int, within_s: float) -> int:
    """The status of a child that ends within so long, or is ended then; as of `waitpid`."""
    until = time.monotonic() + within_s
    try:
        while True:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                return status
            if time.monotonic() >= until:
                os.kill(pid, signal.SIGKILL)
                return os.waitpid(pid, 0)[1]
            time.sleep(0.002)
    except ChildProcessError:  # asked about twice
        return 0


# ---------------------------------------------------------------- a child


def _plan(requests: socket.socket, most_bytes: int, cpu_s: int) -> NoReturn:
    """Answers requests about one graph until the broker wants no more."""
    try:
        from .answer_bytes import answer_bytes

        _limit(most_bytes)
        while (request := receive(requests, _MOST_REQUEST_BYTES)) is not None:
            _allow(cpu_s)
            answer = answer_bytes(request)
            if len(answer) > MOST_ANSWER_BYTES:
                raise LargeError
            send(requests, answer)
        status = 0
    except LargeError:
        status = OVER_ANSWER
    except MemoryError:
        status = OVER_MEMORY
    except OSError:  # the broker is gone
        status = 0
    except BaseException:
        import traceback

        traceback.print_exc()
        status = FAILED
    os._exit(status)


def _limit(most_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if not sys.platform.startswith("linux"):
        return
    set_parent_death_signal, set_no_new_privileges = 1, 38
    prctl = ctypes.CDLL(None).prctl
    prctl(set_parent_death_signal, signal.SIGKILL)
    prctl(set_no_new_privileges, 1, 0, 0, 0)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + most_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _allow(cpu_s: int) -> None:
    """Allow so many more seconds of CPU, for one request. A backstop for the time on the clock, and
    for a broker that is not there any more to look at it."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    spent = int(used.ru_utime + used.ru_stime) + 1
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (spent + cpu_s, hard))


if __name__ == "__main__":
    main(sys.argv[1:])
