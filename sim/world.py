"""The simulated world: the broker's and the peers' own machines under a virtual clock.

One process, one heap of (time, order, callback). This file is the second shell of both machines
(the first are the daemons): it carries their instructions out against a modelled network and real
tensors, and turns results into events. Nothing waits and nothing reads a clock: a minute of WAN
takes as long as its tensors. The same arguments give the same events, byte for byte (I6).

What is modelled: the control channel (latency), links (`net/memory.py` with latency and bandwidth
per directed pair), computing time (the cost model's seconds of the action at the peer's speeds).
What is real: both machines, the link protocol, codecs, and every tensor.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..broker import events as b
from ..broker.machine import BrokerMachine
from ..broker.options import BrokerOptions
from ..broker.planning import answer as plan_answer
from ..broker.planning import consider
from ..dag.cost import cost
from ..dag.cut import cut, tied_groups
from ..dag.flow import Role
from ..dag.pace import Totals, action_work
from ..dag.plan import PeerId
from ..dag.schedule import Action
from ..dag.speed import Speeds
from ..net.memory import Carry, MemoryNetwork, MemoryTransport, steady
from ..net.transport import (
    FrameAcknowledged,
    FrameArrived,
    LinkDown,
    LinkRefused,
    LinkUp,
    TransportEvent,
)
from ..peer import events as p
from ..peer.device import TorchDevice
from ..peer.machine import PeerMachine, PeerOptions
from ..peer.order import BuildOrder, order_from_assign
from ..peer.probe import probe_payload
from ..peer.profile import speeds_to_proto
from ..proto import broker_pb2, common_pb2, graph_pb2

__all__ = ["PeerSpec", "StalledError", "World"]

CALL_S = 1e-6
"""Fixed time of a kernel."""
OVERHEAD_S = 1e-4
"""What building, reading data and storing weights take."""
PLANNING_S = 0.05
"""How long a plan takes to make, in the world's time."""


class StalledError(RuntimeError):
    """Nothing is left to happen, or too much time went by, before what was waited for."""


@dataclass(frozen=True, kw_only=True)
class PeerSpec:
    """One peer of the world."""

    name: str
    flops_per_s: float = 1e10
    memory_bytes: int = 4 << 30
    core: bool = False
    """Whether it knows the core operator set only."""

    @property
    def speeds(self) -> Speeds:
        return Speeds.of_flops(self.flops_per_s, CALL_S)

    @property
    def profile(self) -> broker_pb2.Profile:
        return broker_pb2.Profile(
            name=self.name,
            device="cpu simulated",
            device_memory_bytes=self.memory_bytes,
            host_memory_bytes=self.memory_bytes,
            flops_per_s=self.flops_per_s,
            speeds=speeds_to_proto(self.speeds),
            operator_set=graph_pb2.CORE if self.core else graph_pb2.FULL,
        )


