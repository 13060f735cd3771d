"""Jobs that threads of one process submit at the same time."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shoal.client import submission
from shoal.client.submission import prepare
from shoal.job import Job

MODEL = """
import between
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.rand(6, 4).cumsum(0))
        between.drawn()
        self.second = nn.Parameter(torch.rand(4, 3).cumsum(0))

    def forward(self, x, y):
        return nn.functional.cross_entropy(x @ self.first @ self.second, y)
"""


class Door:
    """In the place of the lock: says that somebody else is at it."""

    def __init__(self, came: threading.Event) -> None:
        self.lock, self.came = threading.RLock(), came

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            self.came.set()
        self.lock.acquire()

    def __exit__(self, *error: object) -> None:
        self.lock.release()


@pytest.mark.slow
def test_weights_are_drawn_by_the_own_seed_whoever_else_submits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    x = np.random.default_rng(0).normal(size=(40, 6)).astype(np.float32)
    np.savez(tmp_path / "data.npz", x=x, y=(x[:, 0] > 0).astype(np.int64))

    def prepared(seed: int) -> bytes:
        job = Job.from_table(
            {
                **{"version": 1, "seed": seed, "train": {"steps": 2, "batch": 4}},
                "model": {"factory": f"{tmp_path / 'model.py'}:Net"},
                "data": {"kind": "arrays", "source": str(tmp_path / "data.npz")},
            }
        )
        with prepare(job) as found:
            return found.weights.read_bytes()

    came, others = threading.Event(), list[threading.Thread]()
    between: Any = SimpleNamespace(drawn=lambda: None)
    monkeypatch.setitem(sys.modules, "between", between)
    monkeypatch.setattr(submission, "_TURN", Door(came))
    alone = prepared(1), prepared(2)
    together = list[bytes]()

    def drawn() -> None:
        """The other draws as well, or is at the door."""
        if others:
            came.set()
            return
        others.append(threading.Thread(target=lambda: together.append(prepared(2))))
        others[0].start()
        assert came.wait(30)

    between.drawn = drawn
    assert prepared(1) == alone[0]
    others[0].join(30)
    assert together == [alone[1]]
