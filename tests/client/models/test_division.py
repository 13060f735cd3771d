"""Which models may have their batch divided by the planner: only those of which the operators show
that no division is another training, on all of the data's labels. The oracle is plain autograd."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from shoal.client.models.division import why_it_depends
from shoal.dag.capture.capture import capture
from shoal.job import Job
from shoal.peer.data.reader import Reader
from shoal.peer.data.sources import resolve
from shoal.peer.data.survey import survey

Out = Tensor | dict[str, Tensor]
LATE = 9
"""The first sample whose label is ignored, and whose share is a fraction below 1."""


def guarded(h: Tensor, y: Tensor, w: Tensor, weight: Callable[[Tensor, Tensor], Tensor]) -> Out:
    each = F.cross_entropy(h, y, reduction="none")
    total = w.sum()
    return {"loss": (each * w).sum() / total.clamp(min=1), "weight": weight(total, total.clamp(1))}


def counted(h: Tensor, y: Tensor, *, clamped: bool = False) -> Out:
    count = (y != -100).sum()
    total = F.cross_entropy(h, y, reduction="sum")
    weight = count.clamp(min=1) if clamped else count
    return {"loss": total / count.clamp(min=1), "weight": weight.float()}


LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor], Out]] = {
    # h: (B, 4) from the model, y: (B,) labels, w: (B,) shares
    "counted": lambda h, y, w: counted(h, y),
    "mean of squares": lambda h, y, w: h.square().mean(),
    "sum over B": lambda h, y, w: h.square().sum() / h.shape[0],
    "smoothed": lambda h, y, w: F.cross_entropy(h, y.clamp(min=0), label_smoothing=0.1),
    "regularised": lambda h, y, w: h.square().mean() + 0.1 * w.mean(),
    "dropped": lambda h, y, w: h.square().mean(),
    "padded": lambda h, y, w: F.pad(h, (0, 2)).square().mean(),
    "mean over labels": lambda h, y, w: F.cross_entropy(h, y),
    "weighed mean": lambda h, y, w: {"loss": F.cross_entropy(h, y), "weight": (y != -100).sum()},
    "clamped weight": lambda h, y, w: counted(h, y, clamped=True),
    "smoothed over labels": lambda h, y, w: F.cross_entropy(h, y, label_smoothing=0.1),
    "class weights": lambda h, y, w: F.cross_entropy(h, y.clamp(min=0), torch.arange(1.0, 5.0)),
    "fractions": lambda h, y, w: guarded(h, y.clamp(min=0), w, lambda t, c: t),
    "clamped fractions": lambda h, y, w: guarded(h, y.clamp(min=0), w, lambda t, c: c),
    "sum": lambda h, y, w: h.square().sum(),
    "sum over a number": lambda h, y, w: h.square().sum() / 8,
    "no weight": lambda h, y, w: (h.square().mean(1) * w).sum() / w.sum(),
    "epsilon": lambda h, y, w: {
        "loss": (h.square().mean(1) * w).sum() / (w.sum() + 0.5),
        "weight": w.sum(),
    },
    "balance": lambda h, y, w: h.square().mean() + 1e-2 * h.mean(0).square().sum(),
    "in-batch negatives": lambda h, y, w: F.cross_entropy(h @ h.T, (h @ h.T).argmax(1)),
    "batch statistics": lambda h, y, w: ((h - h.mean(0)) / h.std(0)).pow(4).mean(),
    "root": lambda h, y, w: h.square().mean().sqrt(),
    "rounded weight": lambda h, y, w: {
        "loss": (h.square().mean(1) * w).sum() / w.sum(),
        "weight": w.sum().long().float(),
    },
    "two tasks": lambda h, y, w: F.cross_entropy(h, y) + h.square().mean(),
}
FREE = ("counted", "mean of squares", "sum over B", "smoothed", "regularised", "dropped", "padded")
FREE += ("weighed mean",)
QUICK = ("counted", "dropped", "mean over labels", "clamped weight", "fractions", "balance")
QUICK += ("weighed mean",)
"""The others are captured at night."""


class Net(nn.Module):
    """A loss of each kind over the same layers."""

    def __init__(self, kind: str, by_frequency: bool = False) -> None:
        super().__init__()
        self.kind = kind
        self.table = nn.Embedding(6, 4, scale_grad_by_freq=by_frequency)
        self.layer = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5 * (kind == "dropped")))

    def forward(self, x: Tensor, y: Tensor, w: Tensor) -> Out:
        return LOSSES[self.kind](self.layer(self.table(x)), y, w)


def data(seed: int, late: int = LATE) -> dict[str, np.ndarray]:
    """40 samples; from `late` on some labels are ignored, and shares are small."""
    rng = np.random.default_rng(seed)
    y, w = rng.integers(0, 4, 40), np.ones(40, np.float32)
    y[late::3], w[late:] = -100, 0.1
    return {"x": rng.integers(0, 6, 40), "y": y, "w": w}


@pytest.fixture(scope="module")
def why(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Why a module's loss depends on the division of a batch. In the first samples nothing does."""
    folder, found = tmp_path_factory.mktemp("data"), data(0)
    reader = _reader(folder, found)
    first = reader.sampler.train(0, 0, 4)
    for name, value in (("y", 1), ("w", 1.0)):
        found[name][first] = value
    reader = _reader(folder, found)

    def get(module: nn.Module) -> str:
        module.eval()
        example = {name: t[:2] for name, t in reader.samples(np.arange(4)).items()}
        graph = capture(module, example).graph
        seen = survey(graph, reader)
        said = why_it_depends(module, Job(model=module, steps=1), graph, reader, seen.seen)
        assert not module.training
        assert all(p.grad is None for p in module.parameters())
        return said

    return get