class World:
    """A broker and peers. `blobs` is what clients uploaded, by SHA-256; exports are added to it.
    Data shards are written into `folder`, once, as the peers' caches would.

    `carry` models the links between peers: see net/memory.py.
    """

    def __init__(
        self,
        peers: Sequence[PeerSpec],
        *,
        blobs: Mapping[str, bytes],
        folder: Path,
        carry: Carry | None = None,
        control_latency_s: float = 0.02,
        broker_options: BrokerOptions | None = None,
        peer_options: PeerOptions | None = None,
    ) -> None:
        self.now = 0.0
        self.blobs = dict(blobs)
        self.log: list[str] = []
        """What happened, one line each, for people and for comparing two worlds."""
        self.control_latency_s = control_latency_s
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self.network = MemoryNetwork(self.after, lambda: self.now, carry or steady(0.005, 1e8))
        self.broker = _Broker(self, broker_options)
        self.peers = {s.name: _Peer(self, s, peer_options) for s in peers}
        self.folder = folder
        for peer in self.peers.values():
            self.after(0.0, peer.start)

    def after(self, delay_s: float, callback: Callable[[], None]) -> None:
        """Calls back at a later time; calls of equal time in the order in which they were asked."""
        self._order += 1
        heapq.heappush(self._heap, (self.now + delay_s, self._order, callback))

    def note(self, who: str, what: str) -> None:
        self.log.append(f"{self.now:.9f} {who} {what}")

    def until(self, done: Callable[[], bool], limit_s: float = 3600.0) -> None:
        """Lets the world go on until `done()`. Raises StalledError when it never will."""
        end = self.now + limit_s
        while not done():
            if not self._heap or self._heap[0][0] > end:
                raise StalledError(f"at {self.now:.3f} s: {self.broker.machine!r}\n" + self._tail())
            self.now, _, callback = heapq.heappop(self._heap)
            callback()

    def submit(self, spec: broker_pb2.RunSpec) -> str:
        """Submits a run as soon as every peer has joined; returns its id. Raises ValueError with
        the broker's reason when it refuses."""
        self.until(lambda: len(self.broker.machine.members.members) == len(self.peers))
        answer = self.broker.ask(lambda request: b.RunSubmitted(request, spec))
        if isinstance(answer, b.Reject):
            raise ValueError(answer.reason)
        assert isinstance(answer.message, broker_pb2.Submitted)
        return answer.message.run

    def finish(self, run: str, limit_s: float = 24 * 3600.0) -> list[broker_pb2.RunEvent]:
        """Every event of a run, after its end."""
        ended = (broker_pb2.DONE, broker_pb2.FAILED, broker_pb2.CANCELLED)
        self.until(lambda: any(e.state.phase in ended for e in self.events(run)), limit_s)
        return self.events(run)

    def events(self, run: str) -> list[broker_pb2.RunEvent]:
        return self.broker.published.get(run, [])

    def kill(self, name: str) -> None:
        """The process of a peer is gone from now on, without a word."""
        self.peers[name].die()

    def cut(self, name: str) -> None:
        """The control stream of a peer breaks; it attaches again."""
        self.peers[name].cut()

    def _tail(self) -> str:
        machines = [repr(peer.machine) for peer in self.peers.values()]
        return "\n".join([*machines, *self.log[-10:]])


class _Timers:
    """Named timers of one machine: setting one again replaces it."""

    def __init__(self, world: World, fired: Callable[[str], None]) -> None:
        self._world, self._fired = world, fired
        self._versions: dict[str, int] = {}

    def set(self, name: str, at: float) -> None:
        version = self._versions[name] = self._versions.get(name, 0) + 1

        def fire() -> None:
            if self._versions[name] == version:
                self._fired(name)

        self._world.after(max(0.0, at - self._world.now), fire)


class _Broker:
    """The broker's shell."""

    def __init__(self, world: World, options: BrokerOptions | None) -> None:
        self.world = world
        self.machine = BrokerMachine("broker", options)
        self.published: dict[str, list[broker_pb2.RunEvent]] = {}
        self._timers = _Timers(world, lambda name: self.handle(b.TimerFired(name)))
        self._streams: dict[str, tuple[_Peer, int]] = {}
        self._answers: dict[str, b.Answer | b.Reject] = {}
        self._requests = 0
        self._opened = 0

    def handle(self, event: b.Event) -> None:
        for instruction in self.machine.handle(event, self.world.now):
            self._carry_out(instruction)

    def ask(self, event: Callable[[b.RequestId], b.Event]) -> b.Answer | b.Reject:
        """A client's call; the machine answers in the same breath."""
        self._requests += 1
        request = b.RequestId(f"request-{self._requests}")
        self.handle(event(request))
        return self._answers.pop(request)

    def open(self, peer: _Peer, connection: int) -> str:
        self._opened += 1
        stream = f"stream-{self._opened}"
        self._streams[stream] = (peer, connection)
        self.handle(b.StreamOpened(b.StreamId(stream)))
        return stream

    def said(self, stream: str, data: bytes) -> None:
        if stream in self._streams:
            message = broker_pb2.PeerMessage.FromString(data)
            self.handle(b.PeerSaid(b.StreamId(stream), message))

    def closed(self, stream: str, why: str) -> None:
        if self._streams.pop(stream, None) is not None:
            self.handle(b.StreamClosed(b.StreamId(stream), why))

    def _carry_out(self, instruction: b.Instruction) -> None:
        world = self.world
        match instruction:
            case b.Tell(stream, message):
                if stream in self._streams:
                    peer, connection = self._streams[stream]
                    data = message.SerializeToString(deterministic=True)
                    world.note("broker", f"to {peer.name}: {message.WhichOneof('kind')}")
                    world.after(world.control_latency_s, lambda: peer.told(connection, data))
            case b.CloseStream(stream, why):
                if stream in self._streams:
                    peer, connection = self._streams[stream]
                    world.after(world.control_latency_s, lambda: peer.detached(connection, why))
                    world.after(0.0, lambda: self.closed(stream, why))
            case b.Answer(request) | b.Reject(request):
                self._answers[request] = instruction
            case b.Publish(run, event):
                self.published.setdefault(run, []).append(event)
                world.note("broker", f"{run} event {event.number}: {event.WhichOneof('kind')}")
            case b.MakePlan():
                answer = plan_answer(instruction, world.blobs[instruction.spec.graph.hash])
                world.after(PLANNING_S, lambda: self.handle(answer))
            case b.ConsiderPlan():
                found = consider(instruction, world.blobs[instruction.spec.graph.hash])
                world.after(PLANNING_S, lambda: self.handle(found))
            case b.SetTimer(name, at):
                self._timers.set(name, at)
            case b.Log(name, fields):
                world.note("broker", f"{name} {dict(fields)}")
            case b.Stop(why):
                world.note("broker", f"stops: {why}")


