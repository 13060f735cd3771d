"""Records of functions: the same bits, with fewer operators."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from shoal.dag.execute.records import record, shorten

X, Y = torch.linspace(-2, 3, 24).view(4, 6), torch.tensor([0, 2, 5, 1])


def gradient(x: Tensor, y: Tensor) -> Tensor:
    leaf = x.detach().requires_grad_()
    loss = nn.functional.cross_entropy(leaf.reshape(4, 6).tanh() * 1, y)
    return torch.autograd.grad(loss, leaf)[0]


def twice(x: Tensor, y: Tensor) -> Tensor:
    return (x != 0).float() * x + (x != 0).double().float() * y.view(4, 1)


def zeros_of_two_kinds(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return torch.full((3,), 0.0) + x[0, :3], torch.full((3,), -0.0) * x[0, :3]


def numbers_of_two_kinds(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return y * 1, y * 1.0


def written(x: Tensor, y: Tensor) -> Tensor:
    made = x.clone()
    before = made + 1
    made.add_(1)
    return before + (made + 1)


CASES: list[Callable[..., object]] = [
    gradient,
    twice,
    zeros_of_two_kinds,
    numbers_of_two_kinds,
    written,
]


def bits(value: object) -> list[tuple[torch.dtype, list[int]]]:
    found = value if isinstance(value, tuple) else (value,)
    return [(t.dtype, t.contiguous().view(torch.uint8).flatten().tolist()) for t in found]


def operators(graph: fx.Graph) -> list[str]:
    return [str(n.target) for n in graph.nodes if n.op == "call_function"]


@pytest.mark.parametrize("call", CASES)
def test_a_record_comes_to_the_same_bits(call: Callable[..., object]) -> None:
    found = record(call, [X, Y])
    for x in (X, -X, X.flip(0)):
        assert bits(found(x, Y)) == bits(call(x, Y))


def test_what_gives_back_what_it_is_given_is_left_out() -> None:
    graph = make_fx(gradient)(X, Y).graph
    before = operators(graph)
    shorten(graph)
    after = operators(graph)
    assert len(after) < len(before)
    assert "aten.detach.default" not in after
    assert after.count("aten.mul.Tensor") == before.count("aten.mul.Tensor") - 2


def test_what_comes_out_is_not_what_was_given() -> None:
    x = X.clone()
    found = record(lambda t: (t * 1) + 0 * t, [x])(x), record(lambda t: t * 1, [x])(x)
    x.add_(1)
    assert torch.equal(found[0], X)
    assert torch.equal(found[1], X)


def test_what_is_drawn_is_drawn_as_often() -> None:
    graph = make_fx(lambda t: torch.rand_like(t) - torch.rand_like(t))(X).graph
    before = operators(graph)
    shorten(graph)
    assert operators(graph) == before
