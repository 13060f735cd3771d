"""Rounds of one ghost: what `peer/rounds/work.py` does, on hashes (`round_hashes.py`). A frame
announces the bytes that its tensors would have, and carries a hash for each piece in it.

    round:VALUE:base         in snapshots: the version that the round began with
    round:VALUE:given@N      what was moved in round N
    round:VALUE:base@N       what was applied in it
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, cast

import numpy as np

from ...compression.codec import RAW, typical_bytes
from ...dag.execute.execute import TensorSpecError
from ...dag.ir.graph import Graph
from ...dag.plan.plan import PeerId
from ...dag.rounds.vector import PIECE, Entry, RunVector, Span, VectorPiece
from ...dag.rounds.wiring import GIVE, RESULT, VERSION
from ...job.rounds import RoundSettings
from ...net.links.frame import Arrived, FrameKey, Payload
from ...peer.core.events import RoundResult
from ...peer.rounds.attempt import RoundAttempt
from ...peer.rounds.coding import PartCoding, flat_spec
from ...peer.rounds.local import LocalSteps
from ...peer.rounds.side_by_side import FRONT_BYTES
from ...peer.rounds.strategies import codings_of, strategy_of
from ...proto import broker_pb2
from .hashes import MASK, Words
from .plan import Hollow, Weighed
from .round_hashes import digest, factor, given, mean, version
from .stage_hash import HeldHash

__all__ = ["GhostRounds", "GhostVector"]

_IN_FRONT = 8
"""Bytes in front of a coded piece: how long header and piece are, and a header of two bytes."""


class _Part(NamedTuple):
    """values: of its pieces, whose entries they are of. factors: theirs. elements: theirs."""

    values: tuple[str, ...]
    factors: Words
    elements: tuple[int, ...]
    given: Weighed
    """What a contribution announces."""
    meant: Weighed
    """What a mean does."""
    masked: Weighed
    """What both do, where pairs exchange what a mask has."""
    raw: Weighed
    """What a version does."""


class GhostVector:
    """What all ghosts of a run have in common of its vector."""

    def __init__(self, graph: Graph, settings: RoundSettings) -> None:
        self.vector, self.settings = RunVector.of(graph, settings.fragments), settings
        strategy = strategy_of(settings)
        codings = codings_of(strategy, settings, self.vector)
        self._given, self.coding = codings[GIVE], codings[RESULT]
        self.side_by_side, self.apart = strategy.side_by_side, strategy.apart
        self._masked = strategy.coding(self.vector)  # masks of all rounds are of one size
        self._rows = 1 + len(strategy.slots)
        self._parts: dict[Span, _Part] = {}

    @property
    def state_bytes(self) -> int:
        """Bytes of an element of a version, with shared state."""
        return 4 * self._rows

    def part(self, span: Span) -> _Part:
        found = self._parts.get(span)
        return found if found is not None else self._parts.setdefault(span, self._part(span))

    def _part(self, span: Span) -> _Part:
        pieces = tuple(self.vector.pieces(span))
        spec, whole = flat_spec(span[1] - span[0]), flat_spec(self._rows * (span[1] - span[0]))
        masked = Weighed(self._given.name, spec, _typical(self._given, pieces))
        if self._masked is not None:
            masked = Weighed(self._masked.name, spec, self._masked.most_bytes(span))
        return _Part(
            tuple(p.entry.value for p in pieces),
            np.array([factor(p.entry.value, p.start) for p in pieces], np.uint64),
            tuple(p.elements for p in pieces),
            Weighed(self._given.name, spec, _typical(self._given, pieces)),
            Weighed(self.coding.name, spec, _typical(self.coding, pieces)),
            masked,
            Weighed(RAW.name, whole, whole.size_bytes),
        )


def _typical(coding: PartCoding, pieces: Iterable[VectorPiece]) -> int:
    """Bytes of a part."""
    total = 0
    for piece in pieces:
        codec = coding.of(piece)
        total += typical_bytes(codec, flat_spec(piece.elements))
        total += 0 if codec is RAW else _IN_FRONT
    return total


@dataclass(eq=False)
class _Entry:
    """An entry of the vector in a stage here, as `peer.rounds.work` has it."""

    entry: Entry
    version: int
    moved: int | None = None
    applied: int | None = None
    landing: int | None = None
    shown: int | None = None
    round: int = -1
    """Of `moved` and `applied`."""

    def commit(self, *, late: bool) -> None:
        if late and self.moved is not None and self.applied is not None:
            self.landing = (self.applied - self.version - self.moved) & MASK
        self.version = self.version if self.applied is None else self.applied
        self.moved = self.applied = None


class GhostRounds:
    """The rounds of one assignment; the methods are those of RoundWork. `held`: by stage, with the
    hashes that the assignment begins from."""

    def __init__(
        self, shared: GhostVector, local: LocalSteps, peer: PeerId, held: Mapping[int, HeldHash]
    ) -> None:
        self.shared, self.vector, self.local = shared, shared.vector, local
        self._peer, self._held = peer, held
        self._entries: dict[str, _Entry] = {}
        for stage in held.values():
            for value, state in stage.exported().items():
                if (entry := self.vector.of_value(value)) and entry.spec.elements:
                    self._entries[value] = _Entry(entry, state)
        spans = [held[k].linear.stage for k in sorted(held)]
        self._of_stages = [
            [v for v, e in self._entries.items() if s.start <= e.entry.operator < s.stop]
            for s in spans
        ]
        self._ahead, self._fragment = False, 0
        self._replaces = False
        """Whether the stages get what was applied once it is committed, as `HeldEntry` says."""
        self._attempt: RoundAttempt | None = None
        self._gathers = False
        self._early: list[Arrived] = []
        self._came: dict[tuple[int, Span, PeerId], Words] = {}
        """Of the attempt, its own contributions too, by hop, part and source."""
        self._means: dict[Span, Words] = {}
        """Of the parts that are added up here."""

    @property
    def size_bytes(self) -> int:
        """What is kept from round to round, in the memory of a device that is a CPU."""
        elements = sum(e.entry.spec.elements for e in self._entries.values())
        return self.shared.state_bytes * elements

    def versions(self) -> dict[str, int]:
        return {value: e.version for value, e in self._entries.items()}

    # ------------------------------------------------------------ rounds

    def begin(self, start: broker_pb2.RoundStart) -> None:
        self.local.begin(start)
        if self._attempt and self._attempt.plan.round < start.round:
            self._attempt.end()
            self._came, self._means = {}, {}
        for entry in self._entries.values():
            if entry.round < start.round:
                entry.commit(late=start.late > 0 and not self._replaces)
        if self._replaces:
            for stage in self._held.values():
                stage.resume({v: e.version for v, e in self._entries.items()})
        self._replaces = False
        self._round, self._ahead, self._fragment = start.round, start.ahead > 0, start.fragment
        self._gathers = start.gathers

    def contribute(self) -> RoundResult:
        for stage, values in zip(sorted(self._held), self._of_stages, strict=True):
            now = self._held[stage].exported()
            there = [v for v in self._entries if v in now] if self._ahead else values
            for entry in (self._entries[v] for v in there):
                inside = self.vector.is_in(entry.entry, self._fragment)
                if inside and entry.moved is None:
                    entry.moved = (now[entry.entry.value] - self._before(entry)) & MASK
                    entry.round = self._round
        return RoundResult()

    def join(self, plan: broker_pb2.RoundPlan) -> None:
        for entry in self._entries.values():
            entry.applied = None
        self._replaces = False
        self._attempt = RoundAttempt(plan, self._peer, self.vector, self.shared.coding)
        self._came, self._means = {}, {}

    def exchange(self) -> RoundResult:
        attempt = self._joined
        early = [a for a in self._early if (a.key.step, a.key.term) == attempt.number]
        self._early = [a for a in self._early if (a.key.step, a.key.term) > attempt.number]
        for arrived in early:
            try:
                self.accept(arrived)
            except TensorSpecError as error:
                return RoundResult(code="refused", why=str(error))
        for part, by in attempt.wiring.gives:
            words = self._given(part)
            if words is None:
                return RoundResult(code="missing", why=f"no contribution of {part} was taken down")
            if by == self._peer:
                self._came[GIVE, part, self._peer] = words
        return RoundResult()

    def apply(self) -> RoundResult:
        attempt = self._joined
        made = dict(self._from_versions(attempt)) | dict(self._from_means(attempt))
        fragment = 0 if attempt.wiring.gets else attempt.plan.fragment
        wanted = {v for v, e in self._entries.items() if self.vector.is_in(e.entry, fragment)}
        if missing := wanted - made.keys():
            return RoundResult(code="missing", why=f"{min(missing)} has not all come")
        for value, word in made.items():
            entry = self._entries[value]
            entry.applied, entry.round = word, attempt.plan.round
        taken = all(e.moved is not None for e in self._entries.values())
        self._replaces = bool(self._ahead and attempt.wiring.gets and taken)
        if not self._ahead or (attempt.wiring.gets and not taken):
            for stage in self._held.values():
                stage.resume(made)
        attempt.applied = True
        now = {v: made.get(v, e.version) for v, e in self._entries.items()}
        mine = ({v: now[v] for v in values} for values in self._of_stages)
        return RoundResult(hashes=tuple(map(digest, mine)))

    def show(self) -> RoundResult:
        for stage in self._held.values():
            now = stage.exported()
            for value in self._entries.keys() & now.keys():
                self._entries[value].shown = now[value]
            stage.resume({v: e.version for v, e in self._entries.items()})
        return RoundResult()

    def land(self) -> RoundResult:
        for stage in self._held.values():
            now = stage.exported()
            here = {v: e for v, e in self._entries.items() if v in now}
            local = {v: now[v] if e.shown is None else e.shown for v, e in here.items()}
            stage.resume({v: (local[v] + (e.landing or 0)) & MASK for v, e in here.items()})
        for entry in self._entries.values():
            entry.shown = entry.landing = None
        return RoundResult()

    def _from_means(self, attempt: RoundAttempt) -> Iterator[tuple[str, int]]:
        taken: list[tuple[Span, Words | None]] = [
            (p, self._mean(p) if by == self._peer else self._came.get((RESULT, p, by)))
            for p, by in attempt.wiring.takes
        ]
        for value, pieces in self._gathered(taken):
            moved = sum(a * q for a, q in pieces) & MASK
            yield value, version(self._before(self._entries[value]), moved)

    def _before(self, entry: _Entry) -> int:
        """h(v) of the rule; in gossip 0."""
        return 0 if self.shared.apart else entry.version

    def _from_versions(self, attempt: RoundAttempt) -> Iterator[tuple[str, int]]:
        came = [(p, self._came.get((VERSION, p, by))) for p, by in attempt.wiring.gets]
        for value, pieces in self._gathered(came):
            [made] = {h for _, h in pieces}
            yield value, made

    def _gathered(
        self, parts: list[tuple[Span, Words | None]]
    ) -> Iterator[tuple[str, list[tuple[int, int]]]]:
        """Entries here whose pieces have all come: their factors, and what came."""
        found: dict[str, list[tuple[int, int]]] = {}
        for span, words in parts:
            if words is not None:
                part = self.shared.part(span)
                for value, a, word in zip(
                    part.values, part.factors.tolist(), words.tolist(), strict=True
                ):
                    found.setdefault(value, []).append((a, word))
        for value, pieces in found.items():
            entry = self._entries.get(value)
            if entry is not None and len(pieces) == -(-entry.entry.spec.elements // PIECE):
                yield value, pieces

    # ------------------------------------------------------------ frames

    def accept(self, arrived: Arrived) -> None:
        """Raises TensorSpecError for what is not as the plan says."""
        key, attempt = arrived.key, self._attempt
        if attempt is None or (key.step, key.term) > attempt.number:
            self._early.append(arrived)
            return
        span = attempt.comes(key)
        if span is None:
            raise TensorSpecError(f"{key}: the plan of the round has none come to {self._peer}")
        wanted = self._weighed(key, span)
        if (arrived.spec, arrived.codec) != (wanted.spec, wanted.codec):
            raise TensorSpecError(
                f"{key}: expected {wanted.spec!r} by {wanted.codec}, got {arrived.spec!r} by "
                f"{arrived.codec!r}"
            )
        words = np.frombuffer(cast(Hollow, arrived.data).tag, np.uint64)
        self._came.setdefault((key.hop, span, PeerId(key.source)), words)

    def most_bytes(self, key: FrameKey) -> int | None:
        attempt = self._attempt
        if attempt is None or (key.step, key.term) != attempt.number:
            return None
        span = attempt.comes(key)
        return 0 if span is None else self._weighed(key, span).size_bytes

    def payload(self, key: FrameKey) -> Payload:
        """Raises KeyError for what is not there to be sent."""
        attempt = self._attempt
        span = attempt.goes(key) if attempt else None
        words: Words | None = None
        if attempt and span:
            if key.hop == GIVE:
                words = self._given(span)
            elif key.hop == RESULT:
                words = self._mean(span)
            elif attempt.applied:
                words = self._made(span)
        if span is None or words is None:
            raise KeyError(f"{key} is not there to be sent by {self._peer}")
        codec, spec, size = self._weighed(key, span)
        return Payload(codec, b"", spec, (cast(memoryview, Hollow(size, words.tobytes())),))

    def _weighed(self, key: FrameKey, span: Span) -> Weighed:
        part = self.shared.part(span)
        if key.hop == VERSION:
            return part.raw
        if self.shared.apart and not self._gathers:
            return part.masked
        if key.hop == RESULT and self.shared.side_by_side:
            many, size = self._joined.plan.members, part.given.size_bytes + FRONT_BYTES
            return part.given._replace(size_bytes=many * size)
        return part.given if key.hop == GIVE else part.meant

    def _given(self, span: Span) -> Words | None:
        part = self.shared.part(span)
        entries = [self._entries.get(v) for v in part.values]
        moved = [e.moved for e in entries if e is not None and e.moved is not None]
        if len(moved) < len(entries):
            return None
        return given(part.factors, np.array(moved, np.uint64))

    def _mean(self, span: Span) -> Words | None:
        """None while a contribution is not here."""
        if span not in self._means:
            attempt = self._joined
            total = np.zeros(len(self.shared.part(span).values), np.uint64)
            for giver in attempt.wiring.adds[span]:
                words = self._came.get((GIVE, span, giver.peer))
                if words is None:
                    return None
                total += words * np.uint64(giver.weight)
            self._means[span] = mean(total, attempt.plan.weight)
        return self._means[span]

    def _made(self, span: Span) -> Words | None:
        entries = [self._entries.get(v) for v in self.shared.part(span).values]
        made = [e.version if e.applied is None else e.applied for e in entries if e]
        return np.array(made, np.uint64) if len(made) == len(entries) else None

    # ------------------------------------------------------------ snapshots

    def state(self) -> tuple[dict[str, int], int]:
        """What it goes on from, and how many bytes that would be."""
        found, size = dict[str, int](), 0
        for value, e in self._entries.items():
            now = {"base": e.version}
            size += self.shared.state_bytes * e.entry.spec.elements
            if e.moved is not None:
                now[f"given@{e.round}"] = e.moved
                size += 4 * e.entry.spec.elements
            if e.applied is not None:
                now[f"base@{e.round}"] = e.applied
                size += self.shared.state_bytes * e.entry.spec.elements
            found |= {f"round:{value}:{part}": h for part, h in now.items()}
        return found, size

    def load(self, states: Mapping[str, int]) -> None:
        for name, h in states.items():
            value, _, part = name.removeprefix("round:").rpartition(":")
            entry = self._entries.get(value)
            if entry is None or not name.startswith("round:"):
                continue
            kind, _, number = part.partition("@")
            if not number:
                entry.version = h
                continue
            entry.round = int(number)
            if kind == "given":
                entry.moved = h
            else:
                entry.applied = h

    @property
    def _joined(self) -> RoundAttempt:
        assert self._attempt is not None, "no exchange was joined"
        return self._attempt
