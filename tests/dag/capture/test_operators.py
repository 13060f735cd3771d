"""Operators that are not on the allow-list, but that torch can write with those that are."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shoal.dag.capture.capture import CaptureError, capture
from shoal.dag.execute.execute import StageExecutor
from shoal.dag.ir.graph import BufferUpdate
from shoal.dag.plan.cut import cut

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


def copied(h: Tensor) -> Tensor:
    with torch.no_grad():
        target = h.detach().clone()
        target[:, 0] = 0
        target.view(-1).mul_(2)
    return (h - target).square()


def computed(h: Tensor) -> Tensor:
    with torch.no_grad():
        target = F.linear(h, torch.ones(8, 8)).relu_()
        rows = (h + 1).transpose(0, 1)
        rows += target.transpose(0, 1)
    return h * target + rows.transpose(0, 1)


FUNCTIONS |= {
    "a copy changed under no_grad": copied,
    "a result changed under no_grad": computed,
    "checkpointing": lambda h: checkpoint(torch.tanh, h, use_reentrant=False),
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
    assert_trained_alike(FUNCTIONS[name])


def assert_trained_alike(function: Callable[[Tensor], Tensor]) -> None:
    """The loss and gradients of a module with the function, and of its graph."""
    module = Applied(function)
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


class Rounded(torch.autograd.Function):
    """Rounds, and passes gradients on where the input is small: no derivative of its forward."""

    @staticmethod
    def forward(x, scale, mask):
        return torch.round(x * 4) / 4 * scale

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, ctx.scale, _ = inputs
        ctx.save_for_backward(x.abs() < 0.5)

    @staticmethod
    def backward(ctx, grad):
        (small,) = ctx.saved_tensors
        return grad * small * ctx.scale, None, None


class Normalised(torch.autograd.Function):
    """Gradients by their norm: no factor for each element."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad / grad.norm()


class Cut(Normalised):
    """Gradients limited to a range: a factor for each element, until one is large."""

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad.clamp(-5, 5)


class Noisy(Normalised):
    """A forward that draws, whose draws no graph would repeat."""

    @staticmethod
    def forward(ctx, x):
        return x + torch.rand_like(x)

    @staticmethod
    def backward(ctx, grad):
        return grad


OWN = {
    "reversal": lambda h: Reversal.apply(h),
    "rounded": lambda h: Rounded.apply(h, 3.0, h > 0),
    "both": lambda h: Reversal.apply(Rounded.apply(h, 0.5, h > 0)),
}


@pytest.mark.parametrize("name", OWN)
def test_a_backward_that_multiplies_each_element_is_trained_as_its_user_wrote_it(name: str) -> None:
    assert_trained_alike(OWN[name])


@pytest.mark.parametrize("function", [Normalised, Cut, Noisy])
def test_any_other_backward_is_refused(function: type[torch.autograd.Function]) -> None:
    with pytest.raises(CaptureError, match=f"Function {function.__name__} has a backward of its"):
        capture(Applied(lambda h: function.apply(h)), {"x": torch.zeros(2, 5, 8)})


def test_a_gradient_of_ones_own_making_is_refused_and_never_lost() -> None:
    batch = {"x": torch.zeros(2, 5, 8)}
    with pytest.raises(CaptureError, match=r"(?s)Normalised\.apply\(h\).*backward of its own"):
        capture(Applied(lambda h: Normalised.apply(h)), batch)
    assert Reversal.apply(torch.ones(1)).item() == 1  # as before, outside of a capture

    module = Applied(torch.tanh)
    hook = module.linear.weight.register_hook(lambda grad: 3 * grad)
    with pytest.raises(CaptureError, match=r"'linear\.weight' has a backward hook"):
        capture(module, batch)
    hook.remove()
    capture(module, batch)
    hook = module.linear.weight.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(CaptureError, match=r"'linear\.weight' has a backward hook"):
        capture(module, batch)
    hook.remove()


def reversed_by_hook(h):
    h.register_hook(lambda grad: -grad)
    return h


def frozen_teacher(h):
    with torch.inference_mode():
        return h * 2


@pytest.mark.parametrize(
    ("forward", "says"),
    [
        (reversed_by_hook, r"(?s)register_hook.*a hook changes the gradient"),
        (frozen_teacher, r"(?s)inference_mode.*use torch\.no_grad"),
    ],
)
def test_what_changes_gradients_within_a_forward_is_refused(forward, says) -> None:
    with pytest.raises(CaptureError, match=says):
        capture(Applied(forward), {"x": torch.zeros(2, 5, 8)})
    x = torch.ones(1, requires_grad=True)  # as before, outside of a capture
    x.register_hook(lambda grad: -grad)
    x.sum().backward()
    assert x.grad is not None
    assert x.grad.item() == -1
    with torch.inference_mode():
        assert torch.ones(1).is_inference()


def test_weights_that_share_memory_are_refused_transposed_too() -> None:
    class Tied(Applied):
        def __init__(self) -> None:
            super().__init__(torch.tanh)
            self.back = nn.Linear(*self.linear.weight.shape)
            self.back.weight = nn.Parameter(self.linear.weight.data.t())

    with pytest.raises(CaptureError, match=r"linear\.weight.*back\.weight.*the same memory"):
        capture(Tied(), {"x": torch.zeros(2, 5, 8)})


@pytest.mark.parametrize("step", ["n.add_(1, alpha=2)", "n.copy_(m + 1)", "n.add_(1)"])
def test_a_counter_counts_as_in_the_module(step: str) -> None:
    class Counting(Applied):
        def __init__(self) -> None:
            super().__init__(torch.tanh)
            self.register_buffer("n", torch.zeros(()))
            self.register_buffer("m", torch.full((), 5.0))

        def forward(self, x):
            exec(step, {"n": self.n, "m": self.m})
            return super().forward(x)

    batch = {"x": torch.zeros(2, 5, 8)}
    if "m" in step:
        with pytest.raises(CaptureError, match="buffer 'n' is changed by the forward"):
            capture(Counting(), batch)
        return
    (buffer,) = [b for b in capture(Counting(), batch).graph.buffers if b.name == "n"]
    assert buffer.update == BufferUpdate("add", "", 2.0 if "alpha" in step else 1.0)


def test_a_parameter_may_be_a_metric() -> None:
    class Scaled(Applied):
        def __init__(self) -> None:
            super().__init__(torch.tanh)
            self.scale = nn.Parameter(torch.tensor(2.0))

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"loss": super().forward(self.scale * x), "scale": self.scale}

    graph = capture(Scaled(), {"x": torch.zeros(2, 5, 8)}).graph
    assert [name for name, _ in graph.metrics] == ["scale"]
