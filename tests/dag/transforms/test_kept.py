"""Parameters that are kept in bfloat16: the same training, to the bit, as with float32 parameters
of the same values, and half the bytes."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shoal.dag.capture.capture import capture
from shoal.dag.execute.execute import StageExecutor
from shoal.dag.plan.cut import cut
from shoal.dag.transforms.precision import AS_MADE, KeptDtypes


class Net(nn.Module):
    """A frozen embedding, products, a norm, and a parameter that is only added."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.rows = nn.Embedding(11, 8).requires_grad_(False)
        self.first = nn.Linear(8, 8).requires_grad_(False)
        self.norm = nn.LayerNorm(8).requires_grad_(False)
        self.shift = nn.Parameter(torch.randn(8), requires_grad=False)
        self.last = nn.Linear(8, 5)

    def forward(self, x, y):
        h = self.norm(torch.tanh(self.first(self.rows(x)))) + self.shift
        return F.cross_entropy(self.last(h), y)


BATCH = {"x": torch.tensor([1, 10, 4, 4]), "y": torch.tensor([0, 4, 2, 1])}


def trained_once(module, kept):
    """(loss, gradients, graph) of a microbatch in one stage."""
    captured = capture(module, BATCH, dtype="bf16", kept=kept)
    graph = captured.graph.bind(4)
    (stage,) = cut(graph, [(0, len(graph.operators))])
    specs = {p.name: getattr(torch, p.spec.dtype) for p in graph.parameters}
    values = {n: t.to(specs.get(n, t.dtype)) for n, t in captured.tensors.items()}
    executor = StageExecutor(graph, stage, values)
    loss = executor.forward(0, 0, {}, BATCH).results[graph.loss]
    executor.backward(0, 0, {})
    return loss, {n: p.grad for n, p in executor.parameters.items()}, graph


def rounded(module, trainable):
    """The same module, those of its parameters rounded to bfloat16, in float32."""
    found = copy.deepcopy(module)
    with torch.no_grad():
        for p in found.parameters():
            if p.requires_grad == trainable:
                p.copy_(p.bfloat16())
    return found


def test_what_is_frozen_in_bf16_trains_as_its_values_do():
    loss, grads, graph = trained_once(Net(), KeptDtypes(frozen="bfloat16"))
    wanted, wanted_grads, plain = trained_once(rounded(Net(), False), AS_MADE)
    assert torch.equal(loss, wanted)
    assert all(torch.equal(grads[n], wanted_grads[n]) for n in ("last.weight", "last.bias"))
    sizes = {p.name: p.spec.size_bytes for p in graph.parameters}
    for p in plain.parameters:
        assert sizes[p.name] == (p.spec.size_bytes if p.trainable else p.spec.size_bytes // 2)


def test_what_is_trained_in_bf16_has_the_gradients_of_its_values():
    loss, grads, _ = trained_once(Net(), KeptDtypes(trained="bfloat16"))
    wanted, wanted_grads, _ = trained_once(rounded(Net(), True), AS_MADE)
    assert torch.equal(loss, wanted)
    for name in ("last.weight", "last.bias"):
        assert grads[name].dtype is torch.bfloat16
        assert torch.equal(grads[name], wanted_grads[name].bfloat16())


@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_only_float32_is_kept_otherwise(dtype):
    module = Net()
    module.shift.data = module.shift.data.to(getattr(torch, dtype))
    graph = capture(module, BATCH, kept=KeptDtypes(frozen="bfloat16")).graph
    assert graph.spec["param:shift"].dtype == dtype
    assert graph.spec["param:first.weight"].dtype == "float32", "without dtype = bf16 nothing is"
