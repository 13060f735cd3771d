"""What a stage runs in an operator's place computes what that does, and reads nothing else."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.benchmarks.operators.worker import run_operator
from shoal.dag.execute.execute import StageExecutor
from shoal.dag.ir import random as masks
from shoal.dag.ir.graph import (
    Graph,
    Input,
    Operator,
    Output,
    Ref,
    TensorSpec,
)
from shoal.dag.ir.infer import results_of
from shoal.dag.ir.random import table
from shoal.dag.plan.cut import cut

from .test_operators import call, floats


def _gradients(function: Any, *tensors: Tensor) -> list[Tensor]:
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    made = function(*leaves)
    made = made if isinstance(made, Tensor) else made[0]
    return [made, *torch.autograd.grad(made.square().sum(), leaves)]


@pytest.mark.parametrize("dim", [0, 1])
def test_what_stands_for_an_operator_computes_the_same(dim: int) -> None:
    torch.manual_seed(0)
    v, g = torch.randn(5, 7), torch.rand(5, 1) if dim == 0 else torch.rand(1, 7)
    picture, grid = torch.randn(2, 3, 4, 5), 3 * torch.randn(2, 6, 7, 2)
    x, mean, var = torch.randn(4, 3, 5), torch.randn(3), torch.rand(3)
    weight, bias = torch.randn(3), torch.randn(3)
    no_training = "_native_batch_norm_legit_no_training.default"
    cases: list[tuple[str, list[Tensor], list[Any]]] = [
        ("_weight_norm.default", [v, g], [dim]),
        ("_weight_norm_interface.default", [v, g], [dim]),
        ("grid_sampler_2d.default", [picture, grid], [dim, dim, False]),
        ("grid_sampler.default", [picture, grid], [dim, 2, True]),
        (no_training, [x, weight, bias], [mean, var, 0.1, 1e-5]),
    ]
    for target, tensors, rest in cases:
        packet, overload = target.split(".")
        plain = getattr(getattr(torch.ops.aten, packet), overload)
        names = [f"t{i}" for i in range(len(tensors))]
        fixed = {f"s{i}": r for i, r in enumerate(rest) if isinstance(r, Tensor)}
        args = [Ref(f"s{i}") if isinstance(r, Tensor) else r for i, r in enumerate(rest)]
        several = len(plain._schema.returns) > 1
        op = Operator("op", f"aten.{target}", (*map(Ref, names), *args), (), (), several)

        def stood(
            *given: Tensor, op: Operator = op, names: Any = names, fixed: Any = fixed
        ) -> Tensor:
            values = dict(zip(names, given, strict=True)) | fixed
            return run_operator(op, values, torch.device("cpu"))[0]

        found = _gradients(stood, *tensors)
        expected = _gradients(lambda *given, plain=plain, rest=rest: plain(*given, *rest), *tensors)
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("target", ["grid_sampler.default", "grid_sampler_2d.default"])
@pytest.mark.parametrize("padding", [0, 1, 2])
def test_places_that_are_none_and_those_far_off_read_what_lies_in_the_picture(
    target: str, padding: int
) -> None:
    """torch's own kernel makes an index of them and reads there, wherever that is."""
    picture = torch.rand(1, 1, 4, 5, generator=torch.Generator().manual_seed(0)) + 1.0
    odd = [float("nan"), float("inf"), -float("inf"), 1e30, -1e30, 1e9, 0.0]
    near = [-1.0, 2.0**20, -(2.0**20), 2.0**20, -(2.0**20), 2.0**20, 0.0]
    grids = [torch.tensor([[[(a, b) for b in row] for a in row]]) for row in (odd, near)]
    op, _ = call(target, floats(1, 1, 4, 5), floats(1, 7, 7, 2), 0, padding, False)
    made, wanted = (
        run_operator(op, {"t0": picture, "t1": grid}, torch.device("cpu"))[0] for grid in grids
    )
    assert torch.equal(made, wanted)
    inside = made[made != 0]
    assert inside.numel()
    assert padding == 0 or inside.numel() == made.numel()
    assert padding == 0 or bool(((inside >= 1.0) & (inside <= 2.0)).all())


def test_a_product_over_no_column_has_the_shape_that_meta_tensors_say() -> None:
    for added in (floats(), floats(1), floats(3)):
        op, specs = call("addmv.default", added, floats(3, 0), floats(0))
        values = {n: torch.ones(s.sizes) for n, s in specs.items()}
        (made,) = run_operator(op, values, torch.device("cpu"))
        (said,) = results_of(op, {n: (s, False) for n, s in specs.items()})
        assert said is not None
        assert tuple(made.shape) == said[0].sizes == (3,)
        assert torch.equal(made, torch.ones(3))


def test_the_table_of_masks_goes_with_the_last_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    # Stages of other tests may still hold theirs.
    monkeypatch.setattr(masks, "_tables", weakref.WeakValueDictionary())
    spec = TensorSpec((2, 1 << 10), "float32")
    operators = (
        Operator("drop", "shoal.dropout.default", (Ref("in:x"), 0.5, 0), (), (Output(spec),)),
        Operator("loss", "aten.sum.default", (Ref("drop"),), (), (Output(floats()),)),
    )
    graph = Graph((Input("x", spec),), (), (), operators, "loss", batch=2)
    (stage,) = cut(graph, [(0, 2)])
    executor = StageExecutor(graph, stage, {})
    executor.forward(0, 0, {}, {"x": torch.ones(2, 1 << 10)})
    held = table()
    assert {d.type: t.numel() for d, t in held.words.items()} == {"cpu": 1 << 10}
    del held, executor
    assert table().words == {}
