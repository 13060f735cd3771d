"""skip_learning.py: microbatches that go through stages together get what each gets alone, and
routes visit all stages between as often."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from shoal.benchmarks.schedules import skip_learning as study
from shoal.examples.gpt import gpt


@pytest.mark.parametrize("row", study.ROWS, ids=lambda row: row.name)
def test_together_is_one_after_another(row: study.Row) -> None:
    torch.manual_seed(0)
    model, orders = gpt(study.SETTING.blocks, 8, 1, 4, 0.0), row.orders(3)
    batches = [{n: torch.randint(0, 256, (2, 4)) for n in "xy"} for _ in orders]
    found = study.loss_by(model, batches, orders)
    found.backward()  # type: ignore[no-untyped-call]
    grads = [p.grad.clone() if p.grad is not None else None for p in model.parameters()]
    model.zero_grad()
    wanted = torch.zeros(())
    for batch, order in zip(batches, orders, strict=True):
        blocks = [study.BLOCKS * k + i for k in order for i in range(study.BLOCKS)]
        wanted = wanted + study.loss_of(model, batch, blocks) / len(orders)
    wanted.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(found, wanted)
    for grad, p in zip(grads, model.parameters(), strict=True):
        torch.testing.assert_close(grad, p.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("row", study.ROWS, ids=lambda row: row.name)
def test_stages_between_are_visited_as_often(row: study.Row, seed: int) -> None:
    orders = row.orders(seed)
    visits = Counter(k for order in orders for k in order)
    for k in range(study.STAGES):
        left = row.skipped if k in study.INNER else 0
        assert visits[k] == study.MICROBATCHES - left
    in_order = all(list(order) == sorted(order) for order in orders)
    assert row.swaps or in_order
    assert study.modelled_s(orders) > 0
