"""The worker process's shell: carries the machine's instructions out with asyncio, gRPC and torch.

One event loop owns the machine, the transport and the stream to the broker. Torch never runs in it:

    lane      jobs, in the order in which the machine asked
    compute   Build, Compute, the copy of UploadWeights, Discard
    data      Prefetch
    sending   SendFrame: encode
    arriving  decode what came, into the device's store; then the machine hears FrameArrived
    keeping   snapshots to and from the disk

Every event goes through `_post`: the machine handles one at a time, and what it wants is carried
out before the next. A bug there ends the process with a traceback; the supervisor starts another.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress

import grpc.aio
import torch

from ..dag.flow import Role
from ..dag.plan import PeerId
from ..net import transport as net
from ..net.blobs_client import BlobTransferError
from ..net.cap import Cap, Meter
from ..net.frame import Arrived, FrameKey, Payload
from ..net.grpc_transport import SERVER_OPTIONS, GrpcTransport
from ..net.identity.credential import Credential
from ..net.local import joined, local_address, split
from ..proto import broker_pb2, common_pb2
from . import events as e
from . import relayed
from .addresses import to_dial
from .cache import BlobCache
from .config import DEFAULT_STATE, PeerConfig
from .confirm import confirm
from .credentials import Credentials, NoCredentialError, listen
from .device import TorchDevice
from .fetching import Fetching
from .host import Host
from .hours import Hours
from .identity import Incarnation
from .lane import Lane
from .logs import note
from .machine import PeerMachine
from .opening import Terms
from .optimizer import warm_up
from .options import PeerOptions
from .order import order_from_assign, resumed
from .overheard import note_heard
from .own_data import Catalogue, answer, host_secret, offers
from .owner import Owner
from .probe import probe_payload
from .profile import measure
from .rebuilt import RebuildError
from .relayed import RELAY
from .sharing import Fellows, serve_blobs
from .snapshots import BLOCKS, PART_BYTES, SnapshotError, SnapshotId, SnapshotStore
from .spans import Spans
from .stretch import StretchedDevice
from .upstream import Upstream

__all__ = ["Worker", "look"]

_log = logging.getLogger(__name__)
_LAST_WORDS_S = 2.0
"""For what was told and sent to leave, at the end."""


def look(config: PeerConfig) -> broker_pb2.Profile:
    """What this host offers with the settings. Raises ValueError for a device that is not here."""
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
        speeds=DEFAULT_STATE.expanduser().with_name("speeds.json"),
        stretch=config.stretch,
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
        self._device = (
            TorchDevice(config.device)
            if config.stretch == 1
            else StretchedDevice(config.device, stretch=config.stretch)
        )
        self._spans = Spans(config.trace, me.peer, config.name)
        self._snapshots = SnapshotStore(me.snapshots)
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
            allowed=self._most_bytes,
        )
        self._transport.attach(self._server)
        self._unacknowledged: set[FrameKey] = set()
        self._all_acknowledged = asyncio.Event()  # set whenever the last one was

        self._compute = Lane("compute", self._loop)
        self._data = Lane("data", self._loop)
        self._sending = Lane("sending", self._loop)
        self._arriving = Lane("arriving", self._loop)
        self._keeping = Lane("keeping", self._loop)
        self._built: tuple[str, int] | None = None
        """Run and term that stand on the device; None while they are being built, or gone."""
        self._fellows = Fellows(lambda: upstream.credential, down)
        self._fetching = Fetching(self._loop, lambda: upstream.blobs, self._fellows)
        self._cache = BlobCache(
            me.scratch, self._fetching.from_all, alone=self._fetching.from_broker
        )
        serve_blobs(self._server, self._cache, self._shares_with, up)
        secret = host_secret(config.host_state or config.state) if config.data else b""
        self._own_data = Catalogue(me.scratch / "own", config.data, secret)

        self._listens = joined(host, port)
        address = "" if config.address == "none" else config.address or self._listens
        options = PeerOptions(
            give_up_s=config.give_up_s,
            first_s=config.first_s,
            drain_s=config.drain_s,
            terms=Terms(
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
            snapshots=self._snapshots.found(),
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
                    # An optimizer's first making loads much of torch: better while nobody waits.
                    self._compute.do(warm_up, lambda _: None, self._crash)
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
            lanes = (*(self._compute, self._data), *(self._sending, self._arriving, self._keeping))
            ended = await asyncio.gather(*(lane.close(_LAST_WORDS_S) for lane in lanes))
            self._spans.close()
        if not all(ended):
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
        closed = self.machine.opening.closed
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
            case net.FrameAcknowledged(key=key):
                self._spans.acknowledged(key)
                self._unacknowledged.discard(key)
                self._note_acknowledged()
                self._post(e.FrameAcknowledged(key))

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
            self._keeping.do(
                lambda: self._snapshots.accept(arrived),
                lambda _: self._post(e.FrameArrived(key)),
                lambda error: self._post(e.FrameRefused(key, _text(error))),
            )
            return
        # The device knows nothing of another term, nor of probes: only dropped.
        if key.role is Role.PROBE or not self._holds(key.run, key.term):
            self._post(e.FrameArrived(key))
            return
        self._arriving.do(
            lambda: self._device.accept(arrived) if self._holds(key.run, key.term) else None,
            lambda _: self._post(e.FrameArrived(key)),
            lambda error: self._post(e.FrameRefused(key, _text(error))),
        )

    def _most_bytes(self, key: FrameKey) -> int | None:
        """The most that a frame may have; None: nobody knows. For any thread."""
        return PART_BYTES if key.role is Role.SNAPSHOT else self._device.most_bytes(key)

    def _holds(self, run: str, term: int) -> bool:
        return self._built == (run, term)

    # ------------------------------------------------------------ instructions

    def _carry_out(self, instruction: e.Instruction) -> None:
        match instruction:
            case e.Compute(run, term, step, action):
                self._compute.do(
                    lambda: self._spans.compute(self._device.compute, run, step, action),
                    lambda result: self._post(e.Computed(run, term, step, action, result)),
                    lambda error: self._post(
                        e.ComputeFailed(run, term, step, action, _text(error))
                    ),
                )
            case e.SendFrame(key) if key.role is Role.SNAPSHOT:
                self._keeping.do(
                    lambda: self._snapshots.payload(key),
                    lambda payload: self._send_snapshot(key, payload),
                    lambda error: self._post(e.FrameRefused(key, _text(error))),
                )
            case e.SendFrame(key):
                self._spans.ready(key)
                self._sending.do(
                    lambda: self._device.payload(key) if self._holds(key.run, key.term) else None,
                    lambda payload: self._send(key, payload),
                    lambda error: self._post(e.FrameRefused(key, _text(error))),
                )
            case e.TakeSnapshot(run, term, snapshot):
                self._take_snapshot(run, term, snapshot)
            case e.KeepSnapshot(snapshot, parts):
                self._keeping.do(
                    lambda: self._snapshots.whole(snapshot, parts),
                    lambda _: None,
                    lambda error: self._post(e.SnapshotFailed(snapshot, _text(error))),
                )
            case e.UploadSnapshot(snapshot):
                self._keeping.do(
                    lambda: b"".join(self._snapshots.parts(SnapshotId.of(snapshot))),
                    lambda data: self._store(
                        data,
                        lambda ref: e.SnapshotSaved(snapshot, ref),
                        lambda why: e.SnapshotSaved(snapshot, None, why),
                    ),
                    lambda error: self._post(e.SnapshotSaved(snapshot, None, _text(error))),
                )
            case e.DropSnapshot(old):
                self._keeping.do(lambda: self._snapshots.drop(old), lambda _: None, self._crash)
            case e.SendProbe(key, size_bytes):
                try:
                    self._transport.send(key.destination, key, probe_payload(size_bytes))
                except net.LinkError as error:
                    self._post(e.FrameRefused(key, _text(error)))
                else:
                    self._post(e.FrameQueued(key, size_bytes))
            case e.Release(key):
                self._device.release(key)
                if key.source != self.me.peer:
                    self._transport.release(key.source, key)
            case e.Prefetch(run, term, step):
                self._data.do(
                    lambda: self._device.prefetch(step) if self._holds(run, term) else None,
                    lambda _: self._post(e.DataReady(run, term, step)),
                    lambda error: self._post(e.DataFailed(run, term, step, _text(error))),
                )
            case e.Build():
                self._build(instruction)
            case e.Discard():
                self._built = None
                self._compute.do(self._device.discard, lambda _: None, self._crash)
            case e.UploadWeights(run, term, step):
                self._compute.do(
                    self._device.export,
                    lambda data: self._store(
                        data,
                        lambda ref: e.ExportedWeights(run, term, step, ref),
                        lambda why: e.ExportFailed(run, term, step, why),
                    ),
                    lambda error: self._post(e.ExportFailed(run, term, step, _text(error))),
                )
            case e.Dial(peer, address, generation):
                there = to_dial(self.config.via, address)
                # What the broker reaches need not be reached from here: then by relay.
                relay = RELAY if self._upstream.credentials is not None else ""
                self._transport.dial(peer, there, generation, relay)
            case e.Expect(peer):
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
            case e.Waits(what, within_s):
                note(_log, logging.INFO, "waits", peer=self.me.peer, what=what, within_s=within_s)
                self.waits(what, within_s)
            case e.Exit():
                self._exit.set_result(instruction)

    def _heard(self, message: broker_pb2.BrokerMessage) -> None:
        if message.HasField("relayed"):  # nothing to decide
            there = self._upstream.address
            self._start(relayed.answer(message.relayed.ticket, there, self._listens))
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

    def _build(self, wanted: e.Build) -> None:
        run, term, assign = wanted.run, wanted.term, wanted.assign
        reached = {
            d.peer: to_dial(self.config.via, d.address) for d in assign.dials if d.address != RELAY
        }
        self._start(_close(self._fellows.become(reached)))

        def build() -> e.Built:
            with self._spans.span("build", run):
                self._own_data.check(assign.data.hash, assign.submitter, assign.local)
                # What is in the stages goes when the others are built.
                here = assign.resume.live and self.me.peer not in assign.resume.rebuilt
                live = (self._device.snapshot(assign.first_step)(),) if here else ()
                order = order_from_assign(
                    self.me.peer,
                    assign,
                    blob=self._cache.whole,
                    read=self._cache.read,
                    shard=lambda name: (
                        self._own_data.path(assign.data.hash, name) or self._cache.path(name)
                    ),
                    parts=resumed(
                        assign,
                        wanted.snapshots,
                        self._snapshots.parts,
                        self.me.peer,
                        lambda ref: (memoryview(self._cache.whole(ref)),),
                    )
                    + live,
                )
                return self._device.build(order)

        def done(built: e.Built) -> None:
            part = self.machine.assignment
            if part is not None and part.matches(run, term):
                self._built = run, term
            self._post(built)

        def failed(error: Exception) -> None:
            _log.debug("the build failed", exc_info=error)
            self._post(e.BuildFailed(run, term, _text(error), _code(error)))

        self._compute.do(build, done, failed)

    def _take_snapshot(self, run: str, term: int, snapshot: broker_pb2.Snapshot) -> None:
        """The copy is made between two actions; it is written beside them."""

        def failed(error: Exception) -> None:
            self._post(e.SnapshotFailed(snapshot, _text(error)))

        def written(write: Callable[[], tuple[memoryview, ...]]) -> int:
            parts = write()
            self._snapshots.put(snapshot, parts)
            return len(parts)

        def copied(write: Callable[[], tuple[memoryview, ...]] | None) -> None:
            if write is not None:
                self._keeping.do(
                    lambda: written(write),
                    lambda parts: self._post(e.SnapshotTaken(snapshot, parts)),
                    failed,
                )

        def copy() -> Callable[[], tuple[memoryview, ...]] | None:
            if not self._holds(run, term):
                return None
            blocks = snapshot.term == BLOCKS
            return self._device.blocks() if blocks else self._device.snapshot(snapshot.step)

        self._compute.do(copy, copied, failed)

    def _send_snapshot(self, key: FrameKey, payload: Payload) -> None:
        try:
            self._transport.send(key.destination, key, payload)
        except net.LinkError as error:  # it has hung up: the broker sees that the copy is missing
            note(_log, logging.INFO, "not given", frame=key, why=error)
        else:
            self._post(e.FrameQueued(key, payload.size_bytes))

    def _send(self, key: FrameKey, payload: Payload | None) -> None:
        if payload is None or not self._holds(key.run, key.term):
            return  # the assignment went while it was encoded
        try:
            self._transport.send(key.destination, key, payload)
        except net.LinkError as error:  # its queue is full: without the frame the run would hang
            self._post(e.FrameRefused(key, _text(error)))
            return
        self._spans.sent(key, payload)
        self._unacknowledged.add(key)
        self._all_acknowledged.clear()
        self._post(e.FrameQueued(key, payload.size_bytes))

    # ------------------------------------------------------------ blobs

    def _store(
        self,
        data: bytes,
        stored: Callable[[common_pb2.BlobRef], e.Event],
        failed: Callable[[str], e.Event],
    ) -> None:
        """Uploads it; the machine hears what came of it."""

        async def upload() -> None:
            try:
                ref = await self._upstream.blobs.store(data)
            except BlobTransferError as error:
                self._post(failed(_text(error)))
            else:
                self._post(stored(ref))

        self._start(upload())

    def _shares_with(self, peer: str | None) -> bool:
        """Whether a peer gets blobs from here: only those of the run do, where any has a name."""
        part = self.machine.assignment
        if part is None or self.machine.opening.closed is not None:
            return False
        return self._upstream.credentials is None or peer in part.peers


async def _close(channels: Iterable[grpc.aio.Channel]) -> None:
    for channel in channels:
        await channel.close()


def _text(error: Exception) -> str:
    """What people read of an error: a ValueError explains itself, others need their type."""
    text = str(error)
    return text if isinstance(error, ValueError) and text else f"{type(error).__name__}: {text}"


def _code(error: Exception) -> str:
    """A word for programs: why a build failed."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return "memory"
    if isinstance(error, SnapshotError):
        return "snapshot"
    if isinstance(error, RebuildError):
        return "neighbour"
    return "blob" if isinstance(error, BlobTransferError) else "build"
