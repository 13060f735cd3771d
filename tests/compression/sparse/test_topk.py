"""topk: what is kept, what it costs, what is refused. The oracle is a stable sort."""

from __future__ import annotations

import math
import struct
from contextlib import suppress
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.compression.checks import dtype_name
from shoal.compression.codec import CodecError, fitting, parse
from shoal.compression.sparse import indices
from shoal.compression.sparse.select import HOW
from shoal.compression.sparse.values import VALUES, Values
from shoal.dag.ir.graph import TensorSpec

LONG = 40_000  # from 32,768 elements on a threshold is estimated
dtypes = pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])


def spec_of(tensor):
    return TensorSpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def content(encoded):
    return bytearray(b"".join(encoded.buffers))


def there_and_back(codec, tensor, key=0, device="cpu"):
    encoded = codec.encode(tensor, key)
    return codec.decode(spec_of(tensor), encoded.header, memoryview(content(encoded)), device)


def normal(*shape, seed=0, dtype="float32"):
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return tensor.to(getattr(torch, dtype))


def by_sorting(x, k):
    order = x.double().abs().view(-1).sort(descending=True, stable=True).indices
    out = torch.zeros_like(x).view(-1)
    out[order[:k]] = x.reshape(-1)[order[:k]]
    return out.view(x.shape)


def error(codec, tensor, **how):
    difference = there_and_back(codec, tensor, **how).double() - tensor.double()
    return float(difference.norm() / tensor.double().norm())


@dtypes
@given(
    shape=st.lists(st.integers(0, 12), max_size=3),
    ratio=st.floats(1, 1e4),
    seed=st.integers(0, 999),
)
def test_exactly_the_k_largest_come_back_as_they_were(dtype, shape, ratio, seed):
    x = normal(*shape, seed=seed, dtype=dtype).round(decimals=1)
    back = there_and_back(parse(f"topk:values=fp32,ratio={ratio}"), x)
    k = max(1, round(x.numel() / ratio)) if x.numel() else 0
    assert torch.equal(back, by_sorting(x, k))


@dtypes
def test_of_a_long_tensor_too(dtype):
    x = normal(4, LONG, dtype=dtype)
    assert torch.equal(there_and_back(parse("topk:values=fp32"), x), by_sorting(x, 1600))


@pytest.mark.parametrize("scope", ["tensor", "sample"])
@pytest.mark.parametrize("select", HOW)
@pytest.mark.parametrize("values", VALUES)
def test_the_error_is_within_the_bound_and_the_size_is_announced(values, select, scope):
    for ratio in (1.0, 3.0, 100.0):
        codec = parse(f"topk:ratio={ratio},values={values},select={select},scope={scope}")
        for x in (
            normal(2, LONG),
            normal(30, 50),
            normal(1),
            torch.ones(3, 99),
            normal(2, LONG).abs() + 7.0,
            normal(7, 70, dtype="bfloat16"),
        ):
            spec, encoded = spec_of(x), codec.encode(x)
            assert error(codec, x) <= codec.error_bound(spec)
            announced = codec.size_bytes(spec)
            if select == "exact":
                assert encoded.size_bytes == announced
            else:
                assert 0.98 * announced <= encoded.size_bytes <= announced


def test_the_bound_is_met_where_all_numbers_are_equal():
    x = torch.full((1000,), 0.5)
    codec = parse("topk:values=bf16,ratio=10")
    assert error(codec, x) == pytest.approx(math.sqrt(0.9))
    assert codec.error_bound(spec_of(x)) == pytest.approx(math.sqrt(0.9), rel=1e-4)
    assert parse("topk:values=fp32,ratio=1").error_bound(spec_of(x)) == 0


def test_a_hundredth_costs_three_bytes_per_number_and_the_obvious_way_twelve():
    n, k = 10_000_000, 100_000
    codec = parse("topk")
    size = codec.size_bytes(TensorSpec((n,), "float32"))
    assert size == 2 * k + indices.size_bytes(n, k) + 2  # and a header of the values
    assert 12 * k / size > 3.9


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("select", HOW)
def test_a_samples_answer_does_not_depend_on_its_mates(values, select):
    codec = parse(f"topk:scope=sample,ratio=20,values={values},select={select}")
    for m in (50, 700, LONG):
        x = normal(4, m) * torch.tensor([[1.0], [1e-9], [1e9], [3.0]])
        back = there_and_back(codec, x)
        for i in range(4):
            assert torch.equal(back[i], there_and_back(codec, x[i : i + 1])[0])
            if select == "exact":
                assert torch.count_nonzero(back[i]) == max(1, round(m / 20))


