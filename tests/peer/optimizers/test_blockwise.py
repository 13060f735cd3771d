"""Moments in 8 bits: the nearest numbers of a table, what is no state, and the same as whole
tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from shoal.dag.cost.optimizer_states import BLOCK
from shoal.job import Train
from shoal.peer.optimizers.blockwise import (
    SCALE,
    SIGNED,
    _codes,
    _ends,
    decoded,
    dynamic_table,
    encoded,
)
from shoal.peer.sync import narrow
from shoal.peer.sync.optimizer import StageOptimizer
from shoal.sim.plain.oracle import AdamW8bit

TRAIN = Train(
    **{"steps": 9, "warmup": 0, "schedule": "constant", "lr": 0.01, "clip": 0.0, "no_decay": ()},
    optimizer="adamw8bit",
)
SHAPE = (70, 61)
"""16 whole blocks, and one of 174."""


def start(dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).to(dtype))


def gradient(step: int, spread: float = 1.0) -> Tensor:
    rng = torch.Generator().manual_seed(9 + step)
    return torch.randn(SHAPE, generator=rng) * 10 ** (spread * torch.randn(SHAPE, generator=rng))


def stepped(update: StageOptimizer, weight: nn.Parameter, steps: range) -> nn.Parameter:
    for step in steps:
        weight.grad = gradient(step).to(weight.dtype)
        update.step(step, weight=1.0, norm=0.0)
    return weight


@pytest.mark.parametrize("signed", [True, False])
@settings(max_examples=30)
@given(st.integers(1, 900), st.integers(0, 2**31), st.floats(1e-25, 1e25), st.floats(0, 2))
def test_a_code_is_of_the_number_next_to_it(
    signed: bool, count: int, seed: int, size: float, spread: float
) -> None:
    """By brute force: of each number the distance to all 256."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(count, generator=rng) * 10 ** (spread * torch.randn(count, generator=rng))
    x = (x if signed else x.abs()) * size
    x[torch.rand(count, generator=rng) < 0.1] = 0.0
    codes, scales = encoded(x, signed=signed)
    assert (codes.shape, codes.dtype) == (x.shape, torch.uint8)
    again = decoded(codes, scales, signed=signed, dtype=torch.float32)
    for block, most, found in zip(x.split(BLOCK), scales, again.split(BLOCK), strict=True):
        assert most == block.abs().max()
        unit = float(most) or 1.0
        shares, table = block.double() / unit, dynamic_table(signed).double()
        distance = (shares[:, None] - table).abs()
        if not signed:  # what is above 0 stays so
            distance[shares > 0, 0] = torch.inf
        off = (found.double() / unit - shares).abs()
        assert bool((off <= distance.min(1).values + 1e-7).all())
        assert signed or torch.equal(found > 0, block > 0)


@pytest.mark.parametrize("signed", [True, False])
def test_codes_without_a_search_are_those_of_a_search(signed: bool) -> None:
    """At both ends of all numbers that begin with the same 16 bits, and around every end of a
    code."""
    upper = torch.arange(1 << 16, dtype=torch.int32) << 16
    ends = _ends(signed)
    beside = [torch.nextafter(ends, torch.tensor(to)) for to in (-torch.inf, torch.inf)]
    both = torch.cat([upper.view(torch.float32), (upper + 0xFFFF).view(torch.float32)])
    x = torch.cat([both, ends, *beside])
    x = x[x != -torch.inf]  # which is no share: it is NaN
    assert torch.equal(_codes(x, signed), torch.bucketize(x, ends, out_int32=True))


