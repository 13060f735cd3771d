"""Random liars among honest members that sign what they give: the receipts of peers and what the
broker makes of them, without a network. Whatever one signs, claims and shows, no honest member is
ever to blame, and no lie of two versions is passed over."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shoal.broker.rounds.claims import ClaimVerdict, SignedClaims
from shoal.dag.execute.execute import TensorSpecError
from shoal.dag.ir.graph import TensorSpec
from shoal.dag.plan.plan import PeerId
from shoal.dag.rounds.wiring import GIVE, RESULT, port_of
from shoal.dag.schedule.flow import Role
from shoal.net.identity.receipts import ATTEMPT, RECEIPT, claim_of, proves
from shoal.net.identity.statements import signed
from shoal.net.links.frame import Arrived, FrameKey
from shoal.peer.secure.attempt_receipts import AttemptReceipts
from shoal.proto.broker_pb2 import (
    AttemptStatement,
    RoundAnswer,
    RoundGiver,
    RoundPlan,
    RoundQuestion,
    RoundReceipt,
    RoundReport,
    RoundSegment,
    SignedStatement,
)
from shoal.sim.virtual.identities import NamedMember, check_named

PART = 10
"""Elements of a part here."""


@dataclass
class Game:
    """One attempt among `names`, each of which adds up a segment or two of some parts. `liar` is
    one of them. lied: whether honest members got different sums."""

    rng: random.Random
    names: list[str]
    liar: str
    plans: dict[str, RoundPlan] = field(default_factory=dict)
    receipts: dict[str, AttemptReceipts] = field(default_factory=dict)
    extra: list[SignedStatement] = field(default_factory=list)
    """What the liar has signed besides."""
    got: dict[str, dict[tuple[int, str, int], bytes]] = field(default_factory=dict)
    """By honest member, the bytes that it has of each hop, signer and part."""
    shows: dict[tuple[int, str, int], list[SignedStatement]] = field(default_factory=dict)
    """What the liar shows of a hop, a signer and the segment that begins somewhere."""
    says: SignedStatement | None = None
    """What it claims; None: anything."""

    def __post_init__(self) -> None:
        adders = [name for name in self.names for _ in range(self.rng.randint(1, 2))]
        parts = [self.rng.randint(1, 3) for _ in adders]
        at = 0
        segments = []
        for name, count in zip(adders, parts, strict=True):
            givers = [RoundGiver(peer=n, weight=1) for n in self.names]
            segments.append(RoundSegment(start=at + 3, aggregator=name, givers=givers))
            at += PART * count
            segments[-1].stop = at + 3  # parts begin in front of it
            segments[-1].takers.extend(self.names)
        for i, name in enumerate(self.names):
            mine = [RoundSegment() for _ in segments]
            for s, own in zip(segments, mine, strict=True):
                own.CopyFrom(s)
                if s.aggregator != name:  # as `sliced` has it
                    del own.givers[:], own.takers[:]
                    own.givers.add(peer=name, weight=1)
                    own.takers.append(name)
            self.plans[name] = RoundPlan(run=f"r.{i}", term=1, round=5, attempt=2, segments=mine)
            identity = NamedMember(PeerId(name))
            self.receipts[name] = AttemptReceipts(identity, "r", self.plans[name])
            self.got[name] = {}
        self.segments = segments

    def parts(self, s: RoundSegment) -> Iterator[tuple[int, int]]:
        for start in range(s.start - 3, s.stop - 3, PART):
            yield start, start + PART

    # ------------------------------------------------------------ the exchange

    def exchange(self) -> None:
        """Honest ones give the same to all; a liar may give anybody what it likes, signed."""
        for hop in (GIVE, RESULT):
            for s in self.segments:
                adder = s.aggregator
                for part in self.parts(s):
                    for by in self.names if hop == GIVE else [adder]:
                        self._sends(hop, by, part, [adder] if hop == GIVE else self.names)

    def _sends(self, hop: int, by: str, part: tuple[int, int], to: list[str]) -> None:
        heard = b"h" if hop == RESULT else b""
        data = f"{hop}{by if hop == GIVE else ''}{part}".encode()
        self.receipts[by].sign(hop, part, 0, [memoryview(data)], heard)
        for other in to:
            key = FrameKey("r", 2, 5, Role.ROUND, 0, hop, port_of(part), by, other)
            header, sent = self.receipts[by].header(key, part), data
            if by == self.liar and self.rng.random() < 0.2:
                header, sent = self._other(header, data, heard)
            if by == other:
                continue
            arrived = Arrived(key, "raw", header, TensorSpec((1,), "float32"), memoryview(sent))
            try:
                receipt = self.receipts[other].read(part, arrived)
            except TensorSpecError:  # it asks for the right one, or there is no version
                header = self.receipts[by].header(key, part)
                arrived = Arrived(key, "raw", header, arrived.spec, memoryview(data))
                receipt, sent = self.receipts[other].read(part, arrived), data
            assert receipt is not None
            self.receipts[other].keep(key, part, receipt)
            self.got[other][hop, by, part[0]] = sent

    def _other(self, header: bytes, data: bytes, heard: bytes) -> tuple[bytes, bytes]:
        said = RoundReceipt.FromString(SignedStatement.FromString(header).statement)
        match self.rng.randrange(4):
            case 0:  # other bytes than it has signed for
                return header, data + b"!"
            case 1:  # other addends
                said.heard = heard + b"?"
                return self._signs(said), data
            case 2:  # the same in other bytes
                return self._signs(said, b"\x9a\x06\x01!"), data
        other = data + bytes([self.rng.randrange(2)])
        sent = AttemptReceipts(NamedMember(PeerId(self.liar)), "r", self.plans[self.liar])
        sent.sign(said.hop, (said.start, said.stop), said.block, [memoryview(other)], heard)
        key = FrameKey("r", 2, 5, Role.ROUND, 0, said.hop, "", self.liar, "")
        return sent.header(key, (said.start, said.stop)), other

    def _signs(self, said: RoundReceipt, more: bytes = b"") -> bytes:
        data = said.SerializeToString(deterministic=True) + more
        found = signed(NamedMember(PeerId(self.liar)), RECEIPT, data)
        self.extra.append(found)
        return found.SerializeToString()

    # ------------------------------------------------------------ what is said

    def reports(self) -> dict[int, dict[PeerId, RoundReport]]:
        found = {}
        for i, name in enumerate(self.names):
            said = self.receipts[name].statement([7])
            if name == self.liar:
                said = self.says or self._claims(said)
            report = RoundReport(run=f"r.{i}", term=1, round=5, attempt=2, hashes=[7], signed=said)
            found[i] = {PeerId(name): report}
        return found

    def _held(self, hop: int, by: str, s: RoundSegment) -> list[SignedStatement]:
        """Receipts that the liar may show: some that it has, and some that it makes."""
        asked = RoundQuestion(hop=hop, start=s.start, stop=s.stop, signer=by)
        if self.rng.random() < 0.3:  # those of other segments as well
            asked.start, asked.stop = 0, 1 << 20
        answer = self.receipts[self.liar].answer(asked)
        held = [*answer.receipts]
        for one in held:
            one.certificate = answer.certificate
        rng = self.rng
        if held and rng.random() < 0.5:
            held = rng.sample(held, rng.randrange(len(held) + 1))
        if by == self.liar and rng.random() < 0.5:
            start = rng.choice([rng.randrange(s.start - 3, s.stop), s.stop - 3, s.stop - 1])
            stop = rng.choice([start + rng.randint(1, PART), s.stop])
            said = RoundReceipt(run="r", round=5, attempt=2, hop=hop, start=start, stop=stop)
            said.hash = b"made up"
            held.append(SignedStatement.FromString(self._signs(said)))
        if rng.random() < 0.2:
            held += rng.sample(held, min(1, len(held)))
        if rng.random() < 0.8:
            held.sort(key=lambda one: RoundReceipt.FromString(one.statement).start)
        return held

    def _claims(self, said: SignedStatement) -> SignedStatement:
        told = AttemptStatement.FromString(said.statement)
        rng = self.rng

        def claims(of: Any, subjects: Iterable[tuple[int, str, RoundSegment]]) -> None:
            for i, (hop, by, s) in enumerate(subjects):
                if rng.random() < 0.3:
                    held = self.shows[hop, by, s.start] = self._held(hop, by, s)
                    of[i] = rng.choice(
                        [b"", bytes(32), *[claim_of(one.statement for one in held)] * 4]
                    )

        mine = [s for s in self.segments if s.aggregator == self.liar]
        claims(told.gave, [(GIVE, self.liar, s) for s in self.segments])
        claims(told.heard, [(GIVE, n, s) for s in mine for n in self.names])
        claims(told.got, [(RESULT, s.aggregator, s) for s in self.segments])
        data = told.SerializeToString(deterministic=True)
        return signed(NamedMember(PeerId(self.liar)), ATTEMPT, data)

    def answer(self, name: str, asked: RoundQuestion) -> RoundAnswer | None:
        found = self.receipts[name].answer(asked)
        shown = self.shows.get((asked.hop, asked.signer, asked.start))
        if name != self.liar or shown is None:
            return found
        if self.says is None and self.rng.random() < 0.1:
            return None
        del found.receipts[:]
        found.certificate = asked.signer.encode()
        found.receipts.extend(shown)
        return found

    # ------------------------------------------------------------ what comes of it

    @property
    def lied(self) -> bool:
        """Whether two honest members have different sums."""
        honest = [n for n in self.names if n != self.liar]
        sums: dict[tuple[int, str, int], set[bytes]] = {}
        for name in honest:
            for of, data in self.got[name].items():
                if of[0] == RESULT:
                    sums.setdefault(of, set()).add(data)
        return any(len(of) > 1 for of in sums.values())

    def verdict(self) -> ClaimVerdict | None:
        members = {n: SimpleNamespace(id=n, stream=n) for n in self.names}
        replicas = [
            SimpleNamespace(context=SimpleNamespace(holders=lambda m=m: [m]))
            for m in members.values()
        ]
        view: Any = SimpleNamespace(
            plans=self.plans,
            made=self.reports(),
            rounds=SimpleNamespace(versions=SimpleNamespace(round=5)),
        )
        run: Any = SimpleNamespace(id="r", replicas=replicas)
        claims = SignedClaims(run, view, check_named)
        for name, by in zip(self.names, view.made.values(), strict=True):
            [report] = by.values()
            member: Any = members[name]
            assert not claims.wrong(member, report)
        asked = claims.asks()
        if asked is None or isinstance(asked, ClaimVerdict):
            return asked
        for tell in asked:
            name: Any = tell.stream
            answer = self.answer(name, tell.message.round_question)
            found = answer and claims.answered(members[name], answer)  # type: ignore[arg-type]
            if found is not None:
                return found
        return claims.given_up()


@settings(max_examples=250, deadline=None)
@given(seed=st.integers(0, 2**32))
@example(1)
def test_whatever_one_signs_no_honest_member_is_to_blame(seed: int) -> None:
    rng = random.Random(seed)
    names = [f"p{i}" for i in range(rng.randint(2, 5))]
    game = Game(rng, names, rng.choice(names))
    game.exchange()
    verdict = game.verdict()
    assert verdict is not None or not game.lied
    if verdict is None:
        return
    assert set(verdict.unshown) <= {game.liar}
    assert all(game.liar in pair for pair in verdict.apart)
    if verdict.lie is not None:
        assert verdict.lie.peer == game.liar
        assert proves(verdict.lie.first, verdict.lie.second, check_named) == game.liar


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (lambda said, told: said.ClearField("signature"), "not signed"),
        (lambda said, told: said.MergeFrom(_by("p1", told)), "p1 has signed something else"),
        (lambda said, told: told.gave.pop(), "other claims than its plan has"),
        (lambda said, told: told.heard.append(b""), "other claims than its plan has"),
        (lambda said, told: told.got.append(b""), "other claims than its plan has"),
        (lambda said, told: setattr(told, "attempt", 1), "p0 has signed something else"),
        (lambda said, told: setattr(told, "run", "q"), "p0 has signed something else"),
        (lambda said, told: told.hashes.append(1), "p0 has signed something else"),
    ],
)
def test_a_report_counts_with_its_members_signature_and_all_its_claims_only(
    wrong: Any, why: str
) -> None:
    game = Game(random.Random(3), ["p0", "p1", "p2"], liar="nobody")
    game.exchange()
    said = game.receipts["p0"].statement([7])
    told = AttemptStatement.FromString(said.statement)
    before = told.SerializeToString()
    wrong(said, told)
    if told.SerializeToString() != before:
        said = _by("p0", told)
    view: Any = SimpleNamespace(plans=game.plans)
    run: Any = SimpleNamespace(id="r")
    member: Any = SimpleNamespace(id="p0")
    report = RoundReport(run="r.0", term=1, round=5, attempt=2, hashes=[7], signed=said)
    assert why in SignedClaims(run, view, check_named).wrong(member, report)
    report.signed.CopyFrom(game.receipts["p0"].statement([7]))
    assert not SignedClaims(run, view, check_named).wrong(member, report)


def _by(name: str, told: AttemptStatement) -> SignedStatement:
    data = told.SerializeToString(deterministic=True)
    return signed(NamedMember(PeerId(name)), ATTEMPT, data)


@pytest.mark.parametrize(
    "shows",
    [
        lambda held: held[::-1],
        lambda held: [held[0], *held],
        lambda held: held[1:],
        lambda held: [held[0], *held[2:]],
        lambda held: [],
    ],
    ids=["in another order", "twice", "not the first", "not the second", "none"],
)
def test_who_shows_others_than_all_that_came_in_order_has_not_got_them(shows: Any) -> None:
    """Though they are receipts, and it claims just these."""
    game = Game(random.Random(3), ["p0", "p1", "p2"], liar="nobody")
    game.exchange()
    segment = next(s for s in game.segments if len([*game.parts(s)]) > 1)
    by, at = segment.aggregator, game.segments.index(segment)
    game.liar = next(n for n in game.names if n != by)
    asked = RoundQuestion(hop=RESULT, start=segment.start, stop=segment.stop, signer=by)
    answer = game.receipts[game.liar].answer(asked)
    held = shows([*answer.receipts])
    game.shows[RESULT, by, segment.start] = held
    told = AttemptStatement.FromString(game.receipts[game.liar].statement([7]).statement)
    told.got[at] = claim_of(one.statement for one in held)
    game.says = _by(game.liar, told)
    verdict = game.verdict()
    assert verdict is not None
    assert [*verdict.unshown] == [game.liar]


def test_honest_members_are_never_asked() -> None:
    game = Game(random.Random(3), ["p0", "p1", "p2"], liar="nobody")
    game.exchange()
    assert game.verdict() is None


@pytest.mark.parametrize("to", [["p1"], ["p1", "p2"]])
def test_two_sums_are_a_proof(to: list[str]) -> None:
    """An adder gives some another sum than the others, with a receipt for each."""
    game = Game(random.Random(3), ["p0", "p1", "p2"], liar="nobody")
    game.exchange()
    part = next(game.parts(game.segments[0]))
    false = AttemptReceipts(NamedMember(PeerId("p0")), "r", game.plans["p0"])
    false.sign(RESULT, part, 0, [memoryview(b"another")], b"h")
    for name in to:
        key = FrameKey("r", 2, 5, Role.ROUND, 0, RESULT, port_of(part), "p0", name)
        told = SignedStatement.FromString(false.header(key, part))
        game.receipts[name]._kept[RESULT, PeerId("p0")][part, 0] = told
    verdict = game.verdict()
    assert verdict is not None
    assert verdict.lie is not None
    assert verdict.lie.peer == "p0"
    assert verdict.unshown == verdict.apart == ()
