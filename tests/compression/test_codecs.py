"""One conformance suite for all codecs: a new one joins by its text in TEXTS."""

from __future__ import annotations

import itertools
import math
from contextlib import suppress

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.compression.checks import DTYPES, FLOATING
from shoal.compression.codec import (
    RAW,
    WORDS,
    WRAPPERS,
    CodecError,
    Stream,
    fitting,
    is_stateful,
    parse,
    typical_bytes,
)
from shoal.dag.ir.graph import ITEM_BYTES, TensorSpec

TEXTS = [
    "raw",
    "lossless",
    "bf16",
    "fp16",
    "int8",
    "int8:block=8",
    "int8:rounding=stochastic",
    "int6",
    "int4",
    "int4:block=32,rounding=stochastic",
    "int2",
    "int2:rounding=stochastic",
    "e3m0",
    "e3m0:block=8",
    "chunks:density=0.1,chunk=64",
    "chunks:density=0.3,chunk=50,bits=32",
    "chunks:density=1.0,bits=32",
    "nonzero",
    "topk:ratio=4",
    "topk:ratio=100,values=fp32",
    "topk:ratio=8,values=fp16,scope=sample",
    "topk:ratio=3,values=int8",
    "topk:ratio=2.7,values=int6",
    "topk:ratio=2,values=int4",
    "topk:ratio=4,select=gaussian",
    "topk:ratio=16,select=histogram",
    "topk:ratio=1",
    "randomk:ratio=4",
    "randomk:ratio=10,values=fp32",
    "lowrank:rank=2",
    "lowrank:rank=4,renew=1",
    "ef+topk:ratio=4",
    "ef+int4",
    "efd+randomk:ratio=4",
    "delta+int8",
    "delta+topk:ratio=4",
]
every_codec = pytest.mark.parametrize("text", TEXTS)

FEW = settings(max_examples=12)

shapes = st.one_of(
    st.just(()),
    st.just((1,)),
    st.lists(st.integers(0, 9), max_size=4).map(tuple),
    st.sampled_from([(67, 61), (1030,), (1, 0, 3), (16, 3, 32)]),
)


@st.composite
def tensors(draw, dtypes=FLOATING):
    """Any shape; contiguous or not; numbers of a bell shape, of all equal size, or mostly zeros, of
    usual sizes and at both ends of the dtype."""
    shape, dtype = draw(shapes), DTYPES[draw(st.sampled_from(sorted(dtypes)))]
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    if dtype.is_floating_point:
        tensor = torch.randn(shape, generator=rng, dtype=torch.float64)
        kind = draw(st.sampled_from(["bell", "signs", "sparse"]))
        if kind == "signs":
            tensor = tensor.sign()
        elif kind == "sparse":
            tensor = tensor * (torch.rand(shape, generator=rng) < 0.02)
        limits = torch.finfo(dtype)
        size = draw(st.sampled_from([0.0, 1e-4, 1.0, 1e3, limits.tiny, limits.max / 8]))
        tensor = (tensor * size).to(dtype)
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


def takes(text, tensor):
    """Whether the codec has to write such a tensor."""
    codec = parse(text)
    if "lowrank" in text:
        return (
            tensor.is_floating_point()
            and tensor.dim() > 1
            and tensor.numel() > 0
            and tensor.shape[-1] > codec.rank
            # Its sums are float32, and it says what is too large for them.
            and not bool((tensor.double().abs() > 1e30).any())
        )
    return tensor.is_floating_point() or text in ("raw", "lossless")


def encode(text, tensor, key=0):
    """From the beginning of a stream. None where it may refuse such a tensor, and does."""
    try:
        return Stream(parse(text)).encode(tensor, key)
    except CodecError:
        if takes(text, tensor):
            raise
        return None


def decode(text, spec, header, data, device="cpu"):
    return Stream(parse(text)).decode(spec, header, memoryview(bytearray(data)), device)


