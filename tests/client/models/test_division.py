"""Which models may have their batch divided by the planner."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.client.models.division import why_it_depends
from shoal.dag.ir.graph import Graph, Input, Operator, Output, Ref, Size, TensorSpec
from shoal.job import Job
from shoal.peer.data.reader import Reader
from shoal.peer.data.sources import resolve


class Net(nn.Module):
    """A loss of each kind over the same layer."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.layer = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4, track_running_stats=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor | dict[str, Tensor]:
        h = self.layer(x)  # (B, 4)
        match self.kind:
            case "batch statistics":
                return F.mse_loss(self.norm(h), y)
            case "sum":
                return F.mse_loss(h, y, reduction="sum")
            case "pairs":
                return F.cross_entropy(h @ y.T, (h @ y.T).argmax(1))
            case "small balance":
                return F.mse_loss(h, y) + 1e-2 * h.mean(0).square().sum()
            case "weighted":
                mask = (y > 0).float()
                weight = mask.sum()
                return {"loss": ((h - y).square() * mask).sum() / weight, "weight": weight}
            case "dropout":
                return F.mse_loss(F.dropout(h, 0.5, self.training), y)
        return F.mse_loss(h, y)


def unshown(random: bool) -> Graph:
    """A graph whose operators show nothing of how samples meet, so that the module is tried."""
    spec = TensorSpec((Size(1), 4), "float32")
    meet = Operator("a", "aten.cumsum.default", (Ref("in:x"), 0), (), (Output(spec),))
    args = (Ref("a"), 0.5, 0)
    drawn = Operator("b", "shoal.dropout.default", args, (), (Output(spec),))
    whole = Output(TensorSpec((), "float32"))
    loss = Operator("loss", "aten.sum.default", (Ref("a"),), (), (whole,))
    operators = (meet, drawn, loss) if random else (meet, loss)
    return Graph((Input("x", spec),), (), (), operators, loss="loss")


@pytest.fixture
def why(tmp_path: Path):
    """Why a kind of loss depends on the division of a batch."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 4)).astype(np.float32)
    np.savez(tmp_path / "data.npz", x=x, y=x[:, ::-1].copy())
    manifest, paths = resolve(
        tmp_path / "blobs", kind="arrays", source=str(tmp_path / "data.npz"), holdout=0.0
    )
    reader = Reader(manifest, paths.__getitem__, seed=0, microbatches=1)

    def get(kind: str) -> str:
        torch.manual_seed(0)
        module = Net(kind).eval()
        graph = unshown(random=kind == "dropout")
        found = why_it_depends(module, Job(model=module, steps=1), graph, reader)
        assert not module.training
        assert all(p.grad is None for p in module.parameters())
        return found

    return get


@pytest.mark.parametrize("kind", ["mean", "weighted", "dropout"])
def test_a_mean_over_samples_may_be_divided_in_any_way(why, kind: str) -> None:
    assert why(kind) == ""


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("batch statistics", "could not be tried (ValueError: Expected more than 1 value"),
        ("sum", "the loss of 4 samples is "),
        ("pairs", "the loss of 4 samples is "),
        ("small balance", "one by one"),
    ],
)
def test_what_depends_on_the_microbatch_says_how(why, kind: str, text: str) -> None:
    assert text in why(kind)
