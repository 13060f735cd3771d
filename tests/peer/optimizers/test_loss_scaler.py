"""The scale of losses against torch's own scaler, on whatever steps come."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from shoal.job.training import LossScale
from shoal.peer.optimizers.loss_scaler import LossScaler


@given(
    st.lists(st.booleans(), max_size=40), st.integers(-20, 24), st.integers(1, 5), st.integers(0, 9)
)
@example([False] * 8, 125, 2, 3)  # it grows no further than float32 has numbers
def test_the_scale_is_that_of_torch_after_any_steps(
    overflows: list[bool], power: int, interval: int, again: int
) -> None:
    """Also behind a snapshot taken before step `again`."""
    settings = LossScale(init_scale=2.0**power, growth_interval=interval)
    plain = torch.amp.GradScaler("cpu", init_scale=2.0**power, growth_interval=interval)
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = LossScaler(settings)
    for step, overflowed in enumerate(overflows):
        if step == again:
            kept, scaler = scaler.state_tensors(), LossScaler(settings)
            scaler.load_state_tensors(kept)
        assert scaler.scale == plain.get_scale()
        plain.scale(torch.zeros(()))  # begins it
        weight.grad = torch.tensor([1.0, math.inf if overflowed else 1.0])
        plain.step(optimizer)
        plain.update()
        scaler.update(overflowed=overflowed)
    assert scaler.scale == plain.get_scale()


def test_a_scale_never_becomes_zero() -> None:
    scaler = LossScaler(LossScale())
    for _ in range(500):
        scaler.update(overflowed=True)
    assert scaler.scale == torch.finfo(torch.float32).tiny


def test_a_run_may_go_on_with_a_shorter_interval() -> None:
    before, after = (LossScaler(LossScale(growth_interval=n)) for n in (9, 3))
    for _ in range(5):
        before.update(overflowed=False)
    after.load_state_tensors(before.state_tensors())
    after.update(overflowed=False)
    assert after.scale == 2 * before.scale


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ({}, "cannot be read"),
        ({"scale": torch.tensor(math.nan)}, "expected a power of two"),
        ({"scale": torch.tensor(3.0)}, "3 behind 0 steps"),
        ({"scale": torch.tensor(-2.0)}, "expected a power of two"),
        ({"scale": torch.tensor(2.0**1023, dtype=torch.float64)}, "expected a power of two"),
        ({"good_steps": torch.tensor(-1)}, "behind -1 steps"),
        ({"scale": torch.ones(2)}, "cannot be read"),
    ],
)
def test_a_state_that_cannot_be_is_refused(tensors: dict[str, torch.Tensor], says: str) -> None:
    scaler = LossScaler(LossScale(growth_interval=7))
    given = scaler.state_tensors() | tensors if tensors else {}
    with pytest.raises(ValueError, match=says):
        scaler.load_state_tensors(given)
    assert scaler.scale == 65536.0
