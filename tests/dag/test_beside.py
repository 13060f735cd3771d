"""What must run where data is kept: no bare value, and no bare gradient, crosses a link."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from shoal.dag.beside import beside_data
from shoal.dag.capture import capture
from shoal.dag.cut import cut
from shoal.dag.graph import Graph, Input, Operator, Output, Parameter, Ref, TensorSpec


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


SPEC = TensorSpec((2, 2), "float32")


def random_graph(rng: random.Random) -> Graph:
    made: list[Operator] = []
    for i in range(rng.randint(2, 12)):
        values = ["in:x", "in:y", "param:w", "param:b", *(op.name for op in made)]
        reads = [rng.choice(values), *rng.sample(values, rng.randint(0, 2))]
        reads = [*dict.fromkeys(reads)]
        args = tuple(map(Ref, reads))
        made.append(Operator(f"op{i}", "aten.x.default", args, (), (Output(SPEC, True),)))
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


@given(seed=st.integers(0, 2**32), name=st.sampled_from(["x", "y"]))
def test_whatever_crosses_a_cut_has_met_a_weight_on_every_path(seed: int, name: str) -> None:
    """The oracle walks all paths. Each operator that does not stay is a stage of a stranger."""
    graph = random_graph(random.Random(seed))
    ops = graph.operators
    stay = set(beside_data(graph, (name,)))
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

    def weighs(op: Operator) -> bool:
        return any(map(is_weight, op.reads)) and not all(map(only_weights, op.reads))

    def bare(value: str) -> bool:
        if value in graph.producer:
            op = ops[graph.producer[value]]
            return not weighs(op) and any(map(bare, op.reads))
        return value == f"in:{name}"

    def gives_bare_gradient(op: Operator) -> bool:
        """To what it reads."""
        later = [o for o in ops if not set(op.values).isdisjoint(o.reads)]
        return not weighs(op) and (any(map(bare, op.reads)) or any(map(gives_bare_gradient, later)))

    for stage in stages:
        stranger = stage.index not in stay
        assert not (stranger and name in stage.inputs)
        for port in stage.sends:
            assert not bare(port.value) or {port.source, *port.targets} <= stay
            for back in port.grad_targets:
                assert not gives_bare_gradient(ops[back]) or {port.source, back} <= stay
