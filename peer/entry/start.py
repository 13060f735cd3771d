"""How a peer begins: an identity, a credential, what the device can do; and then its worker.

Loading torch takes longer than all the rest. So it is loaded beside joining: a token that is wrong,
or a broker that is away, is told at once, and a broker far away is waited for meanwhile.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...dag.plan.plan import PeerId
from ...net.identity.enroll import BrokerAwayError, NotAdmittedError
from ..host.config import PeerConfig
from ..host.identity import Identity, IdentityError
from ..logs import note
from ..shell.credentials import obtain

if TYPE_CHECKING:
    from ..shell.daemon import Worker

__all__ = ["work"]

_log = logging.getLogger(__name__)


async def work(config: PeerConfig, started: Callable[[Worker], None] | None = None) -> int:
    """Runs one peer to its end; returns the exit code (README.md). `started` gets the worker, so
    that it can be stopped; before that, cancelling this stops it."""
    loaded = _in_thread(lambda: importlib.import_module("..shell.daemon", __package__))
    try:
        with Identity(config.state, config.name) as me:
            credential = None if config.insecure else await obtain(config)
            if credential is not None:
                me = replace(me, peer=PeerId(credential.party.subject))
            daemon = await loaded
            network = credential.fingerprint if credential else b""
            profile = await _in_thread(lambda: daemon.look(config, network))
            worker: Worker = daemon.Worker(config, me, profile, credential)
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
