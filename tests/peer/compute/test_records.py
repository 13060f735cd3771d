"""What is in a snapshot: going on from one equals never having stopped, to the bit."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save
from torch import nn
from torch.nn import functional as F

from shoal.dag.plan.plan import CodecChoice
from shoal.peer.compute.records import load_records, take_records, write_records
from shoal.peer.core.snapshots import SnapshotError, in_parts
from shoal.tests.peer.optimizers.eight_bits import from_elements

STOP, STEPS = 3, 6


class Net(nn.Module):
    """Five layers, a batch norm, and a parameter that nobody reads."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 12)
        self.norm = nn.BatchNorm1d(12)
        self.layers = nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh())
        self.last = nn.Linear(12, 4)
        self.unread = nn.Parameter(torch.ones(5))

    def forward(self, x, y):
        h = torch.tanh(self.norm(self.first(x)))
        return F.cross_entropy(self.last(self.layers(h)), y)


@pytest.fixture
def case(make_case):
    def make(**train):
        rng = np.random.default_rng(0)
        data = {"x": rng.normal(size=(90, 6)).astype("f4"), "y": rng.integers(0, 4, 90)}
        return make_case(Net(), **data, **train)

    return make


def steps(world, first, stop):
    for step in range(first, stop):
        for device in world.devices.values():
            device.prefetch(step)
        world._pass(step, {p: b.flow.actions(p) for p, b in world.built.items()})


def taken(world, step):
    return tuple(device.snapshot(step)() for device in world.devices.values())


def resumed(made, plan, states, **changes):
    return made.world(plan, first_step=STOP, resumed=states, **changes)


def coded(plan, text):
    links = [(a, b) for a in plan.peers for b in plan.peers if a != b]
    roles = ("activation", "activation_grad", "sync")
    return replace(plan, codecs=tuple(CodecChoice(a, b, r, text) for a, b in links for r in roles))


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


@pytest.mark.parametrize(
    ("codec", "train"),
    [
        ("", {}),
        ("", {"optimizer": "sgd", "momentum": 0.9}),
        ("", {"optimizer": "sgd", "momentum": 0.0}),
        ("delta+topk:ratio=4", {}),
        ("ef+int4", {"optimizer": "sgd"}),
        ("", {"optimizer": "adamw8bit"}),
    ],
)
def test_going_on_from_snapshots_equals_never_having_stopped(case, codec, train, monkeypatch):
    from_elements(monkeypatch, 20)
    made = case(steps=STEPS, **train)
    plan = made.plan(2, ["a", "b c"])
    plan = coded(plan, codec) if codec else plan
    calm = made.world(plan)
    steps(calm, 0, STOP)
    states = taken(calm, STOP)
    if codec:
        assert any(n.startswith("codec/") for n in load_records(states).tensors)
    before = [take_records(d._work, STOP) for d in calm.devices.values()]
    again = resumed(made, plan, states)
    after = [take_records(d._work, STOP) for d in again.devices.values()]
    assert all(equal(a, b) for a, b in zip(after, before, strict=True)), "the round trip"
    steps(calm, STOP, STEPS)
    steps(again, STOP, STEPS)
    assert [o.loss for o in again.outcomes] == [o.loss for o in calm.outcomes[STOP:]]
    assert equal(again.weights(), calm.weights())


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "muon", "adafactor", "lion", "adamw8bit"])
def test_another_cut_loads_by_name(case, optimizer, monkeypatch):
    """Two stages become three, on other peers; parameters, statistics and slots are the same."""
    from_elements(monkeypatch, 20)
    made = case(steps=STEPS, optimizer=optimizer, no_muon=("first.*",))
    calm = made.world(made.plan(2, ["a", "b"]))
    steps(calm, 0, STOP)
    states = taken(calm, STOP)
    again = resumed(made, made.plan(3, ["c", "a", "d"]), states)
    assert equal(load_records(taken(again, STOP)).tensors, load_records(states).tensors)
    assert torch.equal(again.weights()["unread"], torch.ones(5))
    steps(calm, STOP, STEPS)
    steps(again, STOP, STEPS)
    losses = [o.loss for o in calm.outcomes[STOP:]]
    assert [o.loss for o in again.outcomes] == pytest.approx(losses, rel=1e-5)


def test_a_parameter_that_the_snapshots_lack_is_named(case):
    """The starting weights would be silently wrong."""
    made = case(steps=STEPS)
    plan = made.plan(2, ["a", "b"])
    calm = made.world(plan)
    steps(calm, 0, STOP)
    with pytest.raises(SnapshotError, match=r"the snapshots lack 'first\.weight' of stage 0"):
        resumed(made, plan, taken(calm, STOP)[1:])


def test_codecs_of_who_took_a_place_go_on(case):
    made = case(steps=STEPS)
    plan = coded(made.plan(2, ["a", "b"]), "delta+topk:ratio=4")
    other = coded(made.plan(2, ["a", "c"]), "delta+topk:ratio=4")
    calm = made.world(plan)
    steps(calm, 0, STOP)
    again = resumed(made, other, taken(calm, STOP), renamed={"b": "c"})
    steps(calm, STOP, STEPS)
    steps(again, STOP, STEPS)
    assert [o.loss for o in again.outcomes] == [o.loss for o in calm.outcomes[STOP:]]


