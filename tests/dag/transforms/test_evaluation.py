"""The eval form: same operators, same names, known flags only."""

from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.dag.capture.capture import CaptureError, capture
from shoal.dag.capture.export import functional
from shoal.dag.ir.graph import Graph
from shoal.dag.ir.infer import call
from shoal.dag.ir.validate import validate
from shoal.dag.transforms.evaluation import evaluation


class Everything(nn.Module):
    """One of each operator that knows the mode."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 1), nn.BatchNorm2d(4, momentum=0.3)
        self.maps, self.drop = nn.Dropout2d(0.2), nn.Dropout(0.1)
        self.rnn = nn.RNN(4, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.maps(self.norm(self.conv(x))).flatten(2)
        h = self.drop(self.rnn(h.transpose(1, 2))[0])[:, None]
        p = 0.5 if self.training else 0.0
        return F.scaled_dot_product_attention(h, h, h, dropout_p=p, is_causal=True).sum()


@pytest.fixture(scope="module")
def counted() -> tuple[Graph, int]:
    """The graph, and how many exports of it were decomposed."""
    return counting(Everything(), torch.randn(4, 1, 1, 2))


def counting(module: nn.Module, x: Tensor) -> tuple[Graph, int]:
    with mock.patch("shoal.dag.capture.capture.functional", wraps=functional) as calls:
        return capture(module, {"x": x}).graph, calls.call_count


@pytest.fixture(scope="module")
def graph(counted: tuple[Graph, int]) -> Graph:
    return counted[0]


def test_operators_keep_their_number_names_and_order(graph: Graph) -> None:
    derived = evaluation(graph)
    assert [op.name for op in derived.operators] == [op.name for op in graph.operators]
    assert [op.module for op in derived.operators] == [op.module for op in graph.operators]


def test_only_known_flags_change(graph: Graph) -> None:
    derived = evaluation(graph)
    changed = {
        (a.target, b.target)
        for a, b in zip(graph.operators, derived.operators, strict=True)
        if (a.target, a.args) != (b.target, b.args)
    }
    assert changed == {
        ("shoal.dropout.default", "aten.alias.default"),
        ("shoal.feature_dropout.default", "aten.alias.default"),
        ("shoal.attention.default", "aten.scaled_dot_product_attention.default"),
        (
            "aten._native_batch_norm_legit_functional.default",
            "aten._native_batch_norm_legit_no_training.default",
        ),
        ("aten.rnn_tanh.input", "aten.rnn_tanh.input"),
    }


def test_nothing_is_updated_or_differentiated(graph: Graph) -> None:
    derived = evaluation(graph)
    assert not any(b.update for b in derived.buffers)
    assert not derived.grads
    assert validate(derived.bind(2)).batch == 2


def test_the_norm_keeps_the_users_momentum(graph: Graph) -> None:
    (norm,) = (op for op in evaluation(graph).operators if "batch_norm" in op.target)
    assert norm.args[5:] == (0.3, 1e-05)


class Flags(nn.Module):
    """The mode is in arguments only."""

    def __init__(self) -> None:
        super().__init__()
        self.maps, self.drop = nn.Dropout2d(0.2), nn.Dropout(0.1)
        self.cold, self.rnn = nn.Dropout(0.3).eval(), nn.RNN(4, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.cold(self.maps(x)).flatten(2)
        h = self.drop(self.rnn(h.transpose(1, 2))[0])[:, None]
        p = 0.5 if self.training else 0.0
        return F.scaled_dot_product_attention(h, h, h, dropout_p=p).sum() * torch.tensor(3.0)


def test_only_what_differs_in_more_than_flags_is_decomposed_twice(
    counted: tuple[Graph, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert counted[1] == 2
    x = torch.randn(4, 4, 1, 2)
    once = counting(Flags(), x)
    assert once[1] == 1

    # The comparison after the decomposition comes to the same.
    monkeypatch.setattr("shoal.dag.capture.capture.only_flags_differ", lambda *_: False)
    assert counting(Flags(), x) == (once[0], 2)


class Linear(nn.Module):
    """A function of a linear layer's output and of the mode."""

    def __init__(self, function: Callable[[Tensor, bool], Tensor]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(4, 4), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear(x), self.training).mean()


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda h, training: h * 2 if training else h, "something else in eval mode"),
        (lambda h, training: h * torch.tensor([2.0, 1.0, 1.0, 1.0 + training]), "other values"),
        (lambda h, training: F.dropout(h, 0.5), "drops in eval mode too"),
        (lambda h, training: F.dropout(h, 0.5, not training), "drops in eval mode too"),
        (
            lambda h, training: F.scaled_dot_product_attention(*[h[:, None]] * 3, dropout_p=0.5),
            "something else in eval mode",
        ),
    ],
)
def test_a_mode_that_does_more_is_refused(
    function: Callable[[Tensor, bool], Tensor], says: str
) -> None:
    with pytest.raises(CaptureError, match=says):
        capture(Linear(function), {"x": torch.randn(4, 4)})


class Normalised(nn.Module):
    def __init__(
        self, norm: Callable[[nn.BatchNorm1d, Tensor], Tensor], **settings: object
    ) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4, **settings)
        self.function = norm

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.norm, self.linear(x)).square().mean()


def by_batch(norm: nn.BatchNorm1d, h: Tensor, **settings: float) -> Tensor:
    return F.batch_norm(h, norm.running_mean, norm.running_var, training=True, **settings)


@pytest.mark.parametrize("settings", [{}, {"momentum": 0.0}])
def test_a_norm_by_the_batch_in_eval_mode_is_refused_where_it_has_running_statistics(
    settings: dict[str, float],
) -> None:
    module = Normalised(lambda norm, h: by_batch(norm, h, **settings))
    with pytest.raises(CaptureError, match="statistics of the batch in eval mode too"):
        capture(module, {"x": torch.randn(6, 4)})


@pytest.mark.parametrize(
    "module",
    [
        Normalised(lambda norm, h: norm(h)),
        Normalised(lambda norm, h: norm(h), momentum=0.4),
        Normalised(lambda norm, h: norm(h), track_running_stats=False),
        Normalised(
            lambda norm, h: F.batch_norm(
                h, norm.running_mean, norm.running_var, training=norm.training
            )
        ),
        Normalised(
            lambda norm, h: F.batch_norm(h, h.mean(0).detach(), h.var(0).detach(), training=False)
        ),
        Normalised(lambda norm, h: F.batch_norm(h, None, None, training=True)),
    ],
)
def test_any_other_norm_evaluates_as_the_module_does(module: nn.Module) -> None:
    x = torch.randn(6, 4)
    for name, buffer in module.named_buffers():
        if "running" in name:
            buffer.uniform_(0.5, 2.0)
    captured = capture(module, {"x": x})
    derived = evaluation(captured.graph).bind(6)
    values = {f"param:{p.name}": captured.tensors[p.name] for p in derived.parameters}
    values |= {f"buffer:{b.name}": captured.tensors[b.name] for b in derived.buffers}
    values["in:x"] = x
    with torch.no_grad():
        for op in derived.operators:
            values |= zip(op.values, call(op, values, torch.device("cpu")), strict=True)
        torch.testing.assert_close(values[derived.loss], module.eval()(x))
