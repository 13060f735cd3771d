"""What makes a plan a plan."""

from dataclasses import replace

import pytest

from shoal.dag.plan.plan import (
    CodecChoice,
    PeerId,
    Plan,
    PlanError,
    StageExchange,
    StageSlot,
    Visit,
)

A, B = PeerId("a"), PeerId("b")


def test_a_plan_knows_its_peers_and_their_stages(chain):
    plan = replace(
        chain(3, 1).plan(),
        stages=(StageSlot(0, 1, (B,)), StageSlot(1, 2, (A, B)), StageSlot(2, 3, (A,))),
        routes=((Visit(0, B), Visit(1, A), Visit(2, A)),),
        visits=(),
        evaluations=(),
    )
    assert plan.validate(3) is plan
    assert plan.peers == (B, A)
    assert plan.stages_of(A) == (1, 2)
    assert plan.stages_of(B) == (0, 1)
    assert plan.stages_of(PeerId("x")) == ()
    assert repr(plan) == "<Plan [0,1)@b [1,2)@a+b [2,3)@a, 1 microbatches of 2, 1f1b>"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stages": ()}, "no stage"),
        ({"microbatch_size": 0}, "microbatches of 0 samples"),
        (
            {"stages": (StageSlot(0, 1, (A,)), StageSlot(1, 1, (B,)))},
            r"stage 1 is operators \[1, 1",
        ),
        ({"stages": (StageSlot(1, 2, (A,)),)}, "starts at 0"),
        ({"stages": (StageSlot(0, 1, (A,)),)}, "cover 1 operators, the graph has 2"),
        ({"stages": (StageSlot(0, 2, ()),)}, "expected distinct peers"),
        ({"stages": (StageSlot(0, 2, (A, A)),)}, "expected distinct peers"),
        ({"exchanges": (StageExchange(2),)}, "an exchange is of stage 2: expected one of 2"),
        ({"exchanges": (StageExchange(0), StageExchange(0, "ring"))}, "each at most once"),
        ({"exchanges": (StageExchange(0, groups=((A, B),)),)}, "the exchange of stage 0 is among"),
        ({"exchanges": (StageExchange(0, groups=((A,), ())),)}, "a group without a holder"),
        ({"exchanges": (StageExchange(0, weights=(1, 2)),)}, "expected one for each of 1 holders"),
        ({"exchanges": (StageExchange(0, weights=(0,)),)}, "one at least that is not 0"),
        ({"exchanges": (StageExchange(0, chunks=0),)}, "has 0 chunks: expected 1 to"),
        ({"exchanges": (StageExchange(0, chunks=65),)}, "has 65 chunks: expected 1 to"),
        (
            {"exchanges": (StageExchange(0, strategy="none"),)},
            "expected one of mean, ahead",
        ),
        ({"exchanges": (StageExchange(0, weights=(1,), strategy="ahead"),)}, "by gather, as its"),
        ({"routes": ()}, "no route"),
        ({"routes": ((Visit(0, A),),)}, r"microbatch 0 visits stages \[0\]: expected 0 to 1"),
        ({"routes": ((Visit(1, B), Visit(0, A)),)}, "expected 0 to 1 in order"),
        ({"routes": ((Visit(0, A), Visit(1, A)),)}, "visits a for stage 1, which is held by b"),
        ({"evaluation_routes": ((Visit(0, A),),)}, "held-out microbatch 0 visits stages"),
        (
            {"codecs": (CodecChoice(A, B, "grad", "x/1"), CodecChoice(A, B, "grad", "y/1"))},
            "a -> b has two codecs for grad",
        ),
    ],
)
def test_a_plan_that_breaks_a_rule_is_refused_with_the_rule(chain, changes, message):
    with pytest.raises(PlanError, match=message):
        replace(chain(2, 1).plan(), **changes).validate(2)


def test_many_holders_have_few_chunks():
    peers = tuple(PeerId(f"p{i}") for i in range(65))
    route = (Visit(0, peers[0]),)
    plan = Plan((StageSlot(0, 1, peers),), (route,), 1, exchanges=(StageExchange(0, chunks=64),))
    with pytest.raises(PlanError, match="64 chunks among 65 holders: expected at most 62"):
        plan.validate(1)
    replace(plan, exchanges=(StageExchange(0, chunks=62),)).validate(1)
