"""What clients of one peer come to together, of tensors that are single numbers as well."""

from __future__ import annotations

import pytest
import torch

from shoal.peer.federated.client_means import mean_of, rows_of
from shoal.peer.federated.cohort import Trained


@pytest.mark.parametrize("copies", [1, 3])
def test_scalars_and_counters_have_a_number_of_each_client(copies: int) -> None:
    numbers = tuple(range(copies))
    scale = torch.arange(copies, dtype=torch.float32) + 0.5
    counter = torch.zeros((), dtype=torch.int64).expand(copies).clone()  # as copies begin
    counter += 7
    values = {"scale": scale, "counter": counter}
    some = Trained(numbers, values, (1,) * copies, torch.zeros(copies))
    rows = rows_of([some], numbers)
    assert rows["scale"].tolist() == [[n + 0.5] for n in numbers]
    assert rows["counter"].view(torch.int64).tolist() == [[7]] * copies
    weights = {n: n + 1 for n in numbers}
    mean = mean_of([some], weights)
    wanted = sum(w * (n + 0.5) for n, w in weights.items()) / sum(weights.values())
    assert (float(mean["scale"]), int(mean["counter"])) == (pytest.approx(wanted), 7)
    assert mean["scale"].shape == ()
