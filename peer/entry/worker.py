"""Entry point of a worker process: `python -m shoal.peer.entry.worker`, started by the supervisor.

Its standard input is the rope to the supervisor: one line of JSON (PeerConfig), then lines that say
"drain" (end after the step) or "stop" (end now). When the rope ends, or the parent dies, it stops:
no worker outlives its supervisor. What it waits for while it drains it says on its standard output,
as lines of JSON.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import sys
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from ...net.local import allow_descriptors
from ..host.config import WAITS, PeerConfig
from ..logs import to_stderr
from .start import work

if TYPE_CHECKING:
    from ..shell.daemon import Worker

__all__ = ["main"]


def main() -> int:
    """Reads the config, runs the peer, returns its exit code."""
    line = sys.stdin.readline()
    if not line:
        return 0  # the supervisor went before it said anything
    config = PeerConfig.from_json(line)
    to_stderr(config.log)
    if config.parent is not None and not _tie_to(config.parent):
        return 0
    return asyncio.run(_work(config))


async def _work(config: PeerConfig) -> int:
    loop = asyncio.get_running_loop()
    stopped = False
    workers: list[Worker] = []

    def stop(now: bool) -> None:
        nonlocal stopped
        stopped = True
        if not workers:
            starting.cancel()  # it has no part in anything yet
        for worker in workers:
            worker.stop(now)

    def waits(what: str, within_s: float) -> None:
        with suppress(OSError):  # nobody listens any more
            print(json.dumps({WAITS: what, "within_s": within_s}), flush=True)

    def started(worker: Worker) -> None:
        workers.append(worker)
        worker.waits = waits

    def listen() -> None:
        for word in sys.stdin:
            if word.strip() in ("drain", "stop"):
                loop.call_soon_threadsafe(stop, word.strip() == "stop")
        loop.call_soon_threadsafe(stop, True)

    allow_descriptors()
    starting = loop.create_task(work(config, started))
    loop.add_signal_handler(signal.SIGINT, stop, False)
    loop.add_signal_handler(signal.SIGTERM, stop, True)
    threading.Thread(target=listen, name="rope", daemon=True).start()
    try:
        return await starting
    except asyncio.CancelledError:
        if not stopped:
            raise
        return 0


def _tie_to(parent: int) -> bool:
    """Asks the kernel for a SIGTERM when the parent dies (Linux; elsewhere the rope must do).
    False: it is dead already."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)
    return os.getppid() == parent


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    # A thread that hangs in a kernel would keep an orderly exit waiting; all else is closed by now.
    os._exit(code)
