"""Routing to experts: as the plain loop computes it, whatever the offsets say, and memory that a
model fills after it made it."""

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from shoal.dag.capture.capture import CaptureError, capture
from shoal.dag.ir.experts import grouped_mm, histogram
from shoal.dag.ir.infer import call

INT32, INT64 = torch.iinfo(torch.int32), torch.iinfo(torch.int64)


def plain(x: Tensor, weight: Tensor, ends: list[int]) -> Tensor:
    """Row by row: the matrix of the group that it is in, zeros for none."""
    rows = []
    for i, row in enumerate(x):
        group = next((g for g, end in enumerate(ends) if i < end), None)
        rows.append(row.new_zeros(weight.shape[2]) if group is None else row @ weight[group])
    return torch.stack(rows) + 0.0 * (x.sum() + weight.sum())  # so that all have a gradient


@pytest.mark.parametrize("ends", [[2, 5, 6], [0, 6, 6], [6, 6, 6], [0, 0, 0], [1, 1, 4], [3, 1, 5]])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_grouped_product_and_its_gradients_are_those_of_each_row(
    ends: list[int], dtype: torch.dtype
) -> None:
    x, w = torch.randn(6, 4, requires_grad=True), torch.randn(3, 4, 2, requires_grad=True)
    seed = torch.randn(6, 2)
    ours, wanted = grouped_mm(x, w, torch.tensor(ends, dtype=dtype)), plain(x, w, ends)
    torch.testing.assert_close(ours, wanted)
    got = torch.autograd.grad(ours, (x, w), seed)
    for a, b in zip(got, torch.autograd.grad(wanted, (x, w), seed), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    "ends",
    [
        torch.tensor([-5, 100, 3]),
        torch.tensor([INT64.min, INT64.max, INT64.max]),
        torch.tensor([INT32.max, INT32.min, INT32.max], dtype=torch.int32),
        torch.tensor([7, -1, -1]),
        torch.tensor([-1, -1, -1]),
    ],
)
def test_offsets_that_point_elsewhere_reach_nothing(ends: Tensor) -> None:
    x, w = torch.ones(6, 4, requires_grad=True), torch.ones(3, 4, 2, requires_grad=True)
    made = grouped_mm(x, w, ends)
    assert made.shape == (6, 2)
    assert set(made.flatten().tolist()) <= {0.0, 4.0}
    made.sum().backward()
    assert x.grad is not None
    assert set(x.grad.flatten().tolist()) <= {0.0, 2.0}
    assert w.grad is not None
    assert w.grad.sum().item() == made.detach().sum().item()


