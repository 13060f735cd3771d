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
from contextlib import suppress
from functools import partial

import grpc.aio
import torch

from ...dag.plan.plan import PeerId
from ...dag.schedule.flow import Role
from ...net.blobs.client import BlobTransferError, Source
from ...net.cap import Cap, Meter
from ...net.identity.credential import Credential
from ...net.links import transport as net
from ...net.links.frame import Arrived, FrameKey, Payload
from ...net.links.switchboard import MAX_FRAME_BYTES
from ...net.local import joined, local_address, split
from ...net.transports.grpc_transport import SERVER_OPTIONS, GrpcTransport
from ...proto import broker_pb2, common_pb2
from ..blobs.cache import BlobCache
from ..blobs.fetching import Fetching
from ..blobs.sharing import Fellows, serve_blobs
from ..compute.device import TorchDevice
from ..compute.stretch import StretchedDevice
from ..core import events as e
from ..core.machine import PeerMachine
from ..core.options import OwnerLimits, PeerOptions
from ..core.rates.probe import probe_payload
from ..core.snapshots import SnapshotStore
from ..host.addresses import to_dial
from ..host.config import PeerConfig
from ..host.host import Host
from ..host.identity import Incarnation
from ..host.own_data import Catalogue, answer, host_secret, offers
from ..host.profile import measure
from ..host.speeds_file import speeds_path
from ..hours import Hours
from ..logs import note
from . import relayed
from .attempt import confirm
from .credentials import Credentials, NoCredentialError, listen, listen_within
from .event_log import note_heard
from .owner import Owner
from .relayed import RELAY
from .spans import Spans
from .upstream import Upstream
from .workbench import Calls, DeviceRuntime, said_of

__all__ = ["Worker", "look"]

_log = logging.getLogger(__name__)
_LEAST_FRAME = 64 << 20
"""Bytes that a frame may have where the owner offers next to nothing."""
_LAST_WORDS_S = 2.0
"""For what was told and sent to leave, at the end."""


def look(config: PeerConfig, network: bytes = b"") -> broker_pb2.Profile:
    """What this host offers with the settings to a network, which its authority's fingerprint
    names. Raises ValueError for a device that is not here."""
    if config.threads:
        torch.set_num_threads(config.threads)
    return measure(
        config.device,
        name=config.name,
        place=config.place,
        owner=config.owner,
        core=config.operator_set == "core",
        memory_bytes=config.memory_bytes,
        up_bytes_per_s=config.up_bytes_per_s or 0.0,
        down_bytes_per_s=config.down_bytes_per_s or 0.0,
        stay_s=config.stay_s or 0.0,
        hours=str(Hours.parse(config.hours)) if config.hours else "",
        monthly_bytes=config.monthly_bytes or 0,
        data=offers(config.data),
        web=config.web,
        speeds=speeds_path(),
        stretch=config.stretch,
        network=network,
    )


