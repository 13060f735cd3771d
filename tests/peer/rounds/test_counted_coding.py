"""Contributions with how many clients sent each number: what is written is read, and nothing
else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.compression.codec import CodecError
from shoal.dag.execute.execute import TensorSpecError
from shoal.dag.ir.graph import TensorSpec
from shoal.dag.rounds.vector import Entry, RunVector
from shoal.job import Job
from shoal.job.rounds import RoundSettings
from shoal.peer.rounds.client_tensors import ClientTensors
from shoal.peer.rounds.coding import CountedCoding
from shoal.proto.broker_pb2 import RoundPlan

SIZES = {"param:w": 3000, "param:b": 7, "buffer:norm.mean": 5}


def vector() -> RunVector:
    entries, start = [], 0
    for value, n in SIZES.items():
        entries.append(Entry(value, TensorSpec((n,), "float32"), start, 0))
        start += n
    return RunVector(entries)


def rounds() -> RoundSettings:
    job = Job(
        model="m.py:f",
        train={"steps": 5, "batch": 8},
        data={"kind": "arrays", "source": "x", "partition": {"kind": "iid", "clients": 40}},
        sync={
            "kind": "federated",
            "compression": "bcrs+opwa",
            "client_links": {"up": "1Mbit"},
        },
    )
    assert job.rounds is not None
    return job.rounds


def algebra() -> ClientTensors:
    return ClientTensors(vector(), rounds(), "r-1")


@given(st.floats(0.0, 1.0), st.integers(0, 99))
@settings(max_examples=20, deadline=None)
def test_what_is_given_is_read(density: float, seed: int) -> None:
    made, g = algebra(), torch.Generator().manual_seed(seed)
    coding, (part,) = made.codings[0], made.vector.parts(0, made.vector.elements)[:1]
    rows = [torch.randn(2, n, generator=g) for n in SIZES.values()]
    for row in rows:
        row *= torch.rand(row.shape[1], generator=g) < density
    given_ = [(p, rows[list(SIZES).index(p.entry.value)]) for p in made.vector.pieces(part)]
    written = made.give(part, given_, RoundPlan(exponent=10), coding)
    data = b"".join(written.buffers)
    found = coding.decode(part, memoryview(bytearray(data)))
    assert torch.equal(found.view(torch.int32), written.values.view(torch.int32))
    assert torch.equal(found, torch.cat([r for _, r in given_], dim=1))
    assert len(data) <= coding.most_bytes(part)


@given(st.binary(max_size=60), st.integers(0, 40))
@settings(max_examples=60, deadline=None)
def test_other_bytes_are_refused(data: bytes, first: int) -> None:
    coding = CountedCoding(vector(), "nonzero")
    for some in (data, first.to_bytes(8, "little") + data):
        with pytest.raises(CodecError):
            coding.decode((0, 3000), memoryview(bytearray(some)))


def test_a_snapshot_of_another_shape_is_refused() -> None:
    made = algebra()
    entry = made.vector.entries[1]
    assert made.loaded(torch.ones(2, 7), entry, given=True).shape == (2, 7)
    for values, is_given in ((torch.ones(7), True), (torch.ones(2, 7), False)):
        with pytest.raises(TensorSpecError, match="7 elements"):
            made.loaded(values, entry, given=is_given)
