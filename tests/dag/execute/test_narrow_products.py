"""Products with 16-bit weights, cast by slices, are those of float32, rounded once."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.dag.execute import stand_ins
from shoal.dag.execute.stand_ins import linear
from shoal.dag.ir import quantized

sizes = st.integers(1, 9)


@pytest.fixture(autouse=True)
def slow(monkeypatch):
    """As on a processor without instructions for 16 bits, and in slices of a few rows."""
    monkeypatch.setattr(stand_ins, "_has_instructions", lambda dtype: False)
    monkeypatch.setattr(quantized, "SLICE", 12)


@settings(max_examples=60)
@given(
    st.lists(sizes, min_size=1, max_size=3), sizes, st.booleans(), st.booleans(), st.integers(0, 9)
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_they_equal_float32(dtype, lead, out, biased, trained, seed):
    g = torch.Generator().manual_seed(seed)
    x, weight, bias, grad = (
        torch.randn(*shape, generator=g).to(dtype)
        for shape in (lead, (out, lead[-1]), (out,), (*lead[:-1], out))
    )
    narrow = [x.requires_grad_(), weight.requires_grad_(trained), bias.requires_grad_(trained)]
    wide = [t.detach().float().requires_grad_(t.requires_grad) for t in narrow]
    made, wanted = (f(a, w, b if biased else None) for f, (a, w, b) in (
        (linear, narrow), (F.linear, wide)
    ))  # fmt: skip
    torch.testing.assert_close(made, wanted.to(dtype))
    made.backward(grad)
    wanted.backward(grad.float())
    for got, t in zip(narrow, wide, strict=True):
        assert (got.grad is None) == (t.grad is None)
        if t.grad is not None:
            torch.testing.assert_close(got.grad, t.grad.to(dtype))


def test_the_weight_is_all_that_stays_of_a_frozen_one():
    saved = []
    x = torch.randn(3, 4, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(5, 4, dtype=torch.bfloat16)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        linear(x, weight)
    assert [t.data_ptr() for t in saved] == [weight.data_ptr()]


def test_float32_is_torchs_own():
    x, weight = torch.randn(3, 4), torch.randn(5, 4)
    assert torch.equal(linear(x, weight), F.linear(x, weight))