class Worker:
    """One peer in one process. Made in its event loop; `run` acts, `stop` ends it."""

    def __init__(
        self,
        config: PeerConfig,
        me: Incarnation,
        profile: broker_pb2.Profile,
        credential: Credential | None = None,
    ) -> None:
        self.config = config
        self.me = me
        self.waits: Callable[[str, float], None] = lambda what, within_s: None
        """Called with what a drain waits for, and for how many seconds at most."""
        self._loop = asyncio.get_running_loop()
        self._exit: asyncio.Future[e.Exit] = self._loop.create_future()
        self._events: deque[e.Event] = deque()
        self._pumping = False
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._tasks: set[asyncio.Task[None]] = set()

        self._meter = Meter()
        up = Cap(config.up_bytes_per_s, meter=self._meter)
        down = Cap(config.down_bytes_per_s, meter=self._meter)
        self._upstream = upstream = Upstream(
            config,
            me.peer,
            credential,
            up,
            down,
            post=self._post,
            heard=self._heard,
            start=self._start,
        )
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        host = config.host or local_address(split(upstream.address)[0])
        credentials = upstream.credentials
        port = listen(self._server, host, config.port, credentials)
        self._spans = Spans(config.trace, me.peer, config.name)
        self._owner = (
            None
            if config.host_state is None
            else Owner(
                Host(config.host_state),
                self._meter,
                peer=me.peer,
                name=config.name,
                broker=config.broker,
                monthly_bytes=config.monthly_bytes,
            )
        )
        self._transport = GrpcTransport(
            me.peer,
            me.boot,
            self._on_transport,
            credential=None if credentials is None else lambda: credentials.now,
            resolve=lambda address: upstream.address if address == RELAY else address,
            up=up,
            down=down,
            # No value of a run is larger than the memory that runs may use here.
            max_frame_bytes=min(MAX_FRAME_BYTES, max(_LEAST_FRAME, profile.device_memory_bytes)),
            allowed=self._most_bytes,
        )
        self._transport.attach(self._server)
        self._unacknowledged: set[FrameKey] = set()
        self._all_acknowledged = asyncio.Event()  # set whenever the last one was

        self._fellows = Fellows(lambda: upstream.credential, down)
        self._fetching = Fetching(
            self._loop, lambda: upstream.blobs, self._fellows, config.web, down
        )
        cache = BlobCache(me.scratch, self._fetching.from_all, alone=self._fetching.from_broker)
        serve_blobs(self._server, cache, self._shares_with, up)
        secret = host_secret(config.host_state or config.state) if config.data else b""
        self._own_data = Catalogue(me.scratch / "own", config.data, secret)
        snapshots = SnapshotStore(me.snapshots)
        stretch = config.stretch
        device = TorchDevice if stretch == 1 else partial(StretchedDevice, stretch=stretch)
        self._bench = DeviceRuntime(
            me.peer,
            device(config.device),
            snapshots,
            cache,
            self._fetching.from_web,
            self._own_data,
            self._spans,
            Calls(
                post=self._post,
                crash=self._crash,
                send=self._send,
                store=self._store,
                wants=self._wants,
            ),
            may_warm=config.monthly_bytes is None,
        )

        self._listens = joined(host, port)
        within = "" if credentials is None else listen_within(self._server, me.boot, credentials)
        self._relayed_to = within or self._listens
        address = "" if config.address == "none" else config.address or self._listens
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
            snapshots=snapshots.found(),
        )
        note(
            _log,
            logging.INFO,
            "peer",
            peer=me.peer,
            start=me.counter,
            device=profile.device,
            memory_bytes=profile.device_memory_bytes,
            flops_per_s=profile.flops_per_s,
            address=address,
        )
        note(_log, logging.DEBUG, "settings", config=config)

    def stop(self, now: bool = False) -> None:
        """The owner wants it to end: after the step that it is in, or at once."""
        self._post(e.StopAsked(now))

    async def run(self) -> int:
        """From Started to Exit; leaves no task, thread, port or link behind. Returns the code."""
        try:
            async with self._transport:
                self._upstream.open()
                await self._server.start()
                try:
                    if self._upstream.credentials is not None:
                        self._start(self._keep(self._upstream.credentials))
                    self._bench.warm_up()
                    if self._owner is not None:  # before anybody can give it work
                        self._post(await asyncio.to_thread(self._owner.look, ""))
                        self._start(self._owner.watch(self._post, self._closed))
                    self._post(e.Started())
                    end = await self._exit
                    await self._last_words(end)
                finally:
                    await self._cancel()
                    await _close(self._fellows.become({}))
                    await self._upstream.close()
                    await self._server.stop(grace=None)
        finally:
            ended = await self._bench.close(_LAST_WORDS_S)
            self._spans.close()
        if not ended:
            note(_log, logging.WARNING, "a job does not end", peer=self.me.peer)
        level = logging.INFO if end.code == 0 else logging.ERROR
        note(_log, level, "ended", peer=self.me.peer, code=end.code, why=end.why)
        return end.code

    async def _last_words(self, end: e.Exit) -> None:
        """Lets leave what was told and, after a good end, the frames that others wait for."""
        await self._upstream.finish(_LAST_WORDS_S)
        if end.code == 0 and self._unacknowledged:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._all_acknowledged.wait(), _LAST_WORDS_S)

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
        closed = self.machine.availability.closed
        return "" if closed is None else closed.text

    async def _keep(self, credentials: Credentials) -> None:
        try:
            await credentials.keep()
        except NoCredentialError as error:
            note(_log, logging.ERROR, "not renewed", why=error)
            if not self._exit.done():
                self._exit.set_result(e.Exit(4, str(error)))

    # ------------------------------------------------------------ events

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

    def _on_transport(self, event: net.TransportEvent) -> None:
        match event:
            case net.LinkUp(peer, again_bytes=again):
                self._post(e.LinkUp(PeerId(peer), again))
            case net.LinkDown(peer, why):
                self._post(e.LinkDown(PeerId(peer), why))
                if self._exit.done():  # it may have hung up; this process does not wait for it
                    self._forget_sent(peer)
            case net.LinkRefused(peer, why):
                # Anybody can claim to be `peer`: a link that this ended gets a LinkDown of its own.
                note(_log, logging.INFO, "link refused", peer=self.me.peer, of=peer, why=why)
                if self._exit.done():
                    self._forget_sent(peer)
            case net.FrameArrived(arrived):
                self._arrived(arrived)
            case net.FrameAcknowledged(key=key, began_s=began_s):
                self._spans.acknowledged(key)
                self._unacknowledged.discard(key)
                self._note_acknowledged()
                self._post(e.FrameAcknowledged(key, began_s))

    def _forget_sent(self, peer: str) -> None:
        self._spans.forget(peer)
        self._unacknowledged = {k for k in self._unacknowledged if k.destination != peer}
        self._note_acknowledged()

    def _note_acknowledged(self) -> None:
        if not self._unacknowledged:
            self._all_acknowledged.set()

    def _arrived(self, arrived: Arrived) -> None:
        key = arrived.key
        if key.role is Role.SNAPSHOT and self.machine.keeping.expects(key):
            self._bench.keep(arrived)
        elif key.role is Role.PROBE or not self._bench.knows(key):
            # The device knows nothing of another term, nor of probes: only dropped.
            self._post(e.FrameArrived(key, len(arrived.data)))
        else:
            self._bench.accept(arrived)

    def _most_bytes(self, key: FrameKey) -> int | None:
        """The most that a frame may have; None: no more is known of it than that it is a frame."""
        if key.role is Role.PROBE:
            return self.machine.probes.most_bytes(key)
        return self._bench.most_bytes(key)

    def _wants(self, run: str, term: int) -> bool:
        part = self.machine.assignment
        return part is not None and part.matches(run, term)

    # ------------------------------------------------------------ instructions

    def _carry_out(self, instruction: e.Instruction) -> None:
        match instruction:
            case e.SendProbe(key, size_bytes):
                try:
                    self._transport.send(key.destination, key, probe_payload(size_bytes))
                except net.LinkError as error:
                    self._post(e.FrameRefused(key, said_of(error)))
                else:
                    self._post(e.FrameQueued(key, size_bytes))
            case e.Release(key):
                self._bench.release(key)
                if key.source != self.me.peer:
                    self._transport.release(key.source, key)
            case e.Dial(peer, address, generation):
                there = to_dial(self.config.via, address)
                # What the broker reaches need not be reached from here: then by relay.
                relay = RELAY if self._upstream.credentials is not None else ""
                self._transport.dial(peer, there, generation, relay)
            case e.ExpectPeer(peer):
                self._transport.expect(peer)
            case e.HangUp(peer):
                self._transport.hang_up(peer)
                self._forget_sent(peer)
            case e.Allow(peer, role, frames):
                self._transport.allow(peer, role, frames)
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
            there = self._upstream.address
            self._start(relayed.answer(message.relayed.ticket, there, self._relayed_to))
        elif message.HasField("resolve"):
            self._start(self._resolve(message.resolve))
        elif message.HasField("confirm"):
            self._start(self._confirm(message.confirm.address))
        else:
            self._post(e.BrokerSaid(message))

    async def _resolve(self, ask: broker_pb2.Resolve) -> None:
        """The manifest of this host's own data; no part in a run."""
        self._upstream.tell(await answer(self._own_data, ask, self._upstream.blobs))

    async def _confirm(self, address: str) -> None:
        """The broker's owner wants to know whether its public address is right."""
        if (credential := self._upstream.credential) is None:
            return
        found = await confirm(address, to_dial(self.config.via, address), credential)
        self._upstream.tell(broker_pb2.PeerMessage(confirmed=found))

    def _send(self, key: FrameKey, payload: Payload) -> None:
        kept = key.role is Role.SNAPSHOT
        try:
            self._transport.send(key.destination, key, payload)
        except net.LinkError as error:
            if kept:  # it has hung up: the broker sees that the copy is missing
                note(_log, logging.INFO, "not given", frame=key, why=error)
            else:  # its queue is full: without the frame the run would hang
                self._post(e.FrameRefused(key, said_of(error)))
            return
        if not kept:
            self._spans.sent(key, payload)
            self._unacknowledged.add(key)
            self._all_acknowledged.clear()
        self._post(e.FrameQueued(key, payload.size_bytes))

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
        if part is None or self.machine.availability.closed is not None:
            return False
        return self._upstream.credentials is None or peer in part.peers


async def _close(channels: Iterable[grpc.aio.Channel]) -> None:
    for channel in channels:
        await channel.close()