def relative_error(back, tensor):
    """‖back - tensor‖ / ‖tensor‖; scaled first, for squares of the largest float64 overflow."""
    if tensor.numel() == 0:
        return 0.0
    exponent = math.frexp(tensor.double().abs().max().item())[1]
    a, b = (t.double() * 2.0 ** -(exponent // 2) for t in (back, tensor))
    a, b = (t * 2.0 ** -(exponent - exponent // 2) for t in (a, b))
    difference, norm = (a - b).norm().item(), b.norm().item()
    return difference / norm if norm else (math.inf if difference else 0.0)


def test_every_word_is_tried():
    tried = {word for text in TEXTS for word in text.partition(":")[0].split("+")}
    tried.add("support")  # needs a value beside the tensor: test_support.py
    assert tried == {*WORDS, *WRAPPERS}


@every_codec
def test_a_name_is_a_text_of_the_same_codec(text):
    codec = parse(text)
    for part in codec.name.partition(":")[0].split("+"):
        word, _, version = part.partition("/")
        assert word in {*WORDS, *WRAPPERS}
        assert int(version) > 0
    assert parse(codec.name).name == codec.name


@every_codec
@FEW
@given(tensor=tensors(), key=st.integers(0, 2**64 - 1))
def test_what_is_decoded_is_what_was_encoded_within_the_stated_bound(text, tensor, key):
    spec, encoded = spec_of(tensor), encode(text, tensor, key)
    if encoded is None:
        return
    back = decode(text, spec, encoded.header, over_the_wire(encoded))
    assert back.shape == tensor.shape
    assert back.dtype == tensor.dtype
    assert back.is_contiguous()
    assert back.isfinite().all()
    bound = parse(text).error_bound(spec)
    if bound == 0:
        assert torch.equal(back, tensor)
    assert relative_error(back, tensor) <= bound * (1 + 1e-9)


@every_codec
@FEW
@given(tensor=tensors(tuple(DTYPES)))
def test_the_size_is_known_without_encoding(text, tensor):
    codec, spec, encoded = parse(text), spec_of(tensor), encode(text, tensor)
    if encoded is None:
        return
    if getattr(codec, "varying", False) or hasattr(codec, "typical_bytes"):
        assert encoded.size_bytes <= codec.size_bytes(spec)
        assert typical_bytes(codec, spec) <= codec.size_bytes(spec)
    else:
        assert encoded.size_bytes == codec.size_bytes(spec) == typical_bytes(codec, spec)


@every_codec
@FEW
@given(tensor=tensors(), change=st.integers(-20, 20).filter(bool))
def test_truncated_and_trailing_bytes_are_refused(text, tensor, change):
    spec, encoded = spec_of(tensor), encode(text, tensor)
    if encoded is None:
        return
    data, header = bytes(over_the_wire(encoded)), encoded.header
    for changed in ((header, _changed(data, change)), (_changed(header, change), data)):
        if changed != (header, data):
            with pytest.raises(CodecError):
                decode(text, spec, *changed)


def _changed(content, change):
    return content + bytes(change) if change > 0 else content[:change]


@every_codec
@FEW
@given(tensor=tensors(), data=st.data())
def test_flipped_bits_give_a_tensor_or_a_codec_error(text, tensor, data):
    spec, encoded = spec_of(tensor), encode(text, tensor)
    if encoded is None:
        return
    content = bytearray(encoded.header + bytes(over_the_wire(encoded)))
    for _ in range(data.draw(st.integers(1, 3)) if content else 0):
        at = data.draw(st.one_of(st.integers(0, min(20, len(content) - 1)), st.just(-1)))
        content[at] ^= data.draw(st.integers(1, 255))
    cut = len(encoded.header)
    with suppress(CodecError):
        back = decode(text, spec, bytes(content[:cut]), content[cut:])
        assert back.shape == tensor.shape
        assert back.dtype == tensor.dtype


@every_codec
@FEW
@given(spec=st.builds(TensorSpec, shapes, st.sampled_from(sorted(ITEM_BYTES))), data=st.data())
def test_any_bytes_give_a_tensor_or_a_codec_error(text, spec, data):
    most = 0
    with suppress(CodecError):
        most = parse(text).size_bytes(spec)
    size = data.draw(st.sampled_from([most, 0, 1, 100]))
    content = bytearray(data.draw(st.binary(min_size=min(size, 100), max_size=min(size, 100))))
    content += bytes(max(0, size - 100))
    header = data.draw(st.one_of(st.just(b""), st.binary(max_size=30), st.just(bytes(2))))
    with suppress(CodecError):
        back = decode(text, spec, header, content)
        assert tuple(back.shape) == spec.sizes


@every_codec
@pytest.mark.parametrize("sizes", [(2**40, 2**40), (2**63, 2), (0, 2**40, 2**40), (-1,), (-2, -3)])
def test_a_shape_that_no_tensor_has_is_refused(text, sizes):
    with pytest.raises(CodecError, match=r"expected|cannot"):
        decode(text, TensorSpec(sizes, "float32"), b"", b"")


@every_codec
@pytest.mark.parametrize("dtype", ["bool", "int8", "int64", "complex64"])
def test_other_dtypes_are_refused_or_kept_bit_for_bit(text, dtype):
    tensor = torch.ones(6, 8).to(getattr(torch, dtype))
    if takes(text, tensor) and dtype != "complex64":
        encoded = encode(text, tensor)
        assert torch.equal(
            decode(text, spec_of(tensor), encoded.header, over_the_wire(encoded)), tensor
        )
        return
    with pytest.raises(CodecError, match=dtype):
        Stream(parse(text)).encode(tensor)
    with pytest.raises(CodecError, match=dtype):
        decode(text, TensorSpec((6, 8), dtype), b"", bytes(tensor.nbytes))


@every_codec
@pytest.mark.parametrize("tensor", [torch.eye(8).to_sparse(), torch.zeros(8, 8, device="meta")])
def test_what_has_no_dense_memory_is_refused(text, tensor):
    with pytest.raises(CodecError):
        Stream(parse(text)).encode(tensor)


@every_codec
@pytest.mark.parametrize("dtype", FLOATING)
def test_what_is_not_finite_is_kept_or_refused(text, dtype):
    for value, many in itertools.product([math.nan, math.inf, -math.inf], [1, 3, 500]):
        tensor = torch.randn(50, 20).to(DTYPES[dtype])
        places = torch.randperm(1000)[:many]
        tensor.view(-1)[places] = value
        try:
            encoded = Stream(parse(text)).encode(tensor)
        except CodecError as error:
            assert "finite" in str(error)  # noqa: PT017 - it may be kept just as well
            continue
        back = decode(text, spec_of(tensor), encoded.header, over_the_wire(encoded))
        assert not back.view(-1)[places].isfinite().any()
        if parse(text).error_bound(spec_of(tensor)) == 0:
            assert torch.equal(back.view(torch.uint8), tensor.view(torch.uint8))


@every_codec
def test_equal_arguments_give_equal_bytes(text):
    tensor = torch.randn(64, 48)
    first, again = (encode(text, tensor.clone(), key=5) for _ in range(2))
    assert first.header == again.header
    assert over_the_wire(first) == over_the_wire(again)


@pytest.mark.parametrize("text", [t for t in TEXTS if "stochastic" in t or "randomk" in t])
def test_another_key_gives_other_bytes(text):
    tensor = torch.randn(64, 48)
    assert over_the_wire(encode(text, tensor, key=5)) != over_the_wire(encode(text, tensor, key=6))


@every_codec
def test_the_tensor_is_left_alone_and_no_gradient_comes_out(text):
    tensor = torch.randn(64, 48, requires_grad=True)
    before = tensor.detach().clone()
    encoded = encode(text, tensor)
    back = decode(text, spec_of(tensor), encoded.header, over_the_wire(encoded))
    assert torch.equal(tensor.detach(), before)
    assert not back.requires_grad


@every_codec
@FEW
@given(spec=st.builds(TensorSpec, shapes, st.sampled_from(sorted(ITEM_BYTES))))
def test_fitting_codecs_pay(text, spec):
    codec = fitting(parse(text), spec)
    if codec is not RAW:
        assert typical_bytes(codec, spec) < spec.size_bytes
        assert spec.is_floating
        encoded = Stream(codec).encode(torch.ones(spec.sizes, dtype=DTYPES[spec.dtype]))
        assert encoded.size_bytes <= codec.size_bytes(spec)


@pytest.mark.parametrize(
    "text",
    [
        "nothing",
        "",
        "int8/2",
        "int8:block=0",
        "int8:block=-8",
        "int8:block=100",
        "int8:block=131072",
        "int8:block=many",
        "int8:blocks=8",
        "int8:block=8,block=8",
        "int4:rounding=up",
        "lossless:level=3",
        "bf16:dtype=fp16",
        "topk:ratio=0.5",
        "topk:ratio=nan",
        "topk:ratio=inf",
        "topk:values=int3",
        "topk:select=some",
        "topk:scope=batch",
        "randomk:ratio=0",
        "randomk:ratio=nan",
        "lowrank:rank=0",
        "lowrank:renew=0",
        "ef+nothing",
        "nothing+int8",
        "ef+delta+int8",
        "int8+ef",
    ],
)
def test_a_text_that_makes_no_sense_is_refused(text):
    with pytest.raises(CodecError, match="expected"):
        parse(text)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@every_codec
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shape", [(5, 7), (300, 333)])
def test_a_device_writes_and_reads_the_same(text, dtype, shape):
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(DTYPES[dtype])
    spec, encoded = spec_of(tensor), encode(text, tensor.cuda(), key=7)
    back = decode(text, spec, encoded.header, over_the_wire(encoded), "cuda")
    assert back.device.type == "cuda"
    assert relative_error(back.cpu(), tensor) <= parse(text).error_bound(spec) * (1 + 1e-9)
    here = decode(text, spec, encoded.header, over_the_wire(encoded))
    if not is_stateful(parse(text)):  # sums of float32 have an order there
        assert torch.equal(back.cpu(), here)
        assert over_the_wire(encode(text, tensor, key=7)) == over_the_wire(encoded)
    assert relative_error(back.cpu(), here) <= 1e-2


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
