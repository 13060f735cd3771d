"""Modules made without values: their recipes are what torch's initialisers would have drawn from,
and everything else is what it is in a module that was made in the ordinary way."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn
from torch.nn import init

import shoal
from shoal.client.models import models
from shoal.client.models.factories import factory_of
from shoal.client.models.initialise import recording_of
from shoal.client.models.recording import recipe_of, record
from shoal.dag.ir.capture_errors import CaptureError
from shoal.job import Job


class Holder(nn.Module):
    """One parameter, filled by a function."""

    def __init__(self, fill, shape=(96, 400), dtype=torch.float32):
        super().__init__()
        self.w = nn.Parameter(torch.empty(shape, dtype=dtype))
        with torch.no_grad():
            made = fill(self.w)
        if isinstance(made, nn.Parameter):
            self.w = made


def recipe(factory, seed=0):
    module, recording = record(factory, seed)
    return recipe_of(module, recording, seed)


def ours(fill, **kwargs) -> Tensor:
    found, others, _ = recipe(lambda: Holder(fill, **kwargs))
    assert not others, "a recipe was expected"
    assert list(found.tensors) == ["w"]
    return shoal.initialise(shoal.deferred_init(lambda: Holder(fill, **kwargs))).w.detach()


def torchs(fill, **kwargs) -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return Holder(fill, **kwargs).w.detach()


DRAWN = {
    "uniform_": lambda w: init.uniform_(w, -0.1, 0.3),
    "normal_": lambda w: init.normal_(w, 0.5, 0.02),
    "xavier_uniform_": lambda w: init.xavier_uniform_(w, gain=1.7),
    "xavier_normal_": init.xavier_normal_,
    "kaiming_uniform_": lambda w: init.kaiming_uniform_(w, a=math.sqrt(5)),
    "kaiming_normal_": lambda w: init.kaiming_normal_(w, mode="fan_out", nonlinearity="relu"),
    "trunc_normal_": lambda w: init.trunc_normal_(w, std=0.02, a=-0.04, b=0.03),
    "trunc_normal_ of a tail": lambda w: init.trunc_normal_(w, mean=0.0, std=1.0, a=1.5, b=4.0),
    "randn * c": lambda w: nn.Parameter(torch.randn(96, 400) * 0.02),
    "c + rand / c": lambda w: nn.Parameter(1 + torch.rand(96, 400) / 4),
    "rand_like - c": lambda w: nn.Parameter(-(torch.rand_like(w) - 0.5)),
    "normal": lambda w: nn.Parameter(torch.normal(0.1, 2.0, (96, 400))),
    "mul_ of a part": lambda w: init.normal_(w)[:32].mul_(0.5),
    "of parts": lambda w: (init.uniform_(w[:40]), init.normal_(w[40:])),
    "zero row": lambda w: init.normal_(w)[3].zero_(),
    "cast": lambda w: nn.Parameter(torch.randn(96, 400, dtype=torch.float64).float()),
    "copied": lambda w: w.copy_(torch.empty(96, 400).uniform_(2, 3)),
}


@pytest.mark.parametrize("name", DRAWN)
def test_each_initialiser_has_torchs_distribution(name):
    """Two samples, Kolmogorov and Smirnov; then rows one by one, where they differ."""
    a, b = ours(DRAWN[name]), torchs(DRAWN[name])
    assert (a.shape, a.dtype) == (b.shape, b.dtype)
    assert stats.ks_2samp(a.flatten(), b.flatten()).pvalue > 1e-3
    assert torch.allclose(a.std(1), b.std(1), rtol=0.35, atol=1e-6)
    assert a.unique().numel() > 0.9 * b.unique().numel()


SET = {
    "zeros_": init.zeros_,
    "ones_": init.ones_,
    "constant_": lambda w: init.constant_(w, 0.3),
    "full": lambda w: nn.Parameter(torch.full((96, 400), -2.5)),
    "zeros of a Parameter": lambda w: nn.Parameter(torch.zeros(96, 400)),
    "fill_ of a part": lambda w: init.zeros_(w)[5:7].fill_(1.0),
    "last one counts": lambda w: init.zeros_(init.normal_(w)),
    "tensor": lambda w: nn.Parameter(torch.tensor([0.25, -1.0])),
    "eye_": init.eye_,
    "dirac_": lambda w: init.dirac_(nn.Parameter(torch.empty(8, 6, 3))),
    "arange": lambda w: nn.Parameter(torch.log(torch.arange(1, 17).float()).repeat(4, 1)),
    "columns": lambda w: init.ones_(w)[:, 3:9].zero_(),
    "int": lambda w: nn.Parameter(torch.arange(5), requires_grad=False),
}


@pytest.mark.parametrize("name", SET)
def test_what_is_not_drawn_is_as_torch_sets_it(name):
    made = shoal.initialise(shoal.deferred_init(lambda: Holder(SET[name]))).w
    expected = torchs(SET[name])
    assert torch.equal(made, expected)
    assert made.dtype == expected.dtype


@pytest.mark.parametrize("shape", [(40, 12), (12, 40), (16, 3, 3)])
def test_orthogonal_by_recipe(shape):
    w = ours(lambda w: init.orthogonal_(w, gain=2.0), shape=shape).flatten(1).double() / 2
    gram = w.T @ w if w.shape[0] >= w.shape[1] else w @ w.T
    assert torch.allclose(gram, torch.eye(len(gram), dtype=torch.float64), atol=1e-6)


def test_a_large_orthogonal_matrix_is_made_here_and_sent(monkeypatch):
    monkeypatch.setattr("shoal.client.models.recorded.MOST_ORTHOGONAL", 1000)
    found, others, _ = recipe(lambda: Holder(init.orthogonal_, shape=(40, 30)))
    assert not found.tensors
    assert list(others) == ["w"]
    w = shoal.initialise(shoal.deferred_init(lambda: Holder(init.orthogonal_, shape=(40, 30)))).w
    assert torch.allclose(w.T @ w, torch.eye(30), atol=1e-5)


def test_bfloat16_is_rounded_once_from_the_same_draws():
    fill = DRAWN["normal_"]
    half, full = ours(fill, dtype=torch.bfloat16), ours(fill, dtype=torch.float64)
    assert half.dtype == torch.bfloat16
    assert float((half.double() - full).abs().max()) <= 2**-9
    assert float((half.double() - full).mean().abs()) < 5e-5


class Odd(nn.Module):
    """Ties, slices, copies, buffers, plain tensors, and values that are looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16, padding_idx=2)
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embed.weight
        self.layers = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2, enable_nested_tensor=False
        )
        self.rnn = nn.LSTM(16, 8)
        self.norm = nn.BatchNorm1d(16)
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.q, self.k = nn.Linear(16, 16), nn.Linear(16, 16)
        joined = torch.randn(32, 16) * 0.1
        with torch.no_grad():
            self.q.weight.copy_(joined[:16])
            self.k.weight.copy_(joined[16:])
            self.rnn.bias_hh_l0[8:16].fill_(1.0)
        for i, rate in enumerate(torch.linspace(0, 0.5, 4)):
            self.add_module(f"drop{i}", nn.Dropout(rate.item()))
        self.scale = nn.Parameter(torch.tensor(self.q.weight.detach().abs().max().item()))
        inverse = 1.0 / (10000 ** (torch.arange(0, 8, 2).float() / 8))
        self.register_buffer("inverse", inverse, persistent=False)
        self.register_buffer("mask", torch.ones(5, 5).tril().bool())
        self.plain = torch.linspace(0, 1, 5)
        self.several = [torch.arange(3), {"a": torch.zeros(2)}]


