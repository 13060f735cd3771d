"""What is frozen is in the weights files for good: no snapshot and no export brings it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shoal.dag.cost.cost import cost
from shoal.dag.cost.memory import MemoryModel
from shoal.dag.transforms.quantize import in_int8
from shoal.peer.compute.records import load_records, write_records
from shoal.peer.core.snapshots import SnapshotError
from shoal.tests.peer.optimizers.eight_bits import from_elements

STOP, STEPS = 2, 4


class Net(nn.Module):
    """Frozen layers below and beside trained ones, one of them tied, one never read; a buffer that
    stays and one that steps update."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.below = nn.Linear(6, 8).requires_grad_(False)
        self.again = nn.Linear(6, 8)
        self.again.weight, self.again.bias = self.below.weight, self.below.bias
        self.norm = nn.BatchNorm1d(8)
        self.middle = nn.Linear(8, 8)
        self.beside = nn.Linear(8, 4, bias=False).requires_grad_(False)
        self.last = nn.Linear(8, 4, bias=False)
        self.unread = nn.Parameter(torch.randn(3), requires_grad=False)
        self.register_buffer("scale", torch.full((8,), 1.5))

    def forward(self, x, y):
        h = self.norm(torch.tanh(self.below(x) + self.again(x))) * self.scale
        h = torch.tanh(self.middle(h))
        return F.cross_entropy(self.beside(h) + self.last(h), y)


STILL = {"below.weight", "below.bias", "beside.weight", "unread", "scale"}
TIED = {"again.weight", "again.bias"}


@pytest.fixture
def made(make_case):
    rng = np.random.default_rng(0)
    data = {"x": rng.normal(size=(90, 6)).astype("f4"), "y": rng.integers(0, 4, 90)}
    return make_case(Net(), **data, steps=STEPS)


def steps(world, first, stop):
    for step in range(first, stop):
        for device in world.devices.values():
            device.prefetch(step)
        world._pass(step, {p: b.flow.actions(p) for p, b in world.built.items()})


def names(states):
    """Of parameters and buffers in snapshots."""
    found = load_records(states).tensors
    return {n.partition(":")[2] for n in found if n.startswith(("param:", "buffer:"))}


def exported(world):
    from safetensors.torch import load

    return {n: t for d in world.devices.values() for n, t in load(bytes(d.export())).items()}


