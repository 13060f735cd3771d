"""Frozen weights in 8 bits: the same training as with float32 weights of the same values, which are
worked out here by the formula."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shoal.dag.capture.capture import capture
from shoal.dag.cost.cost import cost
from shoal.dag.cost.memory import MemoryModel
from shoal.dag.execute.execute import StageExecutor
from shoal.dag.ir import quantized
from shoal.dag.ir.quantized import int8_embedding, int8_linear
from shoal.dag.ir.validate import validate
from shoal.dag.plan.cut import cut
from shoal.dag.transforms.lower import lower
from shoal.dag.transforms.quantize import in_int8, kept_wide
from shoal.dag.transforms.vocabulary import split_head
from shoal.peer.blobs.starting import ByGraph


class Columns(nn.Module):
    """A linear layer whose weight is (in, out), as those of GPT-2."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(8, 6)), nn.Parameter(torch.randn(6))

    def forward(self, x):
        return torch.addmm(self.bias, x, self.weight)


class Net(nn.Module):
    """Lookups and products that are frozen, with a head of its own or the lookup's; a matrix that
    something else reads too; trained layers below, between and in a bias."""

    def __init__(self, tied):
        super().__init__()
        torch.manual_seed(0)
        self.rows = nn.Embedding(11, 8)
        self.below = nn.Linear(8, 8)
        self.first = nn.Linear(8, 8)
        self.columns = Columns()
        self.last = nn.Linear(6, 8)
        self.both = nn.Linear(8, 8, bias=False)
        self.head = nn.Linear(8, 11, bias=not tied)
        for part in (self.rows, self.first, self.columns, self.both, self.head):
            part.requires_grad_(False)
        self.first.bias.requires_grad_(True)
        if tied:
            self.head.weight = self.rows.weight

    def forward(self, x, y):
        h = torch.tanh(self.first(torch.tanh(self.below(self.rows(x)))))
        h = torch.tanh(self.last(torch.tanh(self.columns(h))))
        return F.cross_entropy(self.head(self.both(h) * self.both.weight.norm()), y)


BATCH = {"x": torch.tensor([1, 10, 4, 4]), "y": torch.tensor([0, 4, 2, 1])}
NARROW = {"rows.weight": 1, "first.weight": 1, "columns.weight": 0}
"""The dimension that the largest of each output is taken over."""


def rounded(module, tied):
    """The same module, its narrow weights as they are in 8 bits, in float32."""
    found = copy.deepcopy(module)
    with torch.no_grad():
        for name, along in (NARROW if tied else {**NARROW, "head.weight": 1}).items():
            weight = found.get_parameter(name)
            scale = weight.abs().amax(along, keepdim=True) / 127
            weight.copy_((weight / scale).round() * scale)
    return found


def trained_once(graph, tensors, core=False, batch=BATCH):
    """(loss, gradients) of a microbatch in one stage."""
    graph = validate(graph).bind(4)
    (stage,) = cut(graph, [(0, len(graph.operators))])
    form = lower(graph).graph if core else graph
    executor = StageExecutor(
        form, stage, ByGraph(tensors, graph), operators=(0, len(form.operators))
    )
    loss = executor.forward(0, 0, {}, batch).results[graph.loss]
    executor.backward(0, 0, {})
    return loss, {n: p.grad for n, p in executor.parameters.items() if p.grad is not None}


@pytest.mark.parametrize(
    ("tied", "dtype", "loose"),
    [
        (False, "fp32", 1e-6),
        pytest.param(True, "fp32", 1e-6, marks=pytest.mark.slow),
        (True, "bf16", 2e-2),
        pytest.param(False, "bf16", 2e-2, marks=pytest.mark.slow),
    ],
)
def test_it_trains_as_the_rounded_weights_do(tied, dtype, loose):
    captured = capture(Net(tied), BATCH, dtype=dtype)
    graph = in_int8(captured.graph)
    own = {p.name: p.spec.dtype for p in graph.parameters if ".." not in p.name}
    narrow = {n for n, kind in own.items() if kind == "int8"}
    assert narrow == {*NARROW, *(() if tied else ("head.weight",))}
    assert kept_wide(graph) == ("both.weight",)
    wanted = rounded(Net(tied), tied)
    wanted(**BATCH).backward()
    forms = [(graph, False), (graph, True)]
    if not tied:
        forms.append((split_head(graph, 3), False))
    for form, core in forms:
        loss, grads = trained_once(form, captured.tensors, core)
        torch.testing.assert_close(loss, wanted(**BATCH).detach(), rtol=loose, atol=loose)
        trained = {n: p.grad for n, p in wanted.named_parameters() if p.requires_grad}
        assert grads.keys() == trained.keys()
        for name, grad in trained.items():
            torch.testing.assert_close(grads[name], grad, rtol=loose, atol=loose * 4)


