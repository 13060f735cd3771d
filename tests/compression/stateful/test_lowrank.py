"""Rows on a basis that both ends know."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.compression.codec import RAW, CodecError, Stream, fitting, parse, typical_bytes
from shoal.compression.echo import shape_of


def data_of(encoded):
    return memoryview(bytearray(b"".join(encoded.buffers)))


def step(sender, receiver, x, key=0):
    encoded = sender.encode(x, key)
    return receiver.decode(shape_of(x), encoded.header, data_of(encoded))


def rows_of_rank(rank, shape, seed=0):
    """Rows in a space of `rank` dimensions around a mean that is not 0."""
    rng = torch.Generator().manual_seed(seed)
    space = torch.randn(rank, shape[-1], generator=rng)
    mean = torch.randn(shape[-1], generator=rng) * 3
    return torch.randn(*shape[:-1], rank, generator=rng) @ space + mean


def apart(heard, x):
    return float((heard - x).norm() / x.norm())


@given(
    rank=st.integers(1, 8),
    shape=st.sampled_from([(2, 9), (5, 40), (50, 20), (3, 20, 33), (1, 30)]),
    seed=st.integers(0, 2**31),
)
def test_rows_of_no_higher_rank_lose_only_roundings(rank, shape, seed):
    codec = parse("lowrank:rank=8")
    sender, receiver = Stream(codec), Stream(codec)
    x = rows_of_rank(rank, shape, seed)
    assert apart(step(sender, receiver, x, seed), x) < 2**-7
    # The same space again, without a new basis.
    x = x.flip(0) * 0.5
    assert apart(step(sender, receiver, x, seed), x) < 2**-7


@pytest.mark.parametrize("seed", [62, 28772])
def test_a_single_row_has_a_basis(seed):
    """All that it differs from its mean by is the mean's rounding, in one direction."""
    codec, x = parse("lowrank:rank=8"), rows_of_rank(8, (1, 30), seed)
    assert apart(step(Stream(codec), Stream(codec), x, seed), x) < 2**-7


def test_what_is_lost_is_what_the_best_rank_loses():
    rng = torch.Generator().manual_seed(3)
    x = torch.randn(200, 60, generator=rng) @ torch.diag(0.8 ** torch.arange(60.0)) + 2
    codec = parse("lowrank:rank=6")
    heard = step(Stream(codec), Stream(codec), x)
    centred = x - x.mean(0)
    best = torch.linalg.svdvals(centred)[6:].square().sum().sqrt()
    assert float((heard - x).norm()) <= 1.05 * float(best) + 2**-7 * float(x.norm())


def test_the_basis_travels_with_every_renewal_and_only_then():
    codec = parse("lowrank:rank=4,renew=3")
    sender, receiver = Stream(codec), Stream(codec)
    sizes, bases = [], []
    for key in range(7):
        x = rows_of_rank(4, (6, 50), seed=key)
        encoded = sender.encode(x, key)
        receiver.decode(shape_of(x), encoded.header, data_of(encoded))
        sizes.append(encoded.size_bytes)
        bases.append(sender.state["basis"])
        assert torch.equal(sender.state["basis"], receiver.state["basis"])
        assert int(sender.state["count"]) == int(receiver.state["count"]) == key + 1
    with_basis, without = 2 * (6 * 4 + 50) + 4 * 50 * 4, 2 * (6 * 4 + 50)
    assert sizes == [with_basis, without, without] * 2 + [with_basis]
    assert codec.size_bytes(shape_of(x)) == with_basis
    assert typical_bytes(codec, shape_of(x)) == without + 4 * 50 * 4 // 3
    assert torch.equal(bases[0], bases[2])
    assert not torch.equal(bases[2], bases[3])
    unit = bases[3].T @ bases[3]
    assert torch.allclose(unit, torch.eye(4), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_any_floating_dtype(dtype):
    x = rows_of_rank(3, (20, 30)).to(dtype)
    codec = parse("lowrank")
    heard = step(Stream(codec), Stream(codec), x)
    assert heard.dtype == dtype
    assert apart(heard.double(), x.double()) < 2**-6


@pytest.mark.parametrize("shape", [(), (100,), (10, 8), (10, 1), (0, 30), (5, 0)])
def test_tensors_without_a_basis_to_gain_from_go_raw(shape):
    codec, x = parse("lowrank:rank=8"), torch.zeros(shape)
    assert fitting(codec, shape_of(x)) is RAW
    with pytest.raises(CodecError, match="expected 2 dimensions"):
        Stream(codec).encode(x)
    with pytest.raises(CodecError, match="expected 2 dimensions"):
        Stream(codec).decode(shape_of(x), b"", memoryview(bytearray(0)))


def test_few_rows_do_not_pay_and_many_do():
    codec = parse("lowrank:rank=8,renew=1")
    assert fitting(codec, shape_of(torch.zeros(2, 64))) is RAW
    assert fitting(codec, shape_of(torch.zeros(64, 64))) is codec


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_refused_and_the_basis_stays(bad):
    codec = parse("lowrank:renew=1")
    sender = Stream(codec)
    x = rows_of_rank(3, (20, 30))
    sender.encode(x)
    before, worse = sender.state, x.clone()
    worse[3, 4] = bad
    with pytest.raises(CodecError, match="not finite"):
        sender.encode(worse)
    assert sender.state is before


def test_a_payload_that_belongs_elsewhere_is_refused_and_changes_nothing():
    codec, x = parse("lowrank:renew=2"), rows_of_rank(3, (20, 30))
    sender, receiver = Stream(codec), Stream(codec)
    first, second = sender.encode(x), sender.encode(x)
    spec = shape_of(x)
    for header, data in (
        (second.header, data_of(second)),
        (b"", data_of(first)),
        (first.header[:8], data_of(first)),
        (first.header[:8] + b"\0", data_of(first)),
        (first.header + b"\0", data_of(first)),
        (first.header, data_of(first)[:-1]),
        (first.header, memoryview(bytearray(data_of(first)) + b"\0")),
        (first.header, memoryview(bytearray(b"\xff" * first.size_bytes))),
    ):
        with pytest.raises(CodecError):
            receiver.decode(spec, header, data)
        assert receiver.state == {}
    receiver.decode(spec, first.header, data_of(first))
    receiver.decode(spec, second.header, data_of(second))


@pytest.mark.parametrize(
    "state",
    [
        {"basis": torch.zeros(31, 8), "count": torch.tensor(1)},
        {"basis": torch.zeros(30, 7), "count": torch.tensor(1)},
        {"basis": torch.zeros(30, 8).double(), "count": torch.tensor(1)},
        {"basis": torch.zeros(30, 8)},
        {"held": torch.zeros(20, 30)},
    ],
)
def test_a_state_of_another_tensor_is_refused(state):
    with pytest.raises(CodecError, match="expected a"):
        Stream(parse("lowrank"), state).encode(torch.randn(20, 30))


@pytest.mark.parametrize("text", ["lowrank:rank=0", "lowrank:rank=-1", "lowrank:renew=0"])
def test_numbers_that_make_no_sense_are_refused(text):
    with pytest.raises(CodecError, match="expected"):
        parse(text)


def test_equal_keys_give_equal_bytes():
    x, codec = torch.randn(40, 30), parse("lowrank")
    one, other = Stream(codec).encode(x, 7), Stream(codec).encode(x, 7)
    assert bytes(data_of(one)) == bytes(data_of(other))


def test_zeros_come_back():
    codec, x = parse("lowrank"), torch.zeros(20, 30)
    assert torch.equal(step(Stream(codec), Stream(codec), x), x)
