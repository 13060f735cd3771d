"""The broker's daemon: its settings, its life, and its end.

The first SIGINT, SIGTERM or SIGHUP drains (active runs may end, with a countdown), the second
leaves. What is left behind is the state folder, if one was given, and nothing else.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import secrets
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import grpc.aio

from .blobs import BlobLimits, BlobStore
from .events import DrainAsked, StopAsked
from .journal import open_journal
from .machine import BrokerMachine
from .options import BrokerOptions
from .services import add_services, server_options
from .shell import Shell

__all__ = ["Broker", "BrokerConfig", "BrokerConfigError", "join_line", "serve"]

log = logging.getLogger(__name__)


class BrokerConfigError(ValueError):
    """A setting of the broker that cannot be; the message says what to do."""


@dataclass(frozen=True, kw_only=True)
class BrokerConfig:
    """How the daemon listens, keeps and leaves."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 7077
    """0: any free one."""
    insecure: bool = False
    """No identity, no encryption; loopback only."""
    state: Path | None = None
    """Folder of the journal, blobs and the broker's id; None: a temporary one, removed at the end,
    and a journal in memory."""
    drain_s: float = 10.0
    """Seconds that active runs get to end after the first Ctrl-C."""
    options: BrokerOptions = field(default_factory=BrokerOptions)
    """Of the decisions."""
    limits: BlobLimits = field(default_factory=BlobLimits)
    """Of the blobs."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise BrokerConfigError(f"port is {self.port}: expected 0 to 65535")
        if not self.insecure:
            raise BrokerConfigError(
                "identity and admission are not built yet; use --insecure (loopback only)"
            )
        if not _is_loopback(self.host):
            raise BrokerConfigError(
                f"--insecure binds to loopback only, and {self.host} is not: anybody who "
                "reaches it could use your peers; use 127.0.0.1"
            )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def join_line(address: str) -> str:
    """What a peer's owner pastes."""
    return f"shoal join {address} --insecure"


class Broker:
    """`async with Broker(config) as broker:` listens at `broker.address` until the block ends.

    Raises BrokerConfigError when the port is taken, JournalError when the journal cannot be used,
    OSError when the rest of the state folder cannot.
    """

    def __init__(self, config: BrokerConfig) -> None:
        self.config = config
        self.address = ""

    def __repr__(self) -> str:
        return repr(self.shell.machine).replace("<Broker", f"<Broker at {self.address}:")

    async def __aenter__(self) -> Broker:
        config = self.config
        log.info("broker_config %s", config)
        self._journal, decided = await asyncio.to_thread(
            open_journal, config.state and config.state / "journal.sqlite", config.options
        )  # first: it holds the lock of the folder
        self.blobs = BlobStore(config.state and config.state / "blobs", config.limits)
        try:
            await asyncio.to_thread(self.blobs.open)
        except BaseException:
            self._journal.close()
            raise
        self._tasks = asyncio.TaskGroup()
        await self._tasks.__aenter__()
        boot = secrets.token_hex(8)
        machine = BrokerMachine(
            _broker_id(config.state), config.options, boot=boot, decided=decided
        )
        self.shell = Shell(machine, self.blobs, self._tasks, self._journal)
        self._server = grpc.aio.server(options=server_options())
        add_services(self._server, self.shell)
        host = f"[{config.host}]" if ":" in config.host else config.host
        try:
            port = self._server.add_insecure_port(f"{host}:{config.port}")
        except RuntimeError:
            port = 0
        if not port:
            await self._close()
            raise BrokerConfigError(
                f"cannot listen on {host}:{config.port}: the port is taken or the address is not "
                "this host's; take another with --port (0: any free one)"
            )
        await self._server.start()
        self.address = f"{host}:{port}"
        log.warning("broker_insecure address=%s: no identity, no encryption, loopback only", host)
        log.info("broker_listens address=%s id=%s", self.address, machine.broker_id)
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.shell.post(StopAsked())
        await self.shell.settled()
        await self._server.stop(grace=2.0)
        await self._close()
        log.info("broker_left address=%s", self.address)

    async def _close(self) -> None:
        self.shell.close()
        await self._tasks.__aexit__(None, None, None)
        await asyncio.to_thread(self.blobs.close)
        self._journal.close()

    async def drain(self, leave: asyncio.Event) -> None:
        """Starts nothing new and returns when no run is active, after `drain_s`, or at `leave`."""
        self.shell.post(DrainAsked())
        until = self.shell.now + self.config.drain_s
        over = [asyncio.ensure_future(e.wait()) for e in (self.shell.stopped, leave)]
        try:
            while (left := until - self.shell.now) > 0 and not any(o.done() for o in over):
                active = sum(run.active for run in self.shell.machine.runs.values())
                log.warning(
                    "broker_drains left_s=%.0f active_runs=%d: Ctrl-C leaves at once", left, active
                )
                await asyncio.wait(
                    over, timeout=min(1.0, left), return_when=asyncio.FIRST_COMPLETED
                )
        finally:
            for waiting in over:
                waiting.cancel()


async def _either(*events: asyncio.Event) -> None:
    """Returns when one of them is set."""
    waiting = [asyncio.ensure_future(e.wait()) for e in events]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for one in waiting:
            one.cancel()


def _broker_id(state: Path | None) -> str:
    """The persistent id of this broker; a new one for a temporary state."""
    made = f"broker-{secrets.token_hex(4)}"
    if state is None:
        return made
    path = state / "broker-id"
    try:
        return path.read_text().strip() or made
    except FileNotFoundError:
        path.write_text(made + "\n")
        return made


async def serve(config: BrokerConfig, *, ready: Callable[[str], None]) -> None:
    """Runs the daemon until it is told to end; calls `ready` with its address when it listens.

    Call it in the main thread. Raises BrokerConfigError, OSError, and JournalError when the journal
    cannot be read or, later, written: what is decided then is told to nobody.
    """
    first, second = asyncio.Event(), asyncio.Event()

    def asked() -> None:
        (second if first.is_set() else first).set()

    # Logs go to stderr, unless the caller has arranged something else.
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    loop = asyncio.get_running_loop()
    signals = [
        number
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is not signal.SIG_IGN  # nohup
    ]
    for number in signals:
        loop.add_signal_handler(number, asked)
    try:
        async with Broker(config) as broker:
            ready(broker.address)
            await _either(first, broker.shell.stopped)
            if broker.shell.error is None:
                await broker.drain(second)
        if broker.shell.error is not None:
            raise broker.shell.error
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
