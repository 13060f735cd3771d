"""The broker's daemon: its settings, its life, and its end.

With a state folder it leaves at the first SIGINT, SIGTERM or SIGHUP: its runs go on without it, and
the next start takes them up. Without one the first drains (active runs may end, with a countdown)
and the second leaves. What is left behind is the state folder, if one was given, and nothing else.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import secrets
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import grpc.aio

from ...dag.plan.plan import PeerId
from ...net.address import AddressError, address_of, host_of
from ...net.discovery.process import check_available
from ...net.discovery.record import DirectoryError, check_multiaddr, check_swarm
from ...net.grpc_quirks import pass_over_broken_streams
from ...net.identity.authority import Authority, AuthorityError, utc
from ...net.identity.names import Party
from ...net.identity.statements import checked_by
from ...net.local import allow_descriptors, free_port, is_loopback, joined, local_address, split
from ...net.printable import SafeFormatter
from ...net.repeats import Repeats
from ...planner.service.planner import PlannerLimits
from ...proto.admission_pb2 import Invitation, PageKey
from ...proto.broker_pb2 import SignedStatement
from ..access.admission import AdmissionError
from ..events import DrainAsked, StopAsked
from ..journal.journal import open_journal
from ..machine import BrokerMachine
from ..options import BrokerOptions
from .admitting import DOOR_OPTIONS, add_admission, add_door
from .blobs import BlobLimits, BlobStore
from .broker_id import broker_id
from .door.public import PublicAddress
from .door.swarm import Swarm
from .secured import Secured
from .services import add_services, server_options
from .shell import Shell

if TYPE_CHECKING:
    from .page.page import Page

__all__ = ["Broker", "BrokerConfig", "BrokerConfigError", "serve"]

log = logging.getLogger(__name__)

_PAGE_NEEDS = ("starlette", "uvicorn", "prometheus_client")


class BrokerConfigError(ValueError):
    """A setting of the broker that cannot be; the message says what to do."""


@dataclass(frozen=True, kw_only=True)
class BrokerConfig:
    """How the daemon listens, keeps and leaves."""

    host: str = "127.0.0.1"
    """Address to listen on; "::": all of this host's, 0.0.0.0: all of IPv4."""
    port: int = 7077
    """0: any free one."""
    public: str = ""
    """HOST:PORT under which others reach it. Empty: found out, as far as this host knows."""
    swarm: str = ""
    """Name under which peers find the broker wherever it is. Empty: by its address only."""
    bootstrap: tuple[str, ...] = ()
    """Multiaddrs of nodes through which others of the swarm are found, besides those known."""
    insecure: bool = False
    """No identity, no encryption; loopback only."""
    state: Path | None = None
    """Folder of the journal, blobs and the broker's identity; None: a temporary one, removed at the
    end, and a journal in memory."""
    drain_s: float = 10.0
    """Seconds that active runs get to end after the first Ctrl-C, without a state folder."""
    page: bool = True
    """Whether it serves its page and metrics; needs the extra shoal[page], and identities."""
    page_certificate: Path | None = None
    """Folder with fullchain.pem and privkey.pem for the page, as certbot leaves them. None: its
    own, which browsers warn about."""
    options: BrokerOptions = field(default_factory=BrokerOptions)
    """Of the decisions."""
    limits: BlobLimits = field(default_factory=BlobLimits)
    """Of the blobs."""
    planner: PlannerLimits = field(default_factory=PlannerLimits)
    """Of the processes that plan."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise BrokerConfigError(f"port is {self.port}: expected 0 to 65535")
        try:
            object.__setattr__(self, "host", host_of(self.host))
            if self.public:
                public = address_of(self.public, self.port or None)
                object.__setattr__(self, "public", public)
        except AddressError as error:
            raise BrokerConfigError(str(error)) from None
        self._check_swarm()
        if self.page_certificate is not None and (self.insecure or not self.page):
            raise BrokerConfigError(
                "--page-certificate without a page: expected neither --no-page nor --insecure"
            )
        if self.insecure and not is_loopback(self.host):
            raise BrokerConfigError(
                f"--insecure binds to loopback only, and {self.host} is not: anybody who "
                "reaches it could use your peers; use 127.0.0.1"
            )

    def _check_swarm(self) -> None:
        if not self.swarm:
            if self.bootstrap:
                raise BrokerConfigError("--bootstrap is a way into a swarm: expected --swarm, too")
            return
        try:
            check_swarm(self.swarm)
            for way in self.bootstrap:
                check_multiaddr(way)
        except ValueError as error:
            raise BrokerConfigError(str(error)) from None
        if self.insecure or self.state is None:
            raise BrokerConfigError(
                "--swarm needs an identity that stays, as a record is believed by its authority: "
                "expected a state folder, and no --insecure"
            )


class Broker:
    """`async with Broker(config) as broker:` listens at `broker.address` until the block ends.
    `broker.secured` has its authority and admissions; None: it is insecure.

    Raises BrokerConfigError when the port is taken, JournalError when the journal cannot be used,
    OSError when the rest of the state folder cannot.
    """

    def __init__(self, config: BrokerConfig) -> None:
        self.config = config
        self.address = ""
        self.secured: Secured | None = None
        self.swarm: Swarm | None = None
        self.page: Page | None = None
        self._no_page = "it has no identities"
        self._port = config.port
        self._door: grpc.aio.Server | None = None
        self._opened = AsyncExitStack()

    def __repr__(self) -> str:
        return repr(self.shell.machine).replace("<Broker", f"<Broker at {self.address}:")

    async def __aenter__(self) -> Broker:
        config = self.config
        log.debug("broker_config %s", config)
        secured = not config.insecure
        options = replace(config.options, relays=secured, identities=secured)
        if config.swarm:
            try:
                check_available()
            except DirectoryError as error:
                raise BrokerConfigError(str(error)) from None
        tasks = asyncio.TaskGroup()
        try:
            port = await self._open(options, tasks)
        except BaseException:
            await self._opened.aclose()
            raise
        self.address, self.port = self._address(port), port
        log.info(
            "broker_listens address=%s id=%s", self.address, self.shell.machine.members.broker_id
        )
        if self.swarm is not None:
            await self.swarm.shine(tasks)
        return self

    async def _open(self, options: BrokerOptions, tasks: asyncio.TaskGroup) -> int:
        """Opens what it is made of, one after the other, and returns the port. The end closes it in
        reverse."""
        config, opened = self.config, self._opened
        journal, decided = await asyncio.to_thread(
            open_journal, config.state and config.state / "journal.sqlite", options
        )  # first: it holds the lock of the folder
        opened.callback(journal.close)
        self.blobs = BlobStore(config.state and config.state / "blobs", config.limits)
        name = broker_id(config.state)
        await asyncio.to_thread(self.blobs.open)
        opened.push_async_callback(asyncio.to_thread, self.blobs.close)
        await tasks.__aenter__()
        opened.push_async_callback(tasks.__aexit__, None, None, None)
        boot = secrets.token_hex(8)
        if config.swarm:
            await self._enter_swarm(boot)
        machine = BrokerMachine(
            name,
            options,
            boot=boot,
            decided=decided,
            check=None if config.insecure else self._check,
            secret=secrets.token_bytes(32),
        )
        self.shell = Shell(machine, self.blobs, tasks, journal, config.planner)
        opened.callback(self.shell.close)
        self._server = grpc.aio.server(options=server_options())
        return await (self._listen_insecurely() if config.insecure else self._listen())

    def _check(self, statement: bytes, said: SignedStatement) -> PeerId:
        """Return the peer that signed a statement. Raises SignatureError."""
        assert self.secured is not None, "peers speak once its port is open"
        by = checked_by(self.secured.authority.pem, lambda: utc(time.time()))
        return by(statement, said)

    def _address(self, port: int) -> str:
        """Where others reach it."""
        host = self.config.host
        if host in ("0.0.0.0", "::"):
            mine = local_address()
            host = "127.0.0.1" if host == "0.0.0.0" and ":" in mine else mine
        return self.config.public or joined(host, port)

    async def _enter_swarm(self, boot: str) -> None:
        """Before anything else runs: a node takes seconds, and holders of a run have one lease to
        come back. Raises BrokerConfigError where there can be none."""
        config = self.config
        assert config.state is not None, "the config was checked"
        try:
            authority = Authority.open(config.state / "authority", utc(time.time()))
            self._port = config.port or free_port(config.host)
            self.swarm = Swarm(
                *(config.swarm, config.state / "swarm", config.bootstrap, authority, boot)
            )
            self._opened.push_async_callback(self.swarm.stop)
            await self.swarm.start(self._address(self._port))
        except (DirectoryError, AuthorityError) as error:
            raise BrokerConfigError(str(error)) from None

    async def _listen(self) -> int:
        config = self.config
        try:
            secured = await self._opened.enter_async_context(Secured(config.state))
        except AuthorityError as error:
            raise BrokerConfigError(str(error)) from None
        self.secured = secured
        public = PublicAddress(config.public) if config.public else None
        swarm = self.swarm
        ways = None if swarm is None else swarm.offered
        add_services(self._server, self.shell, secured, public, ways=ways)
        parts = self.shell, secured.admission, secured.guard
        add_admission(self._server, *parts, found=self._found, page=self._page_key)
        self._door = grpc.aio.server(options=DOOR_OPTIONS)
        add_door(self._door, *parts)
        secured.listen(self._server, self._door)
        await self._open_page(secured)
        await self._door.start()
        await self._server.start()
        try:
            at = 0 if swarm is None else swarm.port
            page = None if self.page is None else self.page.sockets
            return await secured.open_port(config.host, self._port, swarm=at, page=page)
        except OSError as error:
            await self._server.stop(None)
            await self._door.stop(None)
            raise self._taken(f": {error.strerror}") from None

    async def _open_page(self, secured: Secured) -> None:
        """Raises BrokerConfigError where the owner's certificate cannot be used."""
        config = self.config
        missing = [n for n in _PAGE_NEEDS if importlib.util.find_spec(n) is None]
        self._no_page = "it was started with --no-page"
        if config.page and missing:
            self._no_page = f"{', '.join(missing)} is missing: pip install 'shoal[page]'"
        if not config.page or missing:
            log.warning("page_off why=%s", self._no_page)
            return
        from .page.page import Page, PageError

        def refusals() -> dict[str, Counter[str]]:
            streams = self.shell.refused
            return {"port": secured.refused, "call": secured.guard.refused, "stream": streams}

        try:
            page = Page(
                *(self.shell, secured.admission, refusals),
                folder=(config.state or secured.sockets) / "page",
                sockets=secured.sockets,
                host=split(self._address(self._port or 1))[0],
                certificate=config.page_certificate,
            )
            self.page = await self._opened.enter_async_context(page)
        except PageError as error:
            raise BrokerConfigError(str(error)) from None

    def _page_key(self, party: Party, lasts_s: float) -> PageKey:
        if self.page is None:
            raise AdmissionError("FAILED_PRECONDITION", f"it has no page: {self._no_page}")
        key, ends_s = self.page.key(party, lasts_s)
        log.info("page_key for=%s ends_s=%d", party, ends_s)
        at = {"address": self.address, "fingerprint": self.page.fingerprint}
        return PageKey(key=key, ends_s=ends_s, **at)

    async def _listen_insecurely(self) -> int:
        add_services(self._server, self.shell)
        try:
            address = joined(self.config.host, self.config.port)
            port = int(self._server.add_insecure_port(address))
        except RuntimeError:
            raise self._taken("") from None
        await self._server.start()
        log.warning("broker_insecure address=%s: no identity, no encryption", address)
        return port

    def _taken(self, why: str) -> BrokerConfigError:
        return BrokerConfigError(
            f"cannot listen on {joined(self.config.host, self.config.port)}{why}: the port is "
            "taken or the address is not this host's; take another with --port (0: any free one)"
        )

    def join_line(self) -> str:
        """What a peer's owner pastes."""
        if self.secured is None:
            return f"shoal join {self.address} --insecure"
        found = self._found()
        flags = [f"--swarm {found.swarm}"] if found.swarm else []
        flags += [f"--bootstrap {way}" for way in found.ways]
        token = f"--token {self.secured.printed_token()}"
        return " ".join(["shoal join", self.address, *flags, token])

    def _found(self) -> Invitation:
        """The part of an invitation that says where others find the broker."""
        if self.swarm is None:
            return Invitation(address=self.address)
        return Invitation(address=self.address, swarm=self.swarm.name, ways=self.swarm.ways)

    async def __aexit__(self, *exc: object) -> None:
        if self.config.state is None:
            self.shell.post(StopAsked())
        elif going := [run.id for run in self.shell.machine.runs.values() if not run.ended]:
            log.warning(
                "broker_leaves runs=%s: they go on; the next start with this state takes them up",
                ",".join(going),
            )
        await self.shell.settled()
        if self._door is not None:
            await self._door.stop(grace=None)
        await self._server.stop(grace=2.0)
        await self._opened.aclose()
        log.info("broker_left address=%s", self.address)

    async def drain(self, leave: asyncio.Event) -> None:
        """Starts nothing new and returns when no run is active, after `drain_s`, or at `leave`; at
        once with a state folder, as runs go on without the broker then."""
        if self.config.state is not None:
            return
        self.shell.post(DrainAsked())
        until = self.shell.now + self.config.drain_s
        while (left := until - self.shell.now) > 0:
            active = sum(run.active for run in self.shell.machine.decided.runs.values())
            log.warning(
                "broker_drains left_s=%.0f active_runs=%d: Ctrl-C leaves at once", left, active
            )
            with suppress(TimeoutError):
                async with asyncio.timeout(min(1.0, left)):
                    await _either(self.shell.stopped, leave)
                    return


