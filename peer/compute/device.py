"""What a peer does with tensors: one device, the stages of one assignment on it.

All of torch that a peer runs is behind this class; both shells carry the machine's instructions out
with it. One microbatch through it:

    prefetch(step)          its samples lie on the host
    accept(arrived)         values from other peers, checked against the plan, into the store
    compute(step, F3@1)     takes from the store, runs the stage, leaves values in the store
    payload(key)            encodes a value that leaves for another peer
    release(key)            frees a value that was consumed

`compute` and `export` are called one at a time, from one thread. `accept`, `payload`, `release` and
`prefetch` may run beside them in others: so codecs work beside the compute. On CUDA they have a
stream of their own, so that codecs and copies overlap the compute, through pinned memory. Only the
sender of a sum of gradients has to wait for its codec before it goes on, when that loses something:
it needs what the others get.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ...dag.execute.execute import TensorSpecError
from ...dag.plan.action import ROUNDS, TRAITS, Action, ExchangeContent, Kind
from ...dag.rounds.noise import StreamKey, secret_key
from ...dag.schedule.flow import Role, Transfer
from ...net.identity.statements import MemberOfNetwork
from ...net.links.frame import Arrived, FrameKey, Payload
from ..blobs.weights import Serialized, serialize
from ..core.events import Built, Result
from ..core.snapshots import in_parts
from ..core.step import transfer_of
from ..federated.client_states import ClientStates
from ..rounds.work import RoundWork
from ..secure.masked_sums import MemberOf
from .build import BuiltStages, build_work
from .order import BuildOrder
from .rebuilt import given_records, on_snapshots, rebuilt_records
from .records import load_records, take_records, write_records
from .stage_actions import forget_moments, run_action
from .store import StoredValue

__all__ = ["TensorSpecError", "TorchDevice"]

_UNKNOWN_BYTES = 64 << 20
"""Of a frame before anything was built here: one that was meant for an earlier start."""
_ROUND_BYTES = 16 << 20
"""Of a frame of rounds while nothing is built: a part with what all share of it takes 8.4 MB."""


class TorchDevice:
    """Computes the stages of one assignment on one device. `device` is a torch device name; `clock`
    gives the seconds that reports have of codecs; `noise_key` the key of noise that hides clients
    in sums: only simulations have another one. `member_of` makes its part in sums that are masked;
    None: it has no certificate for that. clients: their state from round to round. `identity_of`:
    of this peer, that signs what it gives in rounds; None: it signs nothing."""

    def __init__(
        self,
        device: str | torch.device = "cpu",
        *,
        clock: Callable[[], float] = time.perf_counter,
        noise_key: StreamKey = secret_key,
        member_of: MemberOf | None = None,
        clients: ClientStates | None = None,
        identity_of: MemberOfNetwork | None = None,
    ) -> None:
        self.device = torch.device(device)
        self.clients = clients or ClientStates()
        self._built = partial(
            build_work,
            clock=clock,
            noise_key=noise_key,
            member_of=member_of,
            states=self.clients,
            identity_of=identity_of,
        )
        self.peak_bytes = 0
        """Most that was held at once since `build`; on a CPU counted, not measured."""
        self._went_on_at = -1  # the first step behind snapshots
        self._largest_bytes = _UNKNOWN_BYTES, 0  # of frames under the last two plans
        self._work: BuiltStages | None = None
        self._copies: torch.cuda.Stream | None = None

    # ------------------------------------------------------------ building

    def build(self, order: BuildOrder) -> Built:
        """Builds this peer's stages of the plan; an assignment before it is discarded.

        Raises ValueError (PlanError, GraphError, TensorSpecError, WeightError) when plan, graph,
        weights and data do not fit together, SnapshotError when the snapshots cannot be gone on
        from, RebuildError when lost stages cannot be made from what others gave."""
        self.discard()
        if self.device.type == "cuda":
            # The first stream begins CUDA, without which there are no counts to reset.
            self._copies = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]  # of torch
            torch.cuda.reset_peak_memory_stats(self.device)
        goes_on, files = bool(order.resumed), order.weights
        self._went_on_at = order.first_step if goes_on else -1
        with on_snapshots(goes_on):
            records = load_records(order.resumed).renamed(order.renamed)
            if order.rebuilt:
                records = records.without_codecs()
            if order.peer in order.rebuilt:
                records = rebuilt_records(order, records)
            if goes_on:
                order = replace(order, weights=records.over(order.weights), resumed=())
            self._work = work = self._built(order, self.device, files=files)
            if goes_on:
                records.load(work)
        self.peak_bytes = 0
        self._measure()
        plan, train, flow = order.plan, order.training.train, work.flow
        came = (t for t in flow.taken_by if not t.is_local)
        sizes = (work.streams.codings.of(t).size_bytes for t in came)
        self._largest_bytes = self._largest_bytes[1], max(sizes, default=0)
        return Built(
            run=order.run,
            term=order.term,
            flow=flow,
            slots=tuple((source, Role(role), count) for source, role, count in order.slice.slots),
            device_bytes=work.standing_bytes,
            steps=train.steps or 0,
            eval_every=train.eval_every if plan.evaluation_routes else 0,
            exports=tuple(k for k in work.held if plan.stages[k].holders[0] == order.peer),
            partial=bool(work.unchanged),
            vector=work.rounds.vector if work.rounds else None,
        )

    def discard(self) -> None:
        """Forgets the assignment, if there is one, and gives its memory back."""
        self._work = None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    # ------------------------------------------------------------ values

    def accept(self, arrived: Arrived) -> None:
        """Decodes a value into the store. Raises TensorSpecError or CodecError, with nothing
        stored, when it is not what the plan says for its key. Frames of rounds are of the exchange
        that was joined last (`RoundFrames.accept`)."""
        work, key = self._now, arrived.key
        if key.role is Role.ROUND:
            self.rounds.frames.accept(arrived)
            return
        transfer = transfer_of(key)
        if transfer not in work.flow.taken_by or key.destination != work.order.peer:
            raise TensorSpecError(f"{key}: the plan names no such transfer to {work.order.peer}")
        expected = work.wire.spec(transfer)
        if arrived.spec != expected:
            raise TensorSpecError(
                f"{key}: expected {expected!r}, got {arrived.spec!r}; the sender's graph or "
                "microbatch size is not this run's"
            )
        if arrived.absent:
            if transfer.role is not Role.ACTIVATION_GRAD:
                raise TensorSpecError(
                    f"{key}: expected {expected!r}, got none; only gradients may lack"
                )
            work.store.put(key, StoredValue(None))
            return
        codec = work.streams.codings.of(transfer).codec.name
        if arrived.codec != codec:
            raise TensorSpecError(f"{key}: expected codec {codec}, got {arrived.codec!r}")
        with self._copying() as stream:
            tensor = work.streams.decode(key, transfer, arrived.codec_header, arrived.data)
            if tensor is not None:
                work.store.put(key, StoredValue(tensor, stream.record_event() if stream else None))

    def most_bytes(self, key: FrameKey) -> int:
        """The most that a frame of this key has under the plan; 0 for one that the plan does not
        name. One of another term, or while nothing is built, is as large as any of the last two
        plans at most: it was on its way when the plan changed, or is nobody's. For any thread."""
        work, transfer = self._work, transfer_of(key)
        if key.role is Role.ROUND:
            return work.rounds.frames.most_bytes(key) if work and work.rounds else _ROUND_BYTES
        if work is None or (key.run, key.term) != (work.order.run, work.order.term):
            return max(self._largest_bytes)
        if transfer not in work.flow.taken_by:
            return 0
        return work.streams.codings.of(transfer).size_bytes

    def payload(self, key: FrameKey) -> Payload:
        """Encodes a value that leaves for another peer; the store lets go of it, for the payload
        holds what it needs. Raises KeyError for a value that no action left."""
        work, transfer = self._now, transfer_of(key)
        if key.role is Role.ROUND:
            return self.rounds.frames.payload(key)
        entry = work.store.pop(key)
        if entry is None:
            raise KeyError(f"{key} is not in the store of {work.order.peer}")
        coding = work.streams.codings.of(transfer)
        if entry.tensor is None:
            return Payload(coding.codec.name, b"", coding.whole, absent=True)
        with self._copying() as stream:
            if stream and entry.ready:
                stream.wait_event(entry.ready)
            encoded = work.streams.encode(key, transfer, entry.tensor)
        return Payload(coding.codec.name, encoded.header, coding.whole, encoded.buffers)

    def release(self, key: FrameKey) -> None:
        """Frees a value, or a frame of a round that came too early; if it is here."""
        if (work := self._work) is not None:
            early = work.rounds.frames.early if work.rounds and key.role is Role.ROUND else None
            (work.store if early is None else early).pop(key)

    # ------------------------------------------------------------ data

    def needs(self, step: int) -> tuple[str, ...]:
        """Hashes of the shards that this peer's stages read in a step and its evaluation."""
        work = self._now
        size, found = work.order.plan.microbatch_size, dict[str, None]()
        for stage, names in work.reading:
            for m in work.ran(step, stage):
                at, number = work.place(step, m)
                found |= dict.fromkeys(work.data.reader.needs(at, (number,), size, names))
        return (*found, *(name for name in work.held_out_needs if name not in found))

    def prefetch(self, step: int) -> None:
        """Reads the samples of a step, fetching shards where they are not here yet. Blocks.

        Raises DataError or OSError when a shard cannot be had, DataError for a row that is asked
        for and not there.
        """
        work = self._now
        for name in self.needs(step):
            work.order.shard(name)
        for stage, names in work.reading:
            for m in work.ran(step, stage):
                batch = work.data.train(*work.place(step, m), names)
                if self.device.type == "cuda":
                    batch = {name: tensor.pin_memory() for name, tensor in batch.items()}
                work.inputs[step, m, stage] = batch

    # ------------------------------------------------------------ rounds

    @property
    def rounds(self) -> RoundWork[Tensor]:
        """Rounds of the assignment. Raises TensorSpecError for a run without rounds."""
        if self._now.rounds is None:
            raise TensorSpecError(f"{self._now.order.run} has no rounds between replicas")
        return self._now.rounds

    # ------------------------------------------------------------ actions

    def compute(self, step: int, action: Action) -> Result:
        """Runs one action. What it takes must be in the store; what it gives is there afterwards.
        Nothing that it takes is changed or freed. Of an action of a round, `step` is its number.
        Raises DataError for a row that is asked for and not there."""
        work = self._now
        # On a CPU another process's turn does not count: the plan knows who shares the cores.
        passed = time.thread_time if self.device.type == "cpu" else time.perf_counter
        began, peer = passed(), work.order.peer
        if action.kind in ROUNDS:
            of_round = self.rounds.carry_out(action.kind)
            if action.kind is Kind.CONTRIBUTE and of_round.code:
                # It goes on from another version: its optimizer is spoilt, too.
                forget_moments(work)
            self._finish()
            return Result(passed() - began, self.peak_bytes, round=of_round)
        taken = [
            (t, self._take(work.store.get(work.order.key(step, t))))
            for t in work.flow.at(step).takes(peer, action)
        ]
        traits = TRAITS[action.kind]
        place = work.place(step, action.microbatch) if traits.trains else None
        with on_snapshots(step == self._went_on_at), work.data.named(step, place):
            given = run_action(work, step, action, taken, partial(self._echo, step))
        ready = self._finish()
        for transfer, tensor in given.items():
            work.store.put(work.order.key(step, transfer), StoredValue(tensor, ready))
        self._measure(work.backward_bytes(action.stage) if traits.recomputes else 0)
        seconds = passed() - began
        links = work.streams.take_uses() if action.kind is Kind.UPDATE else ()
        ends = action.kind is Kind.TAKE and peer == work.flow.hub
        content = action.content if ends else None
        outcome = work.outcome(step) if content is ExchangeContent.NORM else None
        evaluation = work.evaluation() if content is ExchangeContent.SCORES else None
        return Result(seconds, self.peak_bytes, outcome, evaluation, links)

    # ------------------------------------------------------------ results

    def snapshot(self, step: int) -> Callable[[], tuple[memoryview, ...]]:
        """Copies all that is needed to go on when `step` updates are in the stages. What it returns
        writes it, in parts, in whichever thread calls it."""
        work = self._now
        records, lossless = take_records(work, step), work.order.lossless_snapshots
        return lambda: in_parts(write_records(records, lossless=lossless))

    def blocks(self) -> Callable[[], tuple[memoryview, ...]]:
        """Copies the blocks from which neighbours rebuild a lost stage; the returned call writes
        them out."""
        records = given_records(self._now)
        return lambda: in_parts(write_records(records))

    def export(self) -> memoryview:
        """The weights that this peer answers for (`BuiltStages.exported`), as safetensors."""
        return serialize(self._now.exported())

    def export_after(self, step: int) -> memoryview | Serialized:
        """Exports the state after a step. After the last step nothing changes any more, so the
        export has no memory of its own."""
        if step == self._now.order.training.train.steps:
            return Serialized(self._now.exported())
        return self.export()

    # ------------------------------------------------------------ memory

    def _measure(self, during: int = 0) -> None:
        """On a CPU: what stands, the values in the store, what live microbatches keep, and bytes
        that were there only during the action."""
        if self.device.type == "cuda":
            self.peak_bytes = torch.cuda.max_memory_allocated(self.device)
            return
        work = self._now
        now = work.standing_bytes + work.store.size_bytes + work.streams.size_bytes + during
        self.peak_bytes = max(self.peak_bytes, now + work.live_bytes())

    # ------------------------------------------------------------ streams

    @property
    def _now(self) -> BuiltStages:
        assert self._work is not None, "no assignment is built"
        return self._work

    def _echo(self, step: int, transfer: Transfer, tensor: Tensor) -> Tensor:
        """What the destinations of a sum of gradients have of it."""
        work = self._now
        if work.streams.codings.of(transfer).exact:
            return tensor
        ready = self._finish()
        with self._copying() as copies:
            if copies and ready:
                copies.wait_event(ready)
            heard = work.streams.echo(work.order.key(step, transfer), transfer, tensor)
            there = copies.record_event() if copies else None
        found = self._take(StoredValue(heard, there))
        assert found is not None
        return found

    @contextmanager
    def _copying(self) -> Iterator[torch.cuda.Stream | None]:
        """Copies in here run on a stream of their own, beside the compute."""
        if self._copies is None:
            yield None
            return
        with torch.cuda.stream(self._copies):
            yield self._copies

    def _take(self, entry: StoredValue) -> Tensor | None:
        if entry.ready is not None and entry.tensor is not None:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(entry.ready)
            entry.tensor.record_stream(stream)
        return entry.tensor

    def _finish(self) -> torch.cuda.Event | None:
        """Waits for the compute, so that an action that is reported has ended."""
        if self.device.type != "cuda":
            return None
        event: torch.cuda.Event = torch.cuda.current_stream(self.device).record_event()
        event.synchronize()
        return event

    def __repr__(self) -> str:
        if self._work is None:
            return f"<TorchDevice {self.device}, nothing built>"
        return f"<TorchDevice {self.device}, stages {[*self._work.held]}, {self._work.store!r}>"
