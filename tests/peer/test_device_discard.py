"""What a discarded assignment held is free at once, for the next one stands beside it."""

import gc
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from shoal.dag.lower import lower
from shoal.dag.plan import CodecChoice

from .test_device import Gpt, Mlp, digits


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
        replace(plan, stages=tuple(replace(s, ahead=True) for s in plan.stages)),
        "ef+topk:ratio=4",
        "sync",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
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
        with no_collection():
            before = tensors()
            device.discard()
            freed = before - tensors()
            assert freed > 0
            left = tensors()
            gc.collect()
            assert tensors() == left, f"{left - tensors()} of {freed} tensors were in cycles"


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