async def _either(*events: asyncio.Event) -> None:
    """Returns when one of them is set."""
    waiting = [asyncio.ensure_future(e.wait()) for e in events]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for one in waiting:
            one.cancel()


def _to_stderr() -> logging.Handler:
    handler = logging.StreamHandler()
    handler.setFormatter(SafeFormatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    handler.addFilter(Repeats())
    return handler


async def serve(config: BrokerConfig, *, ready: Callable[[Broker], None]) -> None:
    """Runs the daemon until it is told to end; calls `ready` with the broker when it listens.

    Call it in the main thread. Raises BrokerConfigError, OSError, and JournalError when the journal
    cannot be read or, later, written: what is decided then is told to nobody.
    """
    first, second = asyncio.Event(), asyncio.Event()

    def asked() -> None:
        (second if first.is_set() else first).set()

    allow_descriptors()
    # Logs go to stderr, unless the caller has arranged something else.
    logging.basicConfig(level=logging.INFO, handlers=[_to_stderr()])
    pass_over_broken_streams()
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
            ready(broker)
            broker.shell.warm_up()  # while nobody is here: the first run need not wait for it
            await _either(first, broker.shell.stopped)
            if broker.shell.error is None:
                await broker.drain(second)
        if broker.shell.error is not None:
            raise broker.shell.error
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
