"""The exponential mean of weights against torch's AveragedModel."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from shoal.job import SettingsError, Train
from shoal.peer.sync.optimizer import StageOptimizer

DECAY = 0.9
TRAIN = Train(steps=9, batch=4, lr=0.05, warmup=0, optimizer="sgd", ema=DECAY)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
    made[0].bias.requires_grad_(False)
    return made


def step(module: nn.Module, update: StageOptimizer, number: int) -> None:
    rng = torch.Generator().manual_seed(number)
    (module(torch.randn(4, 5, generator=rng)) ** 2).mean().backward()
    update.step(number, weight=1.0, norm=0.0)
    update.average()
    module.zero_grad()


def test_it_is_that_of_torch_and_goes_on_from_its_state() -> None:
    module = model()
    wanted = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    update = StageOptimizer(TRAIN, dict(module.named_parameters()))
    assert update.averages() == {}
    for number in range(6):
        if number == 3:  # another holder goes on
            kept = {n: t.clone() for n, t in update.state_tensors().items()}
            module = copy.deepcopy(module)
            update = StageOptimizer(TRAIN, dict(module.named_parameters()))
            update.load_state_tensors(kept)
        step(module, update, number)
        wanted.update_parameters(module)
    found = update.averages()
    assert found.keys() == {"0.weight", "2.weight", "2.bias"}
    for name, parameter in wanted.module.named_parameters():
        if name in found:
            torch.testing.assert_close(found[name], parameter.detach(), rtol=1e-6, atol=1e-7)
            assert not torch.equal(found[name], module.get_parameter(name))


def test_one_without_a_mean_passes_over_that_of_others() -> None:
    module = model()
    update = StageOptimizer(TRAIN, dict(module.named_parameters()))
    step(module, update, 0)
    other = StageOptimizer(Train(steps=9, batch=4), dict(model().named_parameters()))
    other.load_state_tensors(update.state_tensors())
    assert other.averages() == {}
    assert not any(name.endswith(":ema") for name in other.state_tensors())


def test_its_bytes_are_known_before() -> None:
    module = model()
    update = StageOptimizer(TRAIN, dict(module.named_parameters()))
    before = update.state_bytes
    step(module, update, 0)
    assert before == sum(t.nbytes for t in update.averages().values()) + 4 * 49


@pytest.mark.parametrize("ema", [-0.1, 1.0])
def test_a_decay_that_is_none_is_refused(ema: float) -> None:
    with pytest.raises(SettingsError, match="ema"):
        Train(steps=1, ema=ema)
