"""The ways to divide a batch that a run allows."""

from __future__ import annotations

import pytest

from shoal.broker.events import MakePlan, PlanReady, RunId
from shoal.dag.ir.convert import graph_to_bytes
from shoal.dag.ir.graph import Graph, Input, Operator, Output, Parameter, Ref, Size, TensorSpec
from shoal.dag.plan.plan import PeerId, Plan, StageSlot, Visit
from shoal.job import Job
from shoal.planner.answers.planning import answer
from shoal.planner.base.interface import CodecOptions, PeerOffer
from shoal.planner.requests.batchings import Batching
from shoal.planner.requests.requirements import read_spec
from shoal.planner.requests.run_spec import RunSpecError
from shoal.proto.broker_pb2 import Checkpoint, CheckpointFile, RoundPosition, RunSpec, Span
from shoal.proto.common_pb2 import BlobRef

REF = BlobRef(hash="ab" * 32, size_bytes=1)


def make_spec(*sizes: int, batch: int = 8, plan: dict | None = None, **train) -> RunSpec:
    """A run with microbatches of 2 samples, or of one of `sizes`."""
    job = Job(model="m:f", plan=plan, steps=1, batch=batch, microbatch=2, **train)
    return RunSpec(
        version=1, job=job.to_json(), graph=REF, data=REF, steps=1,
        microbatches=batch // 2, microbatch_size=2, microbatch_sizes=sizes,
    )  # fmt: skip


def with_plan(spec: RunSpec, size: int, routes: int) -> RunSpec:
    spec.plan.microbatch_size, spec.plan.schedule = size, "1f1b"
    spec.plan.stages.add(start=0, stop=2, holders=["a"])
    for _ in range(routes):
        spec.plan.routes.add().visits.add(stage=0, peer="a")
    return spec


def test_the_default_comes_first_and_evaluations_count_the_same_samples() -> None:
    wish = read_spec(make_spec(1, 4, 8, eval_batches=3))
    assert wish.batchings == (
        Batching(2, 4, 12),
        Batching(1, 8, 24),
        Batching(4, 2, 6),
        Batching(8, 1, 3),
    )
    assert read_spec(make_spec(eval_every=0)).batchings == (Batching(2, 4, 0),)


def test_every_pipeline_needs_a_microbatch() -> None:
    found = read_spec(make_spec(1, 4, 8, plan={"pipelines": 2})).batchings
    assert [b.microbatch_size for b in found] == [2, 1, 4]
    found = read_spec(make_spec(1, 4, 8, plan={"pipelines": 5})).batchings
    assert [b.microbatch_size for b in found] == [1]
    with pytest.raises(RunSpecError, match=r"plan.pipelines is 5 with 4 microbatches"):
        read_spec(make_spec(4, 8, plan={"pipelines": 5}))


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (make_spec(3), "has 3, and the 8 samples of a step are not divisible by it (remainder 2)"),
        (make_spec(0), "has 0: expected 1 to"),
        (make_spec(2**31 + 1), "expected 1 to 2147483648"),
        (make_spec(4, 1, 4), "has 4, which is there twice"),
        (make_spec(1, 2), "has 2, which is there twice or is microbatch_size"),
        (make_spec(*range(3, 68)), "has 65 sizes: expected at most 64"),
        (make_spec(1, batch=40_000), "one evaluation has 160000 microbatches"),
        (with_plan(make_spec(1, 4), 8, 1), "microbatches of 8, the run has microbatches of 2 or 1"),
        (with_plan(make_spec(1, 4), 4, 4), "has 4 routes: expected one for each of 2 microbatches"),
        (with_plan(make_spec(1, 8, plan={"pipelines": 2}), 8, 1), "2 with 1 microbatches"),
    ],
)
def test_sizes_that_no_plan_can_have_are_refused(spec: RunSpec, text: str) -> None:
    with pytest.raises(RunSpecError) as caught:
        read_spec(spec)
    assert text in str(caught.value)


@pytest.mark.parametrize(("size", "routes"), [(2, 4), (1, 8), (4, 2), (8, 1)])
def test_a_hand_written_plan_may_have_any_of_the_sizes(size: int, routes: int) -> None:
    spec = with_plan(make_spec(1, 4, 8), size, routes)
    wish = read_spec(spec)
    x, scalar = TensorSpec((Size(1), 3), "float32"), TensorSpec((), "float32")
    weight = Parameter("w", TensorSpec((3, 3), "float32"))
    operators = (
        Operator("a", "aten.linear.default", (Ref("in:x"), Ref("param:w")), (), (Output(x, True),)),
        Operator("loss", "aten.sum.default", (Ref("a"),), (), (Output(scalar, True),)),
    )
    graph = Graph((Input("x", x),), (weight,), (), operators, loss="loss")
    offers = (PeerOffer(PeerId("a"), "a", device_memory_bytes=2**30),)
    ready = answer(MakePlan(RunId("r"), 1, spec, offers), graph_to_bytes(graph))
    assert isinstance(ready, PlanReady)
    assert (ready.plan.microbatch_size, len(ready.plan.routes)) == (size, routes)
    assert wish.allows(ready.plan)
    assert not wish.allows(
        Plan((StageSlot(0, 2, (PeerId("a"),)),), ((Visit(0, PeerId("a")),),) * 3, size)
    )


