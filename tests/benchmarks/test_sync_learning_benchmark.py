"""benchmarks/sync/learning.py: replicas in one tensor are those of the oracle, and bytes add up."""

from __future__ import annotations

import copy
import importlib
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.benchmarks.sync.batched import BatchedSparseLoCo
from shoal.dag.ir.graph import TensorSpec
from shoal.job import Train
from shoal.sim.plain.round_methods import (
    DiLoCo,
    NoLoCo,
    SparseLoCo,
    Streaming,
    e3m0,
    top_of_chunks,
    two_bits,
)
from shoal.sim.plain.round_oracle import PlainMethod, PlainReplica, even, train


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def learning() -> ModuleType:
    return importlib.import_module("shoal.benchmarks.sync.learning")


@pytest.fixture
def rows() -> ModuleType:
    return importlib.import_module("shoal.benchmarks.sync.rows")


def small(learning: ModuleType, **fields: Any) -> Any:
    little = {"steps": 12, "blocks": 2, "width": 8, "heads": 1, "length": 8, "batch": 8}
    return replace(learning.SETTING, **little, **fields)


def vector(numbers: int) -> TensorSpec:
    return TensorSpec((numbers,), "float32")


def batches(numbers: range) -> dict[str, Tensor]:
    each = [
        torch.randint(0, 256, (9,), generator=torch.Generator().manual_seed(g)) for g in numbers
    ]
    found = torch.stack(each)
    return {"x": found[:, :-1].contiguous(), "y": found[:, 1:].contiguous()}


def methods(kind: str) -> PlainMethod:
    if kind == "diloco":
        return DiLoCo(0.7, 0.9)
    if kind == "streaming":
        return Streaming(0.4, 0.5, up=e3m0)
    return NoLoCo()


@pytest.mark.parametrize("kind", ["diloco", "streaming", "noloco"])
def test_replicas_in_one_tensor_are_those_of_the_oracle(learning: ModuleType, kind: str) -> None:
    setting = small(learning)
    torch.manual_seed(3)
    module = setting.model()
    rounds = even(
        4,
        steps=12,
        every=5,
        batch=8,
        pairs=lambda count: ((0, 1), (2, 3)),
        fragments=2 * (kind == "streaming"),
        late=kind == "streaming",
    )
    plain = train(module, rounds, batches, setting.train, methods(kind), steps=12)
    together = learning.Together(setting.model(), 4, compiled=False)
    found = together.train(
        module.state_dict(), rounds, batches, setting.train, methods(kind), steps=12
    )
    for one, other in zip(plain.losses, found.losses, strict=True):
        for k in range(4):
            assert other[k] == pytest.approx(one[k], rel=1e-4)


def test_dense_bytes_are_those_of_a_ring(rows: ModuleType) -> None:
    sent = 2 * 3 * (1000 / 4) * 4  # of each of 4 peers, a step: 2·(P-1) parts of fp32
    assert rows.Row("", "dense").bytes([vector(1000)], 4, 10) == pytest.approx(10 * 2 * sent)


@pytest.mark.parametrize(
    ("fields", "ratio"),
    [
        ({"method": "average", "every": 50}, 50),
        ({"method": "diloco", "every": 50, "code": "int8"}, 200),
        ({"method": "diloco", "every": 50, "code": "e3m0"}, 400),
        ({"method": "diloco", "every": 10, "code": "sign"}, 320),
        # 64 of 4096 kept, at 10 bits and two levels of 16; to who adds up, and 7 times to others,
        # where dense has 2·7/8 of 32 bits
        (
            {"method": "sparse", "every": 30, "code": "top_64"},
            30 * (2 / 9 * 32) / (64 * 10 / 4096 + 32 / 4096),
        ),
        # of a pair each sends its local weights, once: its slow weights are its own
        ({"method": "noloco", "every": 64}, 64 * (2 * 7 / 8 * 4) / 4),
        ({"method": "saps"}, 2 * 7 / 8 * 100),
    ],
)
def test_ratios_of_bytes_are_as_calculated(
    rows: ModuleType, fields: dict[str, Any], ratio: float
) -> None:
    """In long runs of one large tensor, where scales and the last average do not count."""
    found = rows.Row("", **fields).ratio(
        [vector(4096 * 1024)], 8, 1_000_000 * fields.get("every", 1)
    )
    assert found == pytest.approx(ratio, rel=0.04)


def test_a_short_run_pays_for_its_last_average(rows: ModuleType) -> None:
    noloco = rows.Row("", "noloco", every=100)
    assert noloco.ratio([vector(1000)], 4, 100) == pytest.approx(100 / (8 / 12 + 1))
    streaming = rows.Row("", "streaming", every=100, fragments=4, code="raw")
    assert streaming.ratio([vector(1000)], 4, 100) == pytest.approx(100 / (3 / 4 + 1))