def test_a_module_is_what_it_is_when_it_is_made_in_the_ordinary_way():
    plain, module = Odd(), shoal.deferred_init(Odd)
    assert all(p.is_meta for n, p in module.named_parameters() if n != "scale")
    for (n, b), (m, c) in zip(plain.named_buffers(), module.named_buffers(), strict=True):
        assert n == m
        assert torch.equal(b, c)
    assert torch.equal(module.plain, plain.plain)
    assert torch.equal(module.several[0], torch.arange(3))
    assert [module.get_submodule(f"drop{i}").p for i in range(4)] == [
        plain.get_submodule(f"drop{i}").p for i in range(4)
    ]
    shoal.initialise(module, 0)
    assert recording_of(module) is None
    theirs, mine = plain.state_dict(), module.state_dict()
    assert {n: (t.shape, t.dtype, t.stride()) for n, t in theirs.items()} == {
        n: (t.shape, t.dtype, t.stride()) for n, t in mine.items()
    }
    assert module.head.weight is module.embed.weight
    assert not module.embed.weight[2].any()
    assert module.embed.weight[3].all()
    first, second = (layer.linear1.weight for layer in module.layers.layers)
    assert torch.equal(first, second)  # TransformerEncoder copies its layer, values and all
    assert first is not second
    assert torch.equal(module.rnn.bias_hh_l0[8:16], torch.ones(8))
    assert module.rnn._flat_weights[0] is module.rnn.weight_ih_l0
    assert torch.equal(module.scale, module.q.weight.abs().max())  # what it saw was what it got
    assert not torch.equal(module.q.weight, module.k.weight)
    module.rnn(torch.zeros(2, 16))