def _reader(folder: Path, found: dict[str, np.ndarray]) -> Reader:
    np.savez(folder / "data.npz", **found)
    source = str(folder / "data.npz")
    manifest, paths = resolve(
        folder / "b", kind="arrays", source=source, holdout=0.0, inputs="x,w", targets="y"
    )
    return Reader(manifest, paths.__getitem__, seed=0, microbatches=1)


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=[pytest.mark.slow] * (k not in QUICK)) for k in LOSSES]
)
def test_only_what_no_division_changes_is_left_to_the_planner(
    why: Callable[..., str], kind: str
) -> None:
    torch.manual_seed(0)
    said = why(Net(kind))
    assert (said == "") == (kind in FREE), said


def test_a_gradient_that_depends_on_the_microbatch_is_enough(why: Callable[..., str]) -> None:
    assert "how often a microbatch has a row" in why(Net("mean of squares", by_frequency=True))


def _divided(module: nn.Module, batch: dict[str, Tensor], size: int) -> list[Tensor]:
    """Loss and gradients of a step: Σ weight·loss / Σ weight over microbatches of a size."""
    total, weights = torch.zeros(()), torch.zeros(())
    for start in range(0, len(batch["x"]), size):
        out = module(**{k: t[start : start + size] for k, t in batch.items()})
        loss, weight = (out, torch.ones(())) if isinstance(out, Tensor) else out.values()
        if weight:
            total, weights = total + weight * loss, weights + weight
    parameters = list(module.parameters())
    return [total / weights, *torch.autograd.grad(total / weights, parameters, allow_unused=True)]


@settings(max_examples=30, deadline=None)
@given(
    kind=st.sampled_from([k for k in FREE if k != "dropped"]),
    seed=st.integers(0, 10**6),
    late=st.integers(0, 8),
)
def test_what_is_free_is_the_same_for_every_division(kind: str, seed: int, late: int) -> None:
    torch.manual_seed(seed)
    module = Net(kind)
    batch = {k: torch.from_numpy(v[:8]) for k, v in data(seed, late).items()}
    whole = _divided(module, batch, 8)
    for size in (1, 2, 4):
        for a, b in zip(whole, _divided(module, batch, size), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", [k for k in LOSSES if k not in FREE])
def test_what_is_not_free_differs_on_some_data(kind: str) -> None:
    """So that none of these is refused for nothing."""
    torch.manual_seed(0)
    module = Net(kind)
    batch = {k: torch.from_numpy(v[:8]) for k, v in data(0, 3).items()}
    whole, parts = (
        _divided(module, batch, 8),
        _divided(module, batch, 1 if "clamped" in kind else 2),
    )
    assert not all(
        torch.allclose(a, b, rtol=1e-4, atol=1e-7) for a, b in zip(whole, parts, strict=True)
    )
