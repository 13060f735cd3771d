"""Further classes of a classifier: what it computes stays, and what is none is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.dag.capture.capture import capture
from shoal.dag.execute.model_copies import ModelCopies
from shoal.dag.ir.graph import Graph, GraphError
from shoal.dag.ir.validate import validate
from shoal.dag.transforms.classifier import classifier_of
from shoal.dag.transforms.lower import lower
from shoal.dag.transforms.virtual_classes import above_loss, with_classes

EXAMPLE = {"x": torch.randn(4, 6), "y": torch.tensor([0, 2, 1, 1])}


class Model(nn.Module):
    """`loss` of the logits of a linear and of labels."""

    def __init__(self, loss: Callable[..., object], bias: bool = True) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 5), nn.Linear(5, 3, bias=bias)
        self.loss = loss

    def forward(self, x: Tensor, y: Tensor) -> object:
        return self.loss(self.head(self.body(x).tanh()), y)


@cache
def graph_of(loss: Callable[..., object], bias: bool = True) -> tuple[Model, Graph]:
    torch.manual_seed(0)
    model = Model(loss, bias)
    return model, capture(model, EXAMPLE).graph


@pytest.mark.parametrize("bias", [True, False])
def test_what_it_computes_stays_to_the_bit(bias: bool) -> None:
    def loss(logits: Tensor, y: Tensor) -> dict[str, Tensor]:
        right = logits.argmax(1).float().mean()  # of 3 classes
        return {"loss": F.cross_entropy(logits, y), "right": right}

    model, graph = graph_of(loss, bias)
    grown = validate(with_classes(graph, 4))
    own = {n: p.detach()[None] for n, p in model.named_parameters()}
    for p in own.values():
        p.requires_grad_()
    more = {
        p.name: torch.randn(1, *p.spec.sizes, requires_grad=True)
        for p in grown.parameters
        if p.name not in own
    }
    assert [t.shape[1:] for t in more.values()] == [(4, 5), (4,)][: 1 + bias]
    inputs = {n: t[None] for n, t in EXAMPLE.items()}
    before, after = (ModelCopies(g).run(own | more, {}, inputs) for g in (graph, grown))
    assert torch.equal(before.losses, after.losses)
    for name in own:
        assert torch.equal(before.grads[name], after.grads[name]), name
    assert not any(after.grads[name].any() for name in more), "masked"
    version = {n: t[0].detach() * 9 for n, t in (own | more).items()}
    judged = [ModelCopies(g).evaluate(version, inputs) for g in (graph, grown)]
    assert torch.equal(judged[0].losses, judged[1].losses)
    assert torch.equal(judged[0].metrics["right"], judged[1].metrics["right"])
    assert len(lower(grown.bind(4)).graph.operators) >= len(grown.operators)
    form = above_loss(grown)
    assert (form.inputs, form.labels, form.sample) == ("x", "y", (6,))
    assert (form.classes, form.further) == (3, 4)
    assert form.graph.spec[form.features].shape[1] == 5
    assert not any("cross_entropy" in op.target for op in form.graph.operators)


def two(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits, y) + F.cross_entropy(2 * logits, y)


def weighed(logits: Tensor, y: Tensor) -> dict[str, Tensor]:
    return {"loss": F.cross_entropy(logits, y), "weight": y.sum().float()}


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda logits, y: F.mse_loss(logits[:, 0], y.float()), "0 cross entropies"),
        (two, "2 cross entropies"),
        (lambda logits, y: 0.5 * F.cross_entropy(logits, y), "which is the loss"),
        (lambda logits, y: F.cross_entropy(logits, y, label_smoothing=0.1), "smoothing"),
        (lambda logits, y: F.cross_entropy(logits, y, reduction="sum"), "a reduction"),
        (lambda logits, y: F.cross_entropy(logits, y, ignore_index=0), "an ignored label"),
        (lambda logits, y: F.cross_entropy(logits.tanh(), y), "expected those of a linear"),
        (lambda logits, y: F.cross_entropy(logits, y - 0), "one label for a sample"),
        (weighed, "weighs its losses"),
    ],
)
def test_what_is_no_classifier_without_doubt_is_refused(
    loss: Callable[..., object], words: str
) -> None:
    with pytest.raises(GraphError, match=words):
        with_classes(graph_of(loss)[1], 3)


class Pictures(nn.Module):
    """A classifier without a linear, whose features are maps, and whose loss is of logarithms."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv1d(1, 2, 3), nn.BatchNorm1d(2), nn.ReLU())
        self.head = nn.Sequential(nn.Conv1d(2, 3, 4), nn.Flatten())
        self.twice, self.log = nn.Tanh(), nn.LogSoftmax(1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        inside = self.twice(-self.twice(self.body(x[:, None])))
        return F.nll_loss(self.log(self.head(inside)), y)


@pytest.fixture(scope="module")
def pictures() -> tuple[Pictures, Graph]:
    torch.manual_seed(0)
    model = Pictures()
    return model, capture(model, EXAMPLE).graph


def test_features_and_logits_may_be_named(pictures: tuple[Pictures, Graph]) -> None:
    model, graph = pictures
    found = classifier_of(graph, features="body", logits="head")
    specs = graph.spec
    assert specs[found.features].shape[1:] == (2, 4)
    assert graph.operators[graph.producer[found.features]].module == "body.2"
    assert (specs[found.logits].shape[1], found.classes, found.biased) == (3, 3, True)
    grown = validate(with_classes(graph, 2, features="body", logits="head"))
    assert grown.spec["param:virtual_classes.weight"].shape == (2, 8)
    version = {n: t.detach() for n, t in [*model.named_parameters(), *model.named_buffers()]}
    version |= {p.name: torch.randn(p.spec.sizes) for p in grown.parameters if p.name[0] == "v"}
    inputs = {n: t[None] for n, t in EXAMPLE.items()}
    losses = [ModelCopies(g).evaluate(version, inputs).losses for g in (graph, grown)]
    assert torch.equal(*losses)
    form = above_loss(grown, features="body", logits="head")
    assert (form.features, form.further) == (found.features, 2)
    with pytest.raises(GraphError, match=r"not those of its classifier|are not"):
        above_loss(grown, features="head.0", logits="head")


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ({}, "or the names of the modules"),
        pytest.param({"features": "body"}, "or the names of the modules", marks=pytest.mark.slow),
        ({"logits": "head"}, "expected the name of features"),
        pytest.param(
            {"logits": "log", "features": "body"},
            "expected one of the other",
            marks=pytest.mark.slow,
        ),
        ({"logits": "head", "features": "nose"}, 'no module "nose".*body.0, body.1, body.2'),
        ({"logits": "head", "features": "twice"}, "a module that is called once"),
        ({"logits": "head", "features": "log"}, "do not hang on"),
    ],
)
def test_names_that_say_something_else_are_refused(
    pictures: tuple[Pictures, Graph], names: dict[str, str], words: str
) -> None:
    with pytest.raises(GraphError, match=words):
        with_classes(pictures[1], 2, **names)


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(7, 5), nn.Linear(5, 7)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.words(x)).flatten(0, 1), y.flatten())


def test_a_model_of_tokens_is_refused() -> None:
    tokens = torch.zeros(2, 4, dtype=torch.int64)
    with pytest.raises(GraphError, match="expected"):
        classifier_of(capture(Tokens(), {"x": tokens, "y": tokens}).graph)


def test_a_graph_without_virtual_classes_is_refused_where_clients_train() -> None:
    with pytest.raises(GraphError, match="no virtual classes"):
        above_loss(graph_of(F.cross_entropy)[1])


def test_virtual_classes_that_are_others_are_refused_where_clients_train() -> None:
    grown = with_classes(graph_of(F.cross_entropy)[1], 3)
    operators = list(grown.operators)
    at = [op.name for op in operators].index("masked_logits")
    operators[at] = replace(operators[at], args=(*operators[at].args[:3], 2))
    with pytest.raises(GraphError, match="not those of its classifier"):
        above_loss(replace(grown, operators=tuple(operators)))