@pytest.mark.parametrize(
    ("x", "weight", "ends"),
    [
        (torch.ones(6, 4), torch.ones(3, 5, 2), torch.ones(3, dtype=torch.int32)),
        (torch.ones(6, 4), torch.ones(3, 4, 2), torch.ones(4, dtype=torch.int32)),
        (torch.ones(6, 4), torch.ones(3, 4, 2), torch.ones(3)),
        (torch.ones(6, 4), torch.ones(3, 4, 2).double(), torch.ones(3, dtype=torch.int32)),
        (torch.ones(6), torch.ones(3, 4, 2), torch.ones(3, dtype=torch.int32)),
        (torch.ones(6, 4), torch.ones(0, 4, 2), torch.ones(0, dtype=torch.int32)),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_other_shapes_are_refused_where_only_shapes_are_known_too(
    x: Tensor, weight: Tensor, ends: Tensor, device: str
) -> None:
    with pytest.raises(ValueError, match=r"grouped product of float.*expected \[S, K\]"):
        grouped_mm(x.to(device), weight.to(device), ends.to(device))


def test_shapes_need_no_offsets() -> None:
    x, w = torch.ones(7, 4), torch.ones(3, 4, 2)
    assert grouped_mm(x.to("meta"), w.to("meta"), torch.ones(3, device="meta").int()).shape == (
        7,
        2,
    )
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(t) for t in (x, w, torch.ones(3).int())]
        assert grouped_mm(*fakes).shape == (7, 2)


def test_a_histogram_counts_as_torch_does_and_takes_integers() -> None:
    x = torch.cat([torch.rand(500) * 12 - 1, torch.tensor([0.0, 10.0, 10.5])])
    assert torch.equal(histogram(x, 10, 0.0, 10.0), torch.histc(x, 10, 0, 10))
    ids = torch.randint(0, 9, (200,))
    wanted = torch.histc(ids.float(), 7, 0, 6)
    assert torch.equal(histogram(ids, 7, 0.0, 6.0), wanted.long())
    assert torch.equal(histogram(ids.float(), 7, 0.0, 6.0), wanted)
    odd = torch.tensor([torch.nan, torch.inf, -torch.inf, 1.0])
    assert histogram(odd, 2, 0.0, 2.0).tolist() == [0.0, 1.0]


@pytest.mark.parametrize(
    ("bins", "low", "high"), [(0, 0.0, 1.0), (4, 1.0, 1.0), (4, 0.0, torch.inf), (4, torch.nan, 1)]
)
def test_a_histogram_over_no_range_is_refused(bins: int, low: float, high: float) -> None:
    with pytest.raises(ValueError, match="expected low < high"):
        histogram(torch.ones(3), bins, low, high)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_on_cuda_equal_the_cpu(dtype: torch.dtype) -> None:
    x, w = torch.randn(64, 32).to(dtype), torch.randn(5, 32, 16).to(dtype)
    ends, seed = (
        torch.tensor([10, 10, 40, -3, 60], dtype=torch.int32),
        torch.randn(64, 16).to(dtype),
    )
    found = {}
    for device in ("cpu", "cuda"):
        leaves = [t.to(device).requires_grad_() for t in (x, w)]
        made = grouped_mm(*leaves, ends.to(device))
        found[device] = [made, *torch.autograd.grad(made, leaves, seed.to(device))]
        found[device].append(histogram(ends.to(device), 7, 0.0, 60.0))
    for ours, theirs in zip(found["cuda"], found["cpu"], strict=True):
        tolerance = 1e-2 if dtype is torch.bfloat16 else 1e-4
        torch.testing.assert_close(ours.cpu(), theirs, rtol=tolerance, atol=tolerance)


class Filled(nn.Module):
    """Fresh memory of every kind, filled in parts: what nobody wrote is no value to train on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        whole = h.new_empty(*h.shape[:-1], 6)
        whole[..., :4] = h
        whole[..., 4:] = h[..., :2] * 2
        order = torch.empty_like(x[:, 0], dtype=torch.int64)
        order[:] = 1
        return (whole.square().sum(-1) * order).mean()


def test_fresh_memory_is_zeros_and_writing_to_it_is_functional() -> None:
    torch.manual_seed(0)
    module, x = Filled(), torch.randn(3, 4)
    captured = capture(module, {"x": torch.randn(4, 4)}, core=True)
    graph = captured.graph.bind(3)
    assert not any("empty" in op.target for op in graph.operators)
    values: dict[str, Tensor] = {"in:x": x}
    for p in graph.parameters:
        values[f"param:{p.name}"] = captured.tensors[p.name].clone().requires_grad_()
    values |= {f"buffer:{b.name}": captured.tensors[b.name] for b in graph.buffers}
    for op in graph.operators:
        values |= zip(op.values, call(op, values, torch.device("cpu")), strict=True)
    values[graph.loss].backward()
    h = module.linear(x)
    wanted = (torch.cat([h, h[:, :2] * 2], -1).square().sum(-1)).mean()
    wanted.backward()
    torch.testing.assert_close(values[graph.loss], wanted)
    torch.testing.assert_close(values["param:linear.weight"].grad, module.linear.weight.grad)


class Does(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(4, 4), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear(x)).mean()


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda h: h * torch.histc(h.detach(), 4), "give histc a min and a max"),
        (
            lambda h: torch._grouped_mm(
                h.bfloat16().repeat(1, 2).expand(3, -1, 8), h.bfloat16().new_ones(3, 8, 8)
            ),
            r"rows \(S, K\) times a matrix for each group",
        ),
    ],
)
def test_what_routes_in_another_way_says_what_to_write(function, says: str) -> None:
    with pytest.raises(CaptureError, match=says):
        capture(Does(function), {"x": torch.randn(4, 4)})
