"""What a preview is made of: the pool as it is now, and what of it was not taken at its word."""

from __future__ import annotations

from shoal.broker.events import Answer, PreviewAsked, PreviewWanted, Reject
from shoal.planner.answers.preview import preview_bytes
from shoal.proto.broker_pb2 import Speeds


def asked(world, spec) -> PreviewWanted:
    out = world.handle(PreviewAsked(world.request(), spec))
    return world.only(out, Answer).message


def test_only_the_pool_is_planned_over(world) -> None:
    world.start("a", "b")
    world.join("c")
    wanted = asked(world, world.spec())
    assert [o.peer for o in wanted.offers] == [p.peer for p in wanted.peers] == ["c"]


def test_an_impossible_speed_is_clamped_and_shown(world) -> None:
    fast = Speeds(
        product_flops_per_s=1e20,
        convolution_flops_per_s=1e12,
        attention_flops_per_s=1e12,
        memory_bytes_per_s=1e11,
        special_bytes_per_s=float("nan"),
    )
    world.join("liar", speeds=fast)
    wanted = asked(world, world.spec())
    assert any("1e+20" in note and "liar" in note for note in wanted.notes)
    assert wanted.offers[0].pace.product < 1e16
    answer = preview_bytes(wanted, b"no graph")
    assert list(answer.notes) == list(wanted.notes)


def test_a_spec_that_cannot_be_a_run_is_refused(world) -> None:
    spec = world.spec()
    spec.steps = 0
    out = world.handle(PreviewAsked(world.request(), spec))
    assert world.only(out, Reject).code == "INVALID_ARGUMENT"


def test_an_empty_pool_and_a_graph_that_is_none_are_answers_with_a_reason(world) -> None:
    wanted = asked(world, world.spec())
    answer = preview_bytes(wanted, b"\xff\xff")
    assert not answer.HasField("plan")
    assert answer.reason.code == "graph"
