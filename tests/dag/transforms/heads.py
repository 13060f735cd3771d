"""Graphs that end in a head, and what they give whole and in blocks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shoal.dag.ir.graph import (
    Arg,
    Dtype,
    Graph,
    Input,
    Operator,
    Output,
    Parameter,
    Ref,
    Size,
    TensorSpec,
)
from shoal.dag.ir.infer import call, infer, with_grads
from shoal.dag.ir.validate import validate
from shoal.dag.transforms.split_weights import block_of, blocks, grouped
from shoal.dag.transforms.vocabulary import split_head

MEAN, SUM, NONE = 1, 2, 0


def head_graph(
    words: int = 11,
    width: int = 4,
    length: int = 3,
    *,
    bias: bool = True,
    reduction: int = MEAN,
    ignore: int = -100,
    bf16: bool = False,
    loss: tuple[Arg, ...] = (),
    scale: float | None = None,
) -> Graph:
    """Hidden states scaled by a parameter, a head, and the mean of its cross entropy as captured:
    `in:x` (b, T, D), `in:y` (b, T)."""

    def floats(*shape: Any) -> TensorSpec:
        return TensorSpec(shape, "float32")

    b, tokens = Size(1), Size(length)
    parameters = [
        Parameter("norm", floats(width)),
        Parameter("head.weight", floats(words, width), tied=("output.weight",)),
    ]
    made: list[Operator] = []

    def put(name: str, target: str, args: Any, spec: TensorSpec, kwargs: Any = ()) -> Ref:
        made.append(Operator(name, f"aten.{target}", args, kwargs, (Output(spec),)))
        return Ref(name)

    def lower(value: Ref, name: str) -> Ref:
        if not bf16:
            return value
        shape = (b, length, width) if name == "cast0" else parameters[int(name[-1])].spec.shape
        to = (("dtype", Dtype("bfloat16")),)
        return put(name, "_to_copy.default", (value,), TensorSpec(shape, "bfloat16"), to)

    h = put("h", "mul.Tensor", (Ref("in:x"), Ref("param:norm")), floats(b, length, width))
    args = [lower(h, "cast0"), lower(Ref("param:head.weight"), "cast1")]
    if bias:
        parameters.append(Parameter("head.bias", floats(words)))
        args.append(lower(Ref("param:head.bias"), "cast2"))
    dtype = "bfloat16" if bf16 else "float32"
    logits = put("linear", "linear.default", tuple(args), TensorSpec((b, length, words), dtype))
    if scale is not None:
        logits = put("scaled", "mul.Tensor", (logits, scale), floats(b, length, words))
    flat = put(
        "flat", "reshape.default", (logits, (tokens, words)), TensorSpec((tokens, words), dtype)
    )
    if bf16:
        flat = put(
            "flat32",
            "_to_copy.default",
            (flat,),
            floats(tokens, words),
            (("dtype", Dtype("float32")),),
        )
    y = put("y", "reshape.default", (Ref("in:y"), (tokens,)), TensorSpec((tokens,), "int64"))
    shape = (tokens,) if reduction == NONE else ()
    entropy = (flat, y, *(loss or (None, reduction, ignore)))
    result = put("loss", "cross_entropy_loss.default", entropy, floats(*shape))
    if reduction == NONE:
        result = put("total", "sum.default", (result,), floats())
    inputs = (Input("x", floats(b, length, width)), Input("y", TensorSpec((b, length), "int64")))
    graph = Graph(inputs, tuple(parameters), (), tuple(made), result.value)
    return _with_grads(graph)


def _with_grads(graph: Graph) -> Graph:
    """With the flags that capture sets."""
    return replace(
        with_grads(graph, infer(graph.bind(2))),
        inputs=graph.inputs,
    )


def run(graph: Graph, given: dict[str, Tensor], batch: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and the gradient of every float that is given, operator by operator."""
    values: dict[str, Any] = {
        name: t.clone().requires_grad_(t.is_floating_point()) for name, t in given.items()
    }
    leaves = {name: t for name, t in values.items() if t.requires_grad}
    bound = graph.bind(batch)
    for op in bound.operators:
        (values[op.name],) = call(op, values, torch.device("cpu"))
        assert tuple(values[op.name].shape) == bound.spec[op.name].sizes, op
    values[graph.loss].backward()
    return values[graph.loss].detach(), {name: t.grad for name, t in leaves.items()}


def tensors(graph: Graph, batch: int, seed: int, ignored: Any = None, size: float = 1.0) -> Any:
    """Data and weights; `ignored`: (label, share of the tokens that have it)."""
    rng = torch.Generator().manual_seed(seed)
    specs = {n: s for n, s in graph.bind(batch).spec.items() if n.startswith(("param:", "in:x"))}
    found = {n: size * torch.randn(s.sizes, generator=rng) for n, s in specs.items()}
    words = len(found["param:head.weight"])
    shape = graph.bind(batch).spec["in:y"].sizes
    labels = torch.randint(words, shape, generator=rng)
    if ignored:
        labels[torch.rand(shape, generator=rng) < ignored[1]] = ignored[0]
    return found | {"in:y": labels}


def in_blocks(given: dict[str, Tensor], parts: int) -> dict[str, Tensor]:
    """The same weights, with the head's cut into blocks."""
    found = dict(given)
    for name in ("param:head.weight", "param:head.bias"):
        if name in given:
            whole = found.pop(name)
            for block in blocks(name, parts):
                found[str(block)] = whole[slice(*block.rows(len(whole)))]
    return found


def merged(grads: dict[str, Tensor]) -> dict[str, Tensor]:
    found = {n: g for n, g in grads.items() if block_of(n) is None}
    for name, of in grouped(grads).items():
        found[name] = torch.cat([grads[str(block)] for block in of])
    return found


def compare(graph: Graph, given: Any, parts: int, batch: int, rel: float = 1e-5) -> float:
    """Raises where the blocks differ from the whole; returns the largest relative difference."""
    loss, grads = run(graph, given, batch)
    split = validate(split_head(graph, parts))
    again, blockwise = run(split, in_blocks(given, parts), batch)
    torch.testing.assert_close(again, loss, rtol=rel, atol=1e-6, equal_nan=True)
    found = merged(blockwise)
    assert found.keys() == grads.keys()
    worst = 0.0
    for name, wanted in grads.items():
        difference, norm = float((found[name] - wanted).norm()), float(wanted.norm())
        assert difference <= rel * norm + 1e-7, f"gradient of {name}: {difference} of {norm}"
        worst = max(worst, difference / norm if norm else difference)
    return worst