pytest.importorskip("transformers.integrations.moe")


class Experts(nn.Module):
    """Frozen experts in one tensor, (experts, out, in) or (experts, in, out), between trained
    layers; one of them gets no row. `alone`: whether nothing else reads them."""

    def __init__(self, rows, alone=True):
        super().__init__()
        torch.manual_seed(0)
        self.rows, self.alone = rows, alone
        self.below, self.last = nn.Linear(4, 4), nn.Linear(6, 3)
        self.experts = nn.Parameter(torch.randn(3, 6, 4) if rows else torch.randn(3, 4, 6))
        self.experts.requires_grad_(False)

    def forward(self, x, y):
        weight = self.experts.transpose(-2, -1) if self.rows else self.experts
        ends = torch.tensor([1, 1, 4], dtype=torch.int32)
        h = torch.ops.transformers.grouped_mm_fallback(torch.tanh(self.below(x)), weight, ends)
        loss = F.cross_entropy(self.last(torch.tanh(h)), y)
        return loss if self.alone else loss + self.experts[0].norm()


@pytest.mark.parametrize("rows", [True, False])
@pytest.mark.parametrize(("dtype", "loose"), [("fp32", 1e-6), ("bf16", 2e-2)])
def test_experts_in_one_tensor_train_as_the_rounded_ones_do(rows, dtype, loose, monkeypatch):
    monkeypatch.setattr(quantized, "SLICE", 24)  # an expert at a time
    batch = {"x": torch.randn(4, 4), "y": torch.tensor([0, 2, 1, 1])}
    captured = capture(Experts(rows), batch, dtype=dtype)
    graph = in_int8(captured.graph)
    specs = {p.name: p.spec for p in graph.parameters}
    assert specs["experts"].dtype == "int8"
    assert specs["experts..scale"].sizes == ((3, 6, 1) if rows else (3, 1, 6))
    assert kept_wide(graph) == ()
    wanted = Experts(rows)
    with torch.no_grad():
        scale = wanted.experts.abs().amax(2 if rows else 1, keepdim=True) / 127
        wanted.experts.copy_((wanted.experts / scale).round() * scale)
    wanted(**batch).backward()
    trained = {n: p.grad for n, p in wanted.named_parameters() if p.requires_grad}
    for core in (False, True):
        loss, grads = trained_once(graph, captured.tensors, core, batch)
        torch.testing.assert_close(loss, wanted(**batch).detach(), rtol=loose, atol=loose)
        assert grads.keys() == trained.keys()
        for name, grad in trained.items():
            torch.testing.assert_close(grads[name], grad, rtol=loose, atol=loose * 4)
    stage = {
        g: MemoryModel(g, cost(g)).stage(0, len(g.operators)).weights
        for g in (captured.graph.bind(4), graph.bind(4))
    }
    wide, narrow = stage.values()
    assert wide - narrow == 3 * 72 - 4 * 18  # a byte for four, and a scale an output


def test_experts_that_something_else_reads_stay_as_they_are():
    batch = {"x": torch.randn(4, 4), "y": torch.tensor([0, 2, 1, 1])}
    graph = capture(Experts(True, alone=False), batch).graph
    assert in_int8(graph) is graph
    assert kept_wide(graph) == ("experts",)


def test_a_graph_without_frozen_matrices_is_the_same_object():
    graph = capture(nn.Sequential(nn.Linear(4, 1)), {"input": torch.ones(2, 4)}, loss=_mean).graph
    assert in_int8(graph) is graph


def _mean(output, batch):
    return output.mean()


