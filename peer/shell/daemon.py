"""The worker process's shell: carries the machine's instructions out with asyncio, gRPC and torch.

One event loop owns the machine, the transport and the stream to the broker. What takes longer is
done on a workbench (`workbench.py`).

Every event goes through `_post`: the machine handles one at a time, and what it wants is carried
out before the next. A bug there ends the process with a traceback; the supervisor starts another.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass

import grpc.aio
import torch

from ...job.words import size_text
from ...net.blobs.client import BlobTransferError, Source
from ...net.cap import Cap
from ...proto import broker_pb2, common_pb2
from ..blobs.cache import BlobCache
from ..blobs.fetching import Fetching
from ..blobs.sharing import Fellows, serve_blobs
from ..compute.device import TorchDevice
from ..core import events as e
from ..core.machine import PeerMachine
from ..core.options import OwnerLimits, PeerOptions
from ..core.snapshots import SnapshotStore
from ..host.addresses import to_dial
from ..host.config import PeerConfig
from ..host.identity import Incarnation
from ..host.lending import in_text, speed_text
from ..host.own_data import Catalogue, answer
from ..host.speeds_file import speeds_path
from ..hours import Hours
from ..logs import note
from . import relayed
from .attempt import confirm
from .credentials import Credentials, NoCredentialError
from .event_log import note_heard
from .measuring import measure_again
from .owner import Owner
from .peer_links import PeerLinks
from .relayed import RELAY
from .spans import Spans
from .upstream import Upstream
from .workbench import Calls, DeviceRuntime, said_of

__all__ = ["Opened", "Worker"]

_log = logging.getLogger(__name__)
_LAST_WORDS_S = 2.0
"""For what was told and sent to leave, at the end."""


@dataclass(frozen=True, kw_only=True)
class Opened:
    """What a worker needs of its machine, open: a port, a device, files (`opening.py`)."""

    server: grpc.aio.Server
    """Has its ports, and is not started."""
    listens: str
    """HOST:PORT at which others reach the server."""
    within: str
    """What leads to the server from this process, for dials that the relay brings."""
    credentials: Credentials | None
    """None: nothing is encrypted."""
    up: Cap
    down: Cap
    """Bytes per second that the owner gives, and a count of what was moved."""
    owner: Owner | None
    """None: nobody can pause it, and nothing limits what it moves."""
    device: TorchDevice
    snapshots: SnapshotStore
    kept: tuple[tuple[broker_pb2.Snapshot, int], ...]
    """Snapshots that an earlier process left, with their numbers of parts."""
    own_data: Catalogue
    spans: Spans


class Worker:
    """One peer in one process. Made in its event loop, of what is open already: making it touches
    neither the network nor the disk. `run` acts, and closes all that; `stop` ends it."""

    def __init__(
        self, config: PeerConfig, me: Incarnation, profile: broker_pb2.Profile, opened: Opened
    ) -> None:
        self.config = config
        self.me = me
        self._profile = profile
        self.waits: Callable[[str, float], None] = lambda what, within_s: None
        """Called with what a drain waits for, and for how many seconds at most."""
        self._loop = asyncio.get_running_loop()
        self._exit: asyncio.Future[e.Exit] = self._loop.create_future()
        self._events: deque[e.Event] = deque()
        self._in_text = in_text(config.name or me.peer, profile)
        """What is said the first time that the broker takes it; empty afterwards."""
        self._pumping = False
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._tasks: set[asyncio.Task[None]] = set()

        self._opened = opened
        self.listens = opened.listens
        address = "" if config.address == "none" else config.address or self.listens
        options = PeerOptions(
            give_up_s=config.give_up_s,
            first_s=config.first_s,
            drain_s=config.drain_s,
            terms=OwnerLimits(
                hours=Hours.parse(config.hours) if config.hours else None,
                monthly_bytes=config.monthly_bytes,
            ),
        )
        self.machine = PeerMachine(
            me.peer,
            me.boot,
            profile,
            counter=me.counter,
            address=address,
            options=options,
            snapshots=opened.kept,
        )
        self._upstream = upstream = Upstream(
            config,
            me.peer,
            opened.credentials,
            opened.up,
            opened.down,
            post=self._post,
            heard=self._heard,
            start=self._start,
        )
        self._fellows = Fellows(lambda: upstream.credential, opened.down)
        self._fetching = Fetching(
            self._loop, lambda: upstream.blobs, self._fellows, config.web, opened.down
        )
        cache = BlobCache(me.blobs, self._fetching.from_all, alone=self._fetching.from_broker)
        serve_blobs(opened.server, cache, self._shares_with, opened.up)
        self._bench = DeviceRuntime(
            me.peer,
            opened.device,
            opened.snapshots,
            cache,
            self._fetching.from_web,
            opened.own_data,
            opened.spans,
            Calls(
                post=self._post,
                crash=self._crash,
                send=lambda key, payload: self.links.send(key, payload),
                store=self._store,
                wants=self._wants,
            ),
            may_warm=config.monthly_bytes is None,
        )
        self.links = PeerLinks(
            me,
            self.machine,
            self._bench,
            upstream,
            opened.spans,
            post=self._post,
            via=config.via,
            up=opened.up,
            down=opened.down,
            memory_bytes=profile.device_memory_bytes,
        )
        self.links.transport.attach(opened.server)
        note(
            _log,
            logging.INFO,
            "peer",
            peer=me.peer,
            start=me.counter,
            device=profile.device,
            memory=size_text(profile.device_memory_bytes),
            speed=speed_text(profile.flops_per_s),
            address=address,
        )
        note(_log, logging.DEBUG, "settings", config=config)

    def stop(self, now: bool = False) -> None:
        """The owner wants it to end: after the step that it is in, or at once."""
        self._post(e.StopAsked(now))

    async def run(self) -> int:
        """From Started to Exit; leaves no task, thread, port or link behind. Returns the code."""
        opened = self._opened
        try:
            async with self.links.transport:
                self._upstream.open()
                await opened.server.start()
                try:
                    self._start(self._keep_credential())
                    self._bench.warm_up()
                    if opened.owner is not None:  # before anybody can give it work
                        self._post(await asyncio.to_thread(opened.owner.look, ""))
                        self._start(opened.owner.watch(self._post, self._closed))
                    if self.config.stretch == 1:  # else it stands for a machine of its own
                        self._start(self._measure_again())
                    self._post(e.Started())
                    end = await self._exit
                    await self._last_words(end)
                finally:
                    await self._cancel()
                    await _close(self._fellows.become({}))
                    await self._upstream.close()
                    await opened.server.stop(grace=None)
        finally:
            ended = await self._bench.close(_LAST_WORDS_S)
            opened.spans.close()
        if not ended:
            note(_log, logging.WARNING, "a job does not end", peer=self.me.peer)
        level = logging.INFO if end.code == 0 else logging.ERROR
        note(_log, level, "ended", peer=self.me.peer, code=end.code, why=end.why)
        return end.code

    async def _last_words(self, end: e.Exit) -> None:
        """Lets leave what was told and, after a good end, the frames that others wait for."""
        await self._upstream.finish(_LAST_WORDS_S)
        if end.code == 0:
            await self.links.acknowledged(_LAST_WORDS_S)

    async def _cancel(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        self._fetching.cancel()  # a lane waits for it
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _closed(self) -> str:
        """Why its owner keeps it out of runs, for people; empty: it takes part."""
        closed = self.machine.drain.shut
        return "" if closed is None else closed.text

    async def _keep_credential(self) -> None:
        try:
            await self._upstream.keep_credential()
        except NoCredentialError as error:
            note(_log, logging.ERROR, "not renewed", why=error)
            if not self._exit.done():
                self._exit.set_result(e.Exit(4, str(error)))

    # ------------------------------------------------------------ events

    async def _measure_again(self) -> None:
        profile, path = self._profile, speeds_path()
        device = torch.device(self.config.device)
        await measure_again(
            device, profile, path, self._post, lambda: self.machine.assignment is None
        )

    async def _tell_page(self) -> None:
        if link := await self._upstream.page_link():
            note(_log, logging.INFO, f"your page: {link}")

    def _welcome(self, event: e.Event) -> None:
        """Says once that the broker has taken it."""
        came = isinstance(event, e.BrokerSaid) and event.message.WhichOneof("kind") == "welcome"
        if came and self._in_text:
            note(_log, logging.INFO, self._in_text)
            self._in_text = ""
            self._start(self._tell_page())

    def _post(self, event: e.Event) -> None:
        """Lets the machine handle the event; queued while it handles another one."""
        self._events.append(event)
        if self._pumping:
            return
        self._pumping = True
        try:
            while self._events and not self._exit.done():
                event = self._events.popleft()
                note_heard(_log, self.me.peer, event)
                self._welcome(event)
                for instruction in self.machine.handle(event, self._loop.time()):
                    self._carry_out(instruction)
        except Exception as error:  # a bug: ends the process, not only this callback of the loop
            self._crash(error)
        finally:
            self._pumping = False

    def _crash(self, error: BaseException) -> None:
        if not self._exit.done():
            self._exit.set_exception(error)

    def _start(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """A task of this worker: ends with it, and ends it when it raises."""
        task = self._loop.create_task(work)
        self._tasks.add(task)

        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                self._crash(error)

        task.add_done_callback(ended)
        return task

    def _wants(self, run: str, term: int) -> bool:
        part = self.machine.assignment
        return part is not None and part.matches(run, term)

    # ------------------------------------------------------------ instructions

    def _carry_out(self, instruction: e.Instruction) -> None:
        match instruction:
            case e.SendProbe() | e.Dial() | e.ExpectPeer() | e.HangUp() | e.Allow():
                self.links.do(instruction)
            case e.Release(key, taken):
                if not taken:
                    self._bench.release(key)
                self.links.release(key)
            case e.Connect():
                self._upstream.connect()
            case e.Tell(message):
                self._upstream.tell(message)
            case e.SetTimer(name, at):
                if name in self._timers:
                    self._timers[name].cancel()
                self._timers[name] = self._loop.call_at(at, self._post, e.TimerFired(name))
            case e.ShowWaiting(what, within_s):
                note(_log, logging.INFO, "waits", peer=self.me.peer, what=what, within_s=within_s)
                self.waits(what, within_s)
            case e.Exit():
                self._exit.set_result(instruction)
            case e.Build(assign=assign):
                reached = {d.peer: d.address for d in assign.dials if d.address != RELAY}
                via = self.config.via
                here = {peer: to_dial(via, address) for peer, address in reached.items()}
                self._start(_close(self._fellows.become(here)))
                self._bench.do(instruction)
            case e.Discard():
                self._start(_close(self._fellows.become({})))
                self._bench.do(instruction)
            case _:
                self._bench.do(instruction)

    def _heard(self, message: broker_pb2.BrokerMessage) -> None:
        if message.HasField("relayed"):  # nothing to decide
            there, within = self._upstream.address, self._opened.within
            carries = self.links.transport.carries
            self._start(relayed.answer(message.relayed.ticket, there, within, carries))
        elif message.HasField("resolve"):
            self._start(self._resolve(message.resolve))
        elif message.HasField("confirm"):
            self._start(self._confirm(message.confirm.address))
        else:
            self._post(e.BrokerSaid(message))

    async def _resolve(self, ask: broker_pb2.Resolve) -> None:
        """The manifest of this host's own data; no part in a run."""
        self._upstream.tell(await answer(self._opened.own_data, ask, self._upstream.blobs))

    async def _confirm(self, address: str) -> None:
        """The broker's owner wants to know whether its public address is right."""
        if (credential := self._upstream.credential) is None:
            return
        found = await confirm(address, to_dial(self.config.via, address), credential)
        self._upstream.tell(broker_pb2.PeerMessage(confirmed=found))

    # ------------------------------------------------------------ blobs

    def _store(
        self,
        data: Source,
        stored: Callable[[common_pb2.BlobRef], e.Event],
        failed: Callable[[str], e.Event],
    ) -> None:
        """Uploads it; the machine hears what came of it."""

        async def upload() -> None:
            try:
                ref = await self._upstream.blobs.store(data)
            except (BlobTransferError, OSError) as error:  # OSError: a snapshot that was dropped
                self._post(failed(said_of(error)))
            else:
                self._post(stored(ref))

        self._start(upload())

    def _shares_with(self, peer: str | None) -> bool:
        """Whether a peer gets blobs from here: only those of the run do, where any has a name."""
        part = self.machine.assignment
        if part is None or self.machine.drain.shut is not None:
            return False
        return self._upstream.credentials is None or peer in part.peers


async def _close(channels: Iterable[grpc.aio.Channel]) -> None:
    for channel in channels:
        await channel.close()
