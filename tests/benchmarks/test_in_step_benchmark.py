"""benchmarks/sync/in_step.py: side by side, methods make of gradients what the loops make of them
that holders are compared with."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.benchmarks.learning.chain import Setting
from shoal.benchmarks.sync import in_step
from shoal.benchmarks.sync.in_step import IN_STEP, InStep, LowRank, Shapes
from shoal.benchmarks.sync.rows import ROWS, Row
from shoal.benchmarks.sync.together import Together
from shoal.dag.ir.graph import TensorSpec
from shoal.dag.plan.messages import low_rank
from shoal.job import Train
from shoal.sim.plain import oracle
from shoal.sim.plain.oracle import learning_rate
from shoal.tests.peer.sync import test_demo, test_gtopk, test_lags, test_low_rank
from shoal.tests.peer.sync.conftest import Net
from shoal.tests.peer.sync.loops import parted

Loop = Callable[[int, list[dict[str, Tensor]]], Any]


def loop_of(method: InStep, module: torch.nn.Module, word: str, train: Train) -> Loop:
    count = method.replicas
    made = SimpleNamespace(module=module, train=train)
    match word:
        case "gtopk":
            return test_gtopk.GTopK(list(method.shapes.names), count, method.options["ratio"])
        case "lags":
            return test_lags.LAGS(count, method.options["ratio"])
        case "demo":
            return test_demo.DeMo(made, count)
        case "powersgd" | "acp-sgd":
            assert isinstance(method, LowRank)
            start, square = {}, 1
            names = dict(zip(method.shapes.names, method.shapes.shapes, strict=True))
            for group, found in method.shapes.groups(low_rank(method.shapes.specs, method.options)):
                if found is None:
                    continue
                [name] = [n for n, s in names.items() if s == group.shape]
                right = word == "powersgd" or found.first
                start[name] = method.factor(group, group.shape[1 if right else 0], found.rank)[0]
                square = 0 if found.first and found.rows == found.columns else square
            loop = {"powersgd": test_low_rank.PowerSGD, "acp-sgd": test_low_rank.ACPSGD}[word]
            made_loop = loop(made, count, start)
            made_loop.square = square
            return made_loop
    raise AssertionError(word)


@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize(
    ("word", "options"),
    [
        ("gtopk", {"ratio": 9.0}),
        ("lags", {"ratio": 12.0}),
        ("powersgd", {"rank": 2.0, "saving": 0.0}),
        ("acp-sgd", {"rank": 2.0, "saving": 0.0}),
        (
            "demo",
            {"block": test_demo.BLOCK, "top": test_demo.TOP, "decay": test_demo.DECAY},
        ),
    ],
)
def test_a_method_is_the_loop_that_holders_equal(
    word: str, options: dict[str, float], count: int
) -> None:
    module = Net()
    shapes = Shapes.of(module)
    train = Train(steps=8, batch=count, microbatch=1, lr=0.1)
    method = IN_STEP[word](shapes, count, options)
    plain = loop_of(method, module, word, train)
    like, random = dict(module.named_parameters()), torch.Generator().manual_seed(count)
    for step in range(8):
        gradients = torch.randn(count, shapes.numbers, generator=random)
        owns = [parted(one, like, shapes.names) for one in gradients]
        total = plain(step, owns)
        found = parted(method(gradients, step, learning_rate(train, step, 8)), like, shapes.names)
        for name in shapes.names:
            wanted = total[name] / count
            agree = torch.isclose(found[name], wanted, atol=1e-4).float().mean()
            assert agree > 0.97, (step, name)  # a sign of nearly nothing is either one


def test_what_is_taken_and_what_is_left_is_what_there_was() -> None:
    shapes = Shapes.of(Net())
    for word, options in (("gtopk", {"ratio": 20.0}), ("lags", {"ratio": 20.0})):
        method = IN_STEP[word](shapes, 4, options)
        given, taken = torch.zeros(shapes.numbers), torch.zeros(shapes.numbers)
        for step in range(5):
            gradients = torch.randn(4, shapes.numbers)
            taken += method(gradients, step, 1.0) * 4
            given += gradients.sum(0)
        assert torch.allclose(taken + method.left.sum(0), given, atol=1e-4)


def test_bytes_are_those_of_the_messages() -> None:
    specs = [TensorSpec((1024, 1024), "float32")]
    n, of = 1024 * 1024, {row.name: row for row in ROWS}
    ring = 4 * 7 / 8
    assert Row("", "gtopk", options="ratio=1024").bytes(specs, 8, 10) == 10 * ring * 4 * 2049
    assert Row("", "lags", options="ratio=1024").bytes(specs, 8, 10) == 10 * 14 * 4 * 2049
    assert of["powersgd_4"].bytes(specs, 8, 1) == ring * 4 * (2 * 4096 + 1)
    assert of["acp_sgd_4"].bytes(specs, 8, 1) == ring * 4 * (4096 + 1)
    assert of["demo_1"].ratio(specs, 8, 1) == pytest.approx(ring * n / (14 * (64 * 1.5 + 1)))


class Mean(InStep):
    def __call__(self, gradients: Tensor, step: int, lr: float) -> Tensor:
        return gradients.mean(0)


def test_with_the_plain_mean_it_is_the_plain_loop() -> None:
    setting = Setting(steps=6, blocks=2, width=8, heads=1, length=8, batch=8)
    module = setting.model()
    start = {n: p.clone() for n, p in module.state_dict().items()}

    def batches(numbers: range) -> dict[str, Tensor]:
        each = [
            torch.randint(0, 256, (9,), generator=torch.Generator().manual_seed(g)) for g in numbers
        ]
        return {"x": torch.stack(each)[:, :-1], "y": torch.stack(each)[:, 1:]}

    found = in_step.train(
        Together(setting.model(), 4, compiled=False),
        start,
        batches,
        setting.train,
        Mean(Shapes.of(module), 4, {}),
        steps=6,
        done=lambda step, weights: None,
    )
    oracle.train(
        module,
        lambda step, m: batches(range(8 * step + 2 * m, 8 * step + 2 * m + 2)),
        setting.train,
        steps=6,
        microbatches=4,
    )
    for name, p in module.named_parameters():
        assert torch.allclose(found[name], p, atol=1e-4), name
