"""What all ghosts of one assignment share: stages as matrices, the wiring, and what frames weigh.

It is made from plan and graph alone, once, instead of once on each of a thousand peers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cached_property
from typing import NamedTuple, cast

import numpy as np

from ...compression.codec import RAW, typical_bytes
from ...dag.cost.cost import OperatorCost
from ...dag.cost.memory import MemoryModel, StageMemory
from ...dag.cost.weight_costs import WaitingMemory
from ...dag.exchange.engine import VectorSpace
from ...dag.exchange.wiring import Exchange
from ...dag.ir.graph import Graph, TensorSpec
from ...dag.plan.action import ExchangeContent
from ...dag.plan.cut import cut, tied_groups
from ...dag.plan.plan import PeerId
from ...dag.schedule.flow import Flow, Role, Transfer
from ...dag.schedule.replay import slots
from ...peer.compute.exchange import TransferSpecs
from ...peer.compute.frame_codecs.codings import Codings
from ...peer.compute.order import BuildOrder
from .hashes import MASK, Hash, Hashes, Words, odd
from .stage_hash import Linear

__all__ = ["IN_SHARDS", "GhostPlan", "Hollow", "Shards", "Weighed"]


class Hollow:
    """A flat buffer of `nbytes` bytes that has none of them: what is passed along in its place is
    `tag`. It can be cut, and filled piece by piece, as a memoryview of bytes can."""

    __slots__ = ("nbytes", "tag")
    format, ndim = "B", 1

    def __init__(self, nbytes: int, tag: bytes = b"") -> None:
        self.nbytes, self.tag = nbytes, tag

    def __len__(self) -> int:
        return self.nbytes

    def __bytes__(self) -> bytes:
        return bytes(self.nbytes)

    def __getitem__(self, part: slice) -> Hollow:
        start, stop, _ = part.indices(self.nbytes)
        if stop - start == self.nbytes:
            return self
        return Hollow(max(0, stop - start), b"" if start else self.tag)

    def __setitem__(self, part: slice, piece: Hollow | memoryview) -> None:
        if not part.start and isinstance(piece, Hollow):  # a probe has bytes, which nobody reads
            self.tag = piece.tag


class Weighed(NamedTuple):
    """What a frame announces: its codec, the tensor's spec, and how many bytes it takes encoded."""

    codec: str
    spec: TensorSpec
    size_bytes: int


