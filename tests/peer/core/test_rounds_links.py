"""Links that the rounds of one holder make and end, frames that come before their order, and bytes
that are known after the version."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from shoal.dag.ir.graph import TensorSpec
from shoal.dag.plan.action import Action, Kind
from shoal.dag.plan.plan import PeerId
from shoal.dag.rounds.vector import Entry, RunVector
from shoal.dag.rounds.wiring import AUDIT, port_of
from shoal.net.links.frame import FrameKey, Role
from shoal.peer.core import events as e
from shoal.peer.core.rounds.round_exchange import RoundExchange
from shoal.peer.core.rounds.rounds import Rounds
from shoal.proto.broker_pb2 import (
    DialOrder,
    RoundAudit,
    RoundGiver,
    RoundPlan,
    RoundSegment,
    RoundVersion,
)


def plan(number: int, *takers: str) -> RoundPlan:
    """One in which p adds up all and gives it to these, whom it dials."""
    segment = RoundSegment(
        start=0, stop=8, aggregator="p", givers=[RoundGiver(peer="p", weight=1)], takers=takers
    )
    dials = [DialOrder(peer=taker, address="x", generation=number) for taker in takers]
    return RoundPlan(run="r.1", term=1, round=number, attempt=1, segments=[segment], dials=dials)


def test_links_inside_a_replica_stay_whoever_else_takes_part() -> None:
    """The other stage's holder, which has a copy of a tied parameter, is linked with anyway."""
    vector = RunVector([Entry("param:w", TensorSpec((8,), "float32"), 0, 0)])
    rounds = Rounds(PeerId("p"), "r.1", 1, vector, None, near=[PeerId("mate")])
    out = [i for n, to in enumerate((["mate", "far"], ["far"], []), 1) for i in
           rounds.planned(plan(n, *to), 0.0)]  # fmt: skip
    made = [i.peer for i in out if isinstance(i, e.Dial | e.ExpectPeer)]
    assert set(made) == {"far"}
    assert {i.peer for i in out if isinstance(i, e.Allow)} == {"far", "mate"}
    assert [i.peer for i in out if isinstance(i, e.HangUp)] == ["far"]


def test_a_contribution_that_comes_before_its_order_stays_with_the_device() -> None:
    """The device looks at it when it has heard of the order, which is later than the machine: a
    frame that was forgotten meanwhile would be waited for until the patience ends."""
    vector = RunVector([Entry("param:w", TensorSpec((8,), "float32"), 0, 0)])
    exchange = RoundExchange(PeerId("p"), "r.1", 1, vector)
    exchange.planned(plan(3, "far", "wide"))
    exchange.joins()
    exchange.begins()
    far = FrameKey("r", 1, 3, Role.ROUND, 0, AUDIT, port_of((0, 8)), "far", "p")
    assert exchange.arrived(far, 3) == []
    givers = [RoundGiver(peer=g, weight=1) for g in ("far", "p")]
    again = RoundSegment(start=0, stop=8, aggregator="p", givers=givers)
    exchange.ordered(RoundAudit(round=3, attempt=1, turn=1, segments=[again]))
    assert [peer for _, _, peer, _ in exchange.again.unshown] == ["far"]
    assert exchange.shows() == [e.Release(far, taken=True)]
    assert not exchange.again.unshown


def test_the_version_is_told_with_the_bytes_of_all_that_was_sent_for_it() -> None:
    """Frames are encoded beside the device's actions, and those of the version behind it."""
    vector = RunVector([Entry("param:w", TensorSpec((8,), "float32"), 0, 0)])
    steps: Any = SimpleNamespace(waits=True, begun=False, evaluating=False, step=0)
    rounds = Rounds(PeerId("p"), "r.1", 1, vector, steps)
    asked = plan(3, "far", "wide", "lost")
    asked.segments[0].versions.append(RoundVersion(source="p", destination="late"))
    rounds.planned(asked, 0.0)
    rounds.goes_on(0.0)
    sends = rounds.computed(Action(Kind.EXCHANGE), e.Result(round=e.RoundResult()), 1.0)
    rounds.goes_on(1.0)
    out = rounds.computed(Action(Kind.APPLY), e.Result(round=e.RoundResult(hashes=(7,))), 1.0)
    sends += out
    keys = {i.key.destination: i.key for i in sends if isinstance(i, e.SendFrame)}
    assert keys.keys() == {"far", "wide", "lost", "late"}
    assert not any(isinstance(i, e.Tell) for i in out)
    assert rounds.queued(keys["far"], 40, 1.0) == []
    assert rounds.refused(keys["lost"], "its queue is full", 1.0) == [e.Release(keys["lost"])]
    assert rounds.queued(keys["late"], 50, 1.0) == []
    [told] = rounds.queued(keys["wide"], 40, 1.0)
    assert (told.message.round.sent_bytes, [*told.message.round.hashes]) == (130, [7])
    assert rounds.queued(keys["wide"], 40, 1.0) == [], "once"
