"""What a discarded assignment held is free at once, for the next one stands beside it."""

import gc
import weakref
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from shoal.dag.plan.plan import CodecChoice, StageExchange
from shoal.dag.schedule.schedule import Kind
from shoal.dag.transforms.lower import lower

from .test_device import Gpt, Mlp, digits


@pytest.fixture(autouse=True)
def what_was_there_before():
    """Objects that other tests and modules hold are left out: to look at each takes a second."""
    gc.collect()
    gc.freeze()


@contextmanager
def no_collection():
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def tensors() -> int:
    return sum(issubclass(type(o), Tensor) for o in gc.get_objects())


def weak(device):
    """What a GPU would have of the assignment, by name."""
    found = {}
    for k, held in device._work.held.items():
        executor = held.executor
        found |= {f"{k} {n}": weakref.ref(t) for n, t in executor.parameters.items()}
        found |= {f"{k} {n}": weakref.ref(t) for n, t in executor.buffers.items()}
        state = held.strategy.state_tensors()
        found |= {f"{k} {n}": weakref.ref(t) for n, t in state.items()}
    assert found
    return found


def discard(device):
    with no_collection():
        held = weak(device)
        device.discard()
        assert not [name for name, ref in held.items() if ref() is not None]
        left = tensors()
        gc.collect()
        assert tensors() == left, f"{left - tensors()} tensors were in cycles"


def coded(plan, text, role):
    links = [(a, b) for a in plan.peers for b in plan.peers if a != b]
    return replace(plan, codecs=tuple(CodecChoice(a, b, role, text) for a, b in links))


CHANGES = {
    "raw": lambda plan: plan,
    "recompute": lambda plan: replace(
        plan, stages=tuple(replace(s, recompute=True) for s in plan.stages)
    ),
    "residuals": lambda plan: coded(plan, "ef+topk:ratio=4", "sync"),
    "topk": lambda plan: coded(plan, "topk:ratio=4", "activation"),
    "ahead": lambda plan: coded(
        replace(
            plan,
            exchanges=tuple(StageExchange(k, strategy="ahead") for k in range(len(plan.stages))),
        ),
        "ef+topk:ratio=4",
        "sync",
    ),
}


OFTEN = ("raw", "residuals")
"""What is looked at every day."""


@pytest.mark.parametrize(
    "change", [c if c in OFTEN else pytest.param(c, marks=pytest.mark.slow) for c in CHANGES]
)
@pytest.mark.parametrize("model", ["gpt", "norm"])
def test_no_tensor_waits_for_a_garbage_collection(make_case, model, change):
    if model == "gpt":
        case = make_case(Gpt(dropout=0.1), length=8, steps=2)
    else:
        case = make_case(Mlp(norm=True), **digits(), microbatch=4, batch=16, steps=2)
    plan = CHANGES[change](case.plan(3, ["a b", "a b", "a b"], held_out=2))
    core = lower(case.captured.graph.bind(case.train.microbatch_size))
    world = case.world(plan, of={"b": {"core": core}})
    world.run(2)
    world.evaluate(1)
    for device in world.devices.values():
        discard(device)


def test_nor_one_of_a_step_that_is_under_way(make_case):
    """As nearly always where a plan follows a loss."""
    case = make_case(Gpt(dropout=0.1), length=8, steps=4)
    world = case.world(case.plan(3, ["a", "b", "a"]))
    world.run(2)
    device = world.devices["a"]
    first = next(a for a in device._work.flow.actions("a") if a.kind is Kind.FORWARD)
    device.prefetch(2)
    device.compute(2, first)
    assert device._work.held[first.stage].executor.live
    discard(device)


def test_a_step_leaves_no_tensor_to_a_garbage_collection(make_case):
    case = make_case(Gpt(dropout=0.1), length=8, steps=6)
    world = case.world(case.plan(3, ["a b", "b a", "a b"]))
    world.run(3)
    with no_collection():
        torch.manual_seed(0)
        world.run(3)
        left = tensors()
        gc.collect()
        assert tensors() == left
