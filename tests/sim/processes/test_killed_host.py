"""A host that has fetched the weights of a live module is killed and comes back: what goes to it
over its line is counted."""

from __future__ import annotations

import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.job import Job
from shoal.proto.broker_pb2 import DONE, RunEvent
from shoal.sim.processes import LocalCluster
from shoal.sim.shaped.forwarder import Forwarder
from shoal.sim.shaped.shaping import Shaping

WIDTH = 2048
FROZEN = WIDTH * WIDTH * 4
"""Bytes of what the module has and does not train, which no snapshot has."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.base = nn.Linear(4, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.last = nn.Linear(WIDTH, 2)
        self.base.requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.last(self.base(self.first(x).tanh()).tanh()), y)


def job(folder: Path) -> Job:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 4)).astype(np.float32)
    np.savez(folder / "data.npz", x=x, y=(x[:, 0] > 0).astype(np.int64))
    data: dict[str, Any] = {"kind": "arrays", "source": str(folder / "data.npz")}
    return Job(model=Net(), data=data, steps=400, batch=4, microbatch=4, eval_every=0)


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(300)
def test_weights_of_a_live_module_come_once(tmp_path: Path) -> None:
    ends, fast = ("host", "broker"), 1e9
    with ExitStack() as stack:
        cluster = stack.enter_context(LocalCluster(peers=0, folder=tmp_path / "cluster"))
        here = cluster.address
        shaping = Shaping(
            names=ends,
            latency_s=((0.0, 0.0),) * 2,
            bandwidth=((fast, fast),) * 2,
            up=(fast, fast),
            down=(fast, fast),
        )
        line = stack.enter_context(Forwarder(shaping, {"broker": here}))

        def join() -> None:
            cluster.address = line.address_for("host", "broker")
            cluster.join("host")
            cluster.address = here

        def came() -> int:
            return line.carried().bytes.get(("broker", "host"), 0)

        join()
        client = stack.enter_context(shoal.connect(here))
        run, before, seen = client.submit(job(tmp_path)), 0, list[RunEvent]()
        for event in run.watch():
            seen.append(event)
            if event.HasField("step") and not before:
                before = came()
                cluster.send("host", signal.SIGKILL)
                join()
        assert seen[-1].state.phase == DONE, seen[-1].state.reason.text
        assert max(e.term for e in seen) > 1, "it was back before anybody noticed"
        assert before > FROZEN
        assert came() - before < FROZEN / 8
