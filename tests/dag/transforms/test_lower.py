"""Lowering, operator by operator. (Whole models: tests/dag/capture/test_models.py.)"""

import math
from dataclasses import replace

import pytest
import torch

from shoal.dag.ir.graph import (
    Graph,
    GraphError,
    Input,
    Operator,
    Output,
    Parameter,
    Ref,
    Size,
    TensorSpec,
)
from shoal.dag.ir.infer import call, infer, with_grads
from shoal.dag.ir.operators import CORE, allowed
from shoal.dag.ir.validate import validate
from shoal.dag.transforms.lower import lower

CPU = torch.device("cpu")
A = (2, 4, 4, 4)
FULL_FORMS = {
    "silu": ("aten.silu.default", [A], ()),
    "gelu": ("aten.gelu.default", [A], ()),
    "softmax": ("aten.softmax.int", [A], (-1,)),
    "log_softmax": ("aten.log_softmax.int", [A], (1,)),
    "layer_norm": ("aten.layer_norm.default", [A, (4,), (4,)], None),
    "rms_norm": ("aten.rms_norm.default", [A], ((4,),)),
    "group_norm": ("aten.group_norm.default", [A], (2,)),
    "instance_norm": (
        "aten.instance_norm.default", [A], (None, None, None, None, True, 0.1, 1e-5, False),
    ),
    "matmul": ("aten.matmul.default", [A, A], ()),
    "linear": ("aten.linear.default", [A, (3, 4), (3,)], ()),
    "conv2d": ("aten.conv2d.default", [A, (3, 4, 3, 3), (3,)], ((2, 2), (1, 1))),
    "conv_transpose2d": ("aten.conv_transpose2d.input", [A, (4, 3, 2, 2)], (None, (2, 2))),
    "max_pool2d": ("aten.max_pool2d.default", [A], ((2, 2),)),
    "avg_pool2d": ("aten.avg_pool2d.default", [A], ((2, 2),)),
    "adaptive": ("aten.adaptive_avg_pool2d.default", [A], ((2, 2),)),
    "nearest": ("aten.upsample_nearest2d.vec", [A], (None, (2.0, 2.0))),
    "bilinear": ("aten.upsample_bilinear2d.vec", [A], (None, False, (2.0, 2.0))),
    "bicubic": ("aten.upsample_bicubic2d.vec", [A], (None, False, (2.0, 2.0))),
    "attention": ("aten.scaled_dot_product_attention.default", [A, A, A], (None, 0.0, True)),
    "mse": ("aten.mse_loss.default", [A, A], ()),
    "smooth_l1": ("aten.smooth_l1_loss.default", [A, A], ()),
    "bce": ("aten.binary_cross_entropy_with_logits.default", [A, A], ()),
    "std": ("aten.std.correction", [A], ((1,),)),
    "logsumexp": ("aten.logsumexp.default", [A], ((1,),)),
    "vector_norm": ("aten.linalg_vector_norm.default", [A], (2, (1,))),
    "chunk": ("aten.chunk.default", [A], (2, 1)),
    "unbind": ("aten.unbind.int", [A], (1,)),
    "repeat_interleave": ("aten.repeat_interleave.self_int", [A], (2, 1)),
    "tril": ("aten.tril.default", [A], ()),
    "roll": ("aten.roll.default", [A], ((1,), (1,))),
    "pad": ("aten.pad.default", [A], ((1, 1), "constant", 0.0)),
    "cumsum": ("aten.cumsum.default", [A], (1,)),
    "prod": ("aten.prod.dim_int", [A], (1,)),
    "elu": ("aten.elu.default", [A], ()),
    "mish": ("aten.mish.default", [A], ()),
    "softplus": ("aten.softplus.default", [A], ()),
    "hardswish": ("aten.hardswish.default", [A], ()),
    "leaky_relu": ("aten.leaky_relu.default", [A], ()),
    "log_sigmoid": ("aten.log_sigmoid.default", [A], ()),
    "glu": ("aten.glu.default", [A], (1,)),
    "max": ("aten.max.default", [A], ()),
    "min": ("aten.min.default", [A], ()),
    "max_of_two": ("aten.max.other", [A, A], ()),
    "amax": ("aten.amax.default", [A], ((1, 3),)),
    "amin": ("aten.amin.default", [A], ((-1,), True)),
    "exp2": ("aten.exp2.default", [A], ()),
    "var_mean": ("aten.var_mean.correction", [A], ((1, 2),)),
    "pixel_shuffle": ("aten.pixel_shuffle.default", [A], (2,)),
}  # fmt: skip
"""Name → target, shapes of the tensors it takes first, further arguments."""


