"""What clients send of what they moved, and what becomes of it."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.peer.federated.client_means import mean_of
from shoal.peer.federated.cohort import Trained
from shoal.peer.federated.sparse_updates import SparseUpdates

BASE = {"w": torch.tensor([[0.5, 0.25], [1.0, -2.0]]), "b": torch.tensor([1.0, 2.0, 3.0])}


def trained(*moves: list[float], first: int = 0) -> Trained:
    moved = torch.tensor(moves)
    values = {
        "w": BASE["w"] + moved[:, :4].view(-1, 2, 2),
        "b": BASE["b"] + moved[:, 4:],
        "norm.running_mean": torch.arange(len(moves), dtype=torch.float32).view(-1, 1),
    }
    numbers = tuple(range(first, first + len(moves)))
    return Trained(numbers, values, (1,) * len(moves), torch.zeros(len(moves)))


def test_each_sends_its_largest_numbers_of_all_parameters_together() -> None:
    groups = [
        trained([4.0, -5.0, 0.0, 0.0, 0.0, 3.0, 0.0], [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        trained([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 7.0], first=2),
    ]
    updates = SparseUpdates(BASE, {0: 2, 1: 3, 2: 7})
    mean = mean_of(updates.sent(groups), {0: 1, 1: 2, 2: 1})
    senders = updates.by_name()
    assert senders["w"].tolist() == [3.0, 3.0, 2.0, 1.0], "of equal ones the first"
    assert senders["b"].tolist() == [1.0, 1.0, 1.0]
    moved = {n: (mean[n] - t) * 4 for n, t in BASE.items()}
    torch.testing.assert_close(
        moved["w"], torch.tensor([[6.0, -3.0], [2.0, 0.0]], dtype=torch.float64), atol=1e-5, rtol=0
    )
    torch.testing.assert_close(
        moved["b"], torch.tensor([0.0, 0.0, 7.0], dtype=torch.float64), atol=1e-5, rtol=0
    )
    assert mean["norm.running_mean"].tolist() == [0.5], "whole, by the same weights"


def test_a_scalar_is_a_number_among_the_others() -> None:
    base = {"w": torch.tensor([1.0, 2.0]), "scale": torch.tensor(3.0)}
    moved = {"w": torch.tensor([[1.0, 4.0]]), "scale": torch.tensor([-2.0])}
    some = Trained((5,), {n: t + moved[n] for n, t in base.items()}, (1,), torch.zeros(1))
    updates = SparseUpdates(base, {5: 2})
    mean = mean_of(updates.sent([some]), {5: 3})
    assert {n: t.tolist() for n, t in mean.items()} == {"w": [1.0, 6.0], "scale": 1.0}
    assert {n: t.tolist() for n, t in updates.by_name().items()} == {"w": [0, 1], "scale": [1]}


def test_what_nobody_sent_stays_to_the_bit() -> None:
    g = torch.Generator().manual_seed(0)
    base = {"w": torch.randn(50, generator=g)}
    moved = torch.randn(9, 50, generator=g)
    moved[:, 20:] *= 1e-3
    some = Trained(tuple(range(9)), {"w": base["w"] + moved}, (1,) * 9, torch.zeros(9))
    updates = SparseUpdates(base, dict.fromkeys(range(9), 10))
    weights = {n: (1 << 20) * 7 + 12345 * n for n in range(9)}
    mean: Tensor = mean_of(updates.sent([some]), weights)["w"].float()
    unsent = updates.by_name()["w"] == 0
    assert unsent.sum() >= 30
    assert torch.equal(mean[unsent], base["w"][unsent])
    assert not (mean[~unsent] == base["w"][~unsent]).any()
