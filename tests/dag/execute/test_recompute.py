"""A stage that computes its forward again in the backward gives, bit for bit, what one gives that
keeps everything."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shoal.tests.dag.execute.stage_lines import MODELS, Line, assert_same_bits, batch, model


@pytest.mark.parametrize(
    ("name", "core"), [*((name, False) for name in sorted(MODELS)), ("gpt", True), ("resnet", True)]
)
@settings(max_examples=4)
@given(seed=st.integers(0, 2**32))
def test_no_bit_depends_on_what_is_computed_again(name: str, core: bool, seed: int) -> None:
    rng = random.Random(seed)
    operators = len(model(name)[1].operators)
    count = rng.randint(1, 4)
    cuts = sorted(rng.sample(range(1, operators), count - 1))
    again = {i for i in range(count) if rng.random() < 0.7} or {count - 1}
    want = Line(name, cuts, set(), core).step(name)
    assert_same_bits(Line(name, cuts, again, core).step(name), want)


def test_autograd_saves_nothing_until_the_backward() -> None:
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    _, graph, _ = model("gpt")
    line = Line("gpt", [len(graph.operators) // 2], {1})
    plain, again = line.executors
    for executor in line.executors:
        executor.saved_bytes = 1  # as if counted: the first microbatch has hooks of its own
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        first = plain.forward(0, 0, {}, batch("gpt", 0))
        assert saved
        saved.clear()
        again.forward(0, 0, first.ports, batch("gpt", 0))
        assert not saved
        assert again.live == ((0, 0),)
        again.backward(0, 0, {})
        assert saved
    assert again.live == ()


def test_what_was_live_is_forgotten() -> None:
    (executor,) = Line("unet", [], {0}).executors
    executor.forward(0, 0, {}, batch("unet", 0))
    executor.forget()
    assert executor.live == ()
    executor.forward(0, 0, {}, batch("unet", 0))
