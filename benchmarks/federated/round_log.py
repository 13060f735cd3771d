"""What is noted of another framework's rounds; imports nothing of Shoal, which is not there."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch import nn

__all__ = ["RoundLog", "perceptron"]


def perceptron(weights: Sequence[Any]) -> nn.Module:
    """The problem's model with these weights, arrays in the order of its parameters."""
    net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    with torch.no_grad():
        for p, w in zip(net.parameters(), weights, strict=True):
            p.copy_(torch.from_numpy(np.asarray(w)))
    return net


class RoundLog:
    """Accuracy, time and memory at the end of each round, and the newest weights."""

    def __init__(self, problem: Mapping[str, Any]) -> None:
        self._x, self._y = torch.from_numpy(problem["xt"]), torch.from_numpy(problem["yt"])
        self.accuracies = list[float]()
        self.cpu, self.wall, self.mib = list[float](), list[float](), 0.0
        self.weights = list[Any]()

    def ended(self, count: int, weights: Sequence[Any]) -> None:
        """Note the end of round `count`, from 1; 0: the beginning."""
        self.weights = [np.array(w) for w in weights]
        cpu, mib = used()
        self.cpu.append(cpu)
        self.wall.append(time.perf_counter())
        self.mib = max(self.mib, mib)
        if count:
            with torch.no_grad():
                right = perceptron(weights)(self._x).argmax(1) == self._y
            self.accuracies.append(float(right.float().mean()))

    def write(self, folder: Path, key: str) -> None:
        """Write KEY.npz with the weights, and a line of the rest into rows.jsonl."""
        np.savez(folder / f"{key}.npz", **{f"w{i}": w for i, w in enumerate(self.weights)})
        row = {
            "key": key,
            "accuracies": self.accuracies,
            "round_cpu": np.diff(self.cpu).tolist(),
            "round_s": np.diff(self.wall).tolist(),
            "mib": self.mib,
        }
        with (folder / "rows.jsonl").open("a") as rows:
            rows.write(json.dumps(row) + "\n")


def used() -> tuple[float, float]:
    """Return CPU seconds and resident MiB of this process and all that it has started."""
    me = psutil.Process()
    cpu = resident = 0.0
    for process in [me, *me.children(recursive=True)]:
        try:
            times = process.cpu_times()
            cpu += times.user + times.system
            resident += process.memory_info().rss / 2**20
        except psutil.Error:  # it has ended meanwhile
            continue
    return cpu, resident
