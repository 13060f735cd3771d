"""Sums of an attempt that are added up again before its version is committed.

    all have made it, and claim the same --drawn--> shown to one other --alike--> committed
                                                          |
                                                       it is not --> shown to all others: most count

Who adds up a segment can give everybody the same wrong sum. So of all segments some are added up
once more by another member that has their sum, to whom the same contributions are given with the
same receipts. Which ones follows from a secret of the broker, and is told when all sums are signed:
else an adder, which gives as well, would know where nobody looks. Who was given something else than
the adder was finds it in its claims (`claims.py`). Where sums of the same differ, one of two who
signed them has lied, and the broker, which has no tensors, cannot say which: then all others that
have the sum, and are in no dispute, add up that segment too. What more than half of all that have
the sum say counts, those in disputes among these: they keep honest ones from being asked, and must
not leave a few liars with most of the votes. So who is honest is safe from any liars that are fewer
than half.
"""

from __future__ import annotations

import hmac
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ...dag.plan.plan import PeerId
from ...dag.rounds.wiring import RESULT, segment_of
from ...net.identity.receipts import another_sum, read_receipt
from ...net.identity.signing import SignatureError
from ...net.identity.statements import CheckStatement
from ...proto.broker_pb2 import (
    BrokerMessage,
    LieProved,
    RoundAnswer,
    RoundAudit,
    RoundReceipt,
    RoundSegment,
    SumAudit,
)
from ..events import Instruction, Tell
from ..membership.member import Member
from ..policies.round_view import RoundView
from ..runs.run import Run
from .claims import ClaimVerdict, SignedClaims
from .exchange_planner import ExchangePlanner

__all__ = ["SumAudits"]

_Sum = tuple[int, int, bytes, bytes, tuple[bytes, ...]]
"""Where a part begins and ends, the hash of its sum and of what that is of, and what gatherers of
places are said to have signed: who is to be believed of these is of the same mind in all."""


@dataclass
class _Again:
    """A segment, as who added it up has it, and who adds it up again. others: one peer of each
    replica that may. having: replicas that have the sum, that of the adder among them. found: what
    came of it, by peer."""

    segment: RoundSegment
    others: Sequence[PeerId]
    having: int
    auditors: Sequence[PeerId]
    found: dict[PeerId, SumAudit] = field(default_factory=dict)

    @property
    def waits(self) -> list[PeerId]:
        """Peers that have not said what came of it."""
        return [p for p in self.auditors if p not in self.found]


