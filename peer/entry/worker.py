"""Entry point of a worker process: `python -m shoal.peer.entry.worker`, started by the supervisor.

Its standard input is the rope to the supervisor: one line of JSON (PeerConfig), then lines that say
"drain" (end after the step) or "stop" (end now). When the rope ends, or the parent dies, it stops:
no worker outlives its supervisor. What it waits for while it drains it says on its standard output,
as lines of JSON.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...dag.plan.plan import PeerId
from ...net.identity.enroll import BrokerAwayError, NotAdmittedError
from ...net.local import allow_descriptors
from ...net.surroundings import fault_of
from ..host.config import WAITS, PeerConfig
from ..host.identity import Identity, IdentityError
from ..logs import note, to_stderr
from ..shell.credentials import obtain

if TYPE_CHECKING:
    from ..shell.daemon import Worker

__all__ = ["main", "work"]

# How a peer begins: an identity, a credential, what the device can do; and then its worker.
#
# Loading torch takes longer than all the rest. So it is loaded beside joining: a token that is
# wrong, or a broker that is away, is told at once, and a broker far away is waited for meanwhile.

_log = logging.getLogger(__name__)
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PARENT_DIED = signal.SIGUSR1


async def work(config: PeerConfig, started: Callable[[Worker], None] | None = None) -> int:
    """Runs one peer to its end; returns the exit code (README.md). `started` gets the worker, so
    that it can be stopped; before that, cancelling this stops it."""
    loaded = _in_thread(lambda: importlib.import_module("..shell.opening", __package__))
    began = False
    try:
        with Identity(config.state, config.name) as me:
            credential = None if config.insecure else await obtain(config)
            if credential is not None:
                me = replace(me, peer=PeerId(credential.party.subject))
            opening = await loaded
            network = credential.fingerprint if credential else b""
            profile = await _in_thread(lambda: opening.look(config, network))
            worker: Worker = opening.open_worker(config, me, profile, credential)
            began = True
            if started is not None:
                started(worker)
            return await worker.run()
    except IdentityError as error:
        note(_log, logging.ERROR, "refused", why=error)
        return 4
    except BrokerAwayError as error:
        note(_log, logging.ERROR, "broker away", why=error)
        return 3
    except NotAdmittedError as error:
        note(_log, logging.ERROR, "refused", why=error)
        return 4
    except ValueError as error:  # a device that is not here, memory that is not enough
        note(_log, logging.ERROR, "wrong input", why=error)
        return 2
    except Exception as error:
        if (fault := fault_of(error)) is None:
            raise  # a bug of ours, with its traceback
        # What keeps it from starting would do so again; what came up later may be gone soon.
        note(_log, logging.ERROR, "broke off" if began else "cannot start", why=fault)
        return 1 if began else 2
    finally:
        loaded.cancel()


def _in_thread(make: Callable[[], Any]) -> asyncio.Future[Any]:
    """What `make` returns. In a thread that nobody waits for at the end: who is told to stop while
    torch loads, or a device answers slowly, stops at once."""
    loop = asyncio.get_running_loop()
    found: asyncio.Future[Any] = loop.create_future()

    def tell(call: Callable[[Any], None], what: object) -> None:
        if not found.done():
            call(what)

    def run() -> None:
        told: tuple[Callable[[Any], None], object]
        try:
            told = found.set_result, make()
        except BaseException as error:  # told to who waits
            told = found.set_exception, error
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(tell, *told)

    threading.Thread(target=run, name="start", daemon=True).start()
    return found


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

    def drain() -> None:
        # A unit or a terminal that ends says so to every process, most often more than once. How
        # long that may last, and whether somebody is in a hurry, the supervisor says.
        if not stopped:
            stop(False)

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
            if word.strip() == "drain":
                loop.call_soon_threadsafe(drain)
            elif word.strip() == "stop":
                loop.call_soon_threadsafe(stop, True)
        loop.call_soon_threadsafe(stop, True)

    allow_descriptors()
    starting = loop.create_task(work(config, started))
    for number in STOPS:
        loop.add_signal_handler(number, drain)
    loop.add_signal_handler(PARENT_DIED, stop, True)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)  # what came meanwhile comes now
    threading.Thread(target=listen, name="rope", daemon=True).start()
    try:
        return await starting
    except asyncio.CancelledError:
        if not stopped:
            raise
        return 0


def _tie_to(parent: int) -> bool:
    """Asks the kernel for a signal when the parent dies (Linux; elsewhere the rope must do): one
    that nobody else sends, as SIGTERM comes with the end of a whole unit. False: it is dead
    already."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, PARENT_DIED)
    return os.getppid() == parent


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    # A thread that hangs in a kernel would keep an orderly exit waiting; all else is closed by now.
    os._exit(code)
