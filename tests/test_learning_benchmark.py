"""benchmarks/learning.py: its pipeline is the model, its rows are what they say, and it runs."""

from __future__ import annotations

import importlib
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from shoal.dag.graph import TensorSpec

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
SPEC = TensorSpec((4, 32, 32), "float32")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def chain(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("learning_chain")


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("learning_rows")


def setting(chain: ModuleType, steps: int = 6) -> object:
    return chain.Setting(steps=steps, blocks=6, width=16, heads=2, length=8, batch=4)


def batch(step: int) -> dict[str, Tensor]:
    found = torch.randint(0, 256, (4, 9), generator=torch.Generator().manual_seed(step))
    return {"x": found[:, :-1].contiguous(), "y": found[:, 1:].contiguous()}


def codecs(chain: ModuleType, text: str, replicas: int = 1) -> object:
    return chain.Codecs((text,) * 5, (text,) * 5, text, replicas)


def test_without_compression_the_pipeline_is_the_plain_loop(chain: ModuleType) -> None:
    """Clipping and the learning rate's course as in the job's [train] table."""
    from shoal.peer.optimizer import learning_rate

    small = setting(chain)
    pipeline = chain.Pipeline(small, codecs(chain, "raw"), seed=3)
    torch.manual_seed(3)
    model = small.model()
    plain = [p for n, p in model.named_parameters() if n.endswith("bias") or "norm" in n]
    decays = [p for n, p in model.named_parameters() if not (n.endswith("bias") or "norm" in n)]
    groups = [{"params": decays, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    for step in range(small.steps):
        loss = model(**batch(step))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(small.train, step)
        optimizer.step()
        optimizer.zero_grad()
        assert pipeline.step(step, [batch(step)]) == pytest.approx(loss.item(), abs=2e-4)


def test_two_replicas_are_one_with_the_whole_batch(chain: ModuleType) -> None:
    small = setting(chain)
    one = chain.Pipeline(small, codecs(chain, "raw"), seed=1)
    two = chain.Pipeline(small, codecs(chain, "raw", replicas=2), seed=1)
    for step in range(small.steps):
        whole = batch(step)
        halves = [{n: t[i : i + 2] for n, t in whole.items()} for i in (0, 2)]
        assert two.step(step, halves) == pytest.approx(one.step(step, [whole]), abs=2e-4)


def test_what_crosses_is_what_the_codec_gives_and_is_counted(chain: ModuleType) -> None:
    use = chain.Use()
    crossing = chain.Crossing("bf16", use)
    tensor = torch.randn(4, 8, 16)
    assert torch.equal(crossing(tensor, 7), tensor.bfloat16().float())
    assert use.dense_bytes == 4 * tensor.numel()
    assert use.sent_bytes == pytest.approx(use.dense_bytes / 2, abs=64)
    assert 0 < use.errors[0] < 2**-8


def test_rule_a_compresses_slow_links_and_leaves_fast_ones(rows: ModuleType) -> None:
    texts = rows.adatopk(10.0, SPEC)
    assert [text != "raw" for text in texts] == [link == "slow" for link in rows.LINKS]
    assert all("ratio=10.00" in text for text in texts if text != "raw")


def test_uniform_takes_as_long_as_adatopk_and_no_longer(rows: ModuleType) -> None:
    aim = rows.step_seconds(rows.adatopk(10.0, SPEC), SPEC)
    texts = rows.uniform(10.0, SPEC)
    assert len(set(texts)) == 1
    assert 0.97 * aim < rows.step_seconds(texts, SPEC) <= aim


def test_a_quick_run_learns_and_goes_on_where_it_was(tmp_path: Path) -> None:
    out, cache = tmp_path / "out.json", tmp_path / "cache"
    options = ["--quick", "--steps", "60", "--rows", "dense,adatopk", "--json", str(out)]
    command = [sys.executable, str(BENCHMARKS / "learning.py"), *options, "--cache", str(cache)]
    first = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert first.returncode == 0, first.stderr
    figures = {f["name"]: f["value"] for f in json.loads(out.read_text())}
    assert figures["loss_dense"] < 0.8 * math.log(256), "it learned nothing"
    assert 0.8 < figures["adatopk_loss_over_dense"] < 1.5
    out.unlink()
    again = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert "2/2" in first.stdout
    assert "1/" not in again.stdout, "finished runs ran again"
    assert {f["name"]: f["value"] for f in json.loads(out.read_text())} == figures