class SumAudits:
    """Audits of the round under way; not durable. `check`: who signed what. `secret`: of the draw,
    which no peer knows."""

    def __init__(
        self,
        run: Run,
        view: RoundView,
        exchange: ExchangePlanner,
        claims: SignedClaims,
        check: CheckStatement,
        secret: bytes,
    ) -> None:
        self._run, self._view, self._exchange, self._claims = run, view, exchange, claims
        self._check, self._secret = check, secret
        self._share = run.submitted.requirements.audit
        self.begin()

    def begin(self) -> None:
        """Another attempt, of which nothing is drawn yet."""
        self._turn = 0
        """1: of some segments; 2: of one of them, by all others."""
        self._cases: list[_Again] = []
        self._orders: dict[PeerId, RoundAudit] = {}
        self._lacks: dict[PeerId, list[PeerId]] = {}

    @property
    def asked(self) -> bool:
        """Whether somebody is waited for."""
        return any(case.waits for case in self._cases)

    # ------------------------------------------------------------ the draw

    def asks(self) -> list[Instruction] | ClaimVerdict | None:
        """Have sums added up again that are drawn, or one by all others where it was not the same:
        once each. None: nothing is, or all were the same."""
        if self.asked:
            return []
        if self._turn == 0:
            return self._order([*self._drawn()])
        wrong = next(
            (c for c in self._cases if any(a.HasField("sum") for a in c.found.values())), None
        )
        if wrong is None:
            return None
        if self._turn > 1:
            return self._judged(wrong)
        wrong.auditors = wrong.others
        return self._order([wrong])

    def _drawn(self) -> Iterator[_Again]:
        """Segments of which at least two others have the sum, each with one of these, who is in no
        dispute with anybody whose contribution it needs."""
        versions, replicas = self._view.rounds.versions, self._run.replicas
        of = {p: n for n in versions.inside for p in replicas[n].record.peers}
        apart = {n for pair in self._view.disputes.between(versions.inside) for n in pair}
        for adder, plan in sorted(self._view.plans.items()):
            if plan.attempt != versions.attempt or plan.unclaimed:
                continue
            for s in plan.segments:
                if s.aggregator != adder or not s.givers or self._lot(s, "drawn") >= self._share:
                    continue
                first = dict[int, PeerId]()
                for taker in map(PeerId, s.takers):
                    if taker in of and of[taker] not in {of.get(adder), *apart}:
                        first.setdefault(of[taker], taker)
                others = [*first.values()]
                if len(others) > 1:
                    by = others[int(self._lot(s, "by") * len(others))]
                    having = {of.get(PeerId(p)) for p in (*s.takers, adder)}
                    yield _Again(s, others, len(having), [by])

    def _lot(self, s: RoundSegment, what: str) -> float:
        """Return a number in [0, 1) that only this broker knows, and no two draws share."""
        versions = self._view.rounds.versions
        words = self._run.id, versions.round, versions.attempt, s.start, what
        drawn = hmac.digest(self._secret, "\0".join(map(str, words)).encode(), "sha256")
        return int.from_bytes(drawn[:6], "big") / 2**48

    def _order(self, cases: list[_Again]) -> list[Instruction] | None:
        self._turn, self._cases, self._lacks = self._turn + 1, cases, {}
        segments = [
            RoundSegment(
                start=c.segment.start,
                stop=c.segment.stop,
                aggregator=by,
                givers=c.segment.givers,
                places=c.segment.places,
            )
            for c in cases
            for by in c.waits
        ]
        self._orders = self._exchange.audits(self._view.plans, segments, self._turn)
        there = [m for r in self._run.replicas for m in r.context.holders()]
        return [i for member in there for i in self.tell(member)] or None

    def tell(self, member: Member) -> list[Instruction]:
        """Tell a member its part in what is added up again, while somebody is waited for."""
        order = self._orders.get(member.id) if self.asked else None
        return [] if order is None else [Tell(member.stream, BrokerMessage(round_audit=order))]

    # ------------------------------------------------------------ what is said

    def answered(self, member: Member, said: RoundAnswer) -> bool:
        """Take what a member says of what it added up again; return whether all have. What is not
        as it should be counts as nothing."""
        versions = self._view.rounds.versions
        now = versions.round, versions.attempt, self._turn
        mine = [c for c in self._cases if member.id in c.waits]
        if (said.round, said.attempt, said.turn) != now or not mine:
            return False
        if said.lacks:
            self._lacks[member.id] = [PeerId(p) for p in said.lacks]
            return False
        audits = {(a.start, a.stop): a for a in said.audits}
        found = [(c, audits.get((c.segment.start, c.segment.stop))) for c in mine]
        if not all(a is not None and self._is_sound(c.segment, member.id, a) for c, a in found):
            return False
        for case, audit in found:
            assert audit is not None, "all are there"
            case.found[member.id] = audit
            self._claims.heard_again(member.id, case.segment, audit.heard)
        return not self.asked

    def _is_sound(self, segment: RoundSegment, by: PeerId, said: SumAudit) -> bool:
        """Whether what is said of a segment is of all its givers and, where it says that a part's
        sum is another, shows the receipts of these two for it."""
        if len(said.heard) != len(segment_of(segment).again):
            return False
        if not said.HasField("sum"):
            return True
        try:
            signers, receipts = zip(
                *(read_receipt(r, self._check) for r in (said.sum, said.said)), strict=True
            )
        except SignatureError:
            return False
        versions = self._view.rounds.versions
        mine: RoundReceipt = receipts[0]
        about = mine.run, mine.round, mine.attempt, mine.hop
        expected = self._run.id, versions.round, versions.attempt, RESULT
        inside = segment.start < mine.stop <= segment.stop
        right = signers == (by, segment.aggregator) and about == expected and inside
        return right and another_sum(*receipts)

    # ------------------------------------------------------------ what follows

    def _judged(self, case: _Again) -> ClaimVerdict:
        """All have added up the segment whose sum somebody says is another."""
        adder, says = PeerId(case.segment.aggregator), dict[PeerId, _Sum | None]()
        for peer, audit in case.found.items():
            says[peer] = _sum_of(case.segment, audit) if audit.HasField("sum") else None
        others = [p for p, found in says.items() if found is not None]
        says[adder] = None
        sum_, times = Counter(says.values()).most_common(1)[0]
        self._cases = []
        about = [*says]
        if 2 * times <= case.having:
            claims = ((p, case.found[p].heard) for p in others)
            wrong = ((p, self._claims.wrong_place(case.segment, c)) for p, c in claims)
            apart = [(p, place[0] if place else adder) for p, place in wrong]
            return ClaimVerdict(about, apart=apart, parted="come to different sums of the same")
        alone = [p for p, found in says.items() if found != sum_ and p != adder]
        why, lie = "says of a sum what most of those who add it up do not", None
        if sum_ is not None:
            right = [case.found[p] for p, found in says.items() if found == sum_]
            place = self._claims.wrong_place(case.segment, right[0].heard)
            liar, said = place or (adder, right[0].said)
            lie = LieProved(round=self._view.rounds.versions.round, peer=liar)
            lie.first.CopyFrom(said)
            lie.sums.extend(audit.sum for audit in right)
        return ClaimVerdict(about, lie, alone, why=why)

    def given_up(self) -> ClaimVerdict:
        """Return what follows as the attempt is over, and some have not said what came of it."""
        silent = dict.fromkeys(p for case in self._cases for p in case.waits)
        apart, lacks = list[tuple[PeerId, PeerId]](), self._lacks
        givers = {g.peer for case in self._cases for g in case.segment.givers}
        for peer in silent:
            apart += [(peer, p) for p in lacks.get(peer, ()) if p in givers and p != peer]
        mute = [p for p in silent if not any(p == by for by, _ in apart)]
        about, self._cases = [*silent, *(p for _, p in apart)], []
        why = "has not added up again what it was to, in time"
        parted = "lack what one was to show the other again"
        return ClaimVerdict(about, None, mute, apart, why=why, parted=parted)


def _sum_of(segment: RoundSegment, audit: SumAudit) -> _Sum:
    told = RoundReceipt.FromString(audit.sum.statement)
    places = tuple(audit.heard[len(segment.givers) :])
    return told.start, told.stop, told.hash, told.heard, places
