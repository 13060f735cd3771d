"""What must run where data is kept: no bare value, and no bare gradient, crosses a link."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from shoal.dag.analysis.beside import beside_data
from shoal.dag.capture.capture import capture
from shoal.dag.ir.graph import Graph, Input, Operator, Output, Parameter, Ref, TensorSpec
from shoal.dag.plan.cut import cut


def targets(graph: Graph, names: tuple[str, ...]) -> list[str]:
    """The operators that stay, by the short names of what they do."""
    stay = beside_data(graph, names)
    return [graph.operators[i].target.split(".")[1] for i in stay]


class Classifier(nn.Module):
    """Scales its input before the first layer, and its logits behind the last."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 8), nn.LayerNorm(8)
        self.middle, self.last = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.norm(torch.relu(self.first(x / 255 - 0.5)))
        h = h + torch.relu(self.middle(h))
        return F.cross_entropy(self.last(h) * 0.5, y)


@pytest.fixture(scope="module", params=["fp32", "bf16"])
def classifier(request: pytest.FixtureRequest) -> Graph:
    batch = {"x": torch.zeros(2, 6), "y": torch.zeros(2, dtype=torch.int64)}
    return capture(Classifier(), batch, dtype=request.param).graph.bind(2)


def test_inputs_stay_until_the_first_layer_has_weighed_them(classifier: Graph) -> None:
    stay = beside_data(classifier, ("x",))
    linear = [i for i, op in enumerate(classifier.operators) if "linear" in op.target]
    assert linear[0] in stay
    assert not set(linear[1:]) & set(stay)
    assert not any("layer_norm" in name for name in targets(classifier, ("x",)))


def test_labels_keep_the_loss_and_the_last_layer_beside_them(classifier: Graph) -> None:
    stay = beside_data(classifier, ("y",))
    linear = [i for i, op in enumerate(classifier.operators) if "linear" in op.target]
    assert linear[-1] in stay
    assert not set(linear[:-1]) & set(stay)
    loss = classifier.producer[classifier.loss]
    assert set(range(linear[-1], loss + 1)) <= set(stay)


def test_without_names_nothing_stays(classifier: Graph) -> None:
    assert beside_data(classifier, ()) == ()


class Skip(nn.Module):
    """Its input comes back verbatim at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.out = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(8, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.two(torch.relu(self.one(x)))
        return F.mse_loss(self.out(torch.cat([x, h], 1)), y)


def test_an_input_that_is_carried_along_keeps_all_that_carries_it() -> None:
    graph = capture(Skip(), {"x": torch.zeros(2, 4), "y": torch.zeros(2, 1)}).graph.bind(2)
    assert targets(graph, ("x",)) == ["linear", "linear", "cat", "linear"]


class Model(nn.Module):
    """A part in front of a head with four outputs, or as many as asked for."""

    def __init__(self, part: nn.Module, out: int, outputs: int = 4) -> None:
        super().__init__()
        self.part, self.head = part, nn.Linear(out, outputs)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        made = self.part(x)
        made = made[0] if isinstance(made, tuple) else made
        return F.mse_loss(self.head(made), y)


class Along(nn.Module):
    """A convolution over positions, whose channels come last."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x.transpose(1, 2)).transpose(1, 2)


class Einsum(nn.Module):
    def __init__(self, equation: str, *shape: int) -> None:
        super().__init__()
        self.equation, self.w = equation, nn.Parameter(torch.zeros(*shape))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum(self.equation, x, self.w)


class Call(nn.Module):
    """One call with the data and a matrix of weights."""

    def __init__(self, call: Callable[[Tensor, Tensor], Tensor], *shape: int) -> None:
        super().__init__()
        self.call, self.w = call, nn.Parameter(torch.zeros(*shape))

    def forward(self, x: Tensor) -> Tensor:
        return self.call(x, self.w)


class Bilinear(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.part, self.size = nn.Bilinear(size, size, 8), size

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x[..., : self.size], x[..., : self.size] * 2)


