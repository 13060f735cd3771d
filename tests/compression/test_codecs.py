"""One conformance suite for all codecs: a new one joins by its text in CODECS."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.compression.codec import RAW, CodecError, parse
from shoal.compression.raw import DTYPES
from shoal.dag.graph import ITEM_BYTES, TensorSpec

CODECS = [parse(text) for text in ("raw",)]
codecs = pytest.mark.parametrize("codec", CODECS, ids=[c.name for c in CODECS])

shapes = st.one_of(
    st.just(()),
    st.lists(st.integers(0, 9), max_size=4).map(tuple),
    st.sampled_from([(65536,), (65537,), (257, 255), (1, 0, 3)]),
)


@st.composite
def tensors(draw):
    """Any shape and dtype; contiguous or not."""
    shape, dtype = draw(shapes), DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    if dtype.is_floating_point:
        tensor = torch.randn(shape, generator=rng).to(dtype) * draw(
            st.sampled_from([0.0, 1e-6, 1.0, 1e6])
        )
    else:
        tensor = torch.randint(0, 100, shape, generator=rng).to(dtype)
    layout = draw(st.sampled_from(["contiguous", "transposed", "strided"]))
    if layout == "transposed" and tensor.dim() > 1:
        tensor = tensor.transpose(0, -1)
    elif layout == "strided" and tensor.dim():
        tensor = torch.stack([tensor, tensor], -1)[..., 0]
    return tensor


def spec_of(tensor):
    return TensorSpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def over_the_wire(encoded):
    return memoryview(bytearray(b"".join(encoded.buffers)))


@codecs
@given(tensor=tensors())
def test_what_is_decoded_is_what_was_encoded_within_the_stated_bound(codec, tensor):
    spec, encoded = spec_of(tensor), codec.encode(tensor)
    back = codec.decode(spec, encoded.header, over_the_wire(encoded))
    assert back.shape == tensor.shape
    assert back.dtype == tensor.dtype
    assert back.is_contiguous()
    if codec.error_bound(spec) == 0:
        assert torch.equal(back, tensor)
    else:
        difference = (back.double() - tensor.double()).norm()
        assert difference <= codec.error_bound(spec) * tensor.double().norm()


@codecs
@given(tensor=tensors())
def test_the_size_is_known_without_encoding(codec, tensor):
    assert codec.encode(tensor).size_bytes <= codec.size_bytes(spec_of(tensor))


@codecs
@given(tensor=tensors(), change=st.integers(-20, 20).filter(bool), header=st.binary(max_size=8))
def test_bytes_that_do_not_belong_to_the_spec_are_refused(codec, tensor, change, header):
    spec, encoded = spec_of(tensor), codec.encode(tensor)
    data = bytes(over_the_wire(encoded))
    longer = data + bytes(change) if change > 0 else data[:change]
    if longer != data:
        with pytest.raises(CodecError):
            codec.decode(spec, encoded.header, memoryview(bytearray(longer)))
    if header != encoded.header:
        with pytest.raises(CodecError):
            codec.decode(spec, header, memoryview(bytearray(data)))


@codecs
@given(spec=st.builds(TensorSpec, shapes, st.sampled_from(sorted(ITEM_BYTES))), data=st.data())
def test_any_bytes_give_a_tensor_or_a_codec_error(codec, spec, data):
    size = data.draw(st.sampled_from([codec.size_bytes(spec), 0, 1, 100]))
    content = bytearray(data.draw(st.binary(min_size=min(size, 500), max_size=min(size, 500))))
    content += bytes(max(0, size - 500))
    header = data.draw(st.one_of(st.just(b""), st.binary(max_size=30)))
    with suppress(CodecError):
        back = codec.decode(spec, header, memoryview(content))
        assert tuple(back.shape) == spec.sizes


@codecs
def test_special_numbers_are_kept(codec):
    if codec.error_bound(spec_of(torch.ones(1))):
        pytest.skip("a lossy codec says itself what it does with them")
    for dtype in ("float32", "bfloat16", "float16", "float64"):
        tensor = torch.tensor([float("nan"), float("inf"), -0.0, 1e-40]).to(DTYPES[dtype])
        encoded = codec.encode(tensor)
        back = codec.decode(spec_of(tensor), encoded.header, over_the_wire(encoded))
        assert torch.equal(back.view(torch.uint8), tensor.view(torch.uint8))


@codecs
def test_a_name_is_a_word_and_a_version(codec):
    name, _, version = codec.name.partition("/")
    assert name.isidentifier()
    assert int(version) > 0
    assert parse(codec.name).name == codec.name


# What only raw/1 promises.


def test_raw_copies_nothing_in_either_direction():
    raw, tensor = RAW, torch.randn(100)
    (buffer,) = raw.encode(tensor).buffers
    assert buffer.readonly
    tensor[0] = 5.0
    assert torch.frombuffer(bytearray(buffer), dtype=torch.float32)[0] == 5.0
    data = bytearray(400)
    back = raw.decode(spec_of(tensor), b"", memoryview(data))
    back[0] = 1.0
    assert data[2:4] == b"\x80\x3f"


def test_raw_takes_one_element_of_any_stride():
    raw, tensor = RAW, torch.randn(4, 2, dtype=torch.float32).bfloat16()[:1, 1]
    assert torch.equal(raw.decode(spec_of(tensor), b"", over_the_wire(raw.encode(tensor))), tensor)


def test_raw_takes_tensors_that_require_a_gradient():
    raw, tensor = RAW, torch.randn(3, requires_grad=True)
    back = raw.decode(spec_of(tensor), b"", over_the_wire(raw.encode(tensor)))
    assert torch.equal(back, tensor.detach())
    assert not back.requires_grad


@pytest.mark.parametrize(
    ("tensor", "why"),
    [
        (torch.zeros(2, dtype=torch.complex64), "cannot write complex64"),
        (torch.eye(2).to_sparse(), "layout"),
        (torch.zeros(2, device="meta"), "device meta"),
    ],
    ids=["complex", "sparse", "meta"],
)
def test_raw_says_what_it_cannot_write(tensor, why):
    with pytest.raises(CodecError, match=why):
        RAW.encode(tensor)


def test_raw_refuses_booleans_that_are_neither():
    with pytest.raises(CodecError, match="other than 0 and 1"):
        RAW.decode(TensorSpec((2,), "bool"), b"", memoryview(bytearray(b"\x01\x02")))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool"])
def test_raw_goes_from_and_to_a_device(dtype):
    raw, tensor = RAW, (torch.randn(1000, device="cuda") > 0).to(DTYPES[dtype])
    back = raw.decode(spec_of(tensor), b"", over_the_wire(raw.encode(tensor)), "cuda")
    assert back.device.type == "cuda"
    assert torch.equal(back, tensor)
