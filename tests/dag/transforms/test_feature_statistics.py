"""Statistics of features by class in the graph, and what lies above the features."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.dag.capture.capture import capture
from shoal.dag.execute.model_copies import ModelCopies
from shoal.dag.ir.graph import Graph, GraphError
from shoal.dag.ir.validate import validate
from shoal.dag.transforms.feature_statistics import (
    COUNT,
    DRAWN,
    SQUARE,
    SUM,
    above_features,
    with_statistics,
)
from shoal.dag.transforms.lower import lower

EXAMPLE = {"x": torch.randn(6, 1, 7), "y": torch.tensor([0, 2, 1, 1, 2, 2])}
NAMES = {"features": "low"}


class Model(nn.Module):
    """A classifier with maps for features, which may have a way around them."""

    def __init__(self, around: bool = False) -> None:
        super().__init__()
        self.low = nn.Sequential(nn.Conv1d(1, 2, 3), nn.Tanh())
        self.high = nn.Sequential(nn.Flatten(), nn.Linear(10, 5), nn.BatchNorm1d(5), nn.ReLU())
        self.head, self.around = nn.Linear(5, 4), around

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        inside = self.high(self.low(x))
        logits = self.head(inside + x[:, 0, :5] if self.around else inside)
        right = (logits.argmax(1) == y).float().mean()
        return {"loss": F.cross_entropy(logits, y), "right": right}


@pytest.fixture(scope="module")
def model() -> Model:
    torch.manual_seed(0)
    return Model()


@pytest.fixture(scope="module")
def graph(model: Model) -> Graph:
    return capture(model, EXAMPLE).graph


def held(model: Model, trains: bool = True) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Parameters and buffers of one copy."""
    own = {n: p.detach()[None].requires_grad_(trains) for n, p in model.named_parameters()}
    return own, {n: b[None] for n, b in model.named_buffers()}


def test_what_it_computes_stays_and_statistics_are_those_of_a_loop(
    model: Model, graph: Graph
) -> None:
    grown, shapes = with_statistics(graph, 0.3, **NAMES)
    assert shapes == {COUNT: (4,), SUM: (4, 10), SQUARE: (4, 10)}
    assert len(lower(validate(grown).bind(6)).graph.operators) >= len(grown.operators)
    assert grown.state == graph.state
    inputs = {n: t[None] for n, t in EXAMPLE.items()}
    parameters, buffers = held(model)
    zeros = {name: torch.zeros(1, *shape) for name, shape in shapes.items()}
    before = ModelCopies(graph).run(parameters, buffers, inputs)
    after = ModelCopies(grown).run(parameters, {**buffers, **zeros}, inputs)
    assert torch.equal(before.losses, after.losses)
    for name, grad in before.grads.items():
        assert torch.equal(grad, after.grads[name]), name
    features = model.low(EXAMPLE["x"]).detach().flatten(1)
    for c in range(4):
        mine = [f for f, y in zip(features, EXAMPLE["y"].tolist(), strict=True) if y == c]
        assert float(after.statistics[COUNT][0, c]) == len(mine)
        total = sum(mine, torch.zeros(10))
        square = sum((f**2 for f in mine), torch.zeros(10))
        torch.testing.assert_close(after.statistics[SUM][0, c], total)
        torch.testing.assert_close(after.statistics[SQUARE][0, c], square)


def test_what_lies_above_features_makes_the_loss_and_gradients_of_these_alone(
    model: Model, graph: Graph
) -> None:
    grown, _ = with_statistics(graph, 0.3, **NAMES)
    above = above_features(grown, 0.3, **NAMES)
    assert (above.shape, above.classes, above.labels) == ((2, 5), 4, "y")
    assert not any(p.name.startswith("low") for p in above.graph.parameters)
    validate(above.graph)
    drawn, labels = torch.randn(8, 2, 5), torch.tensor([3, 0, 1, 2, 3, 0, 1, 2])
    parameters, buffers = held(model)
    names = {t.name for t in (*above.graph.parameters, *above.graph.buffers)}
    own = [{n: t for n, t in of.items() if n in names} for of in (parameters, buffers)]
    made = ModelCopies(above.graph).run(*own, {DRAWN: drawn[None], "y": labels[None]})
    kept = {n: b.clone() for n, b in model.named_buffers()}
    loss = F.cross_entropy(model.head(model.high(drawn)), labels)
    high = [n for n in parameters if not n.startswith("low")]
    grads = torch.autograd.grad(loss, [model.get_parameter(n) for n in high])
    for name, buffer in kept.items():
        model.get_buffer(name).copy_(buffer)
    assert float(made.losses) == pytest.approx(float(loss.detach()), rel=1e-6)
    for name, grad in zip(high, grads, strict=True):
        torch.testing.assert_close(made.grads[name][0], grad, rtol=1e-4, atol=1e-6)
    assert made.grads.keys() == {*high}


def test_features_that_something_goes_around_are_refused() -> None:
    graph = capture(Model(True), EXAMPLE).graph
    grown, _ = with_statistics(graph, 0.3, **NAMES)
    with pytest.raises(GraphError, match="past its features"):
        above_features(grown, 0.3, **NAMES)
    grown, _ = with_statistics(graph, 0.3)
    assert above_features(grown, 0.3).shape == (5,), "what the last linear reads has all"


def other_mean(graph: Graph) -> Graph:
    buffers = [replace(b, update=graph.buffers[-1].update) for b in graph.buffers[-3:]]
    return replace(graph, buffers=(*graph.buffers[:-3], *buffers))


@pytest.mark.parametrize(
    ("change", "share", "words"),
    [
        (lambda grown: grown, 0.2, "not those of its features"),
        (other_mean, 0.3, "not those of its features"),
    ],
)
def test_statistics_that_are_others_are_refused_where_clients_train(
    graph: Graph, change: Callable[[Graph], Graph], share: float, words: str
) -> None:
    grown, _ = with_statistics(graph, 0.3, **NAMES)
    with pytest.raises(GraphError, match=words):
        above_features(change(grown), share, **NAMES)
    with pytest.raises(GraphError, match="no statistics"):
        above_features(graph, share, **NAMES)
    with pytest.raises(GraphError, match="expected another one"):
        with_statistics(grown, 0.3, **NAMES)
