"""The head in blocks against the whole one: loss, every gradient, flags and names."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from shoal.dag.capture.capture import capture
from shoal.dag.cost.cost import cost
from shoal.dag.ir.graph import (
    Arg,
    Dtype,
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
from shoal.dag.ir.validate import validate
from shoal.dag.plan.cut import cut
from shoal.dag.plan.plan import PeerId, Plan, PlanError, StageSlot, Visit
from shoal.dag.transforms.split_weights import ParameterBlock, block_of, blocks, grouped, whole_name
from shoal.dag.transforms.vocabulary import (
    MAX_PARTS,
    can_split,
    head_operators,
    planned_graph,
    split_head,
)
from shoal.examples.gpt import gpt

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


@settings(deadline=None)
@given(
    words=st.integers(2, 40),
    parts=st.integers(2, 7),
    batch=st.integers(1, 4),
    length=st.integers(1, 5),
    width=st.integers(1, 9),
    bias=st.booleans(),
    reduction=st.sampled_from([MEAN, SUM, NONE]),
    ignored=st.sampled_from([None, (-100, 0.5), (0, 0.5), (1, 0.3), (-1, 1.0), (-100, 1.0)]),
    seed=st.integers(0, 2**32),
)
def test_loss_and_gradients_are_those_of_the_whole_head(
    words, parts, batch, length, width, bias, reduction, ignored, seed
):
    ignore = ignored[0] if ignored else -100
    graph = head_graph(words, width, length, bias=bias, reduction=reduction, ignore=ignore)
    given = tensors(graph, batch, seed, ignored)
    compare(graph, given, min(parts, words), batch)


def test_a_mean_over_no_token_is_nan_with_gradient_zero():
    graph = head_graph()
    given = tensors(graph, 2, 0, (-100, 1.0))
    loss, grads = run(split_head(graph, 3), in_blocks(given, 3), 2)
    assert loss.isnan()
    assert all(bool((g == 0).all()) for g in grads.values())


def test_a_small_loss_beside_large_logits_keeps_its_digits():
    graph = head_graph(words=8, width=8, length=4, bias=True)
    given = tensors(graph, 2, 1)
    given["param:norm"] = torch.ones(8)
    given["param:head.weight"] = 1000.0 * torch.eye(8)
    given["param:head.bias"] = torch.linspace(0, 1, 8)
    given["in:x"] = torch.nn.functional.one_hot(given["in:y"], 8) * 0.005 + 2.0
    compare(graph, given, 3, 2)


def test_a_block_of_padding_words_that_are_minus_infinity():
    graph = head_graph(words=9)
    given = tensors(graph, 2, 2)
    given["in:y"] %= 6
    given["param:head.bias"][6:] = float("-inf")
    compare(graph, given, 3, 2)


@pytest.mark.parametrize("label", [-1, 11, 1000])
def test_a_label_that_is_no_word_fails_as_in_the_whole_loss(label):
    graph = head_graph(words=11)
    given = tensors(graph, 2, 0)
    given["in:y"][0, 0] = label
    with pytest.raises(GraphError, match="out of bounds"):
        run(graph, given, 2)
    with pytest.raises(GraphError, match="out of bounds"):
        run(split_head(graph, 3), in_blocks(given, 3), 2)


def test_scales_between_head_and_loss_are_each_blocks_own():
    graph = head_graph(scale=0.25)
    compare(graph, tensors(graph, 2, 0), 4, 2)


def test_under_mixed_precision_it_is_equal_to_the_precision_of_bfloat16():
    graph = head_graph(words=32, width=16, bf16=True)
    given = tensors(graph, 3, 0, (-100, 0.3))
    compare(graph, given, 4, 3, rel=1e-2)
    assert split_head(graph, 4).spec["linear/0"].dtype == "bfloat16"


@pytest.mark.parametrize("reduction", [MEAN, SUM, NONE])
@pytest.mark.parametrize("bf16", [False, True])
def test_specs_and_gradient_flags_are_those_that_torch_infers(reduction, bf16):
    split = split_head(head_graph(reduction=reduction, bf16=bf16), 3).bind(2)
    inferred = infer(split)
    assert {value: spec for value, (spec, _) in inferred.items()} == split.spec
    assert with_grads(split, inferred) == split
    assert split == split_head(head_graph(reduction=reduction, bf16=bf16).bind(2), 3)


def test_no_logits_cross_between_stages():
    graph, parts = head_graph(words=100, width=2, length=5), 4
    split = split_head(graph, parts).bind(3)
    bounds = head_operators(graph, parts)
    edges = [0, *(start for start, _ in bounds), bounds[-1][1], len(split.operators)]
    assert [stop for _, stop in bounds[:-1]] == [start for start, _ in bounds[1:]]
    stages = cut(split, list(itertools.pairwise(edges)))
    for stage in stages[1:]:
        assert all(port.spec.sizes[-1] <= 3 * 5 for port in stage.sends), stage.sends
        assert all(port.spec.elements <= 3 * 5 for port in stage.sends)
    for b, stage in enumerate(stages[1:-1]):
        own = {f"head.weight..{b}/4", f"head.bias..{b}/4"}
        assert set(stage.parameters) == own
        # h and the labels, not another block's numbers
        assert {p.source for p in stage.receives} == {0}
    # What the three numbers of a block carry back: its sum and its target, not its maximum.
    assert [p.value for p in stages[1].sends if p.grad] == ["linear/0/sum", "linear/0/target"]


def test_blocks_share_the_heads_work():
    graph = head_graph(words=64, width=512, length=8).bind(4)
    whole, split = cost(graph), cost(split_head(graph, 4))
    per_block = [
        sum(split[i].flops_forward for i in range(*where)) for where in head_operators(graph, 4)
    ]
    head = next(
        c.flops_forward for c, op in zip(whole, graph.operators, strict=True) if op.name == "linear"
    )
    assert all(head / 4 <= flops < head / 3 for flops in per_block)


def test_parameters_become_blocks_with_the_rows_of_the_whole():
    split = split_head(head_graph(words=11, width=4), 3)
    assert [(p.name, p.spec.shape, p.tied) for p in split.parameters] == [
        ("norm", (4,), ()),
        ("head.weight..0/3", (3, 4), ("output.weight..0/3",)),
        ("head.weight..1/3", (4, 4), ("output.weight..1/3",)),
        ("head.weight..2/3", (4, 4), ("output.weight..2/3",)),
        ("head.bias..0/3", (3,), ()),
        ("head.bias..1/3", (4,), ()),
        ("head.bias..2/3", (4,), ()),
    ]
    assert split.loss == "loss"
    assert split.operators[-1].name == "loss"


@given(rows=st.integers(1, 10**6), parts=st.integers(1, 64))
def test_blocks_of_rows_cover_each_row_once(rows, parts):
    edges = [block.rows(rows) for block in blocks("w", parts)]
    assert edges[0][0] == 0
    assert edges[-1][1] == rows
    assert all(a[1] == b[0] for a, b in itertools.pairwise(edges))
    sizes = [stop - start for start, stop in edges]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    "name", ["head.weight", "a..b", "a..0", "a..1/0", "a..2/2", "a..01/2", "..0/2", "a..0/2.b"]
)
def test_other_names_are_no_blocks(name):
    assert block_of(name) is None
    assert whole_name(name) == name


def test_the_name_of_a_block_says_what_it_is():
    assert block_of("head.weight..1/3") == ParameterBlock("head.weight", 1, 3)
    assert whole_name("head.bias..1/3") == "head.bias"
    with pytest.raises(KeyError):  # torch allows no such name in a module
        torch.nn.Module().register_parameter("w..0/3", None)


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


class Shifted(nn.Module):
    """The loss of older Hugging Face models: logits and labels shifted inside the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(13, 6)
        self.head = nn.Linear(6, 13, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.words(x)) / 2
        shifted, labels = logits[..., :-1, :].contiguous(), y[..., 1:].contiguous()
        total = F.cross_entropy(shifted.view(-1, 13), labels.view(-1), reduction="sum")
        count = (labels != -100).sum()
        return {"loss": total / count.clamp(1), "weight": count.float()}


def test_a_captured_model_with_shifted_labels():
    module = Shifted()
    data = {"x": torch.randint(13, (3, 5)), "y": torch.randint(13, (3, 5))}
    data["y"][0, 2:] = -100
    graph = capture(module, data).graph
    assert can_split(graph) == ""
    given = {f"in:{name}": t for name, t in data.items()}
    given |= {f"param:{name}": t.detach() for name, t in module.state_dict().items()}
    compare(graph, given, 4, 3)
    split = split_head(graph, 4).bind(3)
    assert with_grads(split, infer(split)) == split
    assert split.weight == graph.weight


def test_the_tied_example_says_so():
    x = torch.randint(256, (2, 8))
    graph = capture(gpt(layers=1, width=8, heads=2, length=8), {"x": x, "y": x}).graph
    assert "tied to the embedding (bytes.weight is read by embedding" in can_split(graph)
