"""Parts of torch that no graph has are refused in words of ours, with what to write instead; and
what is written instead is taken."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan
from torch.nn.utils.rnn import pack_padded_sequence

from shoal.dag.capture.capture import CaptureError, capture

Part = Callable[[Tensor], Tensor]


def some(names: Iterable[str], *fast: str) -> list[Any]:
    """All names; those that are not `fast` are run by night."""
    return [n if n in fast else pytest.param(n, marks=pytest.mark.slow) for n in names]


class Around(nn.Module):
    """A scale that is trained, before the part."""

    def __init__(self, part: Part, shape: tuple[int, ...], ids: bool) -> None:
        super().__init__()
        self.scale, self.part, self.ids = nn.Parameter(torch.ones(shape)), part, ids

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x).mean() if self.ids else self.part(x * self.scale).mean()


def taken(part: Part, *shape: int, ids: bool = False) -> None:
    x = torch.zeros(3, *shape, dtype=torch.long if ids else torch.float32)
    found = capture(Around(part, shape, ids), {"x": x})
    assert found.unproved == ()


class Calls(nn.Module):
    def __init__(self, call: Callable[..., Tensor], **parts: nn.Module) -> None:
        super().__init__()
        self.call = call
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self, x)


def packed(self: nn.Module, x: Tensor) -> Tensor:
    lengths = torch.full((x.shape[0],), 5)
    return self.lstm(pack_padded_sequence(x, lengths, batch_first=True))[0].data


def decoder(**more: bool) -> nn.Module:
    layer = nn.TransformerDecoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    part = nn.TransformerDecoder(layer, 1)
    return Calls(lambda self, x: self.part(x, x, tgt_mask=mask, **more), part=part)


def labels(x: Tensor) -> Tensor:
    return torch.zeros_like(x[:, 0]).long()


def ctc(x: Tensor) -> Tensor:
    ones = torch.ones(x.shape[0], dtype=torch.long)
    return F.ctc_loss(x.log_softmax(2).transpose(0, 1), ones[:, None], 5 * ones, ones)


INDEX = "mask that never changes, make the index once.*self.index = "
EVEN = torch.arange(4) % 2 == 0
softmax = nn.AdaptiveLogSoftmaxWithLoss(4, 10, [3])
ROWS = ["sum", "mean", "max"]
REFUSED: dict[str, tuple[Callable[[], Part], tuple[int, ...], str]] = {
    "momentum": (lambda: nn.BatchNorm1d(4, momentum=None), (4,), "momentum=None.*momentum=0.1"),
    "tracking": (
        lambda: nn.InstanceNorm1d(4, track_running_stats=True),
        (4, 5),
        "'part' is an instance norm.*leave track_running_stats out",
    ),
    "alpha": (nn.AlphaDropout, (4,), "nn.Dropout in place of nn.AlphaDropout"),
    "alpha of features": (nn.FeatureAlphaDropout, (4, 5), "nn.Dropout in place of"),
    "slopes": (nn.RReLU, (4,), "nn.RReLU draws.*nn.LeakyReLU"),
    "pooling": (lambda: nn.FractionalMaxPool2d(2, 2), (2, 4, 4), "nn.AdaptiveMaxPool2d"),
    "pooling of volumes": (
        lambda: nn.FractionalMaxPool3d(2, 2),
        (2, 4, 4, 4),
        "fractional max pooling draws",
    ),
    "response": (lambda: nn.CrossMapLRN2d(2), (2, 4, 4), "use nn.LocalResponseNorm"),
    "pooling in 3d": (lambda: nn.AdaptiveMaxPool3d(2), (2, 4, 4, 4), "use nn.MaxPool3d"),
    "packed": (lambda: Calls(packed, lstm=nn.LSTM(4, 4, batch_first=True)), (5, 4), "padded"),
    "mask": (decoder, (5, 4), "say whether it is.*tgt_is_causal="),
    "variance": (
        lambda: lambda x: F.gaussian_nll_loss(x, x, x.exp()),
        (4,),
        "looks at the values of var.*write it out",
    ),
    "ctc": (lambda: ctc, (5, 4), "CTC computes.*F.cross_entropy"),
    "classes": (
        lambda: Calls(lambda self, x: self.part(x, labels(x)).loss, part=softmax),
        (4,),
        "AdaptiveLogSoftmaxWithLoss.*F.cross_entropy",
    ),
    "columns": (lambda: lambda x: x[:, EVEN], (4,), INDEX),
    "selected": (lambda: lambda x: torch.masked_select(x, EVEN), (4,), INDEX),
    "nonzero": (lambda: lambda x: x[:, EVEN.nonzero()], (4,), INDEX),
    "cond": (
        lambda: lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)),
        (4,),
        "use torch.where",
    ),
    "scan": (
        lambda: lambda x: scan(lambda c, h: (c * h, c + h), x, torch.stack([x, x]))[1],
        (4,),
        "a Python loop of a fixed length",
    ),
}


FAST = (
    "columns",
    "momentum",
    "alpha",
    "slopes",
    "packed",
    "mask",
    "variance",
    "ctc",
    "classes",
    "cond",
)


@pytest.mark.parametrize("name", some(REFUSED, *FAST))
def test_what_no_graph_has_is_refused_with_what_to_write_instead(name: str) -> None:
    make, shape, says = REFUSED[name]
    with pytest.raises(CaptureError, match=f"(?s){says}") as caught:
        taken(make(), *shape)
    assert "allow-list" not in str(caught.value)


@pytest.mark.parametrize("mode", some(ROWS, "sum"))
def test_bags_of_rows_are_refused(mode: str) -> None:
    with pytest.raises(CaptureError, match=r"nn\.EmbeddingBag.*use nn\.Embedding and reduce"):
        taken(nn.EmbeddingBag(9, 4, mode=mode), 5, ids=True)


@pytest.mark.parametrize("kind", some(["Embedding", "EmbeddingBag"], "Embedding"))
def test_rows_whose_norm_is_bounded_are_refused(kind: str) -> None:
    with pytest.raises(CaptureError, match=r"max_norm changes the weights.*leave max_norm out"):
        taken(getattr(nn, kind)(9, 4, max_norm=1.0), 5, ids=True)


INSTEAD: dict[str, tuple[Callable[[], Part], tuple[int, ...]]] = {
    "mask": (lambda: decoder(tgt_is_causal=True), (5, 4)),
    "variance": (lambda: lambda x: 0.5 * (x.exp().log() + (x - 1).square() / x.exp()), (4,)),
    "pooling": (lambda: nn.AdaptiveMaxPool2d(2), (2, 4, 4)),
    "slopes": (nn.PReLU, (4,)),
}


@pytest.mark.parametrize("name", some(INSTEAD, "variance"))
def test_what_to_write_instead_is_taken(name: str) -> None:
    make, shape = INSTEAD[name]
    taken(make(), *shape)


@pytest.mark.parametrize("mode", some(ROWS, "max"))
def test_rows_that_are_reduced_are_taken(mode: str) -> None:
    reduced = {"sum": Tensor.sum, "mean": Tensor.mean, "max": Tensor.amax}[mode]
    taken(Calls(lambda self, x: reduced(self.rows(x), 1), rows=nn.Embedding(9, 4)), 5, ids=True)


def test_another_error_of_such_a_part_keeps_its_own_words() -> None:
    with pytest.raises(CaptureError, match="expected 2D or 3D input") as caught:
        taken(nn.BatchNorm1d(4), 4, 5, 6)
    assert "momentum" not in str(caught.value)
