"""skip_learning.py: microbatches that go through stages together get what each gets alone, routes
visit all stages between as often, and rows are made with what is asked for."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, replace
from hashlib import sha256
from pathlib import Path

import pytest
import torch

from shoal.benchmarks.schedules import skip_learning as study
from shoal.examples.gpt import gpt


@pytest.mark.parametrize("deeper", [False, True])
@pytest.mark.parametrize("row", study.ROWS, ids=lambda row: row.name)
def test_together_is_one_after_another(row: study.Row, deeper: bool) -> None:
    torch.manual_seed(0)
    model, orders = gpt(study.SETTING.blocks, 8, 1, 4, 0.0), row.orders(3)
    batches = [{n: torch.randint(0, 256, (2, 4)) for n in "xy"} for _ in orders]
    found = study.loss_by(model, batches, orders, deeper=deeper)
    found.backward()  # type: ignore[no-untyped-call]
    grads = [p.grad.clone() if p.grad is not None else None for p in model.parameters()]
    model.zero_grad()
    wanted = torch.zeros(())
    visits = Counter(k for order in orders for k in order)
    for batch, order in zip(batches, orders, strict=True):
        h_btd = model.bytes(batch["x"]) + model.positions(torch.arange(4))
        for k in order:
            added = h_btd
            for block in model.blocks[study.BLOCKS * k : study.BLOCKS * (k + 1)]:
                added = block(added)
            h_btd = h_btd + (added - h_btd) * (len(orders) / visits[k] if deeper else 1.0)
        logits_btv = model.head(model.norm(h_btd))
        loss = torch.nn.functional.cross_entropy(logits_btv.flatten(0, 1), batch["y"].flatten())
        wanted = wanted + loss / len(orders)
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


def test_rows_are_made_with_what_is_asked_for_and_kept_by_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to the end of full steps a run is the plain one. The key of a row without options is that
    of before there were any."""
    small = {"steps": 5, "width": 8, "heads": 1, "eval_every": 1, "eval_windows": 16}
    small |= {"eval_size": 16, "final_windows": 16}
    key = study.ROWS[2].key(1)
    old = [asdict(study.SETTING), {"name": "skip_25", "skipped": 3, "swaps": False}, 1, 6, 8]
    assert key == sha256(json.dumps(old).encode()).hexdigest()[:16]
    monkeypatch.setattr(study, "SETTING", replace(study.SETTING, **small))
    plain, skipping = (replace(study.ROWS[k], full=(0, 5)) for k in (0, 2))
    source = study.Data.write(tmp_path, study.SETTING)
    whole = study.train_one(plain, 0, source)["curve"]
    rows = [
        skipping.made_with(study.options_of(*asked))
        for asked in (("2", "0%", "sum"), ("2", "0%", "stochastic-depth"), ("0%", "20%", "sum"))
    ]
    assert len({row.key(0) for row in (skipping, *rows)}) == len({r.name for r in rows}) + 1 == 4
    for row in rows:
        made = study.train_one(row, 0, source)
        begins = row.full[0]
        assert made["curve"][:begins] == whole[:begins]
        assert made["curve"][begins:] != whole[begins:]
        out = study.modelled_s(row.orders(0)) * (row.full[1] - begins)
        full = study.modelled_s(study.IN_ORDER) * (5 - row.full[1] + begins)
        assert study.elapsed_s(made, 5) == pytest.approx(out + full)
    assert plain.made_with(study.options_of("2", "0%", "sum")) == plain
    with pytest.raises(SystemExit, match=r"skip_warmup.*3 of|5 of 5 steps visit all stages"):
        study.options_of("60%", "40%", "sum")