@settings(max_examples=150, deadline=None)
@given(
    word=st.sampled_from(["int8", "int6", "int4", "fp16"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    rows=st.integers(2, 6),
    n=st.sampled_from([1, 2, 3, 7, 63, 64, 65, 255, 256, 257, 600]),
    scales=st.lists(
        st.sampled_from([0.0, 1.0, 3e-5, 1e4, 1e-30, 1e38, 1e-45, 1e-300]), min_size=6, max_size=6
    ),
    odd=st.sampled_from([None, math.nan, math.inf, -math.inf]),
    seed=st.integers(0, 1000),
)
def test_all_rows_at_once_are_each_row_by_itself_bit_for_bit(
    word, dtype, rows, n, scales, odd, seed
):
    x = torch.randn(rows, n, generator=torch.manual_seed(seed), dtype=torch.float64)
    x = (x * torch.tensor(scales[:rows], dtype=torch.float64).view(-1, 1)).to(dtype)
    if odd is not None:
        x[seed % rows, seed % n] = odd
    values, name, pieces = Values("topk/1", word), dtype_name(x), [n] * rows
    written = b"".join(values.encode(x.view(-1), pieces, key=0))

    alone = parse(word)
    spec = TensorSpec((n,), name)
    if alone.size_bytes(spec) >= spec.size_bytes:
        alone = parse("raw")  # it does not pay
    parts = [alone.encode(row) for row in x]
    data = [b"".join(part.buffers) for part in parts]
    assert written == b"".join([*(part.header for part in parts), *data])

    back = values.decode(name, pieces, memoryview(bytearray(written)), "cpu")
    wanted = [
        alone.decode(spec, part.header, memoryview(bytearray(d)))
        for part, d in zip(parts, data, strict=True)
    ]
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.itemsize]
    assert torch.equal(back.view(bits), torch.cat(wanted).view(bits))


@pytest.mark.parametrize("word", ["int8", "int4", "fp16"])
@given(data=st.data())
def test_changed_bytes_of_rows_say_what_the_loop_says(word, data):
    values, x = Values("topk/1", word), normal(3, 40)
    written = bytearray(b"".join(values.encode(x.view(-1), [40] * 3, key=0)))
    at = data.draw(st.integers(0, len(written) - 1))
    written[at] = data.draw(st.integers(0, 255))

    def read():
        try:
            return values.decode("float32", [40] * 3, memoryview(bytearray(written)), "cpu")
        except CodecError as error:
            return str(error)

    at_once = read()
    with mock.patch.object(Values, "_alike", return_value=None):
        one_by_one = read()
    if isinstance(at_once, str) or isinstance(one_by_one, str):
        assert at_once == one_by_one
    else:
        assert torch.equal(at_once.view(torch.int32), one_by_one.view(torch.int32))


def test_never_more_bytes_than_the_tensor():
    for ratio in (1.0, 1.02, 1.1, 2.0):
        for values in VALUES:
            codec = parse(f"topk:ratio={ratio},values={values}")
            for n in (0, 1, 2, 9, 1000):
                for dtype in ("float32", "bfloat16"):
                    spec = TensorSpec((n,), dtype)
                    assert fitting(codec, spec).size_bytes(spec) <= spec.size_bytes


@pytest.mark.parametrize("values", VALUES)
def test_numbers_that_are_not_finite_stay_so(values):
    codec = parse(f"topk:ratio=10,values={values}")
    for n in (100, LONG):
        x = normal(n)
        x[3], x[n // 2], x[-1] = math.nan, math.inf, -math.inf
        back = there_and_back(codec, x)
        assert not back[~x.isfinite()].isfinite().any()
        if not values.startswith("int"):  # there a block is NaN as a whole
            assert torch.equal(back[~x.isnan()].isinf(), x[~x.isnan()].isinf())
            assert int(back.isfinite().sum()) == n - 3


@pytest.mark.parametrize("scope", ["tensor", "sample"])
def test_more_of_them_than_are_kept_are_refused(scope):
    codec = parse(f"topk:ratio=10,values=fp32,scope={scope}")
    x = normal(1, 100) if scope == "tensor" else normal(5, 100)
    x[0, :10] = math.nan
    assert int(there_and_back(codec, x).isnan().sum()) == 10
    x[0, 50] = math.inf
    with pytest.raises(CodecError, match="keeps 10 of 11 numbers that are NaN or infinite"):
        codec.encode(x)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("topk:ratio=0.99", "ratio is 0.99"),
        ("topk:ratio=nan", "ratio is nan"),
        ("topk:ratio=inf", "ratio is inf"),
        ("topk:ratio=-3", "ratio is -3"),
        ("topk:values=int3", "expected one of fp32, bf16"),
        ("topk:select=best", "expected one of exact, gaussian"),
        ("topk:scope=row", "expected tensor or sample"),
    ],
)
def test_parameters_that_make_no_sense_are_refused(text, why):
    with pytest.raises(CodecError, match=why):
        parse(text)