def world(target: str, shapes, further) -> Graph:
    """A graph of one operator over parameters; its loss is the sum of squares of every result."""
    parameters = tuple(
        Parameter(f"p{i}", TensorSpec(shape, "float32")) for i, shape in enumerate(shapes)
    )
    args = tuple(Ref(f"param:{p.name}") for p in parameters)
    if further is None:  # layer_norm has its shape in between
        args = (args[0], (4,), *args[1:])
    else:
        args += further
    single = target.split(".")[1] not in ("chunk", "unbind", "var_mean")
    probe = Operator("y", target, args, (), (), returns_tuple=not single)
    values = {f"param:{p.name}": torch.empty(p.spec.shape) for p in parameters}
    results = call(probe, values, CPU)
    outputs = tuple(Output(TensorSpec(tuple(r.shape), "float32")) for r in results)
    made = [replace(probe, outputs=outputs)]
    total = ""
    for i, value in enumerate(made[0].values):
        shape = TensorSpec((), "float32")
        made.append(
            Operator(f"sq{i}", "aten.mul.Tensor", (Ref(value), Ref(value)), (), (outputs[i],))
        )
        made.append(Operator(f"sum{i}", "aten.sum.default", (Ref(f"sq{i}"),), (), (Output(shape),)))
        if total:
            add = (Ref(total), Ref(f"sum{i}"))
            made.append(Operator(f"add{i}", "aten.add.Tensor", add, (), (Output(shape),)))
        total = made[-1].name
    inputs = (Input("x", TensorSpec((1,), "float32")),)
    graph = Graph(inputs, parameters, (), tuple(made), total, batch=1)
    return with_grads(graph, infer(graph))


def gradients(
    graph: Graph, given: dict[str, torch.Tensor] | None = None
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    torch.manual_seed(0)
    made = [(given or {}).get(p.name, torch.randn(p.spec.sizes)) for p in graph.parameters]
    leaves = [t.detach().clone().requires_grad_() for t in made]
    values = {f"param:{p.name}": t for p, t in zip(graph.parameters, leaves, strict=True)}
    for op in graph.operators:
        values |= zip(op.values, call(op, values, CPU), strict=True)
    loss = values[graph.loss]
    return loss, list(torch.autograd.grad(loss, leaves))


@pytest.mark.parametrize("form", FULL_FORMS)
def test_the_core_form_has_the_value_and_the_gradients_of_the_full_one(form: str) -> None:
    graph = world(*FULL_FORMS[form])
    lowered = validate(lower(graph).graph)
    assert all(op.target in CORE for op in lowered.operators)
    torch.testing.assert_close(gradients(lowered), gradients(graph), rtol=1e-5, atol=1e-5)


def test_a_row_that_attends_to_nothing_is_zero_in_the_core_form_too() -> None:
    graph = world("aten.scaled_dot_product_attention.default", [A, A, A, (4, 4)], ())
    mask = torch.zeros(4, 4).masked_fill(torch.ones(4, 4).tril(-1) == 0, -math.inf)
    loss, grads = gradients(graph, {"p3": mask})
    assert not any(g.isnan().any() for g in grads)
    torch.testing.assert_close(gradients(lower(graph).graph, {"p3": mask}), (loss, grads))


@pytest.mark.parametrize("name", ["max", "min"])
def test_equal_extremes_share_the_gradient_in_the_core_form_too(name: str, monkeypatch) -> None:
    graph = world(f"aten.{name}.default", [A], ())
    monkeypatch.setattr(torch, "randn", torch.ones)
    torch.testing.assert_close(gradients(lower(graph).graph), gradients(graph))


def test_equal_operators_share_a_recipe_and_keep_their_names() -> None:
    graph = world("aten.silu.default", [A], ())
    lowered = lower(graph)
    assert lowered.start == (0, 2, 3, 4)
    assert [op.name for op in lowered.graph.operators] == ["y/0", "y", "sq0", "sum0"]
    assert lowered.graph.operator_set == "core"


def test_an_unbound_graph_is_refused() -> None:
    graph = replace(world("aten.silu.default", [A], ()), batch=None)
    with pytest.raises(GraphError, match="bind"):
        lower(graph)


def test_an_operator_without_core_form_is_named() -> None:
    graph = world("aten.erfinv.default", [A], ())
    assert not allowed("aten.erfinv.default", "core")
    with pytest.raises(GraphError, match=r"y \(aten.erfinv.default\) has no core form"):
        lower(graph)


def test_no_size_depends_on_the_batch_after_lowering() -> None:
    graph = world("aten.silu.default", [A], ())
    specs = lower(graph).graph.spec.values()
    assert not any(isinstance(d, Size) for s in specs for d in s.shape)