def test_another_seed_gives_other_values_unless_they_were_looked_at():
    def linear():
        return nn.Linear(4, 4)

    a, b, c = (shoal.initialise(shoal.deferred_init(linear), s).weight for s in (1, 1, 2))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    with pytest.raises(ValueError, match=r"with seed 0: expected the same, not 3"):
        shoal.initialise(shoal.deferred_init(Odd), 3)
    assert shoal.initialise(shoal.deferred_init(Odd, seed=3), 3).scale > 0


def test_what_was_not_deferred_cannot_be_initialised():
    with pytest.raises(ValueError, match=r"was not made by shoal\.deferred_init"):
        shoal.initialise(nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"returned int: expected a torch\.nn\.Module"):
        shoal.deferred_init(lambda: 3)


def test_values_from_outside_stay_what_they_are(tmp_path):
    torch.save({"weight": torch.arange(12.0).view(3, 4), "bias": torch.ones(3)}, tmp_path / "w.pt")
    outside = np.arange(6, dtype=np.float32)

    def factory():
        module = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
        module[0].load_state_dict(torch.load(tmp_path / "w.pt"))
        module.register_parameter("numpy", nn.Parameter(torch.from_numpy(outside)))
        return module

    found, others, _ = recipe(factory)
    assert list(found.tensors) == ["1.weight", "1.bias"]
    assert set(others) == {"numpy", "0.weight", "0.bias"}
    module = shoal.initialise(shoal.deferred_init(factory))
    assert torch.equal(module[0].weight, torch.arange(12.0).view(3, 4))
    assert torch.equal(module.numpy, torch.arange(6.0))


def test_a_branch_on_values_sees_those_of_the_recipe():
    seen = []

    def factory():
        module = nn.Linear(6, 6)
        while module.weight.sum() < 0.3:
            module.reset_parameters()
        seen.append(module.weight.sum().item())
        seen.append(float(module.weight.detach().numpy().sum()))
        return module

    module = shoal.initialise(shoal.deferred_init(factory, seed=5), 5)
    assert seen[0] >= 0.3
    assert math.isclose(seen[0], float(module.weight.detach().sum()), rel_tol=1e-5)
    assert math.isclose(seen[1], float(module.weight.detach().sum()), rel_tol=1e-5)


def test_a_parameter_that_nothing_fills_is_named():
    class Forgotten(nn.Module):
        def __init__(self):
            super().__init__()
            self.w, self.v = nn.Parameter(torch.empty(2)), nn.Parameter(torch.zeros(2))

    found, _, empty = recipe(Forgotten)
    assert empty == ["w"]
    assert found.tensors["w"].steps == ()


def test_recording_takes_no_memory_for_weights():
    """A terabyte of them."""
    module = shoal.deferred_init(
        lambda: nn.Sequential(*(nn.Linear(1 << 17, 1 << 17) for _ in range(16)))
    )
    assert sum(p.nbytes for p in module.parameters()) > 1 << 40
    init_ = recording_of(module)
    assert init_ is not None
    found, others, _ = recipe_of(module, init_, 0)
    assert len(found.tensors) == 32
    assert not others


HOOKED = """
from torch import nn

class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.a = nn.Linear(width, width)

def make(how, width):
    module = Net(width)
    getattr(module.a.weight, how)(lambda tensor: None)
    return module
"""


@pytest.mark.parametrize("how", ["register_hook", "register_post_accumulate_grad_hook"])
@pytest.mark.parametrize("width", [4, 5000])  # a large one is captured without values
@pytest.mark.parametrize("live", [False, True])
def test_a_hook_on_a_parameter_that_gets_another_tensor_is_refused(tmp_path, how, width, live):
    (tmp_path / "own.py").write_text(HOOKED)
    model = {"factory": "own.py:make", "args": {"how": how, "width": width}}
    job = Job(model=model, folder=tmp_path, steps=1)
    if live:
        module = shoal.deferred_init(lambda: factory_of(job)())
        job = Job(model=module, folder=tmp_path, steps=1)
    found = models.outline(job, print)
    with pytest.raises(CaptureError, match=r"parameter 'a\.weight' has a backward hook"):
        models.capturable(found, job)


class Halved(nn.Parameter):
    """A linear layer with it gives half."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            found = function(*args, **(kwargs or {}))
            return found * 0.5 if function is nn.functional.linear else found


class Named(nn.Parameter):
    """Only a name of its own."""


def test_a_parameter_whose_class_says_what_operators_do_is_refused(tmp_path) -> None:
    module = nn.Linear(2, 2)
    job = Job(model=module, folder=tmp_path, steps=1)
    module.weight = Named(torch.ones(2, 2))
    models.capturable(models.outline(job, print), job)
    module.weight = Halved(torch.ones(2, 2))
    with pytest.raises(CaptureError, match="'weight' is a Halved, whose class says"):
        models.capturable(models.outline(job, print), job)