def test_tables_are_those_of_the_paper() -> None:
    for signed in (True, False):
        table = dynamic_table(signed)
        assert len(set(table.tolist())) == 256
        assert table.tolist() == sorted(table.tolist())
    assert dynamic_table(True)[[0, 126, 127, 128, 255]].tolist() == pytest.approx(
        [-0.99296875, -5.5e-7, 0.0, 5.5e-7, 1.0]
    )
    assert dynamic_table(False)[[0, 1, 2, 255]].tolist() == pytest.approx([0, 3.25e-7, 7.75e-7, 1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("slices", [1 << 20, BLOCK, 3 * BLOCK])
def test_updates_are_those_of_whole_tensors(
    dtype: torch.dtype, slices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(narrow, "SLICE", slices)
    ours, plain = start(dtype), start(dtype)
    update = StageOptimizer(TRAIN, {"w": ours})
    group = {"params": [plain], "weight_decay": TRAIN.weight_decay}
    oracle = AdamW8bit([group], {"lr": TRAIN.lr, "betas": TRAIN.betas, "eps": TRAIN.eps})
    for step in range(6):
        plain.grad = gradient(step).to(dtype)
        oracle.step()
        stepped(update, ours, range(step, step + 1))
    torch.testing.assert_close(ours, plain, rtol=1e-6, atol=1e-6)
    indices = torch.cat([index for index, _ in oracle.state[plain]["m"]])
    assert torch.equal(update.state_tensors()["w:exp_avg"].flatten().long(), indices)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_goes_on_from_its_state_to_the_bit(dtype: torch.dtype) -> None:
    weight = start(dtype)
    update = StageOptimizer(TRAIN, {"w": weight}, seed=3)
    stepped(update, weight, range(3))
    again = copy.deepcopy(weight)
    other = StageOptimizer(TRAIN, {"w": again}, seed=3)
    other.load_state_tensors(update.state_tensors())
    stepped(update, weight, range(3, 6))
    assert torch.equal(stepped(other, again, range(3, 6)), weight)


def test_slices_change_nothing_in_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for size in (1 << 20, 2 * BLOCK):
        monkeypatch.setattr(narrow, "SLICE", size)
        weight = start(torch.bfloat16)
        update = StageOptimizer(TRAIN, {"w": weight}, seed=3)
        stepped(update, weight, range(3))
        found.append({"": weight.detach(), **update.state_tensors()})
    assert all(torch.equal(found[0][n], found[1][n]) for n in found[0])


def test_small_gradients_beside_large_ones_make_no_large_steps() -> None:
    """A second moment that is rounded to 0 would divide a first moment by eps."""
    weight = start()
    began, update = start().detach(), StageOptimizer(TRAIN, {"w": weight})
    for step in range(8):
        weight.grad = torch.ones(SHAPE)
        weight.grad[0, ::2] = 3e-4 if step < 4 else 0.0
        update.step(step, weight=1.0, norm=0.0)
    moved = (weight.detach() - began * (1 - TRAIN.lr * TRAIN.weight_decay) ** 8).abs()
    assert float(moved.max()) < 8.1 * TRAIN.lr
    assert float(moved[0, ::2].min()) > TRAIN.lr


def test_what_is_not_finite_is_not_hidden() -> None:
    for bad in (torch.nan, torch.inf):
        x = torch.ones(2 * BLOCK)
        x[3] = bad
        for signed in (True, False):
            again = decoded(*encoded(x, signed=signed), signed=signed, dtype=torch.float32)
            assert not again[:BLOCK].isfinite().any()
            assert torch.equal(again[BLOCK:], torch.ones(BLOCK))


LIES: dict[str, Callable[[Tensor], Tensor | None]] = {
    "nothing": lambda _: None,
    "one less": lambda t: t.flatten()[:-1],
    "one more": lambda t: torch.cat([t.flatten(), t.flatten()[:1]]),
    "none": lambda t: t.flatten()[:0],
    "a dimension more": lambda t: t[None],
    "float64": lambda t: t.double(),
    "int64": lambda t: t.long(),
    "int8": lambda t: t.view(torch.int8) if t.dtype is torch.uint8 else t.to(torch.int8),
    "below 0": lambda t: t.neg() - 1 if t.is_floating_point() else None,
}


@pytest.mark.parametrize("part", ["step", *SIGNED, *(f"{m}{SCALE}" for m in SIGNED)])
@pytest.mark.parametrize("lie", LIES)
def test_what_is_no_state_is_refused_before_anything_is_taken(part: str, lie: str) -> None:
    honest = StageOptimizer(TRAIN, {"w": (weight := start())})
    stepped(honest, weight, range(2))
    told = dict(honest.state_tensors())
    made = LIES[lie](told.pop(f"w:{part}"))
    if made is not None:
        told[f"w:{part}"] = made
    fresh = StageOptimizer(TRAIN, {"w": start()})
    with pytest.raises(ValueError, match=r"of w in 8 bits .*expected"):
        fresh.load_state_tensors(told)
    assert fresh.state_tensors() == {}


@pytest.mark.parametrize("code", [0, 255])
def test_any_codes_are_read_within_the_table(code: int) -> None:
    honest = StageOptimizer(TRAIN, {"w": (weight := start())})
    stepped(honest, weight, range(2))
    told = honest.state_tensors()
    told |= {f"w:{m}": torch.full(SHAPE, code, dtype=torch.uint8) for m in SIGNED}
    again = StageOptimizer(TRAIN, {"w": (other := start())})
    again.load_state_tensors(told)
    assert stepped(again, other, range(2, 4)).isfinite().all()


@pytest.mark.slow
def test_bitsandbytes_comes_to_nearly_the_same() -> None:
    """Its codes on a CPU are of a coarser table of 65,536 steps: for what is near 0 others."""
    library = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    tables = library.functional.create_dynamic_map
    for signed in (True, False):
        torch.testing.assert_close(dynamic_table(signed), tables(signed=signed), rtol=0, atol=1e-7)
    ours, theirs, plain = start(), start(), start()
    update = StageOptimizer(TRAIN, {"w": ours})
    rest = {"lr": TRAIN.lr, "betas": TRAIN.betas, "eps": TRAIN.eps, "weight_decay": 0.1}
    other, wide = library.optim.AdamW8bit([theirs], **rest), torch.optim.AdamW([plain], **rest)
    for step in range(8):
        for weight, optimizer in ((theirs, other), (plain, wide)):
            weight.grad = gradient(step, spread=0.2)
            optimizer.step()
        ours.grad = gradient(step, spread=0.2)
        update.step(step, weight=1.0, norm=0.0)
    moved = (ours - start()).norm()
    to_theirs, to_32_bits = ((w - ours).norm().item() / moved.item() for w in (theirs, plain))
    assert to_theirs < 0.005
    assert to_theirs < to_32_bits / 2
