"""benchmarks/learning/neighbour.py: its pipeline is the model, and what is lost is what it says."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.peer.sync.optimizer import StageOptimizer


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def chains() -> ModuleType:
    return importlib.import_module("shoal.benchmarks.learning.neighbour_chain")


def small(chains: ModuleType, **fields: Any) -> Any:
    return chains.Setting(steps=20, blocks=6, width=8, heads=1, length=8, batch=4, **fields)


class Data:
    """Microbatches of one batch for each step."""

    def batch(self, step: int, m: int, size: int) -> dict[str, Tensor]:
        found = torch.randint(0, 256, (4, 9), generator=torch.Generator().manual_seed(step))
        mine = found[m * size : (m + 1) * size]
        return {"x": mine[:, :-1].contiguous(), "y": mine[:, 1:].contiguous()}


def weights(chain: Any) -> dict[str, Tensor]:
    return {n: q.detach().clone() for e in chain.executors for n, q in e.parameters.items()}


def test_without_losses_it_is_the_model(chains: ModuleType) -> None:
    setting = small(chains)
    chain = chains.Chain(setting, 3, swaps=False)
    torch.manual_seed(3)
    model = setting.model()
    parameters = dict(model.named_parameters())
    optimizer = StageOptimizer(setting.train, parameters)
    for step in range(4):
        model.zero_grad()
        loss = model(**Data().batch(step, 0, 4))
        loss.backward()
        squares = sum(float(q.grad.square().sum()) for q in parameters.values())
        optimizer.step(step, weight=1, norm=math.sqrt(squares))
        assert chain.step(step, Data()) == pytest.approx(float(loss.detach()), rel=1e-6)
    # Of a key's bias the gradient is rounding alone, which Adam makes as large as any other.
    found = [(weights(chain)[n] - q.detach(), q.detach()) for n, q in parameters.items()]
    apart, whole = (
        math.sqrt(sum(float(t.square().sum()) for t in ts)) for ts in zip(*found, strict=True)
    )
    assert apart < 1e-3 * whole


def test_swapped_microbatches_visit_the_ends_in_the_other_order(chains: ModuleType) -> None:
    """The oracle is the model with its blocks in that order."""
    setting = small(chains)
    chain = chains.Chain(setting, 3, swaps=True)
    assert chain.order(0) == [0, 1, 2, 3, 4, 5, 6, 7]
    assert chain.order(1) == [0, 2, 1, 3, 4, 6, 5, 7]
    torch.manual_seed(3)
    model = setting.model()
    in_order = float(model(**Data().batch(0, 0, 2)).detach())
    model.blocks = torch.nn.ModuleList(model.blocks[i] for i in (1, 0, 2, 3, 5, 4))
    swapped = float(model(**Data().batch(0, 1, 2)).detach())
    assert chain.step(0, Data()) == pytest.approx((in_order + swapped) / 2, rel=1e-6)


@pytest.mark.parametrize("how", ["random", "copy", "mean"])
def test_only_lost_blocks_change(chains: ModuleType, how: str) -> None:
    chain = chains.Chain(small(chains), 3, swaps=False)
    for step in range(3):
        chain.step(step, Data())
    before = weights(chain)
    chain.lose([2], how, 3)
    after = weights(chain)
    changed = {n for n, t in after.items() if not torch.equal(t, before[n])}
    assert {n.split(".")[1] for n in changed if n.startswith("blocks.")} == {"2"}
    assert all(n.startswith("blocks.") for n in changed)
    name = "feed.0.weight"
    if how == "copy":
        assert torch.equal(after[f"blocks.2.{name}"], before[f"blocks.1.{name}"])
    assert not chain.optimizers[3].state_tensors().keys() - {
        f"{n}:boost" for n in chain.executors[3].parameters
    }, "moments are left"
    chain.step(3, Data())


def test_as_many_are_lost_as_the_rate_says(chains: ModuleType) -> None:
    setting = chains.Setting(steps=40_000)
    for hourly in (0.05, 0.16):
        lost = sum(map(len, chains.losses(setting, hourly, 0).values()))
        hours = setting.steps * 91.3 / 3600
        wanted = -math.log(1 - hourly) * hours * setting.stages
        assert lost == pytest.approx(wanted, rel=0.15)
    assert chains.losses(setting, 0.05, 0) == chains.losses(setting, 0.05, 0)
    assert chains.losses(setting, 0.05, 0) != chains.losses(setting, 0.05, 1)
