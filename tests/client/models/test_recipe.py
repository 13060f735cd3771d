"""From a factory to peers without the weights: what is sent, what is made, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import shoal
from shoal.client.models import initialise as memory
from shoal.client.models import models
from shoal.client.models.factories import factory_of
from shoal.client.models.state_dicts import tied_names
from shoal.client.submission import prepare
from shoal.dag.ir.recipe import make
from shoal.job import Job

NET = """
import torch
from torch import nn
import torch.nn.functional as F

class Net(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.head = nn.Linear(width, 256)
        self.head.weight = self.embed.weight
        self.mix = nn.Parameter(torch.eye(width) + 0.01 * torch.randn(width, width).flip(0))
        self.register_buffer("mask", torch.ones(16, 16).tril())
        self.idle = nn.Parameter(torch.randn(3))

    def forward(self, x, y):
        h = self.mask @ (self.embed(x) @ self.mix) + torch.arange(16)[:, None] / 16
        return F.cross_entropy(self.head(h).flatten(0, 1), y.flatten())

def net(width=8):
    return Net(width)

def stubborn(width=8):
    first = Net(width)
    if first.embed.weight.data_ptr() == 0:
        raise ValueError("no memory")
    return first

def huge():
    made = stubborn()
    made.more = nn.Linear(1 << 20, 1 << 20)
    return made

def broken():
    raise KeyError("mine")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "text.txt").write_text("Many small fish move as one large body. " * 40)
    return tmp_path


def job(folder: Path, factory: str = "net.py:net", **more: Any) -> Job:
    data = {"source": "text.txt", "length": 16, "holdout": 0.0}
    model = {"factory": factory, **more}
    return Job(model=model, data=data, steps=2, batch=4, seed=5, folder=folder)


def values(prepared: Any) -> dict[str, Tensor]:
    """All that peers begin with, by name."""
    found = load_file(prepared.weights)
    recipe = prepared.recipe
    made = {n: make(i, recipe.seed) for n, i in recipe.tensors.items()} if recipe else {}
    assert not found.keys() & made.keys(), "nothing is sent that is made"
    return found | made


@pytest.mark.parametrize("small", [0, 64 << 20])
def test_peers_begin_with_what_build_begins_with(
    folder: Path, small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "SMALL", small)
    wanted = models.build(job(folder)).state_dict()
    with prepare(job(folder)) as prepared:
        assert prepared.recipe is not None
        assert set(prepared.recipe.tensors) == {"embed.weight", "head.bias", "idle"}
        assert {"mix", "mask"} <= set(load_file(prepared.weights))  # `flip` is in no recipe
        found = values(prepared)
    for name, tensor in found.items():
        if name in wanted:  # and not a constant of the graph
            assert torch.equal(tensor, wanted[name]), name
    assert set(wanted) - set(found) == {"head.weight"}  # the other name of embed.weight


def test_the_graph_of_a_module_without_values_is_that_of_one_with(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with prepare(job(folder)) as prepared:
        graph = prepared.graph
    monkeypatch.setattr(models, "SMALL", 0)
    with prepare(job(folder)) as prepared:
        assert prepared.graph == graph


def test_a_module_that_was_deferred_is_submitted_by_its_recipe(folder: Path) -> None:
    plain = job(folder)
    sys.path.insert(0, str(folder))
    try:
        import net as net_module  # made by the fixture
    finally:
        sys.path.remove(str(folder))
        sys.modules.pop("net", None)
    deferred = shoal.deferred_init(net_module.net, seed=5)
    with prepare(plain) as by_factory, prepare(replace(plain, module=deferred)) as live:
        a, b = values(by_factory), values(live)
    assert a.keys() == b.keys()
    recipe = by_factory.recipe
    assert recipe is not None
    for name, tensor in a.items():
        assert torch.equal(tensor, b[name]), name
    assert deferred.embed.weight.is_meta, "it is the user's, and stays as it was"
    mine = shoal.initialise(deferred, 5)
    assert all(torch.equal(p, b[name]) for name, p in mine.named_parameters())


def test_a_weights_file_wins_over_the_recipe(folder: Path) -> None:
    other = models.build(replace(job(folder), seed=99))
    from safetensors.torch import save_file

    save_file(
        {n: t.clone() for n, t in other.state_dict().items() if n != "head.weight"},
        folder / "w.safetensors",
    )
    given = job(folder, weights="w.safetensors")
    with prepare(given) as prepared:
        assert prepared.recipe is None
        assert prepared.pretrained is not None
        assert {n for n, _ in other.named_parameters()} <= set(prepared.pretrained.entries)
        assert not load_file(prepared.weights).keys() & set(prepared.pretrained.entries)
    begun = dict(models.build(given).named_parameters())
    for name, tensor in other.named_parameters():
        assert torch.equal(begun[name], tensor)


def test_a_factory_that_needs_values_is_run_as_it_is_and_that_is_said(folder: Path) -> None:
    said: list[str] = []
    with prepare(job(folder, "net.py:stubborn"), said.append) as prepared:
        assert prepared.recipe is None
        assert "embed.weight" in load_file(prepared.weights)
    (line,) = [line for line in said if "needs values" in line]
    assert line.startswith('factory "net.py:stubborn" needs values (factory "net.py:stubborn" ')
    assert "ValueError: no memory" in line
    assert line.endswith("0.00 GiB in memory, and uploaded")


def test_what_does_not_fit_is_refused_before_it_is_allocated(folder: Path) -> None:
    with pytest.raises(models.ModelError, match=r"they do not fit here: .*4096\.0 GiB more"):
        models.build(job(folder, "net.py:huge"))


def test_a_factory_that_is_broken_says_so_as_ever(folder: Path) -> None:
    with pytest.raises(models.ModelError, match=r'factory "net.py:broken" raised KeyError: .mine'):
        models.build(job(folder, "net.py:broken"))


def test_memory_of_a_process_has_a_limit(tmp_path: Path) -> None:
    code = (
        "import resource\n"
        "resource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))\n"
        "from shoal.client.models.initialise import free_bytes\n"
        "a = free_bytes()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))\n"
        "assert free_bytes() < 6 << 30, free_bytes()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)
    assert memory.free_bytes() > 0


@pytest.mark.parametrize("family", ["gpt2", "llama", "mixtral", "deepseek_v3"])
def test_transformers_models_begin_as_transformers_begins_them(family: str) -> None:
    """Every parameter has a recipe, with the mean and spread of what transformers makes."""
    example = Job.from_toml(Path(shoal.__file__).parent / "examples" / f"hf_{family}.toml")
    found = models.outline(example)
    assert found.recipe is not None
    assert not found.others
    mine = models.build(example)
    theirs = _made(example)
    for name, buffer in theirs.named_buffers():
        assert torch.equal(buffer, mine.get_buffer(name)), name
    for name, p in theirs.named_parameters():
        p, q = p.detach(), mine.get_parameter(name).detach()
        assert (p.shape, p.dtype) == (q.shape, q.dtype)
        spread = 6 / p.numel() ** 0.5
        assert abs(float(p.mean() - q.mean())) <= spread * max(float(p.std(correction=0)), 1e-9)
        assert abs(float(p.std(correction=0) - q.std(correction=0))) <= spread * float(
            p.std(correction=0)
        )
    tied = {n: m for n, m in tied_names(theirs).items() if n != m}
    assert tied == {n: m for n, m in tied_names(mine).items() if n != m}


def _made(example: Job) -> nn.Module:
    """As transformers makes it."""
    factory = factory_of(example)
    assert isinstance(factory, Callable)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = factory()
    assert isinstance(made, nn.Module)
    return made