def test_neither_snapshots_nor_exports_have_it(made):
    world = made.world(made.plan(2, ["a", "b c"]))
    steps(world, 0, STEPS)
    states = tuple(d.snapshot(STEPS)() for d in world.devices.values())
    every = set(made.module.state_dict())
    assert names(states) == every - STILL - TIED
    assert set(exported(world)) == every - STILL - TIED
    assert any(b.partial for b in world.built.values())
    plain = made.plain()[1].state_dict()
    for name, tensor in world.weights().items():
        torch.testing.assert_close(tensor, plain[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("holders", [["a", "b"], ["c", "a", "d"]])
def test_a_run_goes_on_with_it_under_any_cut(made, holders):
    calm = made.world(made.plan(2, ["a", "b"]))
    steps(calm, 0, STOP)
    states = tuple(d.snapshot(STOP)() for d in calm.devices.values())
    again = made.world(made.plan(len(holders), holders), first_step=STOP, resumed=states)
    steps(calm, STOP, STEPS)
    steps(again, STOP, STEPS)
    losses = [o.loss for o in calm.outcomes[STOP:]]
    assert [o.loss for o in again.outcomes] == pytest.approx(losses, rel=1e-5)
    assert set(exported(again)) == set(exported(calm))
    more = tuple(d.snapshot(STEPS)() for d in again.devices.values())
    assert names(more) == names(states), "also those of who went on"


def test_what_no_file_has_is_brought(made):
    """Whoever's run begins with fewer names has the others in its snapshots."""
    plan = made.plan(1, ["a"])
    calm = made.world(plan)
    steps(calm, 0, STOP)
    state = calm.devices["a"].snapshot(STOP)()
    some = {n: t for n, t in made.captured.tensors.items() if n != "beside.weight"}
    with pytest.raises(SnapshotError, match=r"no weights file has 'beside\.weight'"):
        made.world(plan, first_step=STOP, resumed=(state,), weights=some)
    tensors = load_records([state]).tensors
    whole = write_records({**tensors, "param:beside.weight": made.module.beside.weight.detach()})
    again = made.world(plan, first_step=STOP, resumed=((whole,),), weights=some)
    steps(again, STOP, STEPS)
    steps(calm, STOP, STEPS)
    assert [o.loss for o in again.outcomes] == [o.loss for o in calm.outcomes[STOP:]]
    assert "beside.weight" in names((again.devices["a"].snapshot(STEPS)(),))
    assert "beside.weight" in exported(again)


@pytest.fixture
def narrow(made):
    """The same, its frozen matrices in 8 bits."""
    made.captured = replace(made.captured, graph=in_int8(made.captured.graph))
    return made


def test_weights_in_8_bits_are_in_no_snapshot_and_no_export(narrow):
    """Another cut loads the same bits from the files; a byte a weight stands, and a scale a row."""
    calm = narrow.world(narrow.plan(2, ["a", "b c"]))
    steps(calm, 0, STOP)
    states = tuple(d.snapshot(STOP)() for d in calm.devices.values())
    again = narrow.world(narrow.plan(3, ["c", "a", "d"]), first_step=STOP, resumed=states)
    steps(calm, STOP, STEPS)
    steps(again, STOP, STEPS)
    losses = [o.loss for o in calm.outcomes[STOP:]]
    assert [o.loss for o in again.outcomes] == pytest.approx(losses, rel=1e-5)
    changing = set(narrow.module.state_dict()) - STILL - TIED
    for world in (calm, again):
        assert set(exported(world)) == changing
        assert names(tuple(d.snapshot(STEPS)() for d in world.devices.values())) == changing
    alone = narrow.world(narrow.plan(1, ["a"]))
    (held,) = alone.devices["a"]._work.held.values()
    kept = {n: p.nbytes for n, p in held.executor.parameters.items() if not p.requires_grad}
    assert kept == {
        "below.weight": 48,
        "below.weight..scale": 32,
        "below.bias": 32,
        "beside.weight": 32,
        "beside.weight..scale": 16,
    }


class Half(nn.Module):
    """Weights in bfloat16, the first of them frozen; a norm in float32."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 8, dtype=torch.bfloat16).requires_grad_(False)
        self.norm = nn.LayerNorm(8)
        self.last = nn.Linear(8, 4, dtype=torch.bfloat16)

    def forward(self, x, y):
        h = self.norm(torch.tanh(self.first(x.bfloat16())).float())
        return F.cross_entropy(self.last(h.bfloat16()).float(), y)


@pytest.mark.parametrize(
    ("optimizer", "state_dtype", "state"),
    [
        *(("adamw", "fp32", 4), ("adamw", "bf16", 2), ("sgd", "fp32", 4), ("sgd", "bf16", 2)),
        ("adamw8bit", "fp32", 0),
    ],
)
def test_what_stands_is_what_the_plan_counts(make_case, optimizer, state_dtype, state, monkeypatch):
    """By hand, by the peer, and by the memory model that plans are made with."""
    rng = np.random.default_rng(0)
    data = {"x": rng.normal(size=(90, 6)).astype("f4"), "y": rng.integers(0, 4, 90)}
    from_elements(monkeypatch, 32)
    made = make_case(Half(), **data, optimizer=optimizer, state_dtype=state_dtype)
    world = made.world(made.plan(1, ["a"]))
    steps(world, 0, 1)
    frozen, norm, last = 2 * (6 * 8 + 8), 16, 8 * 4 + 4
    slots = 1 if optimizer == "sgd" else 2
    states = slots * state * (norm + last)
    if optimizer == "adamw8bit":  # of last.weight alone, with one scale
        states = 2 * (4 * norm + (8 * 4 + 4) + 4 * 4)
    by_hand = frozen + 2 * (4 * norm + 2 * last) + states
    device = world.devices["a"]
    assert device._work.standing_bytes == by_hand
    held = device._work.held[0]
    kept = held.strategy.state_tensors()
    moments = sum(t.nbytes for n, t in kept.items() if not n.endswith(":step"))
    assert moments == states == held.strategy.size_bytes
    graph = made.captured.graph.bind(2)
    model = MemoryModel(graph, cost(graph), in_8_bits=made.train.in_8_bits)
    memory = model.stage(0, len(graph.operators))
    assert memory.standing(made.train.state_bytes) == by_hand
    assert memory.snapshot(made.train.state_bytes) == by_hand - frozen - 4 * norm - 2 * last
    record = load_records([device.snapshot(1)()]).tensors
    written = sum(t.nbytes for n, t in record.items() if not n.endswith(":step"))
    assert written == memory.snapshot(made.train.state_bytes)
