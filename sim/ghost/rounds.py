"""Rounds of ghosts: what `peer/rounds/work.py` computes with on hashes (`round_hashes.py`). A value
of an entry is one hash; of a part one for each piece. A frame announces the bytes that its tensors
would have, and carries these.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import numpy as np

from ...dag.ir.graph import Graph
from ...dag.plan.plan import PeerId
from ...dag.rounds.vector import Entry, RunVector, Span, VectorPiece
from ...job.rounds import RoundSettings
from ...job.settings import SettingsError
from ...peer.rounds.algebra import HeldEntry, RoundAlgebra
from ...peer.rounds.coding import PartCoding
from ...peer.rounds.local import LocalSteps
from ...peer.rounds.methods.round_strategies import STRATEGIES
from ...peer.rounds.part_algebra import EntryVersion, Pieces, WrittenPart
from ...peer.rounds.work import RoundWork
from ...proto import broker_pb2
from .hashes import MASK, Hash, Words
from .plan import Hollow
from .round_hashes import digest, factor, given, mean, met, version
from .stage_hash import HeldHash

__all__ = ["GhostVector", "HashAlgebra", "HashSum"]

Place = tuple[HeldHash, int]
"""Where a stage has an entry."""


class GhostVector:
    """What all ghosts of a run have in common of its vector."""

    def __init__(self, graph: Graph, settings: RoundSettings) -> None:
        if settings.secure:
            raise SettingsError(
                "sync.secure",
                "is true, and ghosts add up hashes, which no mask is for: expected --virtual, or "
                "secure = false",
            )
        self.vector, self.settings = RunVector.of(graph, settings.fragments), settings
        self.codings = STRATEGIES[settings.method].of(settings).codings(settings, self.vector)
        self._parts: dict[Span, tuple[tuple[VectorPiece, ...], Words]] = {}

    def part(self, span: Span) -> tuple[tuple[VectorPiece, ...], Words]:
        """Return the pieces of a part, and the factor of each."""
        if span not in self._parts:
            pieces = tuple(self.vector.pieces(span))
            factors = np.array([factor(p.entry.value, p.whole_start) for p in pieces], np.uint64)
            self._parts[span] = pieces, factors
        return self._parts[span]

    def rounds(
        self, local: LocalSteps, peer: PeerId, held: Mapping[int, HeldHash]
    ) -> RoundWork[Hash]:
        """Return the rounds of one assignment. `held`: by stage, with the hashes that it begins
        from."""
        copies: dict[str, list[Place]] = {}
        for stage in held.values():
            for at, value in enumerate(stage.linear.standing):
                copies.setdefault(value, []).append((stage, at))
        stages = [h.linear.stage for h in held.values()]
        algebra = HashAlgebra(self)
        return RoundWork(algebra, self.settings, local, peer=peer, stages=stages, copies=copies)

    def snapshot_bytes(self, names: Iterable[str]) -> int:
        """Return the bytes that values of these names in snapshots would have as tensors."""
        total = 0
        for name in names:
            value, _, part = name.removeprefix("round:").rpartition(":")
            entry = self.vector.of_value(value)
            each = 4 if part.startswith("given@") else self.settings.kept_bytes
            total += each * entry.spec.elements if entry else 0
        return total


class HashSum:
    """A weighted sum of contributions to a part, of which all weigh so much."""

    def __init__(self, pieces: int, weight: int) -> None:
        self._total, self._weight = np.zeros(pieces, np.uint64), weight

    def add(self, values: Hash, weight: int) -> None:
        self._total += values * np.uint64(weight)

    def add_sum(self, values: Hash, weight: int) -> None:
        self._total += np.asarray(values, np.uint64)

    @property
    def total(self) -> Hash:
        return self._total

    def mean(self) -> Hash:
        return mean(self._total, self._weight)


class HashAlgebra(RoundAlgebra[Hash]):
    """Hashes of one ghost. Whatever a method keeps beside versions follows from them."""

    def __init__(self, shared: GhostVector) -> None:
        self.vector, self.codings = shared.vector, shared.codings
        self.strategy, self._shared = STRATEGIES[shared.settings.method].of(shared.settings), shared
        self.most_rows = shared.settings.most_rows
        self.keeps_given = shared.settings.keeps_given

    # ------------------------------------------------------------ entries

    def read(self, copy: Place, entry: Entry) -> int:
        stage, at = copy
        return int(stage.state[at])

    def write(self, copy: Place, values: Hash, entry: Entry) -> None:
        stage, at = copy
        stage.put(at, cast(int, values))

    def first(self, held: HeldEntry[Hash], values: Hash) -> EntryVersion[Hash]:
        return EntryVersion(values, {}, {})

    def _before(self, held: HeldEntry[Hash]) -> int:
        """h(v) of the rule; in gossip 0."""
        return 0 if self.strategy.apart else cast(int, held.version.values)

    def contribution(self, held: HeldEntry[Hash], clients: Any, senders: object = None) -> Hash:
        return (cast(int, held.now) - self._before(held)) & MASK

    def landing(self, held: HeldEntry[Hash], version: Hash) -> Hash:
        return (cast(int, version) - self._before(held) - cast(int, held.given)) & MASK

    def moved(self, values: Hash, landing: Hash, entry: Entry) -> Hash:
        return (cast(int, values) + cast(int, landing)) & MASK

    def meet(
        self, held: HeldEntry[Hash], mean: Pieces[Hash], coding: PartCoding
    ) -> EntryVersion[Hash]:
        return self.first(held, version(self._before(held), met(cast(Pieces[int], mean))))

    def taken(self, held: HeldEntry[Hash], version: Pieces[Hash]) -> EntryVersion[Hash]:
        [made] = {cast(int, h) for _, h in version}
        return self.first(held, made)

    def digest(self, entry: Entry, *values: Hash) -> int:
        return digest({entry.value: cast(int, values[0])})

    # ------------------------------------------------------------ parts

    def pieces_of(self, part: Span) -> Sequence[VectorPiece]:
        return self._shared.part(part)[0]

    def _written(self, part: Span, values: Hash, coding: PartCoding) -> WrittenPart[Hash]:
        words = np.asarray(values, np.uint64)
        data = Hollow(coding.typical_bytes(part), words.tobytes())
        return WrittenPart((cast(memoryview, data),), words)

    def give(
        self, part: Span, mine: Pieces[Hash], plan: broker_pb2.RoundPlan, coding: PartCoding
    ) -> WrittenPart[Hash]:
        moved = np.array([h for _, h in mine], np.uint64)
        return self._written(part, given(self._shared.part(part)[1], moved), coding)

    def give_rows(
        self,
        part: Span,
        mine: Pieces[Hash],
        rows: range,
        plan: broker_pb2.RoundPlan,
        coding: PartCoding,
    ) -> WrittenPart[Hash]:
        return self.give(part, mine, plan, coding)

    def combined(
        self, came: Mapping[Span, Sequence[tuple[int, Hash]]], plan: broker_pb2.RoundPlan
    ) -> dict[Span, Hash]:
        found: dict[Span, Hash] = {}
        for part, blocks in came.items():
            total = self.sum(part, plan)
            for rows, values in blocks:
                total.add(values, rows)
            found[part] = total.mean()
        return found

    def sum(self, part: Span, plan: broker_pb2.RoundPlan) -> HashSum:
        return HashSum(len(self.pieces_of(part)), plan.weight)

    def place_sum(self, part: Span, plan: broker_pb2.RoundPlan) -> HashSum:
        return self.sum(part, plan)

    def written_sum(self, part: Span, total: Hash, coding: PartCoding) -> WrittenPart[Hash]:
        return self._written(part, total, coding)

    def result(
        self,
        part: Span,
        mean: Hash,
        came: Sequence[tuple[int, tuple[memoryview, ...]]],
        plan: broker_pb2.RoundPlan,
        coding: PartCoding,
    ) -> WrittenPart[Hash]:
        return self._written(part, mean, coding)

    def whole(
        self, part: Span, made: Pieces[EntryVersion[Hash]], coding: PartCoding
    ) -> tuple[memoryview, ...]:
        words = np.array([v.values for _, v in made], np.uint64)
        return self._written(part, words, coding).buffers

    def decode(self, part: Span, data: memoryview, coding: PartCoding) -> Hash:
        return np.frombuffer(cast(Hollow, data).tag, np.uint64)

    def cut(self, part: Span, values: Hash) -> Iterable[tuple[VectorPiece, Hash]]:
        return zip(self.pieces_of(part), cast(Words, values).tolist(), strict=True)
