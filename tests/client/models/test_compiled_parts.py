"""A model with parts for which `torch.compile` was called: from its capture to its held-out loss
nothing is compiled, so torch leaves no file (such as min_cut_failed_graph.txt) in the working
folder, and needs no compiler."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Never

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shoal.client.models.division import why_it_depends
from shoal.client.models.models import build, check_takes, ready
from shoal.client.runs.evaluate import _evaluate
from shoal.client.submission import prepare
from shoal.dag.capture.capture import capture
from shoal.job import Job
from shoal.peer.data.reader import Reader


def never(*_: Any) -> Never:
    raise AssertionError("it is compiled")


def compiled(part: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return torch.compile(part, backend=never)


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(4, 4), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.linear(x)).relu()


class Whole(nn.Module):
    """`how`: which part of it is compiled."""

    def __init__(self, how: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.part, self.how = Part(), how
        if how == "part":
            self.part = compiled(self.part)
        if how == "in place":
            self.part.compile(backend=never)
        self.function = compiled(torch.tanh) if how in ("function", "checkpoint") else torch.tanh

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.part(x)
        if self.how == "checkpoint":
            h = checkpoint(self.function, h, use_reentrant=False)
        else:
            h = self.function(h)
        return (h - y).square().mean()


FAST = ["part", "checkpoint"]
SLOW = [pytest.param(n, marks=pytest.mark.slow) for n in ("in place", "function", "all")]


def model(how: str) -> nn.Module:
    made = Whole(how)
    if how == "all":
        made.compile(backend=never)
    return made


@pytest.mark.parametrize("how", [*FAST, *SLOW])
def test_what_is_captured_of_a_compiled_part_is_the_part(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    inputs = {"x": torch.zeros(4, 4), "y": torch.zeros(4, 4)}
    found = capture(model(how), inputs)
    assert found.unproved == ()
    operators = [op.target for op in found.graph.operators]
    assert operators == [op.target for op in capture(Whole(), inputs).graph.operators]
    assert not list(tmp_path.iterdir())


def test_nothing_of_it_is_compiled_until_it_is_submitted_nor_when_it_is_evaluated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "working"
    here.mkdir()
    monkeypatch.chdir(here)
    values = np.random.default_rng(0).normal(size=(64, 4)).astype("f4")
    np.savez(tmp_path / "data.npz", x=values, y=np.tanh(values))
    data = {"kind": "arrays", "source": "data.npz", "holdout": 0.25}
    job = Job(model=model("checkpoint"), data=data, folder=tmp_path, batch=8, steps=2)
    with prepare(job) as prepared:
        reader = Reader(prepared.manifest, prepared.shards.__getitem__, seed=0, microbatches=1)
        module = build(job)
        assert why_it_depends(module, job, prepared.graph, reader) == ""
        with ready(module, job):
            check_takes(module, prepared.graph, reader.batch(0, 0, 2), never)
        assert _evaluate(module, job, reader, 1)["loss"] > 0
    assert not list(here.iterdir())
