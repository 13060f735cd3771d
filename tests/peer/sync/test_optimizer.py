"""The update of a stage equals the plain torch loop's."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from shoal.job import Train
from shoal.peer.sync.optimizer import StageOptimizer, clip_factor, learning_rate
from shoal.sim.plain import oracle
from shoal.tests.peer.optimizers.eight_bits import from_elements


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 1))


def batches(step, microbatch):
    g = torch.Generator().manual_seed(100 * step + microbatch)
    return torch.randn(4, 5, generator=g)


def loss_of(module, x):
    return (module(x) ** 2).sum(1).mean() * 10


class Wrapped(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return loss_of(self.inner, x)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "muon", "adafactor", "lion", "adamw8bit"])
@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd", "constant"])
@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_updates_equal_the_plain_loop(optimizer, schedule, clip, monkeypatch):
    from_elements(monkeypatch, 9)
    train = Train(
        steps=6, batch=8, microbatch=4, optimizer=optimizer, schedule=schedule, clip=clip, warmup=2,
        lr=0.05, no_decay=("*.bias", "1.*"), no_muon=("0.*",),
    )  # fmt: skip
    plain = model()
    ours = copy.deepcopy(plain)
    wrapped = Wrapped(plain)
    aliased = Train(
        **{**vars(train), "no_decay": ("*.bias", "inner.1.*"), "no_muon": ("inner.0.*",)}
    )
    oracle.train(wrapped, lambda s, m: {"x": batches(s, m)}, aliased, steps=6, microbatches=2)
    parameters = dict(ours.named_parameters())
    update = StageOptimizer(train, parameters)
    for step in range(6):
        for m in range(2):
            loss_of(ours, batches(step, m)).backward()
        squares = sum(float(p.grad.double().square().sum()) for p in parameters.values())
        update.step(step, weight=2.0, norm=math.sqrt(squares) / 2)
        ours.zero_grad()
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)


def test_no_decay_is_chosen_by_name():
    module = model()
    before = {n: p.detach().clone() for n, p in module.named_parameters()}
    update = StageOptimizer(Train(steps=1, warmup=0, lr=0.1), dict(module.named_parameters()))
    for p in module.parameters():
        p.grad = torch.zeros_like(p)
    update.step(0, weight=1.0, norm=0.0)
    moved = {n for n, p in module.named_parameters() if not torch.equal(p, before[n])}
    assert moved == {"0.weight", "1.weight", "3.weight"}


def test_what_has_no_gradient_or_is_frozen_stays():
    module = model()
    module[0].requires_grad_(False)
    before = copy.deepcopy(module.state_dict())
    update = StageOptimizer(Train(steps=1, warmup=0), dict(module.named_parameters()))
    update.step(0, weight=1.0, norm=0.0)
    assert all(torch.equal(v, before[k]) for k, v in module.state_dict().items())
    assert update.state_bytes == 2 * 4 * (8 + 8 + 8 + 1)
    frozen = StageOptimizer(Train(steps=1), {"w": nn.Parameter(torch.ones(2), requires_grad=False)})
    frozen.step(0, weight=1.0, norm=0.0)
    assert frozen.state_bytes == 0


def test_a_step_without_weight_updates_nothing():
    module = model()
    before = copy.deepcopy(module.state_dict())
    update = StageOptimizer(Train(steps=1, warmup=0), dict(module.named_parameters()))
    for p in module.parameters():
        p.grad = torch.zeros_like(p)
    update.step(0, weight=0.0, norm=0.0)
    assert all(torch.equal(v, before[k]) for k, v in module.state_dict().items())


def test_the_rate_warms_up_and_falls():
    train = Train(steps=100, warmup="10%", lr=1.0, lr_final=0.1, schedule="cosine")
    assert learning_rate(train, 0) == pytest.approx(0.1)
    assert learning_rate(train, 9) == pytest.approx(1.0)
    assert learning_rate(train, 10) == pytest.approx(1.0)
    assert learning_rate(train, 55) == pytest.approx(0.55)
    assert learning_rate(train, 100) == pytest.approx(0.1)
    assert learning_rate(train, 1000) == pytest.approx(0.1)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd", "constant"])
def test_the_rate_is_the_plain_loops(schedule):
    train = Train(
        steps=37, schedule=schedule, warmup="8%", lr_final=1.0 if schedule == "constant" else 0.2
    )
    for step in range(37):
        assert learning_rate(train, step) == pytest.approx(
            oracle.learning_rate(train, step, 37), rel=1e-12
        )


def test_clipping_only_ever_shrinks():
    assert clip_factor(4.0, 1.0) == 0.25
    assert clip_factor(0.5, 1.0) == 1.0
    assert clip_factor(4.0, 0.0) == 1.0


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"optimizer": "sgd", "momentum": 0.9},
        {"optimizer": "sgd", "momentum": 0.0},
        {"optimizer": "muon", "no_muon": ("3.*",)},
        {"optimizer": "adafactor"},
        {"optimizer": "lion"},
        {"optimizer": "adamw8bit"},
    ],
)
def test_an_optimizer_goes_on_from_its_state_to_the_bit(settings, monkeypatch):
    """The other one holds one parameter more, in another order, and takes copies."""
    from_elements(monkeypatch, 9)
    train = Train(steps=6, batch=4, microbatch=4, lr=0.05, no_decay=("*.bias",), **settings)
    first = model()
    one = StageOptimizer(train, dict(first.named_parameters()))

    def update(module, optimizer, step):
        loss_of(module, batches(step, 0)).backward()
        optimizer.step(step, weight=1.0, norm=1.0)
        module.zero_grad()

    for step in range(3):
        update(first, one, step)
    second = copy.deepcopy(first)
    named = {"more": nn.Parameter(torch.ones(3)), **dict(reversed([*second.named_parameters()]))}
    other = StageOptimizer(train, named)
    states = one.state_tensors()
    assert bool(states) == (train.optimizer_slots > 0)
    other.load_state_tensors(states | {"stranger:exp_avg": torch.ones(2)})
    again = other.state_tensors()
    assert again.keys() == states.keys()
    assert all(torch.equal(again[n], states[n]) for n in states)
    for step in range(3, 6):
        update(first, one, step)
        update(second, other, step)
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_frozen_parameters_have_no_state_to_load():
    module = model().requires_grad_(False)
    optimizer = StageOptimizer(Train(steps=1, batch=1), dict(module.named_parameters()))
    optimizer.load_state_tensors({"0.weight:exp_avg": torch.ones(8, 5)})
    assert optimizer.state_tensors() == {}


# ---------------------------------------------------------------- lost stages made anew


def trained(optimizer, steps, weighs=False):
    train = Train(
        steps=9, batch=4, microbatch=4, optimizer=optimizer, warmup=1, lr=0.05, no_muon=("0.*",)
    )
    module = model()
    parameters = dict(module.named_parameters())
    return train, module, parameters, StageOptimizer(train, parameters, weighs=weighs), steps


def run(module, parameters, update, steps):
    for step in steps:
        loss_of(module, batches(step, 0)).backward()
        update.step(step, weight=1.0, norm=0.1)
        module.zero_grad()


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "muon", "lion", "adamw8bit"])
def test_boosted_parameters_are_updated_as_with_so_much_more_learning_rate(optimizer, monkeypatch):
    from_elements(monkeypatch, 9)
    train, module, parameters, update, _ = trained(optimizer, 4)
    oracle_module = copy.deepcopy(module)
    mine = dict(oracle_module.named_parameters())
    faster = Train(**{**vars(train), "lr": 1.5 * train.lr})
    there = {n: q for n, q in mine.items() if n.startswith("0.")}
    rest = {n: q for n, q in mine.items() if n not in there}
    pair = StageOptimizer(faster, there), StageOptimizer(train, rest)
    update.boost(["0.weight", "0.bias"], 1.5)
    update.boost(["0.weight"], 1.5)  # said again: no more than that
    run(module, parameters, update, range(4))
    for step in range(4):
        loss_of(oracle_module, batches(step, 0)).backward()
        for each in pair:
            each.step(step, weight=1.0, norm=0.1)
        oracle_module.zero_grad()
    for name, parameter in parameters.items():
        assert torch.equal(parameter, mine[name]), name


def test_a_boost_and_the_squares_are_part_of_the_state():
    _, module, parameters, update, _ = trained("adamw", 3, weighs=True)
    update.boost(["0.weight"], 1.1)
    run(module, parameters, update, range(3))
    again_module = copy.deepcopy(module)
    _, _, _, other, _ = trained("adamw", 0)
    again = StageOptimizer(other.train, dict(again_module.named_parameters()), weighs=True)
    again.load_state_tensors({n: t.clone() for n, t in update.state_tensors().items()})
    assert again.squares == update.squares
    assert again.squares
    run(module, parameters, update, range(3, 6))
    run(again_module, dict(again_module.named_parameters()), again, range(3, 6))
    for name, parameter in again_module.named_parameters():
        assert torch.equal(parameter, parameters[name]), name


def test_squares_are_of_the_mean_gradient_before_clipping():
    _, module, parameters, update, _ = trained("adamw", 1, weighs=True)
    loss_of(module, batches(0, 0)).backward()
    grads = {n: q.grad.clone() for n, q in parameters.items()}
    update.step(0, weight=2.0, norm=50.0)
    for name, grad in grads.items():
        wanted = float((grad.double() / 2).square().sum())
        assert float(update.squares[name]) == pytest.approx(wanted, rel=1e-9), name
    assert not trained("adamw", 1)[3].squares


def test_after_a_reset_the_state_is_that_of_a_beginner():
    _, module, parameters, update, _ = trained("adamw", 3)
    run(module, parameters, update, range(3))
    update.reset(["0.weight"])
    names = {n.rpartition(":")[0] for n in update.state_tensors()}
    assert names == {*parameters} - {"0.weight"}
    run(module, parameters, update, range(3, 4))
    state = update.state_tensors()
    assert float(state["0.weight:step"]) == 1
    assert float(state["0.bias:step"]) == 4
