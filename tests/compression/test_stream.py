"""One end of a stream."""

from __future__ import annotations

import pytest
import torch

from shoal.compression.codec import CodecError, Stream, is_exact, is_stateful, parse
from shoal.compression.echo import all_finite, narrowed, shape_of

TEXTS = ["raw", "bf16", "int8:rounding=stochastic", "topk:ratio=8", "ef+topk:ratio=8",
         "efd+int4", "delta+int8", "delta+topk:ratio=8", "lowrank:rank=4,renew=2"]  # fmt: skip


@pytest.mark.parametrize("text", TEXTS)
def test_the_echo_is_what_the_other_end_decodes(text):
    codec = parse(text)
    sender, receiver = Stream(codec), Stream(codec)
    rng = torch.Generator().manual_seed(0)
    for key in range(4):
        x = torch.randn(16, 24, generator=rng)
        before = sender.state
        encoded = sender.encode(x, key)
        after = sender.state
        echo = sender.echo(before, shape_of(x), encoded)
        data = memoryview(bytearray(b"".join(encoded.buffers)))
        assert torch.equal(echo, receiver.decode(shape_of(x), encoded.header, data))
        assert sender.state is after


def test_a_call_that_raises_leaves_the_state_as_it_was():
    stream = Stream(parse("delta+int8"))
    stream.encode(torch.ones(5))
    before = stream.state
    with pytest.raises(CodecError):
        stream.encode(torch.ones(6))
    assert stream.state is before


def test_exact_codecs_are_those_that_lose_nothing_of_the_dtype():
    wide, half = shape_of(torch.ones(100)), shape_of(torch.ones(100).bfloat16())
    assert is_exact(parse("raw"), wide)
    assert is_exact(parse("lossless"), wide)
    assert not is_exact(parse("bf16"), wide)
    assert not is_exact(parse("ef+raw"), half)
    assert not is_exact(parse("topk"), wide)
    assert [is_stateful(parse(t)) for t in TEXTS] == [False] * 4 + [True] * 5


def test_numbers_too_large_for_a_dtype_become_its_largest():
    x = torch.tensor([1e6, -1e6, float("inf"), float("nan"), 1.5])
    found = narrowed(x, torch.float16)
    assert found[:2].tolist() == [65504.0, -65504.0]
    assert found[2].isinf()
    assert found[3].isnan()
    assert found[4] == 1.5
    assert narrowed(x, torch.float32) is x
    assert not all_finite(x)
    assert all_finite(x[:2])
    assert all_finite(x[:0])
