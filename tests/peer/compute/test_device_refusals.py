"""What does not fit the plan is refused with numbers, before anything runs on it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shoal.compression.codec import CodecError
from shoal.dag.ir.convert import graph_to_bytes, lowered_to_bytes
from shoal.dag.ir.graph import GraphError, TensorSpec
from shoal.dag.plan.plan import PlanError
from shoal.dag.schedule.convert_slice import slice_to_proto
from shoal.dag.transforms.lower import lower
from shoal.job import Training
from shoal.peer.blobs.cache import BlobMismatchError
from shoal.peer.blobs.weights import WeightError, serialize
from shoal.peer.compute.device import TensorSpecError, TorchDevice
from shoal.peer.compute.order import order_from_assign
from shoal.proto import broker_pb2, common_pb2
from shoal.tests.peer.conftest import slice_of


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 4)
        self.down2 = self.down

    def forward(self, x, y):
        return F.cross_entropy(self.down(torch.tanh(self.up(x))), y)


@pytest.fixture
def case(make_case):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 6)).astype("f4")
    return make_case(Net(), x=x, y=rng.integers(0, 4, 60), batch=4)


@pytest.fixture
def world(case):
    """One step ran; its frames are at hand."""
    world = case.world(case.plan(2, ["a", "b"]))
    world.run(1)
    return world


def test_a_plan_without_the_norm_is_refused_where_updates_need_it(case):
    plan = replace(case.plan(2, ["a", "b"]), without_norm=True)
    with pytest.raises(PlanError, match=r"clipped to 1\.0: expected one with"):
        case.world(plan)


def frame(world, role):
    return next(f for k, f in world.frames if k.role.value == role)


def test_a_tensor_of_another_shape_or_dtype_names_expected_and_got(world):
    good = frame(world, "activation")
    key = good.key._replace(step=1)
    for spec in (
        TensorSpec((2, 9), "float32"),
        TensorSpec((2, 8), "int64"),
        TensorSpec((), "bool"),
    ):
        with pytest.raises(TensorSpecError) as raised:
            world.devices["b"].accept(replace(good, key=key, spec=spec))
        text = str(raised.value)
        for part in (repr(good.spec), repr(spec), "a -> b", "step 1", key.port):
            assert part in text
    assert "Store 0" in repr(world.devices["b"])
    world.devices["b"].accept(replace(good, key=key))
    assert "Store 1" in repr(world.devices["b"])


def test_what_the_plan_does_not_name_is_refused(world):
    good = frame(world, "activation")
    for change in (
        {"port": "nothing"}, {"microbatch": 9}, {"hop": 0}, {"source": "c"}, {"destination": "a"},
    ):  # fmt: skip
        with pytest.raises(TensorSpecError, match="names no such transfer"):
            world.devices["b"].accept(replace(good, key=good.key._replace(**change)))


def test_only_a_gradient_may_be_absent(world):
    value, grad = frame(world, "activation"), frame(world, "activation_grad")
    with pytest.raises(TensorSpecError, match="only gradients may lack"):
        world.devices["b"].accept(replace(value, data=memoryview(b""), absent=True))
    absent = replace(grad, data=memoryview(b""), absent=True)
    world.devices["a"].accept(absent)
    with pytest.raises(TensorSpecError, match="expected"):
        world.devices["a"].accept(replace(absent, spec=TensorSpec((1,), "float32")))


def test_bytes_that_do_not_decode_are_refused(world):
    good = frame(world, "activation")
    with pytest.raises(CodecError, match=r"bytes"):
        world.devices["b"].accept(replace(good, data=memoryview(bytearray(5))))
    with pytest.raises(TensorSpecError, match="codec raw/1"):
        world.devices["b"].accept(replace(good, codec="pickle/1"))
    with pytest.raises(CodecError):
        world.devices["b"].accept(replace(good, codec_header=b"x"))


def test_a_value_leaves_once(world):
    device, good = world.devices["a"], frame(world, "activation")
    with pytest.raises(KeyError, match="not in the store of a"):
        device.payload(good.key)
    device.release(good.key)  # what is gone can be released


def test_weights_must_be_there_and_fit(case):
    plan = case.plan(1, ["a"])
    tensors = dict(case.captured.tensors)
    without = {n: t for n, t in tensors.items() if n != "up.bias"}
    with pytest.raises(WeightError, match=r"no weights file has 'up.bias'"):
        case.world(plan, weights=without)
    wrong = {**tensors, "up.bias": torch.zeros(9)}
    with pytest.raises(WeightError, match=r"'up.bias': expected float32\[8\], got float32\[9\]"):
        case.world(plan, weights=wrong)
    aliased = {n.replace("down.", "down2."): t for n, t in tensors.items()}
    assert case.world(plan, weights=aliased).run(1) == case.world(plan).run(1)


def test_data_must_be_what_the_model_reads(case):
    plan = case.plan(1, ["a"])
    x, y = case.manifest.columns
    other = replace(case.manifest, columns=(replace(x, shape=(3, 2)), y))
    with pytest.raises(TensorSpecError, match=r"data 'x': the model expects float32\[2, 6\]"):
        case.world(plan, manifest=other)
    renamed = replace(case.manifest, columns=(replace(x, name="z"), y))
    with pytest.raises(TensorSpecError, match=r"reads 'x', the data has \['y', 'z'\]"):
        case.world(plan, manifest=renamed)


def test_a_plan_for_another_graph_is_refused(case):
    plan = case.plan(1, ["a"])
    longer = replace(plan, stages=(replace(plan.stages[0], stop=case.operators + 1),))
    with pytest.raises(PlanError):
        case.world(longer)


def test_a_graph_that_lies_about_a_shape_is_refused(case):
    graph = case.captured.graph
    first = graph.operators[0]
    wrong = replace(first.outputs[0], spec=replace(first.outputs[0].spec, dtype="float64"))
    lying = replace(graph, operators=(replace(first, outputs=(wrong,)), *graph.operators[1:]))
    with pytest.raises(GraphError, match="the graph says float64"):
        case.world(case.plan(1, ["a"]), graph=lying)


class KeepsNorm(nn.Module):
    """Keeps its norm in eval mode, whose statistics are other results on every kind of device."""

    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)

    def train(self, mode=True):
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x, y):
        return F.cross_entropy(self.down(self.norm(self.up(x))), y)


def test_results_that_nobody_reads_may_be_others_on_a_peer(make_case):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 6)).astype("f4")
    case = make_case(KeepsNorm(), x=x, y=rng.integers(0, 4, 60), batch=4)
    case.world(case.plan(2, ["a", "b"])).run(1)


def test_a_core_form_of_another_graph_is_refused(case):
    plan = case.plan(1, ["a"])
    core = lower(case.captured.graph.bind(2))
    with pytest.raises(GraphError, match=r"where .* stands"):
        case.world(plan, core=replace(core, start=tuple([0, *core.start[:-2], core.start[-1]])))
    with pytest.raises(GraphError, match="maps"):
        case.world(plan, core=replace(core, start=core.start[:-1]))
    other = replace(core.graph, parameters=core.graph.parameters[::-1])
    with pytest.raises(GraphError, match="other data, weights or results"):
        case.world(plan, core=replace(core, graph=other))


def assigned(case, core=False):
    """(An assignment as it comes from the broker; the blobs that it names, by hash.)"""
    blobs = {}

    def stored(data):
        name = f"{len(blobs):064x}"
        blobs[name] = data
        return common_pb2.BlobRef(hash=name, size_bytes=len(data))

    graph, plan = case.captured.graph, case.plan(1, ["a"])
    full = stored(graph_to_bytes(graph))
    assign = broker_pb2.Assign(
        run="r", term=1, full_graph=full,
        slice=slice_to_proto(slice_of(graph, plan, plan.peers[0])),
        graph=stored(lowered_to_bytes(lower(graph.bind(2)))) if core else full,
        weights=[broker_pb2.WeightFile(blob=stored(serialize(case.captured.tensors)))],
        data=stored(case.manifest.to_json().encode()),
        training=Training(seed=case.seed, train=case.train).to_json(),
    )  # fmt: skip
    return assign, blobs


@pytest.mark.parametrize("what", ["full_graph", "graph", "recipe", "data"])
def test_what_is_too_large_for_what_it_is_to_be_is_not_fetched(case, what):
    assign, blobs = assigned(case)
    large = common_pb2.BlobRef(hash="ab" * 32, size_bytes=(64 << 20) + 1)
    getattr(assign, what).CopyFrom(large)
    with pytest.raises(BlobMismatchError, match=f"has {large.size_bytes} bytes: expected at most"):
        order_from_assign("a", assign, blob=lambda ref: blobs[ref.hash], read=None, shard=None)


@pytest.mark.parametrize("core", [False, True])
def test_an_assignment_from_the_wire_builds_the_same(case, core):
    assign, blobs = assigned(case, core)
    order = order_from_assign(
        "a", assign, blob=lambda ref: blobs[ref.hash],
        read=lambda name, offset, length: blobs[name][offset : offset + length],
        shard=case.paths.__getitem__,
    )  # fmt: skip
    assign.slice.plan.route_of.pop()
    assign.slice.visits[:] = ["F0@0", "B0@0"]
    with pytest.raises(
        PlanError, match="1 microbatches of 2 samples: expected 4 samples in a step"
    ):
        order_from_assign("a", assign, blob=lambda ref: blobs[ref.hash], read=None, shard=None)
    device, plain = TorchDevice(), case.world(case.plan(1, ["a"]))
    built = device.build(order)
    assert built.exports == (0,)
    assert built.steps == 6
    assert device.peak_bytes >= built.device_bytes > 0
    device.prefetch(0)
    found = [device.compute(0, action) for action in built.flow.actions("a")]
    (loss,) = [r.outcome.loss for r in found if r.outcome]
    assert loss == pytest.approx(plain.run(1)[0], rel=1e-6)
