"""Where a worker works: its device, the snapshots on its disk, and the lanes on which all that is
done.

Torch never runs in the event loop:

    lane      jobs, in the order in which the machine asked
    compute   Build, BeginRound, JoinExchange, HearMasks, ShowReceipts, ShowAgain, AddAgain,
              Compute, the copy of UploadWeights and of a snapshot, Discard
    data      Prefetch
    sending   SendFrame: encode
    arriving  decode what came, into the device's store; then the machine hears FrameArrived
    keeping   snapshots to and from the disk
    warming   PrefetchFrozen: fetches for the disk

What a job gives goes back to the loop, as an event for the machine or a frame for the transport.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ...dag.schedule.flow import Role
from ...net.blobs.client import BlobTransferError, Source
from ...net.links.frame import Arrived, FrameKey, Payload
from ...proto import broker_pb2, common_pb2
from ..blobs.cache import BlobCache, BlobMismatchError, FromWeb
from ..blobs.read_ahead import AHEAD_BYTES, ReadAhead
from ..blobs.weight_shards import WeightShard
from ..compute.device import TorchDevice
from ..compute.local_job import trains_in_steps
from ..compute.order import BuildOrder, OfferError, order_from_assign, resumed
from ..compute.rebuilt import RebuildError
from ..compute.warming import frozen_shards, warm
from ..core import events as e
from ..core.rounds.round_exchange import run_of
from ..core.snapshots import BLOCKS, PART_BYTES, SnapshotError, SnapshotId, SnapshotStore
from ..data.manifest import DataError
from ..data.reader import Reader
from ..data.survey import survey
from ..federated.client_steps import check_labels
from ..host.own_data import Catalogue
from ..sync.optimizer import warm_up
from .lane import SerialExecutor
from .spans import Spans

__all__ = ["Calls", "DeviceRuntime", "code_of", "said_of"]

_log = logging.getLogger(__name__)

_MOST_TEXT = 2000


@dataclass(frozen=True, kw_only=True)
class Calls:
    """Callbacks of a workbench, in the event loop."""

    post: Callable[[e.Event], None]
    """With what the machine should hear."""
    crash: Callable[[BaseException], None]
    """With what only a bug can raise."""
    send: Callable[[FrameKey, Payload], None]
    """With a frame that is encoded."""
    store: Callable[
        [Source, Callable[[common_pb2.BlobRef], e.Event], Callable[[str], e.Event]],
        None,
    ]
    """With bytes for the broker, and the events of having stored them, and of not having."""
    wants: Callable[[str, int], bool]
    """Whether the machine still takes part in a term of a run."""


class DeviceRuntime:
    """A worker's device, the snapshots on its disk, and the threads that do its work. Used from the
    event loop's thread."""

    def __init__(
        self,
        peer: str,
        device: TorchDevice,
        snapshots: SnapshotStore,
        cache: BlobCache,
        from_web: FromWeb,
        own_data: Catalogue,
        spans: Spans,
        calls: Calls,
        may_warm: bool = True,
    ) -> None:
        """`may_warm`: whether the owner lets it fetch what may never be needed."""
        self._peer, self._device, self._snapshots = peer, device, snapshots
        self._cache, self._from_web, self._own_data, self._spans = cache, from_web, own_data, spans
        self._calls, self._may_warm = calls, may_warm
        loop = asyncio.get_running_loop()
        self._compute = SerialExecutor("compute", loop)
        self._data = SerialExecutor("data", loop)
        self._sending = SerialExecutor("sending", loop)
        self._arriving = SerialExecutor("arriving", loop)
        self._keeping = SerialExecutor("keeping", loop)
        self._warming, self._cold = SerialExecutor("warming", loop), threading.Event()
        """The second: set when what is fetched there is not wanted any more."""
        self._built: tuple[str, int] | None = None
        """Run and term that stand on the device; None while they are being built, or gone."""

    def warm_up(self) -> None:
        """An optimizer's first making loads much of torch: better while nobody waits."""
        self._compute.do(warm_up, _nothing, self._calls.crash)

    async def close(self, patience_s: float) -> bool:
        """Ends all lanes; False when one did not end in time."""
        self._cold.set()
        lanes = [self._compute, self._data, self._sending]
        lanes += [self._arriving, self._keeping, self._warming]
        return all(await asyncio.gather(*(lane.close(patience_s) for lane in lanes)))

    # ------------------------------------------------------------ frames

    def most_bytes(self, key: FrameKey) -> int | None:
        """The most that a frame may have; None: no more is known. For any thread."""
        return PART_BYTES if key.role is Role.SNAPSHOT else self._device.most_bytes(key)

    def holds(self, run: str, term: int) -> bool:
        """Whether this term of the run stands on the device."""
        return self._built == (run, term)

    def knows(self, key: FrameKey) -> bool:
        """Whether what a frame is of stands on the device."""
        if key.role is Role.ROUND:
            return self._built is not None and run_of(self._built[0]) == key.run
        return self.holds(key.run, key.term)

    def accept(self, arrived: Arrived) -> None:
        """A value came for the device."""
        key = arrived.key
        self._take(
            self._arriving, key, lambda: self._device.accept(arrived) if self.knows(key) else None
        )

    def keep(self, arrived: Arrived) -> None:
        """A part of a snapshot came for the disk."""
        self._take(self._keeping, arrived.key, lambda: self._snapshots.accept(arrived))

    def _take(self, lane: SerialExecutor, key: FrameKey, take: Callable[[], object]) -> None:
        lane.do(take, lambda _: self._calls.post(e.FrameArrived(key)), self._refused(key))

    def _refused(self, key: FrameKey) -> Callable[[Exception], None]:
        return lambda error: self._calls.post(e.FrameRefused(key, said_of(error)))

    def release(self, key: FrameKey) -> None:
        """Nobody needs the value any more."""
        self._device.release(key)

    def _encoded(self, key: FrameKey, payload: Payload | None) -> None:
        if payload is not None and self.knows(key):  # else the assignment went
            self._calls.send(key, payload)

    # ------------------------------------------------------------ instructions

    def do(self, work: e.Work) -> None:
        """Gives it to its lane."""
        calls = self._calls
        match work:
            case e.Compute(run, term, step, action):
                self._compute.do(
                    lambda: self._spans.compute(self._device.compute, run, step, action),
                    lambda result: calls.post(e.Computed(run, term, step, action, result)),
                    lambda error: calls.post(
                        e.ComputeFailed(
                            run, term, step, action, said_of(error), code_of_action(error)
                        )
                    ),
                )
            case e.SendFrame(key) if key.role is Role.SNAPSHOT:
                self._keeping.do(
                    lambda: self._snapshots.payload(key),
                    lambda payload: calls.send(key, payload),
                    self._refused(key),
                )
            case e.SendFrame(key):
                self._spans.ready(key)
                self._sending.do(
                    lambda: self._device.payload(key) if self.knows(key) else None,
                    lambda payload: self._encoded(key, payload),
                    self._refused(key),
                )
            case e.TakeSnapshot(run, term, snapshot):
                self._take_snapshot(run, term, snapshot)
            case e.KeepSnapshot(snapshot, parts):
                self._keeping.do(
                    lambda: self._snapshots.whole(snapshot, parts),
                    _nothing,
                    lambda error: calls.post(e.SnapshotFailed(snapshot, said_of(error))),
                )
            case e.UploadSnapshot(snapshot):
                self._keeping.do(
                    lambda: self._snapshots.streamed(SnapshotId.of(snapshot)),
                    lambda data: calls.store(
                        data,
                        lambda ref: e.SnapshotSaved(snapshot, ref),
                        lambda why: e.SnapshotSaved(snapshot, None, why),
                    ),
                    lambda error: calls.post(e.SnapshotSaved(snapshot, None, said_of(error))),
                )
            case e.DropSnapshot(old):
                self._keeping.do(lambda: self._snapshots.drop(old), _nothing, calls.crash)
            case e.Prefetch(run, term, step):
                self._data.do(
                    lambda: self._device.prefetch(step) if self.holds(run, term) else None,
                    lambda _: calls.post(e.DataReady(run, term, step)),
                    lambda error: calls.post(
                        e.DataFailed(run, term, step, said_of(error), code_of(error, "data"))
                    ),
                )
            case e.BeginRound() | e.JoinExchange() | e.HearMasks():
                self._do_in_rounds(work)
            case e.ShowReceipts() | e.ShowAgain() | e.AddAgain():
                self._do_in_rounds(work)
            case e.PrefetchFrozen():
                self._warm(work)
            case e.Build():
                self._cold.set()
                self._build(work)
            case e.Discard():
                self._cold.set()
                self._built = None
                self._compute.do(self._device.discard, _nothing, calls.crash)
            case e.UploadWeights(run, term, step):
                self._compute.do(
                    lambda: self._device.export_after(step),
                    lambda data: calls.store(
                        data,
                        lambda ref: e.ExportedWeights(run, term, step, ref),
                        lambda why: e.ExportFailed(run, term, step, why),
                    ),
                    lambda error: calls.post(e.ExportFailed(run, term, step, said_of(error))),
                )

    def _do_in_rounds(self, work: e.OfRounds) -> None:
        """Nothing is done, and nothing said, once another term stands on the device."""

        def do() -> e.Event | None:
            return self._device.rounds.do(work) if self.holds(work.run, work.term) else None

        def done(event: e.Event | None) -> None:
            if event is not None:
                self._calls.post(event)

        self._compute.do(do, done, self._calls.crash)

    def _warm(self, wanted: e.PrefetchFrozen) -> None:
        self._cold.set()
        cold = self._cold = threading.Event()
        if not self._may_warm:
            return

        def fetch() -> int:
            if cold.is_set():
                return 0
            order = order_from_assign(
                self._peer,
                wanted.assign,
                blob=self._cache.whole,
                read=self._cache.read,
                shard=self._cache.path,
                memory_bytes=wanted.memory_bytes,
            )
            most = self._cache.limit_bytes // 2
            return warm(frozen_shards(order), self._bring, most, cold)

        self._warming.do(
            fetch,
            lambda size: _log.debug("%d bytes of what is frozen are here", size),
            # Nobody needs it yet; a build that does meets the same.
            lambda error: _log.debug("warming ended", exc_info=error),
        )

    def _bring(self, shard: WeightShard) -> None:
        self._cache.bring(shard, self._from_web)

    def _build(self, wanted: e.Build) -> None:
        run, term, assign = wanted.run, wanted.term, wanted.assign

        def build() -> e.Built:
            with self._spans.span("build", run):
                self._own_data.check(assign.data.hash, assign.submitter, assign.local)
                ahead = ReadAhead(
                    lambda shard: self._cache.shard(shard, self._from_web),
                    self._bring,
                    min(AHEAD_BYTES, wanted.memory_bytes or AHEAD_BYTES),
                )
                # What is in the stages goes when the others are built.
                here = assign.resume.live and self._peer not in assign.resume.rebuilt
                live = (self._device.snapshot(assign.first_step)(),) if here else ()
                order = order_from_assign(
                    self._peer,
                    assign,
                    blob=self._cache.whole,
                    read=self._cache.read,
                    whole=ahead.whole,
                    reading=ahead.reading,
                    shard=lambda name: (
                        self._own_data.path(assign.data.hash, name) or self._cache.path(name)
                    ),
                    parts=resumed(
                        assign,
                        wanted.snapshots,
                        self._snapshots.parts,
                        self._peer,
                        lambda ref: (self._cache.mapped(ref),),
                    )
                    + live,
                    memory_bytes=wanted.memory_bytes,
                )
                self._look_through(order, assign)
                return self._device.build(order)

        def done(built: e.Built) -> None:
            if self._calls.wants(run, term):
                self._built = run, term
            self._calls.post(built)

        def failed(error: Exception) -> None:
            _log.debug("the build failed", exc_info=error)
            self._calls.post(e.BuildFailed(run, term, said_of(error), code_of(error, "build")))

        self._compute.do(build, done, failed)

    def _look_through(self, order: BuildOrder, assign: broker_pb2.Assign) -> None:
        """Look at the data that stays here, as nobody else could. Raises DataError."""
        in_steps = trains_in_steps(order)
        if (assign.first_step and not in_steps) or not self._own_data.has(assign.data.hash):
            return
        mine = Reader(order.manifest, order.shard, seed=0, microbatches=1)
        ignored = survey(order.graph, mine, private=True)
        if in_steps:
            check_labels(order.graph, ignored)

    def _take_snapshot(self, run: str, term: int, snapshot: broker_pb2.Snapshot) -> None:
        """The copy is made between two actions; it is written beside them."""

        def failed(error: Exception) -> None:
            self._calls.post(e.SnapshotFailed(snapshot, said_of(error)))

        def written(write: Callable[[], tuple[memoryview, ...]]) -> int:
            parts = write()
            self._snapshots.put(snapshot, parts)
            return len(parts)

        def copied(write: Callable[[], tuple[memoryview, ...]] | None) -> None:
            if write is not None:
                self._keeping.do(
                    lambda: written(write),
                    lambda parts: self._calls.post(e.SnapshotTaken(snapshot, parts)),
                    failed,
                )

        def copy() -> Callable[[], tuple[memoryview, ...]] | None:
            if not self.holds(run, term):
                return None
            blocks = snapshot.term == BLOCKS
            return self._device.blocks() if blocks else self._device.snapshot(snapshot.step)

        self._compute.do(copy, copied, failed)


def said_of(error: Exception) -> str:
    """What people read of an error: a ValueError explains itself, others need their type. Bounded,
    as it is told to the broker."""
    text = str(error)[:_MOST_TEXT]
    return text if isinstance(error, ValueError) and text else f"{type(error).__name__}: {text}"


def code_of(error: Exception, otherwise: str) -> str:
    """A word for programs: what failed at this peer, which another need not have ("host": its disk
    or its files); `otherwise` for what would fail anywhere."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError | OfferError):
        return "memory"
    if isinstance(error, SnapshotError):
        return "snapshot"
    if isinstance(error, RebuildError):
        return "neighbour"
    if isinstance(error, BlobTransferError | BlobMismatchError):
        return "blob"
    if isinstance(error, DataError):
        return "data"
    return "host" if isinstance(error, OSError) else otherwise


def code_of_action(error: Exception) -> str:
    """A word for programs about an action that raised: "data", "snapshot", or else "compute"."""
    return found if (found := code_of(error, "")) in ("data", "snapshot") else "compute"


def _nothing(_: object) -> None:
    pass
