"""What the device of a simulated peer is asked to do, on virtual time: stages are built, steps
computed, snapshots taken, weights stored.

An action takes the cost model's seconds at the peer's speeds, what is fetched or stored goes over
the modelled network, and a device does with the values what the mode of the world says.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...dag.plan.action import ROUNDS, TRAITS, ExchangeContent
from ...peer.compute.order import resumed
from ...peer.core import events as p
from ...peer.core.snapshots import BLOCKS, SnapshotId, SnapshotStore
from ...peer.data.manifest import DataError
from ...peer.shell.workbench import code_of, code_of_action, said_of
from ...proto import broker_pb2, common_pb2
from .. import trace
from .control import BROKER, nothing
from .device_task import DeviceTask
from .orders import ActionTimes
from .spec import PeerDevice, PeerSpec

if TYPE_CHECKING:
    from .world import World

__all__ = ["OVERHEAD_S", "PeerWork"]

OVERHEAD_S = 1e-4
"""What building, reading data and storing weights take, besides what they fetch or store."""

_AWAY = "the broker is away"


class PeerWork:
    """Work of one process of a peer. `handle` takes what came of it; `alive`: whether the process
    still is."""

    def __init__(
        self,
        world: World,
        spec: PeerSpec,
        device: PeerDevice,
        snapshots: SnapshotStore,
        handle: Callable[[p.Event], None],
        alive: Callable[[], bool],
    ) -> None:
        self.world, self.spec, self.name, self.device = world, spec, spec.name, device
        self.snapshots, self._handle, self._alive = snapshots, handle, alive
        self.task = DeviceTask(world, alive)
        self.stretch = 1.0
        """Compute takes so many times longer."""
        self.fetched: set[str] = set()
        """Hashes of whole blobs that this host has."""
        self._pace: ActionTimes | None = None
        self._copies_until = 0.0  # when the device has copied the newest snapshot

    def carry_out(self, instruction: p.Instruction) -> None:
        """Do what is asked of the device, but for its actions (`compute`)."""
        world = self.world
        match instruction:
            case p.Build():
                self._build(instruction)
            case p.UploadWeights():
                self._upload(instruction)
            case p.TakeSnapshot():
                self._take_snapshot(instruction)
            case p.UploadSnapshot(snapshot):
                self._save(snapshot)
            case p.BeginRound() | p.JoinExchange() | p.HearMasks():
                self._do_in_rounds(instruction)
            case p.ShowReceipts() | p.ShowAgain() | p.AddAgain():
                self._do_in_rounds(instruction)
            case p.Prefetch(run, term, step):
                read: p.Event = p.DataReady(run, term, step)
                try:
                    self.device.prefetch(step)
                except (ValueError, OSError) as error:
                    code = code_of(error, "data")
                    read = p.DataFailed(run, term, step, said_of(error), code)
                world.after(OVERHEAD_S, lambda: self._handle(read))

    def _do_in_rounds(self, instruction: p.OfRounds) -> None:
        if (event := self.device.rounds.do(instruction)) is not None:
            self.world.after(OVERHEAD_S, lambda: self._handle(event))

    def compute(self, wanted: p.Compute) -> None:
        assert self._pace is not None
        action, began = wanted.action, self.world.now
        try:
            done = self.device.compute(wanted.step, action)
        except DataError as error:
            of = wanted.run, wanted.term, wanted.step, action
            failed = p.ComputeFailed(*of, said_of(error), code_of_action(error))
            self.task.begin(OVERHEAD_S, lambda: self._handle(failed))
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
                at = {"microbatch": action.microbatch, "stage": action.stage}
                self._span(kind, began, step=step, **at)
            self._handle(answer)

        self.task.begin(seconds, ended)

    def _build(self, wanted: p.Build) -> None:
        """Build the stages; what they fetch comes from the broker's place, in one request."""
        world, began = self.world, self.world.now
        fetches = _BlobFetches(world, self.fetched)
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
            self._handle(answer)

        def sends() -> None:
            nonlocal answer
            if not world.broker.alive:
                answer = p.BuildFailed(wanted.run, wanted.term, _AWAY, "blob")
            world.carrier.send(
                BROKER, self.name, fetches.bytes, nothing, lambda: world.after(OVERHEAD_S, built)
            )

        world.carrier.send(self.name, BROKER, 0, nothing, sends)

    def _take_snapshot(self, wanted: p.TakeSnapshot) -> None:
        """Copying holds the device up, from now on; writing does not."""
        blocks = wanted.snapshot.term == BLOCKS
        parts = (self.device.blocks() if blocks else self.device.snapshot(wanted.snapshot.step))()
        self.snapshots.put(wanted.snapshot, parts)
        copied = 2 * sum(part.nbytes for part in parts)  # read and written
        now = self.world.now
        self._copies_until = max(now, self._copies_until) + copied / self.spec.speeds.memory
        answer = p.SnapshotTaken(wanted.snapshot, len(parts))
        self.world.after(OVERHEAD_S + self._copies_until - now, lambda: self._handle(answer))

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
            world.carrier.send(BROKER, self.name, 0, nothing, lambda: self._handle(answer))

        world.carrier.send(self.name, BROKER, size, nothing, stored)

    def _upload(self, wanted: p.UploadWeights) -> None:
        world = self.world
        try:
            data = bytes(self.device.export())
        except OSError as error:
            failed = p.ExportFailed(wanted.run, wanted.term, wanted.step, said_of(error))
            world.after(OVERHEAD_S, lambda: self._handle(failed))
            return
        name = hashlib.sha256(data).hexdigest()
        blob = common_pb2.BlobRef(hash=name, size_bytes=len(data))

        def stored() -> None:
            answer: p.Event = p.ExportFailed(wanted.run, wanted.term, wanted.step, _AWAY)
            if world.broker.alive:
                world.blobs[name] = data
                answer = p.ExportedWeights(wanted.run, wanted.term, wanted.step, blob)
            world.carrier.send(BROKER, self.name, 0, nothing, lambda: self._handle(answer))

        world.after(
            OVERHEAD_S,
            lambda: world.carrier.send(self.name, BROKER, len(data), nothing, stored),
        )

    def _span(self, kind: trace.Kind, began: float, **at: Any) -> None:
        world = self.world
        if world.trace is not None and self._alive():
            span = trace.Span(start_s=began, end_s=world.now, peer=self.name, kind=kind, **at)
            world.trace.add(span)


class _BlobFetches:
    """Reads for one order to build. bytes: those that are not on the host yet. `there`: hashes of
    the whole blobs that are; what is read whole is from then on."""

    def __init__(self, world: World, there: set[str]) -> None:
        self._world, self._there = world, there
        self.bytes = 0

    def whole(self, name: str) -> bytes:
        data = self._world.blobs[name]
        self.bytes += 0 if name in self._there else len(data)
        self._there.add(name)
        return data

    def read(self, name: str, offset: int, length: int) -> bytes:
        self.bytes += 0 if name in self._there else length
        return self._world.blobs[name][offset : offset + length]

    def shard(self, name: str) -> Path:
        """Return a file with a blob."""
        path = self._world.folder / name
        data = self.whole(name)
        if not path.exists():
            path.write_bytes(data)
        return path

    def saved(self, ref: common_pb2.BlobRef) -> tuple[memoryview, ...]:
        """Return the parts of a snapshot that lies with the broker."""
        self.bytes += ref.size_bytes
        return self._world.saved[ref.hash]