def test_what_the_plan_counts_is_a_byte_a_weight_and_one_slice(monkeypatch):
    """No product keeps a float32 weight for its backward, and none is there whole."""

    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.below = nn.Linear(64, 64, bias=False)
            self.base = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(3)))
            self.base.requires_grad_(False)

        def forward(self, x):
            return self.base(self.below(x)).square().mean()

    captured = capture(Deep(), {"x": torch.randn(2, 64)})
    wide, narrow = captured.graph.bind(2), in_int8(captured.graph).bind(2)
    stage = {g: MemoryModel(g, cost(g)).stage(0, len(g.operators)) for g in (wide, narrow)}
    each = 64 * 64
    assert stage[wide].weights == 4 * 4 * each
    assert stage[narrow].weights == 4 * each + 3 * (each + 4 * 64)
    assert stage[narrow].kept == stage[wide].kept
    most = stage[narrow].transient - stage[wide].transient
    assert 0 < most <= 4 * each + 4 * 2 * 64  # one matrix in float32, and gradients times scales
    monkeypatch.setattr(quantized, "SLICE", each // 4)
    again = in_int8(capture(Deep(), {"x": torch.randn(3, 64)}).graph).bind(3)
    sliced = MemoryModel(again, cost(again)).stage(0, len(again.operators))
    assert sliced.transient < stage[narrow].transient


def test_slices_of_any_size_give_one_product(monkeypatch):
    torch.manual_seed(0)
    weight, scale = quantized.quantized(torch.randn(13, 7))
    x, bias = torch.randn(2, 3, 7, requires_grad=True), torch.randn(13, requires_grad=True)
    whole = int8_linear(x, weight, scale, bias)
    grads = torch.autograd.grad(whole.square().sum(), (x, bias))
    plain = F.linear(x, weight * scale, bias)
    torch.testing.assert_close(whole, plain)
    torch.testing.assert_close(grads, torch.autograd.grad(plain.square().sum(), (x, bias)))
    for elements in (1, 7, 20, 40):
        monkeypatch.setattr(quantized, "SLICE", elements)
        made = int8_linear(x, weight, scale, bias)
        torch.testing.assert_close(made, whole)
        torch.testing.assert_close(torch.autograd.grad(made.square().sum(), (x, bias)), grads)


def test_products_in_bf16_are_those_of_a_gpu_to_its_digits(monkeypatch):
    """Off the CPU nothing is float32 but the scales: int8 numbers are exact in bfloat16."""
    monkeypatch.setattr(quantized, "_dtype", lambda x: x.dtype)
    torch.manual_seed(0)
    weight, scale = quantized.quantized(torch.randn(13, 70))
    x, bias = torch.randn(6, 70, dtype=torch.bfloat16, requires_grad=True), torch.randn(13)
    made = int8_linear(x, weight, scale, bias)
    wide = x.detach().float().requires_grad_()
    plain = F.linear(wide, weight * scale, bias)
    assert made.dtype is torch.bfloat16
    torch.testing.assert_close(made.float(), plain, rtol=2**-6, atol=2**-4)
    (grad,) = torch.autograd.grad(made.float().sum(), x)
    (wanted,) = torch.autograd.grad(plain.sum(), wide)
    torch.testing.assert_close(grad.float(), wanted, rtol=2**-6, atol=2**-4)


def test_an_output_of_zeros_stays_and_one_that_is_not_finite_is_refused():
    weight = torch.tensor([[0.0, 0.0], [1e-44, 0.0], [-2.0, 0.5]])
    numbers, scale = quantized.quantized(weight)
    assert torch.equal(numbers, torch.tensor([[0, 0], [0, 0], [-127, 32]], dtype=torch.int8))
    assert torch.equal(scale, torch.tensor([[1.0], [1.0], [2 / 127]]))
    for wrong in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="infinite or NaN"):
            quantized.quantized(torch.tensor([[1.0, wrong]]))


@pytest.mark.parametrize(
    ("weight", "scale", "bias"),
    [
        (torch.ones(3, 4, dtype=torch.int8), torch.ones(3), None),
        (torch.ones(3, 4, dtype=torch.int8), torch.ones(4, 1), None),
        (torch.ones(3, 5, dtype=torch.int8), torch.ones(3, 1), None),
        (torch.ones(3, 4), torch.ones(3, 1), None),
        (torch.ones(3, 4, dtype=torch.int8), torch.ones(3, 1, requires_grad=True), None),
        (torch.ones(3, 4, dtype=torch.int8), torch.ones(3, 1), torch.ones(4)),
    ],
)
def test_other_shapes_and_dtypes_are_refused(weight, scale, bias):
    with pytest.raises(ValueError, match=r"8 bits|int8 product"):
        int8_linear(torch.ones(2, 4), weight, scale, bias)


def test_a_lookup_beyond_the_words_is_refused():
    weight, scale = quantized.quantized(torch.randn(5, 4))
    ids = torch.tensor([[0, 4], [2, 2]])
    assert torch.equal(int8_embedding(weight, scale, ids), (weight * scale)[ids])
    with pytest.raises(IndexError):
        int8_embedding(weight, scale, torch.tensor([5]))
    square, _ = quantized.quantized(torch.randn(4, 4))
    with pytest.raises(ValueError, match="a scale for each row"):
        int8_embedding(square, torch.ones(1, 4), ids)
