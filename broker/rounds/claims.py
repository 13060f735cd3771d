"""What members have signed of an attempt, and what follows where that contradicts.

Each member claims by a hash what it gave, what it heard and what it got, by segment and by who gave
it (`AttemptStatement`); so does who adds up a segment again (`sum_audits.py`). Two who claim
different things of what one peer gave are to show its receipts, which honest members have.

- Receipts that contradict each other prove that who signed them has lied.
- Who cannot show what it claims, by the end of the attempt, has not got it.
- What is left is a dispute of the two.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from google.protobuf.message import DecodeError

from ...dag.plan.plan import PeerId
from ...dag.rounds.wiring import GATHER, GIVE, claims_due, segment_of, segments_of
from ...dag.schedule.filled import filled
from ...net.identity.receipts import ATTEMPT, MOST_RECEIPTS, claim_of, contradict, read_receipt
from ...net.identity.signing import SignatureError
from ...net.identity.statements import CheckStatement, signer
from ...proto.broker_pb2 import (
    AttemptStatement,
    BrokerMessage,
    LieProved,
    RoundAnswer,
    RoundPlan,
    RoundQuestion,
    RoundReceipt,
    RoundReport,
    RoundSegment,
    SignedStatement,
)
from ..events import Instruction, Tell
from ..membership.member import Member
from ..policies.round_view import RoundView
from ..runs.run import Run

__all__ = ["ClaimVerdict", "SignedClaims"]


@dataclass(frozen=True)
class ClaimVerdict:
    """What two different claims came to. lie: proved, of a peer. unshown: peers that cannot show
    what they claim. apart: pairs of which one is to blame, nobody knows which. about: all whose
    claims these are, or what they are of."""

    about: Collection[PeerId]
    lie: LieProved | None = None
    unshown: Sequence[PeerId] = ()
    apart: Sequence[tuple[PeerId, PeerId]] = ()
    why: str = "cannot show what it claims that others gave it"
    """Of those in unshown."""
    parted: str = "claim different things of what one gave"
    """Of pairs in apart."""


class _Claimed(NamedTuple):
    """What a claim is of: what `signer` gave of a segment, in one attempt."""

    attempt: int
    hop: int
    signer: PeerId
    start: int
    stop: int


_HEARD = 1
"""Of what a peer gave, heard and got, the second."""
_Shown = dict[bytes, tuple[RoundReceipt, SignedStatement]]
"""Receipts by their statements."""


@dataclass
class _Case:
    """Claims that differ, by who made them, and the receipts that were shown for them."""

    of: _Claimed
    claims: dict[PeerId, bytes]
    shown: dict[PeerId, _Shown] = field(default_factory=dict)


class SignedClaims:
    """Claims of the round under way; not durable. `check`: who signed what."""

    def __init__(self, run: Run, view: RoundView, check: CheckStatement) -> None:
        self._run, self._view, self._check = run, view, check
        self.begin()

    def begin(self) -> None:
        """Another attempt, in which nothing was asked."""
        self._case: _Case | None = None
        self._again = defaultdict[_Claimed, dict[PeerId, bytes]](dict)

    def heard_again(self, peer: PeerId, segment: RoundSegment, claims: Sequence[bytes]) -> None:
        """Take what a peer claims of a segment that it has added up again."""
        attempt, again = self._view.rounds.versions.attempt, segment_of(segment)
        for (hop, by), claim in zip(again.again, claims, strict=True):
            if hop == GIVE and by != peer:
                self._again[_Claimed(attempt, hop, by, *again.span)][peer] = claim

    def wrong_place(
        self, segment: RoundSegment, claims: Sequence[bytes]
    ) -> tuple[PeerId, SignedStatement] | None:
        """Return who says that it gave another sum of its place to a segment than who added that up
        again claims, and its statement; None: nobody does."""
        again, said = segment_of(segment), self._said()
        for (hop, by), claim in zip(again.again, claims, strict=True):
            report, plan = said.get(by), self._view.plans.get(by)
            if hop == GATHER and report is not None and plan is not None:
                of = _Claimed(report.attempt, hop, by, *again.span)
                if dict(_claims(by, plan, report)).get(of) != claim:
                    return by, report.signed
        return None

    def _said(self) -> dict[PeerId, RoundReport]:
        return {peer: said for made in self._view.made.values() for peer, said in made.items()}

    @property
    def asked(self) -> bool:
        """Whether receipts are waited for."""
        return self._case is not None

    def wrong(self, member: Member, said: RoundReport) -> str:
        """Return what is wrong with what a member has signed of its version; empty: nothing."""
        plan = self._view.plans.get(member.id)
        if plan is None:
            return ""
        try:
            by = signer(self._check, ATTEMPT, said.signed)
            told = AttemptStatement.FromString(said.signed.statement)
        except (SignatureError, DecodeError) as error:
            return f"not signed: {error}"
        about = self._run.id, said.round, said.attempt, [*said.hashes]
        if by != member.id or (told.run, told.round, told.attempt, [*told.hashes]) != about:
            return f"{by} has signed something else"
        if [len(c) for c in (told.gave, told.heard, told.got)] != claims_due(plan, member.id):
            return "other claims than its plan has"
        return ""

    # ------------------------------------------------------------ where they differ

    def asks(self) -> list[Instruction] | ClaimVerdict | None:
        """Have two members show receipts, if what they claim differs: once, and who signed these
        itself only where nobody else's differ. None: no claims do. A verdict: some say that they
        have too many to show."""
        if self._case is not None:
            return []
        case = self._differing()
        if case is None:
            return None
        if not all(case.claims.values()):  # honest ones all have too many to show, or none has
            none = [p for p, claim in case.claims.items() if not claim]
            some = [p for p in case.claims if p not in none]
            return ClaimVerdict(_about(case), apart=[(a, b) for a in none for b in some])
        order = sorted(case.claims, key=lambda peer: peer == case.of.signer)
        other = next(p for p in order if case.claims[p] != case.claims[order[0]])
        self._case = replace(case, claims={p: case.claims[p] for p in (order[0], other)})
        there = [m for r in self._run.replicas for m in r.context.holders()]
        return [i for member in there for i in self.tell(member)]

    def _differing(self) -> _Case | None:
        """The first claims of one thing that differ."""
        found = defaultdict[_Claimed, dict[PeerId, bytes]](dict)
        for peer, said in self._said().items():
            plan = self._view.plans.get(peer)
            for of, claim in _claims(peer, plan, said) if plan is not None else ():
                found[of][peer] = claim
        for of, claims in self._again.items():
            found[of] |= claims
        return next(
            (_Case(of, made) for of, made in found.items() if len({*made.values()}) > 1), None
        )

    def tell(self, member: Member) -> list[Instruction]:
        """Ask a member for receipts, if it has not shown them."""
        case, plan = self._case, self._view.plans.get(member.id)
        if case is None or plan is None or member.id not in case.claims.keys() - case.shown:
            return []
        question = filled(RoundQuestion, case.of, run=plan.run, term=plan.term, round=plan.round)
        return [Tell(member.stream, BrokerMessage(round_question=question))]

    # ------------------------------------------------------------ what is shown

    def answered(self, member: Member, said: RoundAnswer) -> ClaimVerdict | None:
        """Return what follows, once it is known, from what a member shows."""
        case = self._case
        if case is None or member.id not in case.claims.keys() - case.shown:
            return None
        if (said.round, said.attempt) != (self._view.rounds.versions.round, case.of.attempt):
            return None
        shown = self._shown(case, member.id, said)
        if shown is not None:
            case.shown[member.id] = shown
            if case.shown.keys() != case.claims.keys():
                return None
        self._case = None
        return _compared(case) if shown is not None else _unshown(case, member.id)

    def given_up(self) -> ClaimVerdict:
        """Return what follows as the attempt is over: who has shown nothing has nothing."""
        assert self._case is not None, "nobody was asked"
        case, self._case = self._case, None
        return _unshown(case, *(p for p in case.claims if p not in case.shown))

    def _shown(self, case: _Case, peer: PeerId, said: RoundAnswer) -> _Shown | None:
        """What a member has shown, if that is what it claimed."""
        of, round_ = case.of, self._view.rounds.versions.round
        if len(said.receipts) > MOST_RECEIPTS:
            return None
        found, last = _Shown(), (-1, -1)
        for receipt in said.receipts:
            receipt.certificate = said.certificate
            try:
                by, told = read_receipt(receipt, self._check)
            except SignatureError:
                return None
            about = by, told.run, told.round, told.attempt, told.hop
            if about != (of.signer, self._run.id, round_, of.attempt, of.hop):
                return None
            if not (of.start < told.stop <= of.stop and last < (told.start, told.block)):
                return None
            last = told.start, told.block
            found[receipt.statement] = told, receipt
        return found if claim_of(found) == case.claims[peer] else None


def _compared(case: _Case) -> ClaimVerdict:
    """Return what follows as both have shown what they claimed."""
    (a, one), (b, other) = case.shown.items()
    by = case.of.signer
    for said, (told, first) in one.items():
        for else_, (its, second) in other.items():
            if said != else_ and contradict(told, its):
                proof = LieProved(round=told.round, peer=by, first=first, second=second)
                return ClaimVerdict(_about(case), proof)
    if one.keys() < other.keys() and b != by:  # it had the others as well
        return _unshown(case, a)
    if other.keys() < one.keys() and a != by:
        return _unshown(case, b)
    return ClaimVerdict(_about(case), apart=[(a, b)])


def _unshown(case: _Case, *peers: PeerId) -> ClaimVerdict:
    return ClaimVerdict(_about(case), unshown=peers)


def _about(case: _Case) -> list[PeerId]:
    return [case.of.signer, *case.claims]


def _claims(peer: PeerId, plan: RoundPlan, said: RoundReport) -> Iterator[tuple[_Claimed, bytes]]:
    """Claims of a peer, whose number is as its plan has it, and what each is of."""
    told = AttemptStatement.FromString(said.signed.statement)
    made = [iter(claims) for claims in (told.gave, told.heard, told.got)]
    for s in segments_of(plan):
        for kind, (due, claims) in enumerate(zip(s.claims(peer), made, strict=True)):
            for of in due:
                claim = next(claims)
                if kind != _HEARD or of[1] != peer:  # what it gave itself is said already
                    yield _Claimed(said.attempt, *of, *s.span), claim
