"""Which optimizer a parameter is for, what it keeps, and that parameters stay whole."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from shoal.dag.ir.random import rounded, rounding_key
from shoal.job import SettingsError, Train
from shoal.peer.optimizers.kinds import kind_of
from shoal.peer.optimizers.lion import Lion
from shoal.peer.sync import narrow
from shoal.peer.sync.optimizer import StageOptimizer
from shoal.tests.peer.optimizers.eight_bits import from_elements

STEPS = 5


def train_of(optimizer: str, **changes: object) -> Train:
    return Train(
        **{"steps": STEPS, "warmup": 0, "schedule": "constant", "lr": 0.01, "clip": 0.0},
        optimizer=optimizer,  # type: ignore[arg-type]
        **{"no_muon": ("table*",), **changes},  # type: ignore[arg-type]
    )


def parameters(dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    rng = torch.Generator().manual_seed(0)
    shapes = {"a": (6, 9), "table": (7, 4), "bias": (9,), "kernel": (3, 2, 3, 3), "one": ()}
    return {n: nn.Parameter(torch.randn(s, generator=rng).to(dtype)) for n, s in shapes.items()}


def grads(step: int, like: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(9 + step)
    return {n: torch.randn(p.shape, generator=rng).to(p.dtype) for n, p in like.items()}


def test_muon_is_for_named_matrices_alone() -> None:
    train = train_of("muon")
    kinds = {n: kind_of(train, n, p) for n, p in parameters().items()}
    assert kinds == {"a": "muon", **dict.fromkeys(("table", "bias", "kernel", "one"), "adamw")}


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "muon", "adafactor", "lion", "adamw8bit"])
def test_the_bytes_of_its_state_are_known_before_there_is_one(
    optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, train = parameters(), train_of(optimizer)
    if optimizer == "adamw8bit":
        from_elements(monkeypatch, 30)
    update = StageOptimizer(train, held)
    before = update.state_bytes
    for name, grad in grads(0, held).items():
        held[name].grad = grad
    update.step(0, weight=1.0, norm=0.0)
    kept = {n: t for n, t in update.state_tensors().items() if not n.endswith(":step")}
    assert before == sum(t.nbytes for t in kept.values())
    if optimizer == "adamw8bit":  # two of 54 numbers in a block, of the others as they are
        assert before == 2 * ((54 + 4) + (54 + 4) + 4 * (28 + 9 + 1))
    else:
        assert before <= train.state_bytes * sum(p.numel() for p in held.values())


def test_lion_is_that_of_its_authors_library_bit_for_bit() -> None:
    library = pytest.importorskip("lion_pytorch")
    ours, theirs = parameters(), parameters()
    one = Lion([*ours.values()], lr=0.01, betas=(0.9, 0.98), weight_decay=0.3)
    two = library.Lion(theirs.values(), lr=0.01, betas=(0.9, 0.98), weight_decay=0.3)
    for step in range(STEPS):
        for held, optimizer in ((ours, one), (theirs, two)):
            for name, grad in grads(step, held).items():
                held[name].grad = grad
            optimizer.step()
    assert all(torch.equal(ours[n], theirs[n]) for n in ours)


def test_lion_goes_by_signs() -> None:
    """The formula by hand, over two steps of one number."""
    weight = nn.Parameter(torch.tensor([1.0]))
    optimizer = Lion([weight], lr=0.1, betas=(0.9, 0.5), weight_decay=0.5)
    weight.grad = torch.tensor([3.0])
    optimizer.step()  # 1·0.95 - 0.1, m = 1.5
    assert weight.item() == pytest.approx(0.85)
    weight.grad = torch.tensor([-10.0])
    optimizer.step()  # 0.9·1.5 - 0.1·10 > 0: 0.85·0.95 - 0.1
    assert weight.item() == pytest.approx(0.7075)


@pytest.mark.parametrize("optimizer", ["muon", "adafactor", "adamw8bit"])
def test_a_block_of_a_parameter_is_refused(optimizer: str) -> None:
    with pytest.raises(ValueError, match=r"a\.\.0/2 is a block: .* has to have it whole"):
        StageOptimizer(train_of(optimizer), {"a..0/2": parameters()["a"]})
    StageOptimizer(train_of("lion"), {"a..0/2": parameters()["a"]})


@pytest.mark.parametrize("optimizer", ["muon", "adafactor"])
def test_16_bit_weights_are_updated_whole_in_float32(
    optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oracle: torch's own over float32 copies, rounded by hand behind each step."""
    monkeypatch.setattr(narrow, "SLICE", 1 << 16)
    train = train_of(optimizer, no_decay=())
    held = {"a": parameters(torch.bfloat16)["a"]}
    update = StageOptimizer(train, held, seed=7)
    wanted = nn.Parameter(held["a"].detach().float())
    plain: torch.optim.Optimizer = torch.optim.Adafactor([wanted], lr=0.01, weight_decay=0.1)
    if optimizer == "muon":
        plain = torch.optim.Muon(
            [wanted], lr=0.01, momentum=0.9, adjust_lr_fn="match_rms_adamw", weight_decay=0.1
        )
    for step in range(STEPS):
        held["a"].grad = grads(step, held)["a"]
        wanted.grad = held["a"].grad.float()
        for group in plain.param_groups:
            if optimizer == "adafactor":
                group["eps"] = (torch.finfo(torch.float32).eps, 1e-3)
        plain.step()
        update.step(step, weight=1.0, norm=0.0)
        with torch.no_grad():
            key = rounding_key(7, step, "a:")
            wanted.copy_(rounded(wanted.reshape(-1), 0, key=key).view(wanted.shape))
        assert torch.equal(held["a"].float(), wanted)
    assert all(t.dtype is torch.float32 for t in update.state_tensors().values())


@pytest.mark.parametrize("optimizer", ["muon", "adafactor"])
def test_16_bit_weights_go_on_from_their_state(optimizer: str) -> None:
    train, calm = train_of(optimizer), parameters(torch.bfloat16)
    one = StageOptimizer(train, calm, seed=3)

    def go(held: dict[str, nn.Parameter], update: StageOptimizer, steps: range) -> None:
        for step in steps:
            for name, grad in grads(step, held).items():
                held[name].grad = grad
            update.step(step, weight=1.0, norm=0.0)

    go(calm, one, range(2))
    again = copy.deepcopy(calm)
    other = StageOptimizer(train, again, seed=3)
    other.load_state_tensors(one.state_tensors())
    go(calm, one, range(2, STEPS))
    go(again, other, range(2, STEPS))
    assert all(torch.equal(calm[n], again[n]) for n in calm)


def test_states_that_are_not_rounded_are_refused_in_bf16() -> None:
    for optimizer in ("muon", "adafactor", "adamw8bit"):
        with pytest.raises(SettingsError, match="state_dtype"):
            train_of(optimizer, state_dtype="bf16")
    assert train_of("lion", state_dtype="bf16").state_bytes == 2
