"""What is frozen is in the weights files for good: no snapshot and no export brings it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shoal.peer.records import load_records
from shoal.peer.snapshots import SnapshotError

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
    """A snapshot of an older peer has all; and then so do those that come after it."""
    plan = made.plan(1, ["a"])
    calm = made.world(plan)
    steps(calm, 0, STOP)
    state = calm.devices["a"].snapshot(STOP)()
    trained = {n: t for n, t in made.captured.tensors.items() if n not in STILL}
    with pytest.raises(SnapshotError, match=r"lack '.*' of stage 0"):
        made.world(plan, first_step=STOP, resumed=(state,), weights=trained)
