"""e3m0: against the oracle's formula, block by block."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.compression.codec import CodecError, parse
from shoal.dag.ir.graph import TensorSpec
from shoal.sim.plain import round_methods


def there_and_back(codec, tensor):
    encoded = codec.encode(tensor)
    data = memoryview(bytearray(b"".join(encoded.buffers)))
    return codec.decode(TensorSpec(tuple(tensor.shape), "float32"), encoded.header, data)


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 600), block=st.sampled_from([8, 64, 256]), seed=st.integers(0, 999))
def test_it_is_the_oracles_formula_of_each_block(n, block, seed):
    x = torch.randn(n, generator=torch.Generator().manual_seed(seed))
    x *= torch.logspace(0, -20, n)
    back = there_and_back(parse(f"e3m0:block={block}"), x)
    wanted = torch.cat([round_methods.e3m0(b) for b in x.split(block)])
    torch.testing.assert_close(back, wanted, rtol=2.0**-8, atol=0.0)


def test_powers_of_two_come_back_as_they_were():
    x = torch.ldexp(torch.ones(8), torch.arange(-6, 2)) * torch.tensor([1.0, -1.0] * 4)
    assert torch.equal(there_and_back(parse("e3m0:block=8"), x)[1:], x[1:])
    assert float(there_and_back(parse("e3m0:block=8"), x)[0]) == 2.0**-5  # half of the smallest


def test_a_number_costs_half_a_byte():
    assert parse("e3m0").size_bytes(TensorSpec((1 << 20,), "float32")) == 2**19 + 2 * 2**12


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_is_refused(bad):
    with pytest.raises(CodecError, match="got 1 of 2 NaN or infinite"):
        parse("e3m0").encode(torch.tensor([1.0, bad]))


def test_the_code_that_is_no_number_is_refused():
    data = memoryview(bytearray([0x80, 0x3F, 0x88, 0, 0, 0]))
    with pytest.raises(CodecError, match="a code is -8"):
        parse("e3m0:block=8").decode(TensorSpec((8,), "float32"), bytes(2), data)