def one_hot(x: Tensor, w: Tensor) -> Tensor:
    return F.one_hot(x, 10).float() @ w


def conv(*sizes: int, **settings: Any) -> nn.Module:
    return Along(nn.Conv1d(*sizes, **settings))


def across(*sizes: int, **settings: Any) -> nn.Module:
    return Along(nn.ConvTranspose1d(*sizes, **settings))


PRODUCTS: dict[str, nn.Module] = {
    "linear": nn.Linear(6, 8),
    "matmul": Call(lambda x, w: x @ w, 6, 8),
    "weights first": Call(lambda x, w: (w @ x.transpose(1, 2)).transpose(1, 2), 8, 6),
    "addmm": Call(lambda x, w: torch.addmm(w[0], x.flatten(0, 1), w).view(x.shape[0], 5, 8), 6, 8),
    "einsum": Einsum("bti,io->bto", 6, 8),
    "einsum of more": Einsum("...i,io", 6, 8),
    "convolution": conv(6, 8, 1),
    "depthwise over positions": conv(6, 6, 3, groups=6, padding=1),
    "depthwise, the same": conv(6, 6, 3, groups=6, padding="same"),
    "transposed": across(6, 8, 1),
    "transposed, overlapping": across(6, 6, 4, stride=2, groups=6),
    "lstm": nn.LSTM(6, 8, batch_first=True),
    "gru": nn.GRU(6, 8, batch_first=True),
    "rnn": nn.RNN(6, 8, batch_first=True),
    "bilinear": Bilinear(6),
}
NONE: dict[str, nn.Module] = {
    "a table of positions": Call(torch.add, 5, 6),
    "a scaling": Call(torch.mul, 5, 6),
    "a norm over two dimensions": nn.LayerNorm((5, 6)),
    "distances": Call(torch.cdist, 7, 6),
    "attention over the data": Call(
        lambda x, w: F.scaled_dot_product_attention(w.expand(x.shape[0], 5, 6), x, x), 5, 6
    ),
    "an added bias": Call(
        lambda x, w: torch.baddbmm(x, w[:5].expand(x.shape[0], 5, 6), w.expand(x.shape[0], 6, 6)),
        6,
        6,
    ),
    "an outer product": Call(lambda x, w: x[..., :1] @ w, 1, 8),
    "einsum without a sum": Einsum("bti,ti->bti", 5, 6),
    "depthwise at a position": conv(6, 6, 1, groups=6),
    "depthwise, nothing beside": Along(nn.Conv1d(6, 6, 3, groups=6, padding=8, dilation=8)),
    "transposed, spread": across(6, 6, 2, stride=2, groups=6),
    "bilinear of one number": Bilinear(1),
    "an embedding": nn.Embedding(10, 8),
    "a lookup": Call(lambda x, w: w[x], 10, 8),
    "a lookup as a product": Call(one_hot, 10, 8),
}


def stages_after(part: nn.Module, outputs: int = 4, names: tuple[str, ...] = ("x",)) -> list[bool]:
    """Whether the head stays, and whether the loss does."""
    x = torch.zeros(2, 5, 6)
    if isinstance(part, nn.Embedding) or (isinstance(part, Call) and part.w.shape[0] == 10):
        x = torch.zeros(2, 5, dtype=torch.int64)
    with torch.no_grad():
        made = part(x)
        made = made[0] if isinstance(made, tuple) else made
    model = Model(part, made.shape[-1], outputs)
    batch = {"x": x, "y": torch.zeros(*made.shape[:-1], outputs)}
    graph = capture(model, batch).graph.bind(2)
    stay = set(beside_data(graph, names))
    head = max(i for i, op in enumerate(graph.operators) if "linear" in op.target)
    return [head in stay, graph.producer[graph.loss] in stay]


