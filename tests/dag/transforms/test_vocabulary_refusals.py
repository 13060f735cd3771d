"""Heads that cannot be split say why, and nothing but a GraphError comes of a damaged graph."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from shoal.dag.capture.capture import capture
from shoal.dag.ir.graph import Arg, Graph, GraphError, Operator, Output, Ref, Size, TensorSpec
from shoal.dag.ir.validate import validate
from shoal.dag.plan.plan import PeerId, Plan, PlanError, StageSlot, Visit
from shoal.dag.transforms.vocabulary import MAX_PARTS, can_split, planned_graph, split_head
from shoal.examples.gpt import gpt

from .heads import MEAN, head_graph


def _changed(graph: Graph, at: str, **changes: Any) -> Graph:
    return replace(
        graph,
        operators=tuple(replace(op, **changes) if op.name == at else op for op in graph.operators),
    )


def _embedding() -> Graph:
    graph = head_graph(bias=False)
    spec = TensorSpec((Size(1), 3, 4), "float32")
    lookup = Operator(
        "embedding",
        "aten.embedding.default",
        (Ref("param:head.weight"), Ref("in:y")),
        (),
        (Output(spec),),
    )
    return replace(graph, operators=(lookup, *graph.operators))


def _accuracy() -> Graph:
    graph = head_graph()
    spec = TensorSpec((Size(3),), "int64")
    guess = Operator("guess", "aten.argmax.default", (Ref("flat"), 1), (), (Output(spec),))
    return replace(graph, operators=(*graph.operators, guess))


REFUSED = {
    "tied": (_embedding, "tied to the embedding"),
    "read elsewhere": (_accuracy, "logits flat are read elsewhere"),
    "class weights": (
        lambda: _changed(
            head_graph(), "loss", args=(Ref("flat"), Ref("y"), Ref("param:head.bias"), MEAN, -100)
        ),
        "class weights",
    ),
    "smoothing": (lambda: head_graph(loss=(None, MEAN, -100, 0.1)), "smooths labels"),
    "no loss": (lambda: replace(head_graph(), operators=head_graph().operators[:-1]), "0 cross"),
    "no linear": (
        lambda: _changed(head_graph(), "linear", target="aten.bilinear.default"),
        "stands between head and loss",
    ),
    "softmax": (
        lambda: _changed(head_graph(), "flat", target="aten.softmax.int"),
        "stands between head and loss",
    ),
    "core": (lambda: replace(head_graph(), operator_set="core"), "core operator set"),
    "activations": (
        lambda: _changed(head_graph(bias=False), "linear", args=(Ref("h"), Ref("in:x"))),
        "expected a parameter",
    ),
    "shape": (
        lambda: replace(
            head_graph(),
            parameters=tuple(
                replace(p, spec=TensorSpec((), "float32")) for p in head_graph().parameters
            ),
        ),
        "expected a row each",
    ),
}


@pytest.mark.parametrize("case", sorted(REFUSED))
def test_what_cannot_be_split_says_why(case):
    make, reason = REFUSED[case]
    graph = make()
    assert reason in can_split(graph)
    with pytest.raises(GraphError, match=reason):
        split_head(graph, 2)


LEAVES: list[Arg] = [
    *(None, True, 0, 1, -1, 11, -100, 1.5, "x", Size(3), (), (1, 2), (Size(3), -1)),
    *(Ref("in:x"), Ref("in:y"), Ref("param:head.weight"), Ref("h"), Ref("linear"), Ref("flat")),
]
SPECS = [
    TensorSpec(shape, dtype)
    for shape in ((), (11,), (Size(3), 11), (11, 4), (0,), (Size(1), 3, 11))
    for dtype in ("float32", "int64", "bfloat16")
]


def _damaged(graph: Graph, rng: random.Random) -> Graph:
    """One operator or parameter of the graph says something else."""
    at, operators = rng.randrange(len(graph.operators)), list(graph.operators)
    op = operators[at]
    args = list(op.args)
    args[rng.randrange(len(args))] = rng.choice(LEAVES)
    operators[at] = rng.choice(
        [
            replace(op, args=tuple(args)),
            replace(op, args=op.args[: rng.randrange(len(args))]),
            replace(op, target=rng.choice(operators).target),
            replace(op, outputs=(Output(rng.choice([*SPECS, None])),)),
            replace(op, returns_tuple=True),
            replace(op, kwargs=((rng.choice(["weight", "bias", "dim"]), rng.choice(LEAVES)),)),
        ]
    )
    parameters = list(graph.parameters)
    if rng.random() < 0.3:
        i = rng.randrange(len(parameters))
        parameters[i] = replace(parameters[i], spec=rng.choice(SPECS))
    return replace(graph, operators=tuple(operators), parameters=tuple(parameters))


def test_a_damaged_graph_is_refused_or_split_into_a_graph():
    """I7: whatever passed `validate`, nothing but a GraphError comes out."""
    rng = random.Random(0)
    graphs = [head_graph(), head_graph(bf16=True), head_graph(bias=False, scale=0.5)]
    outcomes = set()
    for _ in range(1000):
        try:
            graph = validate(_damaged(rng.choice(graphs), rng))
        except GraphError:
            continue
        try:
            validate(split_head(graph, 3))
            outcomes.add("split")
        except GraphError as error:
            outcomes.add(str(error))
    assert "split" in outcomes
    assert len(outcomes) > 20


@pytest.mark.parametrize("parts", [0, 1, 12, 10**9])
def test_the_number_of_blocks_has_bounds(parts):
    with pytest.raises(GraphError, match="expected 2 to 11"):
        split_head(head_graph(words=11), parts)
    with pytest.raises(GraphError, match=f"expected 2 to {MAX_PARTS}"):
        split_head(head_graph(words=1000), MAX_PARTS + 1)


def test_a_plan_counts_the_operators_of_its_graph():
    graph, peer = head_graph(), PeerId("a")
    whole = Plan((StageSlot(0, len(graph.operators), (peer,)),), ((Visit(0, peer),),), 2)
    assert planned_graph(graph, whole) is graph
    assert planned_graph(graph, replace(whole, head_parts=3)) == split_head(graph, 3)
    with pytest.raises(PlanError, match=r"a head in 2 parts: .*tied to the embedding"):
        planned_graph(_embedding(), replace(whole, head_parts=2))


def test_the_tied_example_says_so():
    x = torch.randint(256, (2, 8))
    graph = capture(gpt(layers=1, width=8, heads=2, length=8), {"x": x, "y": x}).graph
    assert "tied to the embedding (bytes.weight is read by embedding" in can_split(graph)