# ---------------------------------------------------------------- bytes

RECORDS = {
    "param:w": torch.arange(12.0).reshape(3, 4).t(),
    "slot:w:step": torch.tensor(7.0),
    "buffer:seen": torch.tensor([1, 2, 3]),
    "param:none": torch.zeros(0, 4),
    "param:half": torch.ones(3, dtype=torch.bfloat16),
}
WRITTEN = bytes(write_records(RECORDS))


LARGE = {
    **RECORDS,
    "param:large": torch.randn(64, 40, generator=torch.manual_seed(0)).t(),
    "slot:large:exp_avg": torch.randn(3000, generator=torch.manual_seed(1)).bfloat16(),
    "slot:odd": torch.tensor([0x7FA00001, -1, 1, 0] * 700, dtype=torch.int32).view(torch.float32),
    "slot:zeros": torch.zeros(100_000),
    "buffer:counts": torch.arange(4000),
}


def bits(tensor):
    return tensor.contiguous().view(torch.uint8) if tensor.dim() else tensor


@pytest.mark.parametrize("lossless", [False, True])
def test_large_tensors_come_back_bit_for_bit(lossless):
    data = write_records(LARGE, lossless=lossless)
    found = load_records([in_parts(data)]).tensors
    assert equal({n: bits(t) for n, t in found.items()}, {n: bits(t) for n, t in LARGE.items()})
    assert all(found[n].dtype == t.dtype for n, t in LARGE.items())
    if lossless:
        assert len(data) < len(write_records(LARGE)) - 3000


CODED = bytes(
    write_records({"param:w": torch.randn(50, 50, generator=torch.manual_seed(0))}, lossless=True)
)


@settings(max_examples=60)
@given(st.integers(0, len(CODED) - 1), st.integers(1, 255))
def test_a_changed_byte_of_a_coded_one_is_never_loaded(at, change):
    damaged = bytearray(CODED)
    damaged[at] ^= change
    try:
        found = load_records([in_parts(damaged)]).tensors
    except SnapshotError:
        return
    assert equal(found, load_records([in_parts(CODED)]).tensors)  # spaces that pad the header


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ([1 << 30, 50], "at most 64 times more"),
        ([-1, 50], "negative"),
        ([49, 50], "planes of"),
        ([51, 50], "not a whole zstd frame"),
    ],
)
def test_a_coded_one_that_claims_another_shape_is_refused(shape, said):
    claimed = CODED.replace(b"[50, 50]", json.dumps(shape).encode())
    grown = len(claimed) - len(CODED)
    length = int.from_bytes(claimed[:8], "little") + grown
    with pytest.raises(SnapshotError, match=said):
        load_records([in_parts(length.to_bytes(8, "little") + claimed[8:])])


def test_going_on_from_coded_snapshots_equals_never_having_stopped(case):
    made = case(steps=STEPS)
    plan = made.plan(2, ["a", "b"])
    calm = made.world(plan, lossless_snapshots=True)
    steps(calm, 0, STEPS)
    first = made.world(plan, lossless_snapshots=True)
    steps(first, 0, STOP)
    again = resumed(made, plan, taken(first, STOP))
    steps(again, STOP, STEPS)
    assert equal(again.weights(), calm.weights())


def test_records_come_back_equal():
    found = load_records([in_parts(WRITTEN)]).tensors
    assert equal(found, RECORDS)
    assert {n: t.dtype for n, t in found.items()} == {n: t.dtype for n, t in RECORDS.items()}


@settings(max_examples=60)
@given(st.integers(0, len(WRITTEN) - 1), st.integers(1, 255))
def test_a_changed_byte_is_never_loaded(at, change):
    damaged = bytearray(WRITTEN)
    damaged[at] ^= change
    try:
        found = load_records([in_parts(damaged)]).tensors
    except SnapshotError:
        return
    assert equal(found, RECORDS)  # spaces that pad the header


def test_a_damaged_tensor_is_named():
    damaged = bytearray(WRITTEN)
    where = WRITTEN.index(RECORDS["param:w"].contiguous().numpy().tobytes())
    damaged[where] ^= 1
    with pytest.raises(SnapshotError, match="'param:w' has another hash"):
        load_records([in_parts(damaged)])


@pytest.mark.parametrize("size", [0, 7, 40, len(WRITTEN) - 1])
def test_a_truncated_one_is_refused(size):
    with pytest.raises(SnapshotError, match=f"of {size} bytes cannot be read"):
        load_records([in_parts(WRITTEN[:size])])


@pytest.mark.parametrize("metadata", [None, {"xxh3_128": "[]"}, {"xxh3_128": "3"}, {"other": ""}])
def test_one_without_hashes_is_refused(metadata):
    with pytest.raises(SnapshotError, match="cannot be read"):
        load_records([in_parts(save({"param:w": torch.ones(2)}, metadata))])


def test_one_that_lacks_a_tensor_is_refused():
    hashes = {"xxh3_128": '{"param:w": "0"}'}
    with pytest.raises(SnapshotError, match="it lacks 'param:w'"):
        load_records([in_parts(save({}, hashes))])