def going_on(position: RoundPosition, step: int = 2) -> RunSpec:
    """A run of 9 steps of 4 microbatches, from a version of replicas that train apart."""
    spec = make_spec()
    sync = {"kind": "local"}
    job = Job(model="m:f", plan={"replicas": 2}, sync=sync, steps=9, batch=8, microbatch=2)
    spec.job, spec.steps = job.to_json(), 9
    file = CheckpointFile(holder="a", spans=[Span(start=0, stop=3)], blob=REF)
    saved = Checkpoint(
        run="r", term=1, step=step, files=[file], job=spec.job, graph=REF, data=REF, operators=3
    )
    saved.microbatch_size = 2
    saved.rounds.CopyFrom(position)
    spec.resumed.CopyFrom(saved)
    return spec


def position(committed: int, handed: int, *returned: tuple[int, int]) -> RoundPosition:
    found = RoundPosition(round=1, committed=committed, next=handed)
    for first, count in returned:
        found.returned.add(first=first, count=count)
    return found


@pytest.mark.parametrize(
    ("at", "text"),
    [
        (position(8, 8), ""),
        (position(9, 14, (2, 2), (5, 3)), ""),
        (position(12, 12), "has 2 steps and 12 microbatches of 4 in each: expected 2 times that"),
        (position(8, 9), "expected 8 to be left"),
        (position(8, 10, (4, 3)), "has 10 microbatches handed out and 3 of them come back"),
        (position(8, 10, (9, 2)), "come back"),
        (position(8, 12, (5, 2), (6, 2)), "not in order"),
        (position(8, 8, (5, 0)), "not in order"),
    ],
)
def test_where_rounds_go_on_is_checked(at: RoundPosition, text: str) -> None:
    if not text:
        assert read_spec(going_on(at)).replicas == 2
        return
    with pytest.raises(RunSpecError, match=text):
        read_spec(going_on(at))


def test_replicas_that_train_apart_go_on_so() -> None:
    spec = going_on(position(8, 8))
    spec.job = Job(model="m:f", steps=9, batch=8, microbatch=2).to_json()
    with pytest.raises(RunSpecError, match=r'sync\.kind of the job is "allreduce"'):
        read_spec(spec)


def test_codecs_of_the_job_reach_the_planner() -> None:
    codec = {"default": "auto", "activation": "int8:block=128", "grad": "adatopk", "ratio": 20.0}
    found = read_spec(make_spec(codec={**codec, "error_budget": 0.01, "feedback": "none"}))
    assert found.options.codecs == CodecOptions(
        activation="int8:block=128",
        activation_grad="auto",
        sync="adatopk",
        ratio=20.0,
        error_budget=0.01,
        feedback="none",
    )
    assert read_spec(make_spec()).options.codecs == CodecOptions()
    sparse = {"activation": "topk:ratio=9", "activation_grad": "support:ratio=9,values=int8"}
    assert read_spec(make_spec(codec=sparse)).options.codecs == CodecOptions(**sparse)
    assert not CodecOptions().asked


@pytest.mark.parametrize(
    ("codec", "text"),
    [
        (
            {"activation": "zip"},
            "codec.activation of the job is.*one of raw, .*int8",
        ),
        ({"default": "zip"}, "codec.default of the job"),
        ({"grad": "int8:blocks=9"}, "codec.grad of the job.*int8 has no 'blocks' here"),
        ({"grad": "topk:ratio=0.5"}, "codec.grad of the job"),
        ({"grad": "ef+zip"}, "codec.grad of the job.*names no codec at 'zip'"),
        ({"grad": "fe+int8"}, "names no wrapper at 'fe'"),
        ({"activation_grad": "int8/9"}, "codec.activation_grad of the job"),
        ({"activation_grad": "support:ratio=9"}, 'beside codec.activation = "topk:ratio=9", which'),
        ({"activation": "topk:ratio=8", "activation_grad": "support:ratio=9"}, "topk:ratio=8"),
        ({"activation": "topk:ratio=9", "grad": "support:ratio=9"}, "codec.grad of the job"),
        ({"default": "support:ratio=9"}, "codec.activation of the job"),
    ],
)
def test_a_codec_that_there_is_not_is_refused_by_its_key(codec: dict, text: str) -> None:
    with pytest.raises(RunSpecError, match=text):
        read_spec(make_spec(codec=codec))