def test_what_decides_a_run_is_in_its_key(learning: ModuleType, rows: ModuleType) -> None:
    row = rows.Row("a", "diloco", every=50)
    keys = {
        learning.Wanted(r, count, seed).key(setting)
        for r in (row, replace(row, lr=1e-3), replace(row, momentum=0.9))
        for count in (4, 8)
        for seed in (0, 1)
        for setting in (learning.SETTING, replace(learning.SETTING, steps=7))
    }
    assert len(keys) == 24


def test_the_bars_take_the_worse_number_of_replicas(learning: ModuleType, rows: ModuleType) -> None:
    """And only seeds that dense has."""
    dense, row = rows.Row("dense", "dense"), rows.Row("a", "diloco", every=50, code="e3m0")
    runs = [
        {"row": "dense", "replicas": 1, "seed": 0, "loss": 2.0},
        {"row": "a", "replicas": 4, "seed": 0, "loss": 2.01},
        {"row": "a", "replicas": 8, "seed": 0, "loss": 2.05},
        {"row": "a", "replicas": 8, "seed": 1, "loss": 9.0},
    ]
    found = {f.name: f.value for f in learning.figures(runs, [dense, row], [4, 8], 2000)}
    assert found["a_loss_over_dense"] == pytest.approx(1.025)
    assert found["sync_bytes_ratio_1pct"] == 0
    assert found["sync_bytes_ratio_3pct"] == found["a_bytes_ratio"] > 350


def test_a_row_is_trained_once(
    learning: ModuleType, rows: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = small(learning, eval_every=4, final_windows=64)
    wanted = [learning.Wanted(rows.Row("a", "average", every=4), 2, 0)]
    monkeypatch.setattr(learning.torch, "compile", lambda call, dynamic: call)
    first = learning.run_all(wanted, setting, tmp_path, only=False)
    assert math.isfinite(first[0]["loss"])
    assert [step for step, _ in first[0]["curve"]] == [4, 8]
    monkeypatch.setattr(learning.Trainer, "run", None)
    assert learning.run_all(wanted, setting, tmp_path, only=False) == first
    assert learning.run_all(wanted, setting, tmp_path, only=True) == first


@pytest.mark.parametrize("back", [0.1, 0.0])
@pytest.mark.parametrize("replicas", [3, 8])
def test_all_at_once_is_the_plain_method_to_the_last_bit(back: float, replicas: int) -> None:
    encode = top_of_chunks(0.05, 64, two_bits)
    backward = top_of_chunks(back, 64, two_bits) if back else None
    plain = SparseLoCo(0.7, 0.95, encode=encode, back=backward)
    batched = BatchedSparseLoCo(0.7, 0.95, keep=0.05, chunk=64, back=back)
    shapes = [(1,), (7,), (16, 16), (16, 16), (65,), (40, 30)]
    generator = torch.Generator().manual_seed(replicas)
    start = {f"p{i}": torch.randn(s, generator=generator) for i, s in enumerate(shapes)}
    found = []
    for method in (plain, batched):
        module = torch.nn.ParameterDict(start)
        each = {
            k: PlainReplica(
                copy.deepcopy(module), Train(steps=1, batch=1), torch.optim.SGD(module.values())
            )
            for k in range(replicas)
        }
        method.begin({n: p.clone() for n, p in start.items()})
        moves = torch.Generator().manual_seed(1)
        for count, r in enumerate(even(replicas, steps=12, every=3, batch=24)):
            with torch.no_grad():
                for replica in each.values():
                    for p in replica.weights.values():
                        p.add_(torch.randn(p.shape, generator=moves))
            method.commit(count, r, each)
        found.append([method.shared, *({**x.weights} for x in each.values())])
    for one, other in zip(*found, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in start)


def test_a_row_climbs_the_grid_until_no_neighbour_is_better(
    learning: ModuleType, rows: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where rate and beta have to change together."""
    losses = {
        **{(4e-3, 0.95): 1.9, (8e-3, 0.95): 1.8, (16e-3, 0.95): 2.2, (32e-3, 0.95): 2.5},
        **{(4e-3, 0.99): 2.1, (8e-3, 0.99): 2.1, (16e-3, 0.99): 2.0, (32e-3, 0.99): 2.3},
    }

    def run_all(wanted: Any, *_: Any, only: bool) -> list[dict[str, float]]:
        assert all((w.replicas, w.seed) == (4, 0) for w in wanted)
        return [{"loss": losses[w.row.lr, w.row.beta2]} for w in wanted]

    monkeypatch.setattr(learning, "run_all", run_all)
    row = rows.Row("a", "average", lr=16e-3, beta2=0.99)
    best, loss = learning.tuned(row, 4, learning.SETTING, tmp_path)
    assert (best.lr, best.beta2, loss) == (8e-3, 0.95, 1.8)
