"""Operators that are not on the allow-list, but that torch can write with those that are."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.dag.capture import CaptureError, capture
from shoal.dag.cut import cut
from shoal.dag.execute import StageExecutor

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "clip": lambda h: h.clip(-0.5, 0.5),
    "meshgrid": lambda h: (
        h + torch.meshgrid(torch.arange(5.0), torch.arange(8.0), indexing="ij")[0]
    ),
    "linalg.norm": lambda h: torch.linalg.norm(h, dim=-1),
    "hstack": lambda h: torch.hstack([h, 2 * h]),
    "tensordot": lambda h: torch.tensordot(h, torch.ones(8, 3), 1),
    "linear interpolation": lambda h: F.interpolate(h, scale_factor=2, mode="linear"),
    "weight norm": lambda h: h @ torch._weight_norm(h[0], h[0].norm(dim=1, keepdim=True), 0).T,
}


class Applied(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return (1.7 * self.function(self.linear(x))).sin().mean()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_torch_can_decompose_is_captured(name: str) -> None:
    module = Applied(FUNCTIONS[name])
    captured = capture(module, {"x": torch.zeros(2, 5, 8)})
    graph = captured.graph.bind(3)
    (stage,) = cut(graph, [(0, len(graph.operators))])
    executor = StageExecutor(graph, stage, captured.tensors)
    x = torch.randn(3, 5, 8)
    loss = module(x)
    loss.backward()

    found = executor.forward(0, 0, {}, {"x": x}).results[graph.loss]
    executor.backward(0, 0, {})

    torch.testing.assert_close(found, loss.detach())
    for parameter, p in module.named_parameters():
        torch.testing.assert_close(executor.parameters[parameter].grad, p.grad)


class Reversal(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -grad


def test_a_gradient_of_ones_own_making_is_refused_and_never_lost() -> None:
    batch = {"x": torch.zeros(2, 5, 8)}
    with pytest.raises(CaptureError, match=r"(?s)Reversal\.apply\(h\).*backward of its own"):
        capture(Applied(lambda h: Reversal.apply(h)), batch)
    assert Reversal.apply(torch.ones(1)).item() == 1  # as before, outside of a capture

    module = Applied(torch.tanh)
    hook = module.linear.weight.register_hook(lambda grad: 3 * grad)
    with pytest.raises(CaptureError, match=r"'linear\.weight' has a backward hook"):
        capture(module, batch)
    hook.remove()
    capture(module, batch)


def test_a_parameter_may_be_a_metric() -> None:
    class Scaled(Applied):
        def __init__(self) -> None:
            super().__init__(torch.tanh)
            self.scale = nn.Parameter(torch.tensor(2.0))

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"loss": super().forward(self.scale * x), "scale": self.scale}

    graph = capture(Scaled(), {"x": torch.zeros(2, 5, 8)}).graph
    assert [name for name, _ in graph.metrics] == ["scale"]
