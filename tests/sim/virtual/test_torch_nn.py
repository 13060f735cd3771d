"""Small models around the layers of torch.nn, each trained for two steps in two stages: losses and
weights are those of the plain loop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.job import Job
from shoal.tests.sim.conftest import Laboratory, assert_equal_training

POINTWISE = [
    "ELU",
    "Hardshrink",
    "Hardsigmoid",
    "Hardtanh",
    "Hardswish",
    "LeakyReLU",
    "LogSigmoid",
    "PReLU",
    "ReLU",
    "ReLU6",
    "SELU",
    "CELU",
    "GELU",
    "Sigmoid",
    "SiLU",
    "Mish",
    "Softplus",
    "Softshrink",
    "Softsign",
    "Tanh",
    "Tanhshrink",
    "GLU",
    "Identity",
]
LOSSES = [
    "L1Loss",
    "MSELoss",
    "SmoothL1Loss",
    "HuberLoss",
    "PoissonNLLLoss",
    "SoftMarginLoss",
    "BCEWithLogitsLoss",
]

Make = Callable[[], Callable[[Tensor], Tensor]]
CASES: dict[str, tuple[Make, tuple[int, ...]]] = {
    **{n: (getattr(nn, n), (6,)) for n in POINTWISE},
    **{n: (lambda n=n: lambda h: getattr(nn, n)()(h, h.detach().sigmoid()), (6,)) for n in LOSSES},
    "Softmax": (lambda: nn.Softmax(1), (6,)),
    "LogSoftmax": (lambda: nn.LogSoftmax(1), (6,)),
    "Softmin": (lambda: nn.Softmin(1), (6,)),
    "Threshold": (lambda: nn.Threshold(0.1, 2.0), (6,)),
    "Linear": (lambda: nn.Linear(6, 4), (6,)),
    "LayerNorm": (lambda: nn.LayerNorm(6), (6,)),
    "RMSNorm": (lambda: nn.RMSNorm(6), (6,)),
    "GroupNorm": (lambda: nn.GroupNorm(3, 6), (6, 4)),
    "LocalResponseNorm": (lambda: nn.LocalResponseNorm(2), (3, 4, 4)),
    "no statistics": (lambda: nn.BatchNorm1d(3, track_running_stats=False), (3, 8)),
    "Flatten": (nn.Flatten, (3, 4)),
    "Unflatten": (lambda: nn.Unflatten(1, (2, 3)), (6,)),
    "Fold": (lambda: nn.Fold((4, 4), 2), (12, 9)),
    "Unfold": (lambda: nn.Unfold(2), (3, 4, 4)),
    "PixelShuffle": (lambda: nn.PixelShuffle(2), (4, 4, 4)),
    "PixelUnshuffle": (lambda: nn.PixelUnshuffle(2), (4, 4, 4)),
    "ChannelShuffle": (lambda: nn.ChannelShuffle(2), (4, 4, 4)),
    "Upsample": (lambda: nn.Upsample(scale_factor=2, mode="bilinear"), (3, 4, 4)),
}
for d in (1, 2, 3):
    shape = (3, *(6,) * d)
    for kind, arguments in {
        "Conv": (3, 4, 3),
        "ConvTranspose": (3, 4, 3),
        "MaxPool": (2,),
        "AvgPool": (2,),
        "LPPool": (2, 2),
        "AdaptiveAvgPool": (3,),
        "BatchNorm": (3,),
        "InstanceNorm": (3,),
        "ReflectionPad": (1,),
        "ReplicationPad": (1,),
        "CircularPad": (1,),
        "ZeroPad": (1,),
    }.items():
        name = f"{kind}{d}d"
        CASES[name] = lambda name=name, given=arguments: getattr(nn, name)(*given), shape
for name in ("RNN", "LSTM", "GRU"):

    def last(name: str = name) -> nn.Module:
        return Called(getattr(nn, name)(4, 5, batch_first=True), lambda part, h: part(h)[0])

    CASES[name] = last, (5, 4)


class Called(nn.Module):
    def __init__(self, part: nn.Module, call: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.part, self.call = part, call

    def forward(self, h: Tensor) -> Tensor:
        return self.call(self.part, h)


CASES |= {
    "attention": (
        lambda: Called(
            nn.MultiheadAttention(4, 2, batch_first=True), lambda part, h: part(h, h, h)[0]
        ),
        (5, 4),
    ),
    "encoder": (lambda: nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True), (5, 4)),
    "Bilinear": (lambda: Called(nn.Bilinear(6, 6, 4), lambda part, h: part(h, h)), (6,)),
    "CosineSimilarity": (lambda: lambda h: F.cosine_similarity(h, h + 1, 2), (3, 6)),
}


class Around(nn.Module):
    """A scale that is trained before the layer, and a loss behind it."""

    def __init__(self, part: Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> None:
        super().__init__()
        self.scale, self.part = nn.Parameter(torch.rand(shape) + 0.5), part

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.part(x * self.scale)
        if h.dim() == 0:
            return h
        h = h.flatten(1)
        return (h.square().mean(1) + 0.1 * h.sum(1) - y).square().mean()


SOME = ("BatchNorm2d", "LSTM")


@pytest.mark.parametrize(
    "name", [n if n in SOME else pytest.param(n, marks=pytest.mark.slow) for n in CASES]
)
def test_a_layer_of_torch_trains_as_in_the_plain_loop(
    name: str, tmp_path: Path, laboratory: Callable[[Job], Laboratory]
) -> None:
    make, shape = CASES[name]
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(40, *shape)).astype("f4"), rng.normal(size=40).astype("f4")
    np.savez(tmp_path / "data.npz", x=x, y=y)
    table: dict[str, Any] = {"data": {"kind": "arrays", "source": "data.npz"}, "folder": tmp_path}
    table["plan"] = {"stages": 2, "scheduler": "uniform"}
    job = Job(
        name=f"nn-{name}", model=Around(make(), shape), **table, batch=8, microbatch=4, steps=2
    )
    lab = laboratory(job)
    assert_equal_training(lab.train(lab.world(2)), lab.plain())
