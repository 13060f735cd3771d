"""Optimizers over bfloat16 weights, and with states in bfloat16: torch's own step in float32, and
one rounding that is the same for every holder, whatever the slices, blocks and interruptions."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from shoal.dag.ir import random
from shoal.dag.ir.random import rounded, rounding_key
from shoal.job import Train
from shoal.peer.sync import narrow
from shoal.peer.sync.optimizer import StageOptimizer

ROWS, WIDE = 10, 6


def grads(step, shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(step))


def start(dtype):
    return torch.linspace(-1, 1, ROWS * WIDE).view(ROWS, WIDE).to(dtype)


def train_of(optimizer, state_dtype="bf16", **changes):
    return Train(
        steps=9, warmup=0, schedule="constant", lr=0.01, clip=0.0, optimizer=optimizer,
        state_dtype=state_dtype, **changes,
    )  # fmt: skip


def stepped(train, parameters, steps, *, update=None, first=0, firsts=None, rows=None):
    update = update or StageOptimizer(train, parameters, seed=7, firsts=firsts)
    for step in range(first, first + steps):
        for name, p in parameters.items():
            whole = grads(step, (ROWS, WIDE))
            p.grad = whole[rows[name] if rows else slice(None)].to(p.dtype)
        update.step(step, weight=1.0, norm=1.0)
    return update


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("state_dtype", ["fp32", "bf16"])
def test_a_step_is_torchs_in_float32_and_one_rounding(optimizer, dtype, state_dtype):
    train = train_of(optimizer, state_dtype)
    ours = nn.Parameter(start(dtype))
    update = stepped(train, {"w": ours}, 4)
    # The oracle: a fresh torch optimizer each step, its state put in and taken out by hand.
    weight, state = start(dtype), {}
    for step in range(4):
        p = nn.Parameter(weight.float())
        p.grad = grads(step, (ROWS, WIDE)).to(dtype).float()
        made = (
            torch.optim.AdamW([p], lr=0.01, betas=train.betas, eps=train.eps, weight_decay=0.1)
            if optimizer == "adamw"
            else torch.optim.SGD([p], lr=0.01, momentum=0.9, weight_decay=0.1)
        )
        if state:
            made.state[p] = {k: t.float() for k, t in state.items()}
        made.step()

        def kept(t, part, dtype, step=step):
            if dtype is not torch.bfloat16 or part == "step":
                return t.clone()
            key = rounding_key(7, step, f"w:{part}")
            return rounded(t.reshape(-1), 0, key=key).view(t.shape)

        state_in = torch.bfloat16 if state_dtype == "bf16" else torch.float32
        weight = kept(p.detach(), "", dtype)
        state = {k: kept(t, k, state_in) for k, t in made.state[p].items()}
    assert torch.equal(ours, weight)
    found = update.state_tensors()
    assert found.keys() == {f"w:{k}" for k in state}
    assert all(torch.equal(found[f"w:{k}"], t) for k, t in state.items())
    moments = [t for n, t in found.items() if not n.endswith(":step")]
    assert update.state_bytes == sum(t.nbytes for t in moments)
    if dtype is torch.float32 or state_dtype == "fp32":
        assert update.state_bytes == train.state_bytes * ours.numel()


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_slices_change_nothing(optimizer, monkeypatch):
    train, found = train_of(optimizer), []
    for size in (1 << 20, 16):
        monkeypatch.setattr(random, "ROUNDED", 16)  # what shares a number of the hash
        monkeypatch.setattr(narrow, "SLICE", size)
        p = nn.Parameter(start(torch.bfloat16))
        states = stepped(train, {"w": p}, 3).state_tensors()
        found.append({"": p.detach(), **states})
    assert all(torch.equal(found[0][k], found[1][k]) for k in found[0])


def test_blocks_of_a_split_parameter_are_updated_as_the_whole():
    train = train_of("adamw")
    whole = nn.Parameter(start(torch.bfloat16))
    stepped(train, {"w": whole}, 3)
    rows = {f"w..{b}/3": slice(ROWS * b // 3, ROWS * (b + 1) // 3) for b in range(3)}
    parts = {n: nn.Parameter(start(torch.bfloat16)[r].clone()) for n, r in rows.items()}
    firsts = {n: r.start * WIDE for n, r in rows.items()}
    stepped(train, parts, 3, firsts=firsts, rows=rows)
    assert torch.equal(torch.cat([*parts.values()]), whole)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_going_on_from_the_state_equals_never_having_stopped(optimizer):
    train = train_of(optimizer)
    calm, again = (nn.Parameter(start(torch.bfloat16)) for _ in range(2))
    update = stepped(train, {"w": calm}, 3)
    stepped(train, {"w": again}, 3)
    resumed = StageOptimizer(train, {"w": again}, seed=7)
    resumed.load_state_tensors(update.state_tensors())
    stepped(train, {"w": calm}, 3, update=update, first=3)
    stepped(train, {"w": again}, 3, update=resumed, first=3)
    assert torch.equal(calm, again)


def test_states_of_another_dtype_are_taken_over():
    """A run that goes on may keep them otherwise."""
    p = nn.Parameter(start(torch.float32))
    update = stepped(train_of("adamw", "fp32"), {"w": p}, 2)
    other = StageOptimizer(train_of("adamw", "bf16"), {"w": p})
    other.load_state_tensors(update.state_tensors())
    found = other.state_tensors()
    assert found["w:exp_avg"].dtype is torch.bfloat16
    assert found["w:step"].dtype is torch.float32
    assert torch.equal(found["w:exp_avg"], update.state_tensors()["w:exp_avg"].bfloat16())


def test_small_updates_of_bf16_weights_add_up():
    """Each is a twentieth of what would change the nearest bfloat16 number: rounded to the nearest,
    none would ever be seen."""
    p = nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
    train = Train(
        steps=200, warmup=0, schedule="constant", lr=2**-8 / 20, optimizer="sgd", momentum=0.0,
        weight_decay=0.0, clip=0.0,
    )  # fmt: skip
    update = StageOptimizer(train, {"w": p})
    for step in range(200):
        p.grad = torch.ones_like(p)
        update.step(step, weight=1.0, norm=1.0)
    moved = 1 - float(p.detach().double().mean())
    assert moved == pytest.approx(200 * 2**-8 / 20, rel=0.02)


def test_a_scalar_and_an_empty_parameter_are_updated_too():
    parameters = {"s": nn.Parameter(torch.tensor(1.0)), "e": nn.Parameter(torch.empty(0))}
    update = StageOptimizer(train_of("adamw"), parameters)
    for p in parameters.values():
        p.grad = torch.ones_like(p)
    update.step(0, weight=1.0, norm=1.0)
    assert math.isfinite(parameters["s"].item())
    assert parameters["s"].item() < 1
    assert update.state_tensors()["s:exp_avg"].shape == ()
