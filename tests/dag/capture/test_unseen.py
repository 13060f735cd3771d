"""What torch.export does not see is said in words of ours, with the line and what to write."""

from __future__ import annotations

import copy
import functools
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from shoal.dag.capture.capture import CaptureError, capture
from shoal.tests.dag.capture.test_capture import Model
from shoal.tests.dag.capture.test_models import run

X = {"x": torch.zeros(4, 4)}


def data_read(self, x):
    return (self.linear(x) * self.linear.weight.data.sum()).mean()


def data_written(self, x):
    h = self.linear(x)
    h.data.mul_(2)
    return h.mean()


def data_set(self, x):
    self.linear.weight.data = self.linear.weight.data.clamp(-1, 1)
    return self.linear(x).mean()


def autograd(self, x):
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(self.linear(x).sum(), x, create_graph=True)
    return self.linear(x).mean() + slope.square().mean()


def backward(self, x):
    loss = self.linear(x).mean()
    loss.backward(retain_graph=True)
    return loss


def func_grad(self, x):
    return self.linear(torch.func.grad(lambda z: self.linear(z).sum())(x)).mean()


def func_jvp(self, x):
    made, slope = torch.func.jvp(self.linear, (x,), (torch.ones_like(x),))
    return (made + slope).mean()


def copied(self, x):
    return copy.deepcopy(self.linear)(x).mean()


def freezes(self, x):
    self.linear.weight.requires_grad_(False)
    return self.linear(x).mean()


def drops_in_training(self, x):
    h = self.linear(x)
    return (h * (torch.rand(h.shape[0], 1) < 0.9) if self.training else h).mean()


def drops_a_layer(self, x):
    h = self.linear(x)
    return (self.linear(h) if not self.training or random.random() >= 0.5 else h).mean()


@functools.lru_cache
def scale_of(part: nn.Linear) -> Tensor:
    return part.weight.detach().abs().mean()


def keeps_a_scale(self, x):
    return (self.linear(x) * scale_of(self.linear)).mean()


LINES = [
    (keeps_a_scale, "part.weight.detach()", "an earlier call made.*function of the inputs"),
    (drops_a_layer, "random.random() >= 0.5", "random numbers of Python's.*draw with torch"),
    (data_read, "self.linear.weight.data.sum", r"`\.data` is not followed.*detach"),
    (data_written, "h.data.mul_", r"`\.data` is not followed"),
    (data_set, "weight.data = ", r"`\.data` is not followed.*self\.weight\.clamp"),
    (autograd, "torch.autograd.grad", "derivative itself.*leave the term out"),
    (backward, "loss.backward", "derivative itself"),
    (func_grad, "torch.func.grad", r"derivative itself \(torch\.func\)"),
    (func_jvp, "torch.func.jvp", r"derivative itself \(torch\.func\)"),
    (copied, "copy.deepcopy", "a copy of a module.*call the module itself"),
    (freezes, "requires_grad_(False)", "changes requires_grad of linear.weight.*model.freeze"),
    (drops_in_training, "", r"in train mode only: write the mask as dropout.*F\.dropout\("),
]


@pytest.mark.parametrize(("function", "line", "says"), LINES, ids=[f.__name__ for f, *_ in LINES])
def test_what_an_export_does_not_see_is_refused_with_its_line(function, line, says) -> None:
    module = Model(function)
    with pytest.raises(CaptureError, match=f"(?s){says}") as caught:
        capture(module, X)
    assert line in str(caught.value).split("\n")[0]
    assert "github" not in str(caught.value)
    assert module.linear.weight.requires_grad


@functools.lru_cache
def places(n: int) -> Tensor:
    return torch.arange(float(n))


@pytest.mark.parametrize("called_before", [False, True])
def test_a_table_that_functools_keeps_is_captured_and_stays_one_of_numbers(called_before) -> None:
    module = Model(lambda self, x: (self.linear(x) * places(x.shape[1])).mean())
    inputs = {"x": torch.randn(4, 4)}
    places.cache_clear()
    if called_before:
        module(**inputs)
    captured = capture(module, inputs)
    graph = captured.graph
    made = run(graph, captured.tensors, inputs)[graph.loss]
    assert places(4).tolist() == [0.0, 1.0, 2.0, 3.0]
    torch.testing.assert_close(made, module(**inputs).detach())


def test_a_table_that_a_library_keeps_is_refused_with_what_to_write() -> None:
    library = """
import functools, torch
@functools.lru_cache
def places(n): return torch.arange(float(n))
def turned(h): return h * places(h.shape[1])
"""
    names: dict[str, Any] = {}
    exec(compile(library, f"{torch.__path__[0]}/turning.py", "exec"), names)
    turned = names["turned"]
    with pytest.raises(CaptureError, match=r"a library's functools\.lru_cache.*into the forward"):
        capture(Model(lambda self, x: turned(self.linear(x)).mean()), X)


def kinds() -> dict[str, tuple[nn.Module, str]]:
    mean = Model(lambda self, x: self.part(x).mean())
    made = {n: copy.deepcopy(mean) for n in ("parallel", "scripted", "lazy", "spectral")}
    made["parallel"].part = nn.DataParallel(nn.Linear(4, 4))
    made["scripted"].part = torch.jit.script(nn.Linear(4, 4))
    made["lazy"].part = nn.LazyLinear(4)
    made["spectral"].part = parametrizations.spectral_norm(nn.Linear(4, 4))
    says = {
        "parallel": r"module 'part' is a DataParallel.*its \.module",
        "scripted": r"module 'part' is compiled by torch\.jit.*nn\.Module that it was made from",
        "lazy": "module 'part' is lazy.*nn.Linear for nn.LazyLinear",
        "spectral": "module 'part.*is changed by the forward.*use weight_norm",
    }
    return {n: (module, says[n]) for n, module in made.items()}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Lazy modules")
@pytest.mark.parametrize("name", ["parallel", "scripted", "lazy", "spectral"])
def test_a_module_that_cannot_be_followed_is_refused_by_name(name) -> None:
    module, says = kinds()[name]
    with pytest.raises(CaptureError, match=f"(?s){says}"):
        capture(module, X)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_looks_alike_is_taken() -> None:
    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        h.retain_grad() if h.requires_grad else None
        mask = F.dropout(h.new_ones(h.shape[0], 1), 0.1, self.training)  # stochastic depth
        return (h * mask + torch.func.vmap(self.weighed)(x) + self.doubled(h)).mean()

    module = Model(forward, weighed=parametrizations.weight_norm(nn.Linear(4, 4)))
    module.linear.register_forward_hook(lambda part, given, made: made + 1)
    module.doubled = torch.compile(lambda h: 2 * h)
    assert "dropout" in str([op.target for op in capture(module, X).graph.operators])
