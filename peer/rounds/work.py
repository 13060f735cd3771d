"""Rounds of one holder: what its stages moved since the last version, the exchange of that with
holders of other replicas, and the next version.

    begin(start)        what was applied last is the version; the next local steps are of this round
    show(), land()      the version is in the stages, for an evaluation; it lands there, if it was
                        made beside local steps
    contribute()        takes down what was moved, of the entries that belong to its stages
    join(plan)          the exchange, in place of an earlier attempt
    accept, payload     its frames; in any thread
    exchange()          what this peer gives to itself is added
    apply()             the next version is made, and in the stages unless local steps go on

Until the next round begins, the version before and the contribution stay, so that another attempt
comes to what it would have come to as the first one. All of it lies on the host, in float32: what
frames bring and take is there too, and the device keeps its memory for the steps. Entries are the
run's (`dag/rounds/vector.py`); a tied one is contributed and hashed by its first stage only, and
applied in all.

    round:VALUE:PART    in snapshots, what is kept of an entry (`entries.py`)

State is shared by all replicas, or of the replica by itself. The latter is kept where an entry
belongs, and moves on only with a version that its contribution is in. Who takes a version without
having begun its round, from a snapshot of an earlier one, begins with none: what was given since
that snapshot is in the version, and must not be given again.

With overlap local steps go on behind `contribute`, and the version lands later, in the next round.
A tied entry is taken down wherever it is then, since each place moves by it. Snapshots of steps
between the two are of the round that is exchanged only: what they have no landing in.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ...compression.codec import RAW, Encoded
from ...dag.execute.execute import TensorSpecError
from ...dag.ir.graph import TensorSpec
from ...dag.plan.plan import PeerId
from ...dag.rounds.digest import digest
from ...dag.rounds.sums import fits
from ...dag.rounds.vector import RunVector, Span, VectorPiece
from ...dag.rounds.wiring import GIVE, RESULT, VERSION
from ...job.rounds import RoundSettings
from ...net.links.frame import Arrived, FrameKey, Payload
from ...proto import broker_pb2
from ..core.events import RoundResult
from ..sync.norm import square_of
from .attempt import EarlyFrames, RoundAttempt, most_of_any
from .buffers import strategy_of_entry
from .coding import flat_spec
from .entries import EntryVersion, HeldEntry, hash_of_segment
from .local import LocalSteps
from .strategies import codings_of, strategy_of
from .strategy import State

__all__ = ["RoundWork"]


class RoundWork:
    """`tensors`: by value, parameters and buffers in the stages of `peer`, each of its copies;
    `owned`: by stage, those that belong to it. `replica`: the id of its replica."""

    def __init__(
        self,
        vector: RunVector,
        settings: RoundSettings,
        local: LocalSteps,
        *,
        replica: str,
        peer: PeerId,
        tensors: Mapping[str, Sequence[Tensor]],
        owned: Mapping[int, Collection[str]],
    ) -> None:
        """Raises CodecError for a codec that rounds cannot have."""
        self.vector, self.local, self.peer = vector, local, peer
        self._settings, self._replica = settings, replica
        self._strategy = strategy_of(settings)
        self._usual = self._codings = codings_of(self._strategy, settings, vector)
        self._entries: dict[str, HeldEntry] = {}
        self._of_stages = [[v for v in owned[k] if v in tensors] for k in sorted(owned)]
        mine = {value for values in self._of_stages for value in values}
        for entry in vector.entries:
            copies = tensors.get(entry.value)
            if copies and entry.spec.elements:
                strategy = strategy_of_entry(entry, self._strategy)
                self._entries[entry.value] = HeldEntry.of(
                    entry,
                    copies,
                    strategy,
                    slots=self._strategy.slots,
                    owned=entry.value in mine,
                )
        self._round, self._ahead, self._fragment = -1, False, 0
        """The round, whether local steps go on while it is exchanged, and of what it is."""
        self._attempt: RoundAttempt | None = None
        self.early, self._lock = EarlyFrames(), threading.Lock()

    @property
    def size_bytes(self) -> int:
        """What is kept from round to round."""
        return self._settings.kept_bytes * sum(e.entry.spec.elements for e in self._all)

    @property
    def values(self) -> tuple[str, ...]:
        """Names of the entries that are here."""
        return tuple(self._entries)

    def versions(self) -> dict[str, int]:
        """By value, the hash of the version that the round began with, with its shared state."""
        found = {}
        for value, entry in self._entries.items():
            state = () if self._strategy.apart else entry.version.state.values()
            found[value] = digest(value, torch.cat([entry.version.values, *state]))
        return found

    @property
    def _all(self) -> Collection[HeldEntry]:
        return self._entries.values()

    # ------------------------------------------------------------ rounds

    def begin(self, start: broker_pb2.RoundStart) -> None:
        """The round may be the one that it is in: then only its local steps are others."""
        self.local.begin(start)
        self._strategy.begin(start.round, gathers=start.gathers)
        if self._attempt and self._attempt.plan.round < start.round:
            self._attempt.end()
        for entry in self._all:
            if entry.round < start.round:
                entry.commit(late=start.late > 0)
        self._round, self._ahead, self._fragment = start.round, start.ahead > 0, start.fragment

    def contribute(self) -> RoundResult:
        """Takes down what was moved; once in a round."""
        drift, apart = 0.0, self._strategy.apart
        whole = self._ahead or apart or self._strategy.mix > 0.0
        for entry in self._all:
            if not self.vector.is_in(entry.entry, self._fragment) or not (whole or entry.owned):
                continue
            if entry.given is None:
                value, own = entry.entry.value, {**entry.version.state, **entry.version.own}
                given = entry.strategy.contribution(value, entry.began, entry.now, own)
                if not entry.entry.integer and not bool(given.isfinite().all()):
                    why = f"{entry.entry.name} has moved by what is no finite number"
                    return RoundResult(code="nonfinite", why=why)
                entry.given, entry.round = given, self._round
            if entry.owned and not entry.entry.is_buffer:
                drift += float(square_of(entry.given - entry.began if apart else entry.given))
        return RoundResult(drift=drift)

    def join(self, plan: broker_pb2.RoundPlan) -> None:
        """Raises TensorSpecError for a plan that is none for this vector."""
        stop = max((s.stop for s in plan.segments), default=0)
        if stop > self.vector.elements:
            raise TensorSpecError(
                f"a segment ends at {stop}: the vector has {self.vector.elements} elements"
            )
        for entry in self._all:
            entry.applied, entry.replaces = None, False
        passes_on = self._strategy.side_by_side
        own = self._strategy.coding(self.vector)
        codings = {GIVE: own, RESULT: own} if own else self._usual
        attempt = RoundAttempt(plan, self.peer, self.vector, codings[RESULT], passes_on)
        with self._lock:
            self._attempt, self._codings = attempt, codings

    def exchange(self) -> RoundResult:
        """What it gives is encoded, and added where it adds up itself: as others will read it, so
        that it makes no difference who adds up."""
        attempt = self._joined
        for arrived in self.early.take(attempt.number):
            try:
                self.accept(arrived)
            except ValueError as error:
                return RoundResult(code="refused", why=str(error))
        for part, by in attempt.wiring.gives:
            heard = []
            for piece in self.vector.pieces(part):
                given = self._given(piece)
                if given is None:
                    return _missing(f"no contribution of {piece.entry.name} was taken down here")
                encoded = self._encoded(piece, given, attempt.plan.round)
                heard.append(self._codings[GIVE].echo(piece, given, encoded))
                if not piece.entry.integer and not fits(heard[-1], attempt.plan.exponent):
                    most = float(heard[-1].abs().amax())
                    why = f"{piece.entry.name} has moved by {most:g}"
                    why += f": expected less than 2^{attempt.plan.exponent}"
                    return RoundResult(code="overflow", why=why)
            if by == self.peer:
                attempt.add(part, self.peer, torch.cat(heard), self._contribution(part) or ())
        return RoundResult()

    def apply(self) -> RoundResult:
        """The next version, of what the plan has come here; nothing changes unless it is whole."""
        attempt = self._joined
        made = dict(self._from_versions(attempt)) | dict(self._from_results(attempt))
        for value, entry in self._entries.items():
            wanted = self.vector.is_in(entry.entry, attempt.plan.fragment) or attempt.wiring.gets
            if wanted and value not in made:
                return _missing(f"{entry.entry.name} has not all come that the plan has come here")
        for value, version in made.items():
            entry = self._entries[value]
            entry.applied, entry.round = version, attempt.plan.round
            taken = bool(attempt.wiring.gets)
            if attempt.plan.final or entry.given is None or (taken and not self._ahead):
                entry.put(version.values)
            elif taken:
                entry.replaces = True
            elif not self._ahead:
                entry.put(entry.mixed(version.values))
        attempt.applied = True
        now = {v: made.get(v, self._entries[v].version).values for v in self._entries}
        return RoundResult(
            hashes=tuple(
                sum(digest(v, now[v]) for v in values if v in now) % 2**64
                for values in self._of_stages
            ),
            parts=tuple(
                hash_of_segment(self.vector, self._entries, s.start, s.stop)
                for s in (() if self._strategy.apart else attempt.plan.segments)
            ),
        )

    def show(self) -> RoundResult:
        """The version is in the stages, until it lands."""
        for entry in self._all:
            entry.show()
        return RoundResult()

    def land(self) -> RoundResult:
        """The stages move to it; nothing that local steps did meanwhile is lost."""
        for entry in self._all:
            entry.land()
        return RoundResult()

    def _from_results(self, attempt: RoundAttempt) -> Iterator[tuple[str, EntryVersion]]:
        for entry, (mean,) in self._gathered(attempt.results(), 1):
            before, value = entry.version, entry.entry.value
            given = mean if entry.given is None else entry.given  # of copies nothing is given
            made = entry.strategy.meet(value, before.values, given, mean, before.state)
            yield value, EntryVersion(*made, self._left(entry, mean, attempt.plan.round))

    def _from_versions(self, attempt: RoundAttempt) -> Iterator[tuple[str, EntryVersion]]:
        slots = self._strategy.slots
        came = ((part, attempt.versions.get(part)) for part, _ in attempt.wiring.gets)
        for entry, (values, *state) in self._gathered(came, 1 + len(slots)):
            own = entry.version.own if self._round >= 0 else entry.nothing
            yield entry.entry.value, EntryVersion(values, dict(zip(slots, state, strict=True)), own)

    def _gathered(
        self, parts: Iterator[tuple[Span, Tensor | None]], rows: int
    ) -> Iterator[tuple[HeldEntry, Tensor]]:
        """Entries of which all parts are there, each as (rows, elements)."""
        found: dict[str, tuple[Tensor, int]] = {}
        for part, came in parts:
            if came is None:
                continue
            table = came.view(rows, part[1] - part[0])
            for piece in self.vector.pieces(part):
                entry = self._entries.get(piece.entry.value)
                if entry is None:
                    continue
                elements = entry.entry.spec.elements
                whole, count = found.get(piece.entry.value, (torch.empty(0), 0))
                whole = whole if count else torch.empty(rows, elements)
                at = piece.entry.start + piece.start - part[0]
                whole[:, piece.start : piece.stop] = table[:, at : at + piece.elements]
                found[piece.entry.value] = whole, count + piece.elements
                if count + piece.elements == elements:
                    yield entry, found.pop(piece.entry.value)[0]

    # ------------------------------------------------------------ frames

    def accept(self, arrived: Arrived) -> None:
        """Raises TensorSpecError or CodecError for what is not as the plan says,
        LargeContributionError for what cannot be counted; then nothing has changed. What comes
        before its attempt was joined is looked at then."""
        key = arrived.key
        with self._lock:
            attempt = self._attempt
            if attempt is None or (key.step, key.term) > attempt.number:
                self.early.keep(arrived)
                return
        part = attempt.comes(key)
        if part is None:
            raise TensorSpecError(f"{key}: the plan of the round has none come to {self.peer}")
        expected = self._spec(key, part)
        codec = self._codec_of(key)
        if (arrived.spec, arrived.codec, arrived.codec_header) != (expected, codec, b""):
            raise TensorSpecError(
                f"{key}: expected {expected!r} by {codec}, got {arrived.spec!r} by "
                f"{arrived.codec!r}"
            )
        if arrived.absent:
            raise TensorSpecError(f"{key}: expected {expected!r}, got none")
        if key.hop == VERSION:
            values = RAW.decode(expected, b"", arrived.data)
        elif key.hop == RESULT:
            values = attempt.decoded(part, arrived.data)
        else:
            values = self._codings[GIVE].decode(part, arrived.data)
        attempt.take(key, part, values, (arrived.data,))

    def most_bytes(self, key: FrameKey) -> int:
        """The most that a frame of this key has; 0 for what no plan names. For any thread."""
        attempt = self._attempt
        if attempt is None or (key.step, key.term) != attempt.number:
            rows, passed_on = 1 + len(self._strategy.slots), self._strategy.side_by_side
            return most_of_any(key, self.vector, self._codings, rows, passed_on)
        part = attempt.comes(key)
        if part is None:
            return 0
        if key.hop == VERSION:
            return self._spec(key, part).size_bytes
        return (attempt if key.hop == RESULT else self._codings[GIVE]).most_bytes(part)

    def payload(self, key: FrameKey) -> Payload:
        """Raises KeyError for what is not there to be sent."""
        attempt = self._attempt
        part = attempt.goes(key) if attempt else None
        buffers: tuple[memoryview, ...] | None = None
        if attempt and part:
            if key.hop == GIVE:
                buffers = self._contribution(part)
            elif key.hop == RESULT:
                found = attempt.result(part)
                buffers = found.buffers if found else None
            elif attempt.applied:
                buffers = self._whole(part)
        if part is None or buffers is None:
            raise KeyError(f"{key} is not there to be sent by {self.peer}")
        return Payload(self._codec_of(key), b"", self._spec(key, part), buffers)

    def _codec_of(self, key: FrameKey) -> str:
        return RAW.name if key.hop == VERSION else self._codings[key.hop].name

    def _spec(self, key: FrameKey, part: Span) -> TensorSpec:
        rows = 1 + len(self._strategy.slots) if key.hop == VERSION else 1
        return flat_spec(rows * (part[1] - part[0]))

    def _contribution(self, part: Span) -> tuple[memoryview, ...] | None:
        found = []
        for piece in self.vector.pieces(part):
            entry = self._entries.get(piece.entry.value)
            if entry is None or piece.start not in entry.encoded:
                return None
            found.append((piece, entry.encoded[piece.start]))
        return self._codings[GIVE].written(found)

    def _whole(self, part: Span) -> tuple[memoryview, ...] | None:
        """What was made of a part, then its slots one after the other."""
        rows: list[list[memoryview]] = [[] for _ in range(1 + len(self._strategy.slots))]
        for piece in self.vector.pieces(part):
            entry = self._entries.get(piece.entry.value)
            if entry is None:
                return None
            made = entry.applied or entry.version  # that once the round is over
            tensors = (made.values, *(made.state[slot] for slot in self._strategy.slots))
            for row, tensor in zip(rows, tensors, strict=True):
                row += RAW.encode(tensor[piece.start : piece.stop]).buffers
        return tuple(buffer for row in rows for buffer in row)

    def _given(self, piece: VectorPiece) -> Tensor | None:
        entry = self._entries.get(piece.entry.value)
        return (
            None if entry is None or entry.given is None else entry.given[piece.start : piece.stop]
        )

    def _encoded(self, piece: VectorPiece, given: Tensor, round_: int) -> Encoded:
        encoded = self._entries[piece.entry.value].encoded
        if piece.start not in encoded:
            encoded[piece.start] = self._codings[GIVE].encode(piece, given, round_, self._replica)
        return encoded[piece.start]

    def _left(self, entry: HeldEntry, mean: Tensor, round_: int) -> State:
        """The replica's own state behind a version that its contribution is in."""
        if not entry.version.own or entry.given is None:
            return entry.version.own
        heard, first = [], entry.entry.start
        for piece in self.vector.pieces((first, entry.entry.stop)):
            given = entry.given[piece.start : piece.stop]
            encoded = self._encoded(piece, given, round_)
            heard.append(self._codings[GIVE].echo(piece, given, encoded))
        return entry.strategy.left(entry.entry.value, entry.given, torch.cat(heard), mean)

    # ------------------------------------------------------------ snapshots

    def state_tensors(self) -> dict[str, Tensor]:
        """What it goes on from; nobody may write to the tensors."""
        return {
            f"round:{value}:{part}": tensor
            for value, entry in self._entries.items()
            for part, tensor in entry.parts().items()
        }

    def load_state_tensors(self, tensors: Mapping[str, Tensor], *, anew: bool = False) -> None:
        """Goes on from copies of what `state_tensors` gave, here or at other holders; of entries
        that have none, from what is in the stages. `anew`: whoever gave it had other data to come,
        and what is its own stays with it."""
        states: dict[str, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            value, _, part = name.removeprefix("round:").rpartition(":")
            if name.startswith("round:") and value in self._entries:
                states.setdefault(value, {})[part] = tensor.to("cpu", torch.float32, copy=True)
        for value, state in states.items():
            entry = self._entries[value]
            if anew:
                state |= entry.nothing
            entry.load(state, self._strategy.slots)

    # ------------------------------------------------------------ inside

    @property
    def _joined(self) -> RoundAttempt:
        assert self._attempt is not None, "no exchange was joined"
        return self._attempt

    def __repr__(self) -> str:
        return (
            f"<RoundWork round {self._round}, {len(self._entries)} of {len(self.vector.entries)} "
            f"entries, attempt {self._attempt.plan.attempt if self._attempt else 'none'}>"
        )


def _missing(why: str) -> RoundResult:
    return RoundResult(code="missing", why=why)
