"""A peer's shell in the simulated world: its machine's instructions on virtual time.

The control stream and links go over the modelled network; what its device is asked to do stands in
`peer_work.py`. A device computes what the mode of the world says: real tensors
(`peer/compute/device.py`), or hashes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...dag.plan.plan import PeerId
from ...dag.schedule.flow import Role
from ...net.links.frame import Arrived, FrameKey, Payload
from ...net.links.outbox import PIECES
from ...net.links.transport import (
    FrameAcknowledged,
    FrameArrived,
    FrameGrows,
    LinkDown,
    LinkError,
    LinkRefused,
    LinkUp,
    TransportEvent,
)
from ...net.transports.memory import MemoryTransport
from ...peer.core import events as p
from ...peer.core.machine import PeerMachine
from ...peer.core.options import PeerOptions
from ...peer.core.rates.probe import probe_payload
from ...peer.core.snapshots import PART_BYTES, SnapshotStore
from ...peer.data.manifest import Manifest
from ...proto import broker_pb2, common_pb2
from .. import trace
from .clock import Observed, Timers
from .control import Control
from .peer_work import OVERHEAD_S, PeerWork
from .spec import PeerDevice, PeerSpec

if TYPE_CHECKING:
    from .world import World

__all__ = ["PeerShell"]

LAST_WORDS_S = 2.0
"""How long a process that ends well lets its frames leave, as the daemon does."""


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
        self.work = PeerWork(world, spec, device, self.snapshots, self.handle, lambda: self.alive)
        self._transport: MemoryTransport = world.network.transport(
            spec.name,
            boot,
            self._transported,
            allocate=getattr(device, "allocate", None),
            allowed=self._most_bytes,
            pieces=getattr(device, "pieces", PIECES),
        )
        self._timers = Timers(world, lambda name: self.handle(p.TimerFired(name)))
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
        medium = world.network.medium
        if medium.frozen and medium.held(self.name, lambda: self.handle(event)):
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
        match event:  # those of every frame come first
            case FrameAcknowledged(_, key, began_s):
                self.handle(p.FrameAcknowledged(key, began_s))
            case FrameArrived(arrived):
                self._arrived(arrived)
            case FrameGrows(_, key):
                self.handle(p.FrameGrows(key))
            case LinkUp(peer, again_bytes=again):
                self.handle(p.LinkUp(PeerId(peer), again))
            case LinkDown(peer, why):
                self.handle(p.LinkDown(PeerId(peer), why))
            case LinkRefused(peer, why):  # a link that this ended gets a LinkDown of its own
                self.world.note(self.name, f"refused link of {peer}: {why}")

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
            self.work.compute(instruction)
        else:
            self._carry_out_rarer(instruction)

    def _carry_out_rarer(self, instruction: p.Instruction) -> None:
        world = self.world
        match instruction:
            case p.SendProbe(key, size_bytes):
                self._send(key, probe_payload(size_bytes))
            case p.Connect():
                if self.control is not None:
                    self.control.end_here("the peer attaches anew")
                self.control = world.dial_broker(self)
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
            case p.PrefetchFrozen():
                pass  # blobs are here at once
            case p.KeepSnapshot(snapshot, parts):
                self.snapshots.whole(snapshot, parts)
            case p.DropSnapshot(name):
                self.snapshots.drop(name)
            case p.Discard(run, term):
                self.device.discard()
                ours = [k for k in self._ready if (k.run, k.term) == (run, term)]
                for key in ours:
                    del self._ready[key]
            case _:
                self.work.carry_out(instruction)

    def _exit(self, instruction: p.Exit) -> None:
        world, self.exit = self.world, instruction
        world.note(self.name, f"exits with {instruction.code}: {instruction.why}")
        world.mark(self.name, "exit", instruction.why)
        if self.control is not None:
            self.control.end_here("it ended")
        world.after(LAST_WORDS_S if instruction.code == 0 else 0.0, self.die)

    def freeze(self) -> None:
        """The process stands still: what it computes ends so much later."""
        if self.name in self.world.network.medium.frozen or not self.alive:
            return
        self.world.network.freeze(self.name)
        self.work.task.freeze()

    def thaw(self) -> None:
        if self.name not in self.world.network.medium.frozen:
            return
        self.work.task.thaw()
        self.world.network.thaw(self.name)
