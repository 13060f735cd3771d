"""Blocks of a split parameter: read by rows, decayed under the user's name, merged on export."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shoal.dag.transforms.split_weights import blocks
from shoal.job import Train
from shoal.peer.blobs.weights import (
    WeightError,
    Weights,
    WeightsFile,
    serialize,
    starting_tensor,
)
from shoal.peer.sync.optimizer import StageOptimizer
from shoal.tests.sim.played import merge_blocks


def reading(tensors, log):
    data = serialize(tensors)

    def read(name, offset, length):
        log.append(length)
        return data[offset : offset + length]

    return Weights([WeightsFile("ab" * 32, len(data))], read)


@given(
    rows=st.integers(2, 30),
    parts=st.integers(2, 9),
    matrix=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
)
def test_a_block_reads_its_rows_and_nothing_more(rows, parts, matrix, dtype):
    whole = torch.randn((rows, 3) if matrix else (rows,)).to(dtype)
    log: list[int] = []
    files = reading({"head.weight": whole, "other": torch.randn(1000)}, log)
    assert len(files) == 2
    log.clear()
    found = {str(b): starting_tensor(files, str(b)) for b in blocks("head.weight", parts)}
    assert sum(log) == whole.numel() * whole.element_size()
    # A mapping that holds tensors gives the same.
    for name, tensor in found.items():
        assert torch.equal(tensor, starting_tensor({"head.weight": whole}, name))
        assert tensor.dtype == dtype
    merged = merge_blocks(found)
    assert list(merged) == ["head.weight"]
    assert torch.equal(merged["head.weight"], whole)


def test_names_that_are_whole_or_absent():
    files = reading({"a": torch.ones(2), "b..0/2": torch.zeros(1)}, [])
    assert torch.equal(starting_tensor(files, "a"), torch.ones(2))
    assert torch.equal(starting_tensor(files, "b..0/2"), torch.zeros(1))  # a part of an export
    assert starting_tensor(files, "b..1/2") is None
    assert starting_tensor(files, "b") is None
    with pytest.raises(KeyError):
        files.rows("b", 0, 1)


@pytest.mark.parametrize(("start", "stop"), [(-1, 1), (0, 3), (2, 1)])
def test_rows_that_a_file_does_not_have_are_refused(start, stop):
    with pytest.raises(WeightError, match="which has shape"):
        reading({"a": torch.ones(2, 2)}, []).rows("a", start, stop)
    with pytest.raises(WeightError, match="which has shape"):
        reading({"a": torch.ones(())}, []).rows("a", 0, 0)


def test_a_scalar_has_no_blocks():
    with pytest.raises(WeightError, match="which has shape"):
        starting_tensor(reading({"a": torch.ones(())}, []), "a..0/2")


WHOLE = {"w..0/3": (1, 2), "w..1/3": (2, 2), "w..2/3": (2, 2), "bias": (5,)}


def test_an_export_has_the_users_names():
    tensors = {name: torch.randn(shape) for name, shape in WHOLE.items()}
    merged = merge_blocks(tensors)
    assert {name: tuple(t.shape) for name, t in merged.items()} == {"w": (5, 2), "bias": (5,)}
    assert merged["bias"] is tensors["bias"]


@pytest.mark.parametrize(
    "change",
    [
        {"w..1/3": None},
        {"w..2/3": None},
        {"w..2/3": (3, 2)},
        {"w..2/3": (2, 1)},
        {"w..2/3": ()},
        {"w..0/2": (2, 2)},
        {"w": (5, 2)},
    ],
)
def test_blocks_that_are_no_whole_are_refused(change):
    shapes = {name: shape for name, shape in (WHOLE | change).items() if shape is not None}
    with pytest.raises(WeightError, match="expected every block of 'w' once"):
        merge_blocks({name: torch.zeros(shape) for name, shape in shapes.items()})


def test_decay_goes_by_the_users_name():
    names = ["head.weight..0/2", "head.bias..1/2", "body.weight"]
    parameters = {name: nn.Parameter(torch.ones(2)) for name in names}
    train = Train(
        steps=1, optimizer="sgd", lr=1.0, warmup=0, schedule="constant", weight_decay=0.5,
        momentum=0.0, no_decay=("*.bias", "head.weight"),
    )  # fmt: skip
    optimizer = StageOptimizer(train, parameters)
    for parameter in parameters.values():
        parameter.grad = torch.zeros(2)
    optimizer.step(0, weight=1.0, norm=0.0)
    assert [p[0].item() for p in parameters.values()] == [1.0, 1.0, 0.5]
