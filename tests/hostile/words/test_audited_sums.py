"""Which sums of a round are added up again, by whom, and who is believed: the broker's part alone,
without a network. Whatever fewer than half of the members say of a sum, no honest one is to blame.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from shoal.broker.policies.disputes import Disputes
from shoal.broker.rounds.claims import ClaimVerdict, SignedClaims
from shoal.broker.rounds.exchange_planner import ExchangePlanner
from shoal.broker.rounds.sum_audits import SumAudits
from shoal.dag.plan.plan import PeerId
from shoal.dag.rounds.wiring import RESULT
from shoal.net.identity.receipts import RECEIPT
from shoal.net.identity.statements import signed
from shoal.proto.broker_pb2 import (
    RoundAnswer,
    RoundAudit,
    RoundGiver,
    RoundPlan,
    RoundReceipt,
    RoundSegment,
    SignedStatement,
    SumAudit,
)
from shoal.sim.virtual.identities import NamedMember, check_named

ROUND = 5


class Broker:
    """Audits of round after round among `names`, one attempt each, of one segment that each of
    them adds up."""

    def __init__(self, names: list[str], share: float, secret: bytes = b"") -> None:
        self.names, ends = names, range(0, 10 * len(names), 10)
        segments = [
            RoundSegment(
                start=at,
                stop=at + 10,
                aggregator=by,
                givers=[RoundGiver(peer=n, weight=1) for n in names],
                takers=names,
            )
            for at, by in zip(ends, names, strict=True)
        ]
        plans = {
            PeerId(n): RoundPlan(run=f"r.{i}", term=1, round=ROUND, attempt=1, segments=segments)
            for i, n in enumerate(names)
        }
        self.members: dict[str, Any] = {n: SimpleNamespace(id=n, stream=n) for n in names}
        replicas = [
            SimpleNamespace(
                record=SimpleNamespace(peers=[n]),
                context=SimpleNamespace(holders=lambda n=n: [self.members[n]]),
            )
            for n in names
        ]
        self.versions = SimpleNamespace(round=ROUND, attempt=1, inside=range(len(names)))
        self.disputes = Disputes()
        requirements = SimpleNamespace(audit=share)
        run: Any = SimpleNamespace(
            id="r", replicas=replicas, submitted=SimpleNamespace(requirements=requirements)
        )
        rounds = SimpleNamespace(versions=self.versions)
        view: Any = SimpleNamespace(plans=plans, made={}, rounds=rounds, disputes=self.disputes)
        planner = ExchangePlanner.__new__(ExchangePlanner)
        planner._dial = lambda *_: None  # type: ignore[method-assign]
        self.claims = SignedClaims(run, view, check_named)
        self.audits = SumAudits(run, view, planner, self.claims, check_named, secret)

    def orders(self, found: Any) -> dict[str, RoundAudit]:
        """By member, what it is told."""
        return {tell.stream: tell.message.round_audit for tell in found or ()}

    def drawn(self, round_: int) -> list[tuple[str, str]]:
        """Who adds up and who adds up again, of each segment that is drawn in a round."""
        self.versions.round = round_
        self.audits.begin()
        found = {
            (self.names[s.start // 10], s.aggregator)
            for order in self.orders(self.audits.asks()).values()
            for s in order.segments
        }
        return sorted(found)


def receipt(by: str, at: int, sum_: bytes) -> SignedStatement:
    said = RoundReceipt(run="r", round=ROUND, attempt=1, hop=RESULT, start=at, stop=at + 10)
    said.hash, said.heard = sum_, b"heard"
    return signed(NamedMember(PeerId(by)), RECEIPT, said.SerializeToString(deterministic=True))


def test_segments_are_drawn_with_the_share_that_was_asked_and_by_no_adder() -> None:
    names = ["p0", "p1", "p2", "p3"]
    broker, rounds = Broker(names, 0.05, b"secret"), range(2000)
    drawn = [pair for n in rounds for pair in broker.drawn(n)]
    wanted = 0.05 * len(names) * len(rounds)  # a binomial number, of which this is 4 deviations
    assert abs(len(drawn) - wanted) < 4 * wanted**0.5
    assert all(adder != by for adder, by in drawn)
    pairs = {(adder, by) for adder in names for by in names if adder != by}
    assert {*drawn} == pairs
    none = sum(not broker.drawn(n) for n in rounds) / len(rounds)
    assert abs(none - 0.95 ** len(names)) < 0.04
    again, other = Broker(names, 0.05, b"secret"), Broker(names, 0.05, b"another")
    assert [again.drawn(n) for n in rounds[:200]] == [broker.drawn(n) for n in rounds[:200]]
    assert [other.drawn(n) for n in rounds[:200]] != [broker.drawn(n) for n in rounds[:200]]
    assert not Broker(names, 0.0).drawn(1)
    assert not Broker(names[:2], 1.0).drawn(1)
    assert len(Broker(names[:3], 1.0).drawn(1)) == 3


def test_who_is_in_a_dispute_adds_nothing_up_again() -> None:
    broker = Broker(["p0", "p1", "p2", "p3", "p4"], 1.0)
    broker.disputes.accuse(3, 4, 3)
    assert {adder for adder, _ in broker.drawn(0)} == {*broker.names}
    assert {by for n in range(20) for _, by in broker.drawn(n)} == {"p0", "p1", "p2"}


@dataclass
class Played:
    """What came of segments of which some sums were wrong. wrong: who added these up; looked: by
    adder, who was the first to add up again."""

    verdict: ClaimVerdict | None
    liars: set[str]
    wrong: set[str]
    looked: dict[str, str]


def play(seed: int) -> Played:
    """Fewer than half of the members lie, some are in disputes, be it that both are honest."""
    rng = random.Random(seed)
    names = [f"p{i}" for i in range(rng.randint(3, 7))]
    liars = {*rng.sample(names, rng.randint(0, (len(names) - 1) // 2))}
    broker = Broker(names, 1.0, str(seed).encode())
    for _ in range(rng.choice((0, 0, 1, 2))):
        broker.disputes.accuse(*rng.sample(range(len(names)), 2), len(names) - 2)
    wrong = {n for n in sorted(liars) if rng.random() < 0.6}
    found, looked = broker.audits.asks(), dict[str, str]()
    for _ in range(2):
        if found is None or isinstance(found, ClaimVerdict):
            break
        for name, order in broker.orders(found).items():
            answer = RoundAnswer(round=ROUND, attempt=1, turn=order.turn)
            for s in order.segments:
                if s.aggregator == name:
                    adder = names[s.start // 10]
                    looked.setdefault(adder, name)
                    answer.audits.append(says(rng, name, adder, s, name in liars, adder in wrong))
            broker.audits.answered(broker.members[name], answer)
        if broker.audits.asked:
            found = broker.audits.given_up()
            break
        found = broker.audits.asks()
    assert found is None or isinstance(found, ClaimVerdict), "it is asked a third time"
    return Played(found, liars, wrong, looked)


def says(
    rng: random.Random, by: str, adder: str, s: RoundSegment, lies: bool, wrong: bool
) -> SumAudit:
    """What a member says of a segment."""
    audit = SumAudit(start=s.start, stop=s.stop, heard=[b"h" for _ in s.givers])
    mine, said = b"right", b"wrong" if wrong else b"right"
    if lies:
        mine = rng.choice([b"right", b"wrong", said, b"other"])
    if mine != said:
        audit.sum.CopyFrom(receipt(by, s.start, mine))
        audit.said.CopyFrom(receipt(adder, s.start, said))
    if lies and rng.random() < 0.2:  # in another's name, or of nobody's sum
        audit.sum.CopyFrom(receipt(rng.choice(["p0", by]), s.start, rng.choice([mine, b"x"])))
        audit.said.CopyFrom(receipt(rng.choice(["p1", adder]), s.start, rng.choice([said, b"y"])))
    return audit


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**32))
@example(1)
def test_whatever_fewer_than_half_say_no_honest_member_is_to_blame(seed: int) -> None:
    """And a wrong sum that an honest one looks at is not passed over."""
    played = play(seed)
    verdict, liars = played.verdict, played.liars
    if verdict is None:
        assert all(played.looked.get(adder, adder) in liars for adder in played.wrong)
        return
    assert {*verdict.unshown} <= liars
    assert all(liars & {*pair} for pair in verdict.apart)
    if verdict.lie is not None:
        assert verdict.lie.peer in played.wrong
        assert len(verdict.lie.sums) > len(liars)


def test_a_member_who_alone_finds_a_wrong_sum_is_joined_by_all_others() -> None:
    broker = Broker(["p0", "p1", "p2", "p3"], 1.0)
    audits = broker.audits

    def answer(order: RoundAudit, name: str) -> None:
        found = RoundAnswer(round=ROUND, attempt=1, turn=order.turn)
        for s in order.segments:
            if s.aggregator == name:
                audit = SumAudit(start=s.start, stop=s.stop, heard=[b"h" for _ in s.givers])
                if s.start == 0:
                    audit.sum.CopyFrom(receipt(name, 0, b"right"))
                    audit.said.CopyFrom(receipt("p0", 0, b"wrong"))
                found.audits.append(audit)
        if found.audits:
            audits.answered(broker.members[name], found)

    first = broker.orders(audits.asks())
    for name, order in first.items():
        answer(order, name)
    second = broker.orders(audits.asks())
    by = {s.aggregator for order in second.values() for s in order.segments}
    looked = {s.aggregator for o in first.values() for s in o.segments if s.start == 0}
    assert by == {"p1", "p2", "p3"} - looked
    for name, order in second.items():
        answer(order, name)
    verdict = audits.asks()
    assert isinstance(verdict, ClaimVerdict)
    assert verdict.lie is not None
    assert verdict.lie.peer == "p0"
    assert len(verdict.lie.sums) == 3
    assert verdict.unshown == []


def test_a_dispute_of_honest_members_gives_liars_no_majority() -> None:
    """Of five, two in a dispute are not asked, and two that are lie about the fifth."""
    broker = Broker(["p0", "p1", "p2", "p3", "p4"], 1.0)
    broker.disputes.accuse(0, 3, 3)
    found = broker.audits.asks()
    for _ in range(2):
        for name, order in broker.orders(found).items():
            answer = RoundAnswer(round=ROUND, attempt=1, turn=order.turn)
            for s in order.segments:
                if s.aggregator == name:
                    audit = SumAudit(start=s.start, stop=s.stop, heard=[b"h" for _ in s.givers])
                    if s.start == 40 and name in ("p1", "p2"):
                        audit.sum.CopyFrom(receipt(name, 40, b"wrong"))
                        audit.said.CopyFrom(receipt("p4", 40, b"right"))
                    answer.audits.append(audit)
            if answer.audits:
                broker.audits.answered(broker.members[name], answer)
        found = broker.audits.asks()
    assert isinstance(found, ClaimVerdict)
    assert found.lie is None
    assert not found.unshown
    assert {*found.apart} == {("p1", "p4"), ("p2", "p4")}


def test_an_answer_of_another_attempt_or_without_all_its_audits_is_none() -> None:
    broker = Broker(["p0", "p1", "p2"], 1.0)
    orders = broker.orders(broker.audits.asks())
    assert len(orders) == 3
    for turn, attempt, of in ((1, 1, 0), (2, 1, 1), (1, 2, 1)):
        for name, order in orders.items():
            found = RoundAnswer(round=ROUND, attempt=attempt, turn=turn)
            for s in order.segments[: len(order.segments) * of]:
                found.audits.add(start=s.start, stop=s.stop, heard=[b"h" for _ in s.givers])
            assert not broker.audits.answered(broker.members[name], found)
    assert broker.audits.asked
    verdict = broker.audits.given_up()
    assert verdict.lie is None
    assert {*verdict.unshown} == {s.aggregator for o in orders.values() for s in o.segments}
