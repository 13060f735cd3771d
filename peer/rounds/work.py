"""Rounds of one holder: what its stages moved since the last version, the exchange of that with
holders of other replicas, and the next version: `begin`, `contribute`, `join`, `exchange`, where
sums are masked `unmask`, and `apply`. Frames come and go meanwhile, in any thread
(`round_frames.py`).

Until the next round begins, the version before and the contribution stay, so that another attempt
comes to what it would have come to as the first one. What values are is `algebra.py`'s to say.
Entries are the run's (`dag/rounds/vector.py`); a tied one is contributed and hashed by its first
stage only, and applied in all.

    round:VALUE:PART    in snapshots, what is kept of an entry (`algebra.py`, `local.py`)

State is shared by all replicas, or of the replica by itself. The latter is kept where an entry
belongs, and moves on only with a version that its contribution is in. Who takes a version without
having begun its round, from a snapshot of an earlier one, begins with none: what was given since
that snapshot is in the version, and must not be given again.

With overlap local steps go on behind `contribute`, and the version lands later, in the next round.
A tied entry is taken down wherever it is then, since each place moves by it. Snapshots of steps
between the two are of the round that is exchanged only: what they have no landing in.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from ...dag.execute.execute import TensorSpecError
from ...dag.plan.action import Kind
from ...dag.plan.cut import Stage
from ...dag.plan.plan import PeerId
from ...dag.rounds.sums import LargeContributionError
from ...dag.rounds.wiring import GIVE, RESULT, VERSION, RoundWiring
from ...job.rounds import RoundSettings
from ...proto import broker_pb2
from ..core import events as e
from ..core.events import RoundResult
from ..secure.attempt_receipts import ReceiptsOf
from ..secure.masked_sums import MaskedSums
from ..secure.round_keys import SecureSumError
from .algebra import HeldEntries, RoundAlgebra
from .attempt import RoundAttempt
from .local import SUM, LocalSteps
from .part_algebra import EntryVersion
from .round_frames import RoundFrames

__all__ = ["RoundWork"]

V = TypeVar("V")


class RoundWork(Generic[V]):
    """Rounds of `peer`. entries: what is known of those that are here. `copies`: by value, an entry
    in each of its `stages` that has it, as the algebra reads and writes them."""

    def __init__(
        self,
        algebra: RoundAlgebra[V],
        settings: RoundSettings,
        local: LocalSteps,
        *,
        peer: PeerId,
        stages: Iterable[Stage],
        copies: Mapping[str, Sequence[Any]],
        masks: MaskedSums | None = None,
        receipts: ReceiptsOf | None = None,
    ) -> None:
        """`masks`: of sums of which nobody sees an addend. `receipts`: of what is exchanged; None:
        peers have no certificates."""
        self.algebra, self.local, self.peer = algebra, local, peer
        self.vector, self._settings, self._masks = algebra.vector, settings, masks
        self._receipts = receipts
        self.entries = HeldEntries(algebra, stages, copies)
        self.frames = RoundFrames(peer, algebra, self.entries)
        self._round, self._ahead, self._fragment = -1, False, 0
        self._clients_moved = 0.0
        """The round, whether local steps go on while it is exchanged, and of what it is."""

    @property
    def size_bytes(self) -> int:
        """Bytes that are kept from round to round."""
        return (self._settings.kept_bytes + self.local.kept_bytes) * self.entries.elements

    # ------------------------------------------------------------ rounds

    def do(self, order: e.OfRounds) -> e.Event | None:
        """Do what the machine wants, in order with actions. Return what it is to hear of that."""
        match order:
            case e.BeginRound(run, term, start):
                self.begin(start)
                return e.RoundReady(run, term, start.round)
            case e.JoinExchange(plan=plan, wiring=wiring):
                self.join(plan, wiring)
            case e.HearMasks(told=told):
                assert self._masks is not None, "sums are not masked"
                self._masks.hear(told)
            case e.ShowReceipts(run, term, asked):
                return e.ReceiptsShown(run, term, self.answer(asked))
            case e.ShowAgain(wiring=wiring):
                self.frames.show(wiring)
            case e.AddAgain(run, term, audit):
                return e.ReceiptsShown(run, term, self.answer_audit(audit))
        return None

    def begin(self, start: broker_pb2.RoundStart) -> None:
        """Begins a round: what was applied last is the version. In the one that it is in only the
        local steps are others from here on."""
        if start.round == self._round and start.more:
            self._set_aside()
        self.local.begin(start)
        self.algebra.begin(start)
        if self._masks is not None:
            self._masks.begin(start.round)
        self.frames.end_before(start.round)
        for entry in self.entries.values():
            if entry.round < start.round:
                entry.commit(late=start.late > 0)
            if start.afresh:
                entry.forget()
        self._round, self._ahead, self._fragment = start.round, start.ahead > 0, start.fragment

    def _set_aside(self) -> None:
        """Go back to the version, for more clients of the round."""
        self.local.set_aside()
        for entry in self.entries.values():
            entry.put(entry.version.values)
            entry.given = None

    def bend(self, step: int) -> None:
        """Have the method draw parameters to the version, by their gradients of an own step."""
        for entry in self.entries.values():
            for copy in entry.copies:
                self.local.bend(step, copy, entry.version.values)

    def stepped(self, step: int) -> bool:
        """Return whether a client ends with an own step, whose update is in the stages: it is taken
        down, and the stages go back to the version."""
        weight = self.local.ends(step)
        for value, entry in self.entries.items() if weight else ():
            if entry.owned:
                self.local.add(value, entry.now, entry.version.values, step)
            entry.put(entry.version.values)
        return weight > 0

    def carry_out(self, kind: Kind) -> RoundResult:
        """Does an action of a round. With SHOW the version is in the stages for an evaluation, with
        LAND it lands there, if it was made beside local steps."""
        match kind:
            case Kind.CONTRIBUTE:
                return self.contribute()
            case Kind.EXCHANGE:
                return self.exchange()
            case Kind.UNMASK:
                return self.unmask()
            case Kind.APPLY:
                return self.apply()
        for entry in self.entries.values():
            entry.show() if kind is Kind.SHOW else entry.land()
        return RoundResult()

    def contribute(self) -> RoundResult:
        """Takes down what was moved; once in a round."""
        drift, strategy = 0.0, self.algebra.strategy
        whole = self._ahead or strategy.apart or strategy.mix > 0.0
        if all(entry.given is None for entry in self.entries.values()):
            shared = {value: e.version.state for value, e in self.entries.items()}
            self._clients_moved = self.local.work(shared)
        for entry in self.entries.values():
            if not self.vector.is_in(entry.entry, self._fragment) or not (whole or entry.owned):
                continue
            if entry.given is None:
                value = entry.entry.value
                clients, senders = self.local.clients(value), self.local.senders(value)
                given = self.algebra.contribution(entry, clients, senders)
                if given is None:
                    why = f"{entry.entry.name} has moved by what is no finite number"
                    return RoundResult(code="nonfinite", why=why)
                entry.given, entry.round = given, self._round
            drift += self.algebra.drift(entry) if entry.owned else 0.0
        masks = self._masks.key if self._masks is not None else None
        return RoundResult(
            drift=drift,
            moved=self._clients_moved,
            left_out=self.local.left_out,
            lost=self.local.lost,
            losses=self.local.losses,
            skipped=self.local.skipped,
            masks=masks,
        )

    def join(self, plan: broker_pb2.RoundPlan, wiring: RoundWiring) -> None:
        """Frames and actions are of this attempt from here on. `wiring`: by the plan."""
        for entry in self.entries.values():
            entry.applied, entry.replaces = None, False
        self.algebra.strategy.planned(plan.share, self.local.to_gradient)
        receipts = self._receipts(plan) if self._receipts is not None else None
        attempt = RoundAttempt(plan, wiring, self.peer, self.algebra, self._masks, receipts)
        self.frames.join(attempt)

    def exchange(self) -> RoundResult:
        """Takes what came early, and gives."""
        attempt, dealt = self._joined, None
        if self._masks is not None and any(attempt.gifts()):
            try:
                dealt = self._masks.deal(attempt.plan)
            except SecureSumError as error:
                return _unsound(error)
        for arrived in self.frames.early.take(attempt.number):
            try:
                self.frames.accept(arrived)
            except ValueError as error:
                return RoundResult(code="refused", why=str(error))
        for part, hop, block in attempt.gifts():
            try:
                mine = self.entries.of_part(part, lambda e: e.given)
            except KeyError as lacks:
                return _missing(f"no contribution of {lacks.args[0]} was taken down here")
            try:
                attempt.give(part, hop, block, mine)
            except LargeContributionError as error:
                return RoundResult(code="overflow", why=str(error))
            except TensorSpecError as error:
                return _missing(str(error))
        return RoundResult(masks=dealt)

    def unmask(self) -> RoundResult:
        """Does with masks what was told: opens shares that are sealed for this one, reveals them,
        or takes the masks that follow from what all revealed."""
        assert self._masks is not None, "sums are not masked"
        try:
            return RoundResult(masks=self._masks.answer())
        except SecureSumError as error:
            return _unsound(error)

    def apply(self) -> RoundResult:
        """Makes the next version of what came; nothing changes unless all of it is here."""
        attempt, plan = self._joined, self._joined.plan
        made, moved = dict[str, EntryVersion[V]](), 0.0
        for entry, whole in self.entries.gathered(attempt.came(VERSION)):
            made[entry.entry.value] = self.algebra.taken(entry, whole)
        for entry, mean in self.entries.gathered(attempt.came(RESULT)):
            made[entry.entry.value] = self.algebra.meet(entry, mean, attempt.codings[GIVE])
            if self._settings.cohorts is not None and entry.owned:
                moved += self.algebra.moved_by(entry, mean)
        gets = bool(attempt.wiring.gets)
        for value, entry in self.entries.items():
            if (gets or self.vector.is_in(entry.entry, plan.fragment)) and value not in made:
                return _missing(f"{entry.entry.name} has not all come that the plan has come here")
        for value, version in made.items():
            entry = self.entries[value]
            entry.round = plan.round
            entry.apply(version, beside=self._ahead, whole=gets, final=plan.final)
        attempt.applied = True
        now = {value: e.applied or e.version for value, e in self.entries.items()}
        hashes = self.entries.hashes(now)
        return RoundResult(
            hashes=hashes,
            said=attempt.receipts.statement(hashes) if attempt.receipts is not None else None,
            parts=self.algebra.digests(plan, now),
            moved=moved / (plan.scale or 1.0) ** 2,
        )

    def answer(self, asked: broker_pb2.RoundQuestion) -> broker_pb2.RoundAnswer:
        """Return receipts of the attempt, as far as they are here."""
        attempt = self.frames.attempt
        if attempt is None or attempt.receipts is None:
            return broker_pb2.RoundAnswer()
        return attempt.receipts.answer(asked)

    def answer_audit(self, order: broker_pb2.RoundAudit) -> broker_pb2.RoundAnswer:
        """Return what came of sums that are added up again here."""
        again = self.frames.again
        return broker_pb2.RoundAnswer() if again is None else again.answer(order)

    # ------------------------------------------------------------ snapshots

    def state(self) -> dict[str, V]:
        """Return what it goes on from; nobody may write to the values."""
        found = {
            f"round:{value}:{part}": values
            for value, entry in self.entries.items()
            for part, values in entry.parts().items()
        }
        return found | {f"round:{name}": values for name, values in self.local.state().items()}

    def load(self, states: Mapping[str, V], *, anew: bool = False) -> None:
        """Goes on from copies of what `state` gave, here or at other holders; of entries that have
        none, from what is in the stages. `anew`: whoever gave it had other data to come, and what
        is its own stays with it. Raises TensorSpecError."""
        found: dict[str, dict[str, V]] = {}
        sums: dict[str, V] = {}
        for name, values in states.items():
            value, _, part = name.removeprefix("round:").rpartition(":")
            if not name.startswith("round:") or (entry := self.entries.get(value)) is None:
                continue
            if not part.startswith(SUM):
                found.setdefault(value, {})[part] = values
            elif entry.owned and not anew:
                sums[f"{value}:{part}"] = values
        self.local.load(sums)
        for value, parts in found.items():
            self.entries[value].load(parts, anew=anew)

    # ------------------------------------------------------------ inside

    @property
    def _joined(self) -> RoundAttempt[V]:
        assert self.frames.attempt is not None, "no exchange was joined"
        return self.frames.attempt

    def __repr__(self) -> str:
        attempt = self.frames.attempt
        return (
            f"<RoundWork round {self._round}, {len(self.entries)} of {len(self.vector.entries)} "
            f"entries, attempt {attempt.plan.attempt if attempt else 'none'}>"
        )


def _unsound(error: SecureSumError) -> RoundResult:
    return RoundResult(code="masks", why=str(error))


def _missing(why: str) -> RoundResult:
    return RoundResult(code="missing", why=why)