def test_the_name_says_everything():
    name = "topk/1:ratio=12.5,values=int8,select=gaussian,scope=sample"
    assert parse("topk:scope=sample,select=gaussian,ratio=12.5,values=int8").name == name
    assert parse(name).name == name
    assert parse("topk").name == "topk/1:ratio=100.0,values=bf16,select=exact,scope=tensor"


@pytest.mark.parametrize("scope", ["tensor", "sample"])
@pytest.mark.parametrize("select", ["exact", "histogram"])
@pytest.mark.parametrize("values", VALUES)
@settings(max_examples=25)
@given(data=st.data())
def test_changed_bytes_give_a_sparse_tensor_or_an_error(values, select, scope, data):
    codec = parse(f"topk:ratio=9,values={values},select={select},scope={scope}")
    x = normal(3, 300)
    encoded = codec.encode(x)
    payload, header = content(encoded), bytearray(encoded.header)
    for _ in range(data.draw(st.integers(1, 4))):
        buffer = data.draw(st.sampled_from([payload, header] if header else [payload]))
        at = data.draw(st.integers(max(0, len(buffer) - 100), len(buffer) - 1))
        buffer[at] ^= data.draw(st.integers(1, 255))
    cut = data.draw(st.sampled_from([0, 0, 0, 1, 7, len(payload)]))
    with suppress(CodecError):
        back = codec.decode(spec_of(x), bytes(header), memoryview(payload[cut:]))
        assert back.shape == x.shape
        assert torch.count_nonzero(back) <= 101


def test_counts_that_do_not_belong_to_the_tensor_are_refused():
    codec = parse("topk:select=gaussian,values=fp32,ratio=10")
    x = normal(LONG)
    encoded = codec.encode(x)
    payload = memoryview(content(encoded))
    for count in (0, 3959, 4041, LONG, LONG + 1, 2**64 - 1):
        with pytest.raises(CodecError, match=f"expected 3960 to 4040 kept numbers, got {count}"):
            codec.decode(spec_of(x), struct.pack("<Q", count), payload)
    for header in (b"", encoded.header + b"\0", encoded.header[:7]):
        with pytest.raises(CodecError, match="header"):
            codec.decode(spec_of(x), header, payload)


def test_samples_with_more_or_fewer_numbers_than_k_are_refused():
    codec = parse("topk:scope=sample,values=fp32,ratio=10")
    wrong = indices.encode(torch.arange(4) * 5, 40)  # 4, 0, 0, 0 of each 10 … in place of 1 each
    payload = memoryview(bytearray(bytes(16) + bytes(wrong.tolist())))
    assert payload.nbytes == codec.size_bytes(TensorSpec((4, 10), "float32"))
    with pytest.raises(CodecError, match="expected 1 to 1 kept numbers of each of 4 samples"):
        codec.decode(TensorSpec((4, 10), "float32"), b"", payload)


@pytest.mark.parametrize(
    "spec",
    [
        TensorSpec((4, 10), "int64"),
        TensorSpec((4, 11), "float32"),
        TensorSpec((2**40, 2**40), "float32"),
        TensorSpec((10,), "float32"),
        TensorSpec((0,), "float32"),
    ],
    ids=["dtype", "shape", "huge", "small", "empty"],
)
def test_another_tensor_is_refused(spec):
    codec = parse("topk:ratio=2")
    encoded = codec.encode(normal(4, 10))
    with pytest.raises(CodecError):
        codec.decode(spec, encoded.header, memoryview(content(encoded)))


@pytest.mark.parametrize("text", ["topk", "topk:select=histogram", "topk:scope=sample,values=int8"])
def test_tensors_of_no_elements_cost_nothing(text):
    codec = parse(text)
    for shape in ((0,), (3, 0), (0, 3)):
        assert codec.encode(torch.empty(shape)).size_bytes == 0
        assert codec.size_bytes(TensorSpec(shape, "float32")) == 0
        assert there_and_back(codec, torch.empty(shape)).shape == shape


def test_whole_numbers_are_refused():
    with pytest.raises(CodecError, match="cannot write int64"):
        parse("topk").encode(torch.arange(9))


def test_the_tensor_is_left_alone():
    x = normal(30, 40).t()
    before = x.clone()
    there_and_back(parse("topk:values=int4"), x)
    assert torch.equal(x, before)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("select", HOW)
@pytest.mark.parametrize("scope", ["tensor", "sample"])
def test_a_device_writes_the_same(values, select, scope):
    codec = parse(f"topk:values={values},select={select},scope={scope},ratio=30")
    x = normal(3, LONG)
    back = there_and_back(codec, x.cuda(), device="cuda")
    assert back.device.type == "cuda"
    if select == "exact":
        assert content(codec.encode(x.cuda())) == content(codec.encode(x))
        assert torch.equal(back.cpu(), there_and_back(codec, x))