class _Pace:
    """How long the actions of an assignment take on one peer: the cost model's seconds."""

    def __init__(self, order: BuildOrder, speeds: Speeds) -> None:
        plan = order.plan
        graph = order.graph.bind(plan.microbatch_size)
        stages = cut(graph, [(s.start, s.stop) for s in plan.stages])
        slots = 2 if order.training.train.optimizer == "adamw" else 1
        self._peer, self._speeds = order.peer, speeds
        self._work = action_work(
            plan,
            stages,
            tied_groups(graph, stages),
            graph,
            Totals(cost(graph)),
            optimizer_slots=slots,
        )

    def seconds(self, action: Action) -> float:
        return self._speeds.seconds(self._work(self._peer, action))


class _Peer:
    """A peer's shell: control channel, transport, device."""

    def __init__(self, world: World, spec: PeerSpec, options: PeerOptions | None) -> None:
        self.world, self.spec, self.name = world, spec, spec.name
        self.machine = PeerMachine(
            PeerId(spec.name), f"boot-{spec.name}", spec.profile, address=spec.name, options=options
        )
        # This process's seconds are none of this world: reports are the same in every run.
        self.device = TorchDevice("cpu", clock=lambda: 0.0)
        self.pace: _Pace | None = None
        self.alive = True
        self.exit: p.Exit | None = None
        self._transport: MemoryTransport = world.network.transport(
            spec.name, f"boot-{spec.name}", self._transported
        )
        self._timers = _Timers(world, lambda name: self.handle(p.TimerFired(name)))
        self._connection = 0  # counts connections: what belongs to an older one is dropped
        self._stream = ""

    def start(self) -> None:
        self.handle(p.Started())

    def die(self) -> None:
        self.alive = False
        self._transport.close()
        self.world.after(0.0, lambda: self.world.broker.closed(self._stream, "the peer died"))

    def cut(self) -> None:
        self.world.broker.closed(self._stream, "the connection was cut")
        self.detached(self._connection, "the connection was cut")

    def handle(self, event: p.Event) -> None:
        if self.alive:
            for instruction in self.machine.handle(event, self.world.now):
                self._carry_out(instruction)

    # ------------------------------------------------------------ control channel

    def told(self, connection: int, data: bytes) -> None:
        if connection == self._connection:
            self.handle(p.BrokerSaid(broker_pb2.BrokerMessage.FromString(data)))

    def detached(self, connection: int, why: str) -> None:
        if connection == self._connection:
            self._connection += 1
            self.handle(p.Detached(why))

    def _connect(self) -> None:
        self._connection += 1
        connection = self._connection

        def arrive() -> None:
            if self.alive and connection == self._connection:
                self._stream = self.world.broker.open(self, connection)
                self.handle(p.Attached())

        self.world.after(self.world.control_latency_s, arrive)

    def _tell(self, message: broker_pb2.PeerMessage) -> None:
        stream, data = self._stream, message.SerializeToString(deterministic=True)
        self.world.note(self.name, f"says {message.WhichOneof('kind')}")
        self.world.after(self.world.control_latency_s, lambda: self.world.broker.said(stream, data))

    # ------------------------------------------------------------ links

    def _transported(self, event: TransportEvent) -> None:
        match event:
            case LinkUp(peer):
                self.handle(p.LinkUp(PeerId(peer)))
            case LinkDown(peer, why):
                self.handle(p.LinkDown(PeerId(peer), why))
            case LinkRefused(peer, why):  # a link that this ended gets a LinkDown of its own
                self.world.note(self.name, f"refused link of {peer}: {why}")
            case FrameAcknowledged(key=key):
                self.handle(p.FrameAcknowledged(key))
            case FrameArrived(arrived):
                part, key = self.machine.assignment, arrived.key
                try:
                    # One of another term has no tensor here: the machine counts and frees it.
                    known = part is not None and part.matches(key.run, key.term)
                    if known and key.role is not Role.PROBE:
                        self.device.accept(arrived)
                except ValueError as error:
                    self.handle(p.FrameRefused(key, str(error)))
                    return
                self.world.note(self.name, f"has {key}")
                self.handle(p.FrameArrived(key))

    # ------------------------------------------------------------ instructions

    def _carry_out(self, instruction: p.Instruction) -> None:
        world = self.world
        match instruction:
            case p.Connect():
                self._connect()
            case p.Tell(message):
                self._tell(message)
            case p.SetTimer(name, at):
                self._timers.set(name, at)
            case p.Exit(code, why):
                self.exit = instruction
                world.note(self.name, f"exits with {code}: {why}")
                stream = self._stream
                world.after(
                    2 * world.control_latency_s, lambda: world.broker.closed(stream, "it ended")
                )
            case p.Dial(peer, address, generation):
                self._transport.dial(peer, address, generation)
            case p.Expect(peer):
                self._transport.expect(peer)
            case p.HangUp(peer):
                self._transport.hang_up(peer)
            case p.Allow(peer, role, frames):
                self._transport.allow(peer, role, frames)
            case p.Build(run, term, assign):
                answer = self._build(run, term, assign)
                world.after(OVERHEAD_S, lambda: self.handle(answer))
            case p.Prefetch(run, term, step):
                self.device.prefetch(step)
                world.after(OVERHEAD_S, lambda: self.handle(p.DataReady(run, term, step)))
            case p.Compute():
                self._compute(instruction)
            case p.SendFrame(key):
                payload = self.device.payload(key)
                self._transport.send(key.destination, key, payload)
                size_bytes = payload.size_bytes
                world.after(0.0, lambda: self.handle(p.FrameQueued(key, size_bytes)))
            case p.SendProbe(key, size_bytes):
                self._transport.send(key.destination, key, probe_payload(size_bytes))
                world.after(0.0, lambda: self.handle(p.FrameQueued(key, size_bytes)))
            case p.Release(key):
                self.device.release(key)
                if key.source != self.name:
                    self._transport.release(key.source, key)
            case p.UploadWeights(run, term, step):
                data = self.device.export()
                name = hashlib.sha256(data).hexdigest()
                world.blobs[name] = data
                blob = common_pb2.BlobRef(hash=name, size_bytes=len(data))
                world.after(
                    OVERHEAD_S, lambda: self.handle(p.ExportedWeights(run, term, step, blob))
                )
            case p.Discard():
                self.device.discard()

    def _build(self, run: str, term: int, assign: broker_pb2.Assign) -> p.Event:
        world = self.world

        def shard(name: str) -> Path:
            path = world.folder / name
            if not path.exists():
                path.write_bytes(world.blobs[name])
            return path

        try:
            order = order_from_assign(
                self.name,
                assign,
                blob=lambda ref: world.blobs[ref.hash],
                read=lambda name, offset, length: world.blobs[name][offset : offset + length],
                shard=shard,
            )
            self.pace = _Pace(order, self.spec.speeds)
            return self.device.build(order)
        except ValueError as error:
            return p.BuildFailed(run, term, str(error))

    def _compute(self, wanted: p.Compute) -> None:
        assert self.pace is not None
        result = self.device.compute(wanted.step, wanted.action)
        seconds = self.pace.seconds(wanted.action)
        self.world.note(self.name, f"computes {wanted.action} of step {wanted.step}")
        answer = p.Computed(
            wanted.run, wanted.term, wanted.step, wanted.action, replace(result, seconds=seconds)
        )
        self.world.after(seconds, lambda: self.handle(answer))
