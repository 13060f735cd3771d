"""A peer's shell in the simulated world: its machine's instructions on virtual time.

The control stream, links and blobs go over the modelled network, an action takes the cost model's
seconds at the peer's speeds, and a device does with the values what the mode of the world says:
real tensors (`peer/compute/device.py`), or hashes.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from ...dag.plan.action import ROUNDS, TRAITS, ExchangeContent
from ...dag.plan.plan import PeerId
from ...dag.schedule.flow import Role
from ...net.links.frame import Arrived, FrameKey, Payload
from ...net.links.outbox import PIECES
from ...net.links.transport import (
    FrameAcknowledged,
    FrameArrived,
    LinkDown,
    LinkError,
    LinkRefused,
    LinkUp,
    TransportEvent,
)
from ...net.transports.memory import MemoryTransport
from ...peer.compute.order import resumed
from ...peer.core import events as p
from ...peer.core.machine import PeerMachine
from ...peer.core.options import PeerOptions
from ...peer.core.rates.probe import probe_payload
from ...peer.core.snapshots import BLOCKS, PART_BYTES, SnapshotId, SnapshotStore
from ...peer.data.manifest import DataError, Manifest
from ...peer.shell.workbench import code_of, code_of_action, said_of
from ...proto import broker_pb2, common_pb2
from .. import trace
from .blob_fetches import BlobFetches
from .clock import Observed, Timers
from .control import BROKER, Control
from .device_task import DeviceTask
from .orders import ActionTimes
from .spec import PeerDevice, PeerSpec

if TYPE_CHECKING:
    from .world import World

__all__ = ["PeerShell"]

OVERHEAD_S = 1e-4
"""What building, reading data and storing weights take, besides what they fetch or store."""
LAST_WORDS_S = 2.0
"""How long a process that ends well lets its frames leave, as the daemon does."""

_AWAY = "the broker is away"


class PeerShell:
    """One process of a peer, from its start to its end. `incarnation` counts those of its name."""

    def __init__(
        self,
        world: World,
        spec: PeerSpec,
        options: PeerOptions | None,
        device: PeerDevice,
        incarnation: int = 0,
    ) -> None:
        self.world, self.spec, self.name = world, spec, spec.name
        self.incarnation = incarnation
        boot = f"boot-{spec.name}" + (f"-{incarnation}" if incarnation else "")
        self.snapshots = world.disks.setdefault(spec.name, SnapshotStore())
        self.machine = PeerMachine(
            PeerId(spec.name),
            boot,
            spec.profile,
            counter=incarnation,
            address=spec.name,
            options=options,
            snapshots=self.snapshots.found(),
        )
        self.device = device
        self.alive = True
        """False: nothing is handled and nothing said any more."""
        self.exit: p.Exit | None = None
        self.control: Control | None = None
        self.stretch = 1.0
        """Compute takes so many times longer."""
        self._pace: ActionTimes | None = None
        self._transport: MemoryTransport = world.network.transport(
            spec.name,
            boot,
            self._transported,
            allocate=getattr(device, "allocate", None),
            allowed=self._most_bytes,
            pieces=getattr(device, "pieces", PIECES),
        )
        self._timers = Timers(world, lambda name: self.handle(p.TimerFired(name)))
        self._task = DeviceTask(world, lambda: self.alive)
        self._copies_until = 0.0  # when the device has copied the newest snapshot
        self._fetched: set[str] = set()  # hashes of whole blobs that this host has
        self._ready: dict[FrameKey, tuple[float, int, str]] = {}  # (when, size, codec) of frames

    def start(self) -> None:
        self.handle(p.Started())

    def stop(self, now: bool = False) -> None:
        """Stop the peer, as its owner's Ctrl-C does."""
        self.handle(p.StopAsked(now))

    def die(self) -> None:
        """The process is gone without a word; the kernel closes what it had open."""
        if self.alive:
            self.alive = False
            self._transport.close()
            if self.control is not None:
                self.control.end_here("the peer died")

    def handle(self, event: p.Event) -> None:
        world = self.world
        if not self.alive:
            return
        if world.network.frozen and world.network.held(self.name, lambda: self.handle(event)):
            return
        observed = world.observe is not None
        if observed and not self._observed(event):
            return
        for instruction in self.machine.handle(event, world.now):
            if observed and not self._observed(instruction):
                return
            self._carry_out(instruction)

    def _observed(self, record: p.Event | p.Instruction) -> bool:
        """Whether the process is still there after the observer has seen this."""
        world = self.world
        assert world.observe is not None
        world.observe(Observed(world.now, self.name, record))
        return self.alive

    # ------------------------------------------------------------ control channel

    def attached(self, control: Control) -> None:
        if control is self.control:
            self.handle(p.Attached())

    def told(self, control: Control, data: bytes) -> None:
        if control is not self.control:
            return
        message = broker_pb2.BrokerMessage.FromString(data)
        if message.HasField("resolve"):
            self.world.after(OVERHEAD_S, lambda: self._resolve(message.resolve))
        else:
            self.handle(p.BrokerSaid(message))

    def detached(self, control: Control, why: str) -> None:
        if control is self.control:
            self.control = None
            self.handle(p.Detached(why))

    def _connect(self) -> None:
        if self.control is not None:
            self.control.end_here("the peer attaches anew")
        self.control = self.world.dial_broker(self)

    def _tell(self, message: broker_pb2.PeerMessage) -> None:
        self.world.note(self.name, "says", message.WhichOneof("kind"))
        if self.control is not None:
            self.control.say(message.SerializeToString(deterministic=True))

    def _resolve(self, ask: broker_pb2.Resolve) -> None:
        """Says which data it has, of which nothing leaves, however it is to be read."""
        name = self.spec.data[ask.data]
        made = Manifest.from_json(self.world.blobs[name])
        blob = common_pb2.BlobRef(hash=name, size_bytes=len(self.world.blobs[name]))
        found = broker_pb2.Resolved(number=ask.number, manifest=blob, local=[*made.fields])
        self._tell(broker_pb2.PeerMessage(resolved=found))

    # ------------------------------------------------------------ links

    def _transported(self, event: TransportEvent) -> None:
        if isinstance(event, FrameAcknowledged):
            self.handle(p.FrameAcknowledged(event.key, event.began_s))
        elif isinstance(event, FrameArrived):
            self._arrived(event.arrived)
        else:
            self._link_changed(event)

    def _arrived(self, arrived: Arrived) -> None:
        world, machine, key = self.world, self.machine, arrived.key
        if world.trace is not None:
            world.arrived(arrived)
        try:
            # One of another term has no tensor here: the machine counts and frees it.
            part = machine.assignment
            if key.role is Role.SNAPSHOT:
                if machine.keeping.expects(key):
                    self.snapshots.accept(arrived)
            elif key.role is not Role.PROBE and part and part.takes(key):
                self.device.accept(arrived)
        except (ValueError, OSError) as error:
            self.handle(p.FrameRefused(key, str(error)))
            return
        if world.logs:
            world.note(self.name, "has", key)
        self.handle(p.FrameArrived(key))

    def _link_changed(self, event: LinkUp | LinkDown | LinkRefused) -> None:
        match event:
            case LinkUp(peer, again_bytes=again):
                self.handle(p.LinkUp(PeerId(peer), again))
            case LinkDown(peer, why):
                self.handle(p.LinkDown(PeerId(peer), why))
            case LinkRefused(peer, why):  # a link that this ended gets a LinkDown of its own
                self.world.note(self.name, f"refused link of {peer}: {why}")

    def _send(self, key: FrameKey, payload: Payload) -> None:
        try:
            self._transport.send(key.destination, key, payload)
        except LinkError as error:
            if key.role is Role.SNAPSHOT:
                return  # it has hung up: the broker sees that the copy is missing
            why = f"LinkError: {error}"
            self.world.after(0.0, lambda: self.handle(p.FrameRefused(key, why)))
            return
        size_bytes = payload.size_bytes
        if self.world.trace is not None:
            self._ready[key] = self.world.now, size_bytes, payload.codec
        self.handle(p.FrameQueued(key, size_bytes))

    def sent(self, arrived: Arrived, left_s: float) -> None:
        """A frame of this peer came, whose last byte left at a time."""
        key = arrived.key
        if self.world.trace is not None and key in self._ready:
            ready_s, size_bytes, codec = self._ready.pop(key)
            self.world.trace.add(
                trace.Span(
                    start_s=ready_s,
                    end_s=left_s,
                    peer=self.name,
                    kind="send",
                    step=key.step,
                    microbatch=key.microbatch,
                    to=key.destination,
                    size_bytes=size_bytes,
                    dense_bytes=0 if key.role is Role.PROBE else arrived.spec.size_bytes,
                    role=key.role.value,
                    codec=codec,
                )
            )

    def _most_bytes(self, key: FrameKey) -> int | None:
        """As the daemon has it."""
        if key.role is Role.PROBE:
            return self.machine.probes.most_bytes(key)
        return PART_BYTES if key.role is Role.SNAPSHOT else self.device.most_bytes(key)

    # ------------------------------------------------------------ instructions

    def _carry_out(self, instruction: p.Instruction) -> None:
        # Those of every action come first; a test of a type takes a third of a case's time.
        if isinstance(instruction, p.Release):
            key = instruction.key
            if not instruction.taken:
                self.device.release(key)
            if key.source != self.name:
                self._transport.release(key.source, key)
        elif isinstance(instruction, p.SendFrame):
            key = instruction.key
            here = self.snapshots if key.role is Role.SNAPSHOT else self.device
            self._send(key, here.payload(key))
        elif isinstance(instruction, p.Compute):
            self._compute(instruction)
        else:
            self._carry_out_rarer(instruction)

    def _carry_out_rarer(self, instruction: p.Instruction) -> None:
        world = self.world
        match instruction:
            case p.SendProbe(key, size_bytes):
                self._send(key, probe_payload(size_bytes))
            case p.Connect():
                self._connect()
            case p.Tell(message):
                self._tell(message)
            case p.SetTimer(name, at):
                self._timers.set(name, at)
            case p.ShowWaiting(what, within_s):
                world.note(self.name, f"waits for {what}, at most {within_s:.3f} s")
            case p.Exit():
                self._exit(instruction)
            case p.Dial(peer, address, generation):
                self._transport.dial(peer, address, generation)
            case p.ExpectPeer(peer):
                self._transport.expect(peer)
            case p.HangUp(peer):
                self._transport.hang_up(peer)
            case p.Allow(peer, role, frames):
                self._transport.allow(peer, role, frames)
            case p.Build():
                self._build(instruction)
            case p.PrefetchFrozen():
                pass  # blobs are here at once
            case p.BeginRound(run, term, start):
                self.device.rounds.begin(start)
                ready = p.RoundReady(run, term, start.round)
                world.after(OVERHEAD_S, lambda: self.handle(ready))
            case p.JoinExchange(plan=plan, wiring=wiring):
                self.device.rounds.join(plan, wiring)
            case p.HearMasks(told=told):
                self.device.rounds.hear(told)
            case p.ShowReceipts(run, term, asked):
                shown = p.ReceiptsShown(run, term, self.device.rounds.answer(asked))
                world.after(OVERHEAD_S, lambda: self.handle(shown))
            case p.ShowAgain(wiring=wiring):
                self.device.rounds.show(wiring)
            case p.AddAgain(run, term, order):
                again = p.ReceiptsShown(run, term, self.device.rounds.answer_audit(order))
                world.after(OVERHEAD_S, lambda: self.handle(again))
            case p.Prefetch(run, term, step):
                read: p.Event = p.DataReady(run, term, step)
                try:
                    self.device.prefetch(step)
                except (ValueError, OSError) as error:
                    code = code_of(error, "data")
                    read = p.DataFailed(run, term, step, said_of(error), code)
                world.after(OVERHEAD_S, lambda: self.handle(read))
            case p.UploadWeights(run, term, step):
                self._upload(instruction)
            case p.TakeSnapshot():
                self._take_snapshot(instruction)
            case p.KeepSnapshot(snapshot, parts):
                self.snapshots.whole(snapshot, parts)
            case p.UploadSnapshot(snapshot):
                self._save(snapshot)
            case p.DropSnapshot(name):
                self.snapshots.drop(name)
            case p.Discard(run, term):
                self.device.discard()
                ours = [k for k in self._ready if (k.run, k.term) == (run, term)]
                for key in ours:
                    del self._ready[key]

    def _exit(self, instruction: p.Exit) -> None:
        world, self.exit = self.world, instruction
        world.note(self.name, f"exits with {instruction.code}: {instruction.why}")
        world.mark(self.name, "exit", instruction.why)
        if self.control is not None:
            self.control.end_here("it ended")
        world.after(LAST_WORDS_S if instruction.code == 0 else 0.0, self.die)

    def _build(self, wanted: p.Build) -> None:
        """Build the stages; what they fetch comes from the broker's place, in one request."""
        world, began = self.world, self.world.now
        fetches = BlobFetches(world, self._fetched)
        answer: p.Event
        parts: tuple[tuple[memoryview, ...], ...] = ()
        resume = wanted.assign.resume
        if resume.live and self.name not in resume.rebuilt:
            parts = (self.device.snapshot(wanted.assign.first_step)(),)
        held = self.snapshots.parts
        try:
            kept = resumed(wanted.assign, wanted.snapshots, held, self.name, fetches.saved)
            order, self._pace = world.orders.read(
                self.name,
                wanted.assign,
                self.spec.speeds,
                blob=fetches.whole,
                read=fetches.read,
                shard=fetches.shard,
                parts=parts + kept,
                shares=getattr(self.device, "shares_plan", False),
            )
            answer = self.device.build(order)
        except (ValueError, OSError) as error:
            code = code_of(error, "build")
            answer = p.BuildFailed(wanted.run, wanted.term, said_of(error), code)

        def built() -> None:
            self._span("build", began)
            self.handle(answer)

        def sends() -> None:
            nonlocal answer
            if not world.broker.alive:
                answer = p.BuildFailed(wanted.run, wanted.term, _AWAY, "blob")
            world.carrier.send(
                BROKER, self.name, fetches.bytes, _nothing, lambda: world.after(OVERHEAD_S, built)
            )

        world.carrier.send(self.name, BROKER, 0, _nothing, sends)

    def _take_snapshot(self, wanted: p.TakeSnapshot) -> None:
        """Copying holds the device up, from now on; writing does not."""
        blocks = wanted.snapshot.term == BLOCKS
        parts = (self.device.blocks() if blocks else self.device.snapshot(wanted.snapshot.step))()
        self.snapshots.put(wanted.snapshot, parts)
        copied = 2 * sum(part.nbytes for part in parts)  # read and written
        now = self.world.now
        self._copies_until = max(now, self._copies_until) + copied / self.spec.speeds.memory
        answer = p.SnapshotTaken(wanted.snapshot, len(parts))
        self.world.after(OVERHEAD_S + self._copies_until - now, lambda: self.handle(answer))

    def _save(self, snapshot: broker_pb2.Snapshot) -> None:
        world, parts = self.world, self.snapshots.parts(SnapshotId.of(snapshot))
        size = sum(part.nbytes for part in parts)
        seen = hashlib.sha256(snapshot.SerializeToString(deterministic=True))
        blob = common_pb2.BlobRef(hash=seen.hexdigest(), size_bytes=size)

        def stored() -> None:
            answer = p.SnapshotSaved(snapshot, None, _AWAY)
            if world.broker.alive:
                world.saved[blob.hash] = parts
                answer = p.SnapshotSaved(snapshot, blob)
            world.carrier.send(BROKER, self.name, 0, _nothing, lambda: self.handle(answer))

        world.carrier.send(self.name, BROKER, size, _nothing, stored)

    def _upload(self, wanted: p.UploadWeights) -> None:
        world = self.world
        try:
            data = bytes(self.device.export())
        except OSError as error:
            failed = p.ExportFailed(wanted.run, wanted.term, wanted.step, said_of(error))
            world.after(OVERHEAD_S, lambda: self.handle(failed))
            return
        name = hashlib.sha256(data).hexdigest()
        blob = common_pb2.BlobRef(hash=name, size_bytes=len(data))

        def stored() -> None:
            answer: p.Event = p.ExportFailed(wanted.run, wanted.term, wanted.step, _AWAY)
            if world.broker.alive:
                world.blobs[name] = data
                answer = p.ExportedWeights(wanted.run, wanted.term, wanted.step, blob)
            world.carrier.send(BROKER, self.name, 0, _nothing, lambda: self.handle(answer))

        world.after(
            OVERHEAD_S,
            lambda: world.carrier.send(self.name, BROKER, len(data), _nothing, stored),
        )

    # ------------------------------------------------------------ computing

    def _compute(self, wanted: p.Compute) -> None:
        assert self._pace is not None
        action, began = wanted.action, self.world.now
        try:
            done = self.device.compute(wanted.step, action)
        except DataError as error:
            self._compute_failed(wanted, error)
            return
        copies_s = max(0.0, self._copies_until - began)
        seconds = copies_s + self._pace.seconds(action) * self.stretch
        if self.world.logs:
            self.world.note(self.name, "computes", action, "of step", wanted.step)
        result = p.Result(
            seconds, done.peak_bytes, done.outcome, done.evaluation, done.links, done.round
        )
        answer = p.Computed(wanted.run, wanted.term, wanted.step, action, result)

        def ended() -> None:
            if self.world.trace is not None:
                scores = action.content is ExchangeContent.SCORES
                kind = "evaluate" if scores else TRAITS[action.kind].word
                step = -1 if action.kind in ROUNDS else wanted.step
                self._span(kind, began, step, action.microbatch, action.stage)
            self.handle(answer)

        self._task.begin(seconds, ended)

    def _compute_failed(self, wanted: p.Compute, error: DataError) -> None:
        why, code = said_of(error), code_of_action(error)
        failed = p.ComputeFailed(wanted.run, wanted.term, wanted.step, wanted.action, why, code)

        self._task.begin(OVERHEAD_S, lambda: self.handle(failed))

    def freeze(self) -> None:
        """The process stands still: what it computes ends so much later."""
        if self.name in self.world.network.frozen or not self.alive:
            return
        self.world.network.freeze(self.name)
        self._task.freeze()

    def thaw(self) -> None:
        if self.name not in self.world.network.frozen:
            return
        self._task.thaw()
        self.world.network.thaw(self.name)

    def _span(
        self, kind: trace.Kind, began: float, step: int = -1, microbatch: int = -1, stage: int = -1
    ) -> None:
        world = self.world
        if world.trace is not None and self.alive:
            world.trace.add(
                trace.Span(
                    start_s=began,
                    end_s=world.now,
                    peer=self.name,
                    kind=kind,
                    step=step,
                    microbatch=microbatch,
                    stage=stage,
                )
            )


def _nothing() -> None:
    pass
