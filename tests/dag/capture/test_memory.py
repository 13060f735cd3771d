"""A tensor that lies in the memory of what training changes is refused, since peers would have it
as it begins; the oracle is a module whose parameters are changed in place, as an optimizer does."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shoal
from shoal.client.models import models
from shoal.dag.capture.capture import CaptureError, capture, check_memory, check_parts
from shoal.job import Job

X = {"x": torch.ones(4, 8)}


class Shares(nn.Module):
    """`v` is added to what a layer gives; `make` says what it is."""

    def __init__(self, make) -> None:
        super().__init__()
        self.a, self.norm = nn.Linear(8, 16), nn.BatchNorm1d(16)
        self.v, self.other = None, None
        make(self)

    def forward(self, x):
        v = self.v[0] if isinstance(self.v, list) else self.v
        return (self.norm(self.a(x) + v) - 1).square().mean()


def buffer(m, tensor):
    del m.v
    m.register_buffer("v", tensor)


def two_parameters(m, first, second):
    m.other, m.v = nn.Parameter(first), nn.Parameter(second)


def frozen(m):
    m.a.bias.requires_grad_(False)
    m.v = m.a.bias.detach()


CASES = {
    "buffer": lambda m: buffer(m, m.a.bias.detach()),
    "attribute": lambda m: setattr(m, "v", m.a.bias.detach()),
    "in a list": lambda m: setattr(m, "v", [m.a.bias.detach()]),
    "a row of the transpose": lambda m: setattr(m, "v", m.a.weight.data.t()[3]),
    "with a gradient": lambda m: setattr(m, "v", m.a.weight.t()[0]),
    "of other numbers": lambda m: setattr(m, "v", m.a.bias.data.view(torch.int32)),
    "statistics": lambda m: buffer(m, m.norm.running_mean.view(1, 16)),
    "statistics themselves": lambda m: setattr(m, "v", m.norm.running_mean),
    "parameters that overlap": lambda m: two_parameters(m, *_windows(torch.zeros(20))),
    "columns side by side": lambda m: two_parameters(m, *torch.zeros(16, 2).unbind(1)),
    "a copy": lambda m: setattr(m, "v", m.a.bias.detach().clone()),
    "the parameter itself": lambda m: setattr(m, "v", m.a.bias),
    "of what is frozen": frozen,
}


def _windows(whole):
    return whole[:16], whole[4:]


def follows(module: Shares) -> bool:
    """Whether `v` changes where only other tensors are trained; a parameter trains by itself."""
    with torch.no_grad():
        v = module.v[0] if isinstance(module.v, list) else module.v
        before = v.clone()
        module.train()(**X)  # changes running statistics
        for p in module.parameters():
            if p.requires_grad and p is not v:
                p.add_(1.0)
        return not torch.equal(v, before)


@pytest.mark.parametrize("case", CASES)
def test_what_follows_a_trained_tensor_is_refused_and_nothing_else(case: str) -> None:
    def made():
        return Shares(CASES[case])

    if not follows(made()):
        check_memory(made())
        shoal.initialise(shoal.deferred_init(made))
        return
    for taken in (
        lambda: capture(made(), X),
        lambda: shoal.deferred_init(made),  # which gives each tensor its own values
        lambda: models.capturable(models.outline(job := Job(model=made(), steps=1)), job),
    ):
        with pytest.raises(CaptureError, match=r"'v'.*memory"):
            taken()


def test_what_a_hook_of_torch_makes_anew_is_taken() -> None:
    normed = nn.utils.spectral_norm(nn.Linear(8, 16))
    assert normed.weight.data_ptr() == normed.weight_orig.data_ptr()
    check_memory(Shares(lambda m: setattr(m, "a", normed)))


def test_a_lazy_part_is_named_before_its_weights_are_looked_at() -> None:
    def made():
        return Shares(lambda m: setattr(m, "a", nn.LazyLinear(16)))

    for look in (lambda: check_parts(made()), lambda: shoal.deferred_init(made)):
        with pytest.raises(CaptureError, match="module 'a' is lazy"):
            look()


def test_two_parameters_over_one_memory_are_refused_frozen_too() -> None:
    module = Shares(lambda m: two_parameters(m, *_windows(torch.zeros(20)))).requires_grad_(False)
    with pytest.raises(CaptureError, match=r"'other'.*'v'.*assigning the same Parameter"):
        check_memory(module)