class Shards(VectorSpace[Words]):
    """A stage's gradient, one hash for each parameter, as shards for its holders: shard b has every
    n-th one from b on. With more holders than parameters a parameter is split into parts that add
    up to it, so that no shard is empty and each counts."""

    def __init__(self, parameters: int, holders: int) -> None:
        self.parameters, self.holders = parameters, holders
        length = max(parameters, holders)
        self._index = np.arange(length) % parameters
        self._part = np.array([odd("part", i) for i in range(length)], np.uint64)
        # The first part of each parameter is what the others leave of 1.
        self._part[:parameters] = 1
        np.subtract.at(self._part, self._index[parameters:], self._part[parameters:])  # modulo 2⁶⁴

    def cut(self, vector: Words) -> list[Words]:
        words = vector[self._index] * self._part
        return [words[b :: self.holders] for b in range(self.holders)]

    def concat(self, shards: Sequence[Words]) -> Words:
        return np.concatenate(shards)

    def split(self, vector: Words, shards: Sequence[int]) -> list[Words]:
        """What `concat` put together."""
        sizes = [-(-(len(self._index) - b) // self.holders) for b in shards]
        return np.split(vector, np.cumsum(sizes[:-1]))

    def add(self, parts: Sequence[Words]) -> Words:
        found: Words = np.add.reduce(np.array(parts, np.uint64), 0)
        return found

    def join(self, shards: Sequence[Words]) -> Words:
        words = np.empty(len(self._index), np.uint64)
        for b, shard in enumerate(shards):
            words[b :: self.holders] = shard
        found = np.zeros(self.parameters, np.uint64)
        np.add.at(found, self._index, words)
        return found


class _Numbers(VectorSpace[Hash]):
    """One number for each vector: nothing is cut."""

    def add(self, parts: Sequence[Hash]) -> Hash:
        return sum(cast(Sequence[int], parts)) & MASK


class _Equal(_Numbers):
    """What all have alike, of which the mean is taken."""

    def add(self, parts: Sequence[Hash]) -> Hash:
        assert len(set(cast(Sequence[int], parts))) == 1, "each stage has the sum of all holders"
        return parts[0]


IN_SHARDS = (ExchangeContent.GRADIENT, ExchangeContent.DELTA, ExchangeContent.SECOND)
"""What holders of a stage add up."""
_SUMS, _SAME = _Numbers(), _Equal()


def _kind_of(flow: Flow, transfer: Transfer) -> Hashable:
    """A key that is the same for all transfers that weigh the same where nothing is compressed."""
    if transfer.role is not Role.SYNC:
        return transfer.role, transfer.port
    exchange, hop = flow.hops[transfer]
    small = exchange.content in (
        ExchangeContent.STATISTICS,
        ExchangeContent.NORM,
        ExchangeContent.SCORES,
    )
    # Who sends counts where it is what microbatches made.
    source = hop.source if small and not hop.total else ""
    return exchange.content, exchange.index, hop.shards, hop.total, source, transfer.hop


class GhostPlan:
    """What all ghosts of one assignment share: stages as matrices, the wiring, the frames' bytes.
    Raises what `peer.build.build_work` raises for a plan that is none for its graph."""

    def __init__(self, order: BuildOrder, costs: Callable[[Graph], Sequence[OperatorCost]]) -> None:
        self._costs = costs
        self.plan = plan = order.plan.validate(len(order.graph.operators))
        self.graph = graph = order.graph.bind(plan.microbatch_size)
        self.stages = cut(graph, [(s.start, s.stop) for s in plan.stages])
        self.tied = tied_groups(graph, self.stages)
        self.flow = Flow(plan, self.stages, self.tied)
        self.wire = TransferSpecs(self.flow, graph)
        self.hashes = Hashes(graph, order.training.seed)
        self._codings = Codings(self.wire, plan.codecs)
        self._linear: dict[int, Linear] = {}
        self._shards: dict[int, Shards] = {}
        self._weighed: dict[Hashable, Weighed] = {}
        self._train = order.training.train

    def linear(self, stage: int) -> Linear:
        if stage not in self._linear:
            self._linear[stage] = Linear(self.hashes, self.stages[stage])
        return self._linear[stage]

    def space(self, exchange: Exchange) -> VectorSpace[Hash]:
        """The arithmetic of an exchange: of words for a stage's gradients, else of one number."""
        if exchange.content not in IN_SHARDS:
            return _SAME if exchange.content is ExchangeContent.TIED_DELTA else _SUMS
        stage = exchange.index
        if stage not in self._shards:
            shards = len(exchange.edges) - 1
            self._shards[stage] = Shards(len(self.stages[stage].trainable), shards)
        return cast(VectorSpace[Hash], self._shards[stage])

    def weighed(self, transfer: Transfer) -> Weighed:
        if self.plan.codecs:
            coding = self._codings.of(transfer)
            size = typical_bytes(coding.codec, coding.body)
            size += coding.tail.size_bytes if coding.tail else 0
            return Weighed(coding.codec.name, coding.whole, size)
        key = _kind_of(self.flow, transfer)
        if key not in self._weighed:
            spec = self.wire.spec(transfer)
            self._weighed[key] = Weighed(RAW.name, spec, spec.size_bytes)
        return self._weighed[key]

    @cached_property
    def slots(self) -> dict[PeerId, list[tuple[PeerId, Role, int]]]:
        """Receive slots by destination."""
        found: dict[PeerId, list[tuple[PeerId, Role, int]]] = {p: [] for p in self.plan.peers}
        for (source, to, role), count in slots(self.plan, self.stages, self.tied).items():
            if source != to:
                found[to].append((source, role, count))
        return found

    @cached_property
    def memory(self) -> tuple[StageMemory, ...]:
        """By stage, as planners reckon it."""
        costs = self._costs(self.graph)
        model = MemoryModel(self.graph, costs, in_8_bits=self._train.in_8_bits)
        slots = self.plan.stages
        return tuple(model.stage(s.start, s.stop, slots[s.index].recompute) for s in self.stages)

    def waiting_bytes(self, stage: int) -> int:
        """What a microbatch whose weights' gradients wait keeps."""
        slot = self.plan.stages[stage]
        return self._waiting.of(slot.start, slot.stop)[0]

    @cached_property
    def _waiting(self) -> WaitingMemory:
        return WaitingMemory(self.graph, self._costs(self.graph))

    @cached_property
    def owner(self) -> dict[str, int]:
        """The lowest stage that has a parameter or buffer, -1 where none has: who exports it."""
        graph = self.graph
        names = [f"param:{p.name}" for p in graph.parameters]
        found = dict.fromkeys([*names, *(f"buffer:{b.name}" for b in graph.buffers)], -1)
        for s in reversed(self.stages):
            for name in (
                *(f"param:{p}" for p in s.parameters),
                *(f"buffer:{b}" for b in s.buffers),
            ):
                found[name] = s.index
        return found
