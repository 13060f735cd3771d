"""What a checkpoint of losslessly coded snapshots is to whoever has safetensors and plain torch:
the weights of the run, bit for bit, with what was frozen in bf16."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import shoal
from shoal.compression.plain.lossless import LosslessCodec
from shoal.job import Job
from shoal.peer.data.reader import Reader
from shoal.peer.data.sources import resolve
from shoal.sim.processes import LocalCluster

NET = """
import torch
import torch.nn.functional as F
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(256, 64)
        self.still = nn.Linear(64, 64).bfloat16()
        self.mix = nn.Linear(64, 64)
        self.last = nn.Linear(64, 256)

    def forward(self, x, y):
        found = self.still(self.embed(x).bfloat16()).float()
        found = self.last(self.mix(found.tanh()).tanh())
        return F.cross_entropy(found.flatten(0, 1), y.flatten())

def net():
    return Net()
"""
STEPS, BATCH, MICROBATCH, EVAL_BATCHES = 4, 8, 2, 2


def plain_module(folder: Path) -> nn.Module:
    spec = importlib.util.spec_from_file_location("net_of_test", folder / "net.py")
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    made: nn.Module = found.net()
    return made


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


@torch.no_grad()
def held_out_loss(module: nn.Module, folder: Path) -> float:
    """Of the samples that the run evaluates, all of one weight."""
    manifest, paths = resolve(folder / "data", source=str(folder / "text.bin"), length=8)
    each = BATCH // MICROBATCH
    reader = Reader(manifest, paths.__getitem__, seed=0, microbatches=each)
    batches = [reader.held_out(m, MICROBATCH) for m in range(EVAL_BATCHES * each)]
    return sum(float(module(**batch)) for batch in batches) / len(batches)


@pytest.mark.slow
@pytest.mark.process
def test_the_weights_of_a_lossless_checkpoint_are_the_runs(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "text.bin").write_bytes(bytes(range(256)) * 40)
    begun = plain_module(tmp_path)
    save_file(begun.state_dict(), tmp_path / "begun.safetensors")
    train: dict[str, Any] = {"batch": BATCH, "microbatch": MICROBATCH, "lr": 1e-2, "warmup": 0}
    job = Job(
        model={"factory": "net.py:net", "freeze": ["still.*"], "weights": "begun.safetensors"},
        data={"source": "text.bin", "length": 8},
        train=train | {"steps": STEPS, "eval_every": STEPS, "eval_batches": EVAL_BATCHES},
        plan={"scheduler": "uniform", "stages": 2},
        codec={"snapshot": "lossless"},
        output={"to": str(tmp_path / "out"), "every": STEPS},
        folder=tmp_path,
    )
    with LocalCluster(peers=2) as cluster, shoal.connect(cluster.address) as client:
        run = client.submit(job)
        events = list(run.watch())
        run.wait()
        exported = run.weights()
        there = [e.step.evaluation for e in events if e.HasField("step")][-1]
    folder = tmp_path / "out" / run.id / f"checkpoint-{STEPS:06d}"
    states = sorted(folder.glob("state-*.safetensors"))
    assert len(states) == 2
    for path in states:
        with safe_open(path, "pt") as file:
            assert LosslessCodec.name in file.metadata(), "it is coded"
    found = load_file(folder / "model.safetensors")
    first = begun.state_dict()
    assert found.keys() == exported.keys() == first.keys()
    assert found["still.weight"].dtype is torch.bfloat16
    for name, tensor in found.items():
        assert (tensor.dtype, tensor.shape) == (exported[name].dtype, exported[name].shape)
        assert bits(tensor) == bits(exported[name]), name
        assert (bits(tensor) == bits(first[name])) == name.startswith("still."), name
    fresh = plain_module(tmp_path)
    fresh.load_state_dict(found)  # strict
    assert held_out_loss(fresh, tmp_path) == pytest.approx(there.loss, rel=1e-6)
