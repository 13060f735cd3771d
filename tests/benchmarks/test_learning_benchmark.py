"""benchmarks/learning/learning.py: its pipeline is the model, its rows are what they say, and it
runs."""

from __future__ import annotations

import importlib
import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.compression.codec import fitting, parse
from shoal.dag.ir.graph import TensorSpec
from shoal.peer.sync.optimizer import learning_rate

SPEC = TensorSpec((4, 32, 32), "float32")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def chain() -> ModuleType:
    return importlib.import_module("shoal.benchmarks.learning.chain")


@pytest.fixture
def wire() -> ModuleType:
    return importlib.import_module("shoal.benchmarks.learning.wire")


@pytest.fixture
def rows() -> ModuleType:
    return importlib.import_module("shoal.benchmarks.learning.rows")


def setting(chain: ModuleType, steps: int = 6) -> object:
    return chain.Setting(steps=steps, blocks=6, width=16, heads=2, length=8, batch=4)


def batch(step: int) -> dict[str, Tensor]:
    found = torch.randint(0, 256, (4, 9), generator=torch.Generator().manual_seed(step))
    return {"x": found[:, :-1].contiguous(), "y": found[:, 1:].contiguous()}


def codecs(wire: ModuleType, text: str, replicas: int = 1) -> object:
    return wire.Codecs((text,) * 5, (text,) * 5, text, replicas)


def plain_losses(small: object, seed: int, sparse: Callable[[int, Tensor], Tensor]) -> list[float]:
    """A loop without Shoal. `sparse(k, h)` stands between blocks k and k + 1, one block a stage."""
    torch.manual_seed(seed)
    model = small.model()
    exempt = {n for n, _ in model.named_parameters() if n.endswith("bias") or "norm" in n}
    groups = [
        {"params": [p for n, p in model.named_parameters() if n not in exempt]},
        {"params": [p for n, p in model.named_parameters() if n in exempt], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    losses = []
    for step in range(small.steps):
        x, y = batch(step).values()
        h = model.bytes(x) + model.positions(torch.arange(x.shape[1]))
        for k, block in enumerate(model.blocks):
            h = block(h)
            h = sparse(k, h) if k + 1 < len(model.blocks) else h
        loss = F.cross_entropy(model.head(model.norm(h)).flatten(0, 1), y.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(small.train, step)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
def test_without_compression_the_pipeline_is_the_plain_loop(
    chain: ModuleType, wire: ModuleType
) -> None:
    small = setting(chain)
    pipeline = chain.Pipeline(small, codecs(wire, "raw"), seed=3)
    losses = [pipeline.step(step, [batch(step)]) for step in range(small.steps)]
    assert losses == pytest.approx(plain_losses(small, 3, lambda k, h: h), abs=2e-4)


@pytest.mark.slow
def test_the_exact_backward_is_that_of_the_network_with_sparse_activations(
    chain: ModuleType, wire: ModuleType
) -> None:
    small = setting(chain, steps=12)
    there = ("raw", "topk:ratio=8,values=fp32", "raw", "raw", "raw")
    back = ("raw", "support:ratio=8,values=fp32", "raw", "raw", "raw")
    pipeline = chain.Pipeline(small, wire.Codecs(there, back), seed=4)

    def sparse(k: int, h: Tensor) -> Tensor:
        if k != 1:
            return h
        kept = torch.zeros(h.numel(), dtype=torch.bool)
        kept[h.detach().abs().flatten().topk(round(h.numel() / 8)).indices] = True
        return h * kept.view(h.shape)

    losses = [pipeline.step(step, [batch(step)]) for step in range(small.steps)]
    wanted = plain_losses(small, 4, sparse)
    assert losses == pytest.approx(wanted, abs=2e-4)
    assert wanted != pytest.approx(plain_losses(small, 4, lambda k, h: h), abs=5e-3)


def test_two_replicas_are_one_with_the_whole_batch(chain: ModuleType, wire: ModuleType) -> None:
    small = setting(chain)
    one = chain.Pipeline(small, codecs(wire, "raw"), seed=1)
    two = chain.Pipeline(small, codecs(wire, "raw", replicas=2), seed=1)
    for step in range(small.steps):
        whole = batch(step)
        halves = [{n: t[i : i + 2] for n, t in whole.items()} for i in (0, 2)]
        assert two.step(step, halves) == pytest.approx(one.step(step, [whole]), abs=2e-4)


def test_what_crosses_is_what_the_codec_gives_and_is_counted(wire: ModuleType) -> None:
    use = wire.Use()
    crossing = wire.Crossing("bf16", use)
    tensor = torch.randn(4, 8, 16)
    assert torch.equal(crossing(tensor, 7), tensor.bfloat16().float())
    assert use.dense_bytes == 4 * tensor.numel()
    assert use.sent_bytes == pytest.approx(use.dense_bytes / 2, abs=64)
    assert 0 < use.errors[0] < 2**-8


def test_rule_a_compresses_slow_links_and_leaves_fast_ones(rows: ModuleType) -> None:
    texts = rows.adatopk(10.0, SPEC)
    assert [text != "raw" for text in texts] == [link == "slow" for link in rows.LINKS]
    sizes = {fitting(parse(text), SPEC).size_bytes(SPEC) for text in texts if text != "raw"}
    (size,) = sizes
    assert 0.97 * SPEC.size_bytes < 10 * size <= SPEC.size_bytes


def test_uniform_takes_as_long_as_adatopk_and_no_longer(rows: ModuleType) -> None:
    aim = rows.step_seconds(rows.adatopk(10.0, SPEC), SPEC)
    texts = rows.uniform(10.0, SPEC)
    assert len(set(texts)) == 1
    assert 0.97 * aim < rows.step_seconds(texts, SPEC) <= aim


@pytest.mark.slow
def test_a_quick_run_learns_and_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    learning = importlib.import_module("shoal.benchmarks.learning.learning")
    out = tmp_path / "out.json"
    options = ["--quick", "--steps", "60", "--jobs", "1", "--rows", "dense,adatopk"]
    places = ["--json", str(out), "--cache", str(tmp_path / "cache")]
    monkeypatch.setattr(sys, "argv", ["learning.py", *options, *places])

    def figures() -> tuple[dict[str, float], str]:
        assert learning.main() == 0
        values = {f["name"]: f["value"] for f in json.loads(out.read_text())}
        out.unlink()
        return values, capsys.readouterr().out

    first, said = figures()
    assert first["loss_dense"] < 0.8 * math.log(256), "it learned nothing"
    assert 0.8 < first["adatopk_loss_over_dense"] < 1.5
    assert "2/2 adatopk seed 0" in said
    again, said = figures()
    assert again == first
    assert "adatopk seed 0" not in said, "finished runs ran again"
