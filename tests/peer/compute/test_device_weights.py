"""Weights are read tensor by tensor, by byte range, and nothing in a file is believed unchecked."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, save

from shoal.peer.blobs.weights import (
    DTYPES,
    Serialized,
    WeightError,
    Weights,
    WeightsFile,
    serialize,
)


def reading(data, log=None):
    def read(name, offset, length):
        if log is not None:
            log.append((offset, length))
        return data[offset : offset + length]

    return Weights([WeightsFile("ab" * 32, len(data))], read)


def test_only_the_bytes_of_a_tensor_are_read():
    tensors = {"a": torch.randn(3, 4), "b": torch.arange(5), "c": torch.zeros(0, 2)}
    tensors["d"] = torch.randn(7).bfloat16()
    data = serialize(tensors)
    log: list[tuple[int, int]] = []
    weights = reading(data, log)
    assert torch.equal(weights["b"], tensors["b"])
    assert [length for _, length in log][2:] == [40]
    assert set(weights) == set(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(weights[name], tensor)
        assert weights[name].dtype == tensor.dtype
    assert "e" not in weights


def test_two_names_of_one_tensor_are_both_written():
    tensor = torch.randn(4)
    found = load(bytes(serialize({"a": tensor, "b": tensor, "c": tensor[:2]})))
    assert torch.equal(found["a"], found["b"])
    assert torch.equal(found["c"], tensor[:2])


@given(
    shapes=st.dictionaries(
        st.text(st.characters(codec="utf-8"), min_size=1, max_size=8),
        st.tuples(st.lists(st.integers(0, 3), max_size=3), st.sampled_from([*DTYPES.values()])),
        max_size=5,
    ),
    metadata=st.none() | st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3),
    strided=st.booleans(),
)
def test_what_is_written_is_what_the_library_reads_and_the_other_way_round(
    shapes, metadata, strided
):
    shapes.pop("__metadata__", None)
    generator = torch.manual_seed(0)
    tensors = {
        name: torch.randint(0, 2, shape, generator=generator).to(dtype)
        for name, (shape, dtype) in shapes.items()
    }
    given_ = {
        n: t.t().contiguous().t() if strided and t.dim() == 2 else t for n, t in tensors.items()
    }
    data = bytes(serialize(given_, metadata))
    for found in (load(data), dict(reading(data)), dict(reading(save(tensors, metadata or None)))):
        assert found.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert torch.equal(found[name], tensor)
            assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)


def test_a_dtype_that_no_file_has_is_named():
    with pytest.raises(WeightError, match=r"'odd' is torch\.complex64: expected one of BOOL"):
        serialize({"odd": torch.zeros(2, dtype=torch.complex64)})


def file_of(header):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(16)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"short",
        (2**40).to_bytes(8, "little"),
        file_of(b"{"),
        file_of([]),
        file_of({"a": 1}),
        file_of({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 15]}}),
        file_of({"a": {"dtype": "F32", "shape": [5], "data_offsets": [0, 20]}}),
        file_of({"a": {"dtype": "F32", "shape": [-4], "data_offsets": [16, 0]}}),
        file_of({"a": {"dtype": "PICKLE", "shape": [4], "data_offsets": [0, 16]}}),
        file_of({"a": {"dtype": ["F32"], "shape": [4], "data_offsets": [0, 16]}}),
        file_of({"a": {"dtype": "F32", "shape": 4, "data_offsets": [0, 16]}}),
    ],
)
def test_a_damaged_file_is_refused(data):
    with pytest.raises(WeightError):
        reading(data)["a"]


@given(st.binary(max_size=200))
def test_random_bytes_are_refused_cleanly(noise):
    data = file_of(noise)
    with pytest.raises((WeightError, KeyError)):
        reading(data)["a"]


def test_a_truncated_file_is_refused():
    data = serialize({"a": torch.ones(8)})
    weights = Weights([WeightsFile("ab" * 32, len(data))], lambda h, o, n: data[o : o + n][:20])
    with pytest.raises(WeightError, match="expected"):
        weights["a"]


def test_a_file_is_made_while_it_is_read():
    tensors = {
        "a": torch.randn(5, 3),
        "b": torch.arange(4),
        "c": torch.zeros(0),
        "d": torch.ones(()),
    }
    whole, made = bytes(serialize(tensors, {"k": "v"})), Serialized(tensors, {"k": "v"})
    assert made.size_bytes == len(whole)
    for offset in range(0, len(whole) + 1, 7):
        for most in (1, 64, 10_000):
            pieces = list(made.pieces(offset, most))
            assert b"".join(pieces) == whole[offset:]
            assert all(0 < len(piece) <= most for piece in pieces)


def test_what_files_say_of_themselves_is_read_with_them():
    data = bytes(serialize({"a": torch.ones(2)}, {"format": "pt"}))
    assert reading(data).metadata == {"format": "pt"}