@pytest.mark.parametrize("name", PRODUCTS)
def test_behind_a_product_with_weights_anybody_may_go_on(name: str) -> None:
    assert stages_after(PRODUCTS[name]) == [False, False]


@pytest.mark.parametrize("name", NONE)
def test_what_only_reads_a_matrix_of_weights_is_no_product(name: str) -> None:
    """The head is the first one; behind it, others go on."""
    assert stages_after(NONE[name]) == [True, False]


def test_the_gradient_of_a_single_output_is_a_scaling_of_what_tells_the_labels() -> None:
    assert stages_after(nn.Linear(6, 8), 1, ("y",)) == [True, True]
    for outputs, first in ((1, True), (2, False)):
        graph = capture(
            Model(nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 8)), 8, outputs),
            {"x": torch.zeros(2, 5, 6), "y": torch.zeros(2, 5, outputs)},
        ).graph.bind(2)
        stay = beside_data(graph, ("y",))
        linear = [i for i, op in enumerate(graph.operators) if "linear" in op.target]
        assert [i in stay for i in linear] == [False, first, True]


class Text(nn.Module):
    """Ids that are looked up, and carried along beside what is made of them."""

    def __init__(self, carried: bool) -> None:
        super().__init__()
        self.table, self.positions = nn.Embedding(10, 8), nn.Embedding(5, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head, self.carried = nn.Linear(8, 10), carried

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.table(x) + self.positions(torch.arange(5))
        for block in self.blocks:
            h = torch.relu(block(h)) + (h if self.carried else 0)
        return F.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


@cache
def text(carried: bool) -> Graph:
    ids = torch.zeros(2, 5, dtype=torch.int64)
    return capture(Text(carried), {"x": ids, "y": ids}).graph.bind(2)


@pytest.mark.parametrize(("carried", "free"), [(True, 0), (False, 2)])
def test_ids_that_are_carried_along_stay_to_the_end(carried: bool, free: int) -> None:
    graph = text(carried)
    stay = beside_data(graph, ("x",))
    linear = [i for i, op in enumerate(graph.operators) if "linear" in op.target]
    assert sum(i not in stay for i in linear[:-1]) == free


def test_where_sums_may_leave_the_first_block_and_the_head_stay() -> None:
    """The sum of looked-up rows and positions is none of them: it has met no weight."""
    graph = text(True)
    stay = set(beside_data(graph, ("x", "y"), blended=True))
    linear = [i for i, op in enumerate(graph.operators) if "linear" in op.target]
    assert [i in stay for i in linear] == [True, False, False, True]
    first = next(i for i in range(linear[0], linear[1]) if "add" in graph.operators[i].target)
    assert first in stay
    assert not set(range(first + 1, linear[-1])) & stay


def test_arguments_that_an_operator_would_refuse_are_no_product() -> None:
    """A graph from elsewhere: it must not end the planning of it with an error."""
    spec = TensorSpec((2, 2), "float32")
    weights = Parameter("w", spec)
    for target, args in (
        ("aten.linear.default", (Ref("in:x"),)),
        ("aten.mm.default", (Ref("in:s"), Ref("param:w"))),
        ("aten.einsum.default", ("->->,.", (Ref("in:x"), Ref("param:w")))),
        ("aten.einsum.default", (3, Ref("param:w"))),
        ("aten.conv2d.default", (Ref("in:x"), Ref("param:w"), None, "s")),
        ("aten.conv1d.default", (Ref("in:x"), Ref("param:w"), None, 0)),
        ("aten.convolution.default", (Ref("in:x"), Ref("param:w"))),
        ("aten.bilinear.default", (Ref("in:x"), None, Ref("param:w"))),
        ("aten.lstm.input", (Ref("in:x"), (), ())),
    ):
        made = Operator("v", target, args, (), (Output(spec, True),))
        inputs = (Input("x", spec), Input("s", TensorSpec((), "float32")))
        graph = Graph(inputs, (weights,), (), (made,), loss="v", batch=2)
        assert beside_data(graph, ("x", "s")) == ((0,) if set(made.reads) - {"param:w"} else ())


SPEC = TensorSpec((2, 2), "float32")


def random_graph(rng: random.Random) -> Graph:
    made: list[Operator] = []
    for i in range(rng.randint(2, 12)):
        values = ["in:x", "in:y", "param:w", "param:b", *(op.name for op in made)]
        reads = [rng.choice(values), *rng.sample(values, rng.randint(0, 2))]
        reads = [*dict.fromkeys(reads)]
        args = tuple(map(Ref, reads))
        two = rng.choice(("mm.default", "mm.default", "add.Tensor"))
        target = f"aten.{two if len(args) > 1 and rng.random() < 0.8 else 'x.default'}"
        made.append(Operator(f"op{i}", target, args, (), (Output(SPEC, True),)))
    tail = tuple(Ref(op.name) for op in made)
    loss = Operator("loss", "aten.x.default", tail, (), (Output(TensorSpec((), "float32"), True),))
    return Graph(
        inputs=(Input("x", SPEC), Input("y", SPEC)),
        parameters=(Parameter("w", SPEC), Parameter("b", TensorSpec((2,), "float32"))),
        buffers=(),
        operators=(*made, loss),
        loss="loss",
        batch=2,
    )


@given(seed=st.integers(0, 2**32), name=st.sampled_from(["x", "y"]), blended=st.booleans())
def test_whatever_crosses_a_cut_has_met_a_weight_on_every_path(
    seed: int, name: str, blended: bool
) -> None:
    """Or, where the owner allows it, is a sum with what has. The oracle walks all paths. Each
    operator that does not stay is a stage of a stranger."""
    graph = random_graph(random.Random(seed))
    ops = graph.operators
    stay = set(beside_data(graph, (name,), blended=blended))
    stages = cut(graph, [(i, i + 1) for i in range(len(ops))])

    def only_weights(value: str) -> bool:
        if value in graph.producer:
            return all(map(only_weights, ops[graph.producer[value]].reads))
        return not value.startswith("in:")

    def is_weight(value: str) -> bool:
        """A matrix, or made of one and of nothing but parameters."""
        if value in graph.producer:
            reads = ops[graph.producer[value]].reads
            return all(map(only_weights, reads)) and any(map(is_weight, reads))
        return value == "param:w"

    def weighs(op: Operator, value: str) -> bool:
        """Whether a value comes into an operator as the other factor beside weights."""
        if op.target != "aten.mm.default" or value not in op.reads[:2]:
            return False
        other = op.reads[1 - op.reads.index(value)]
        return is_weight(other) and not is_weight(value)

    def bare(value: str) -> bool:
        if value in graph.producer:
            op = ops[graph.producer[value]]
            shown = any(bare(v) and not weighs(op, v) for v in op.reads)
            return shown and not (
                blended and op.target == "aten.add.Tensor" and any(map(has_met, op.reads))
            )
        return value == f"in:{name}"

    def has_met(value: str) -> bool:
        """Whether it is made of data, and that has met a weight on every path."""
        if value not in graph.producer or bare(value):
            return False
        reads = ops[graph.producer[value]].reads
        return any(bare(v) or has_met(v) for v in reads)

    def gives_bare_gradient(op: Operator, value: str) -> bool:
        """To a value that it reads."""
        later = [(o, v) for o in ops for v in op.values if v in o.reads]
        tells = any(map(bare, op.reads)) or any(gives_bare_gradient(o, v) for o, v in later)
        return tells and not weighs(op, value)

    for stage in stages:
        stranger = stage.index not in stay
        assert not (stranger and name in stage.inputs)
        for port in stage.sends:
            assert not bare(port.value) or {port.source, *port.targets} <= stay
            for back in port.grad_targets:
                gives = gives_bare_gradient(ops[back], port.value)
                assert not gives or only_weights(port.value) or {port.source, back} <= stay
