"""benchmarks/federated/: what others are given is what the world trains, and what came is kept."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def room(name: str) -> ModuleType:
    return importlib.import_module(f"shoal.benchmarks.federated.{name}")


def perceptron(weights: list[Tensor]) -> nn.Module:
    net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    with torch.no_grad():
        for p, w in zip(net.parameters(), weights, strict=True):
            p.copy_(w)
    return net


def accuracy(weights: list[Tensor], x: Any, y: Any) -> float:
    """Of images of 64 numbers each, or of as many pixels."""
    with torch.no_grad():
        right = perceptron(weights)(torch.as_tensor(x).flatten(1)).argmax(1) == torch.as_tensor(y)
    return float(right.float().mean())


def plain_average(given: Any) -> list[Tensor]:
    """FedAvg of what a file says, one client and one step after the other."""
    version = [torch.from_numpy(given[f"start{i}"]) for i in range(4)]
    for steps_of_clients in given["steps"]:
        came = []
        for steps in steps_of_clients:
            net = perceptron(version)
            for at in steps:
                loss = nn.functional.cross_entropy(
                    net(torch.from_numpy(given["x"][at])), torch.from_numpy(given["y"][at])
                )
                for p, g in zip(
                    net.parameters(), torch.autograd.grad(loss, [*net.parameters()]), strict=True
                ):
                    p.data -= 0.1 * g
            came.append([p.detach() for p in net.parameters()])
        version = [torch.stack(parts).mean(0) for parts in zip(*came, strict=True)]
    return version


def test_what_others_are_given_is_what_the_world_trains(tmp_path: Path) -> None:
    problem = room("problem")
    with problem.Problem(clients=8, per_round=5, rounds=2, passes=1) as few:
        few.write(tmp_path / "given.npz")
        order, played = [*few.start()], few.play(problem.MEAN, evaluate=True)
    given = np.load(tmp_path / "given.npz")
    version = plain_average(given)
    for name, wanted in zip(order, version, strict=True):
        torch.testing.assert_close(played.weights[name], wanted, rtol=1e-5, atol=1e-6)
    assert played.accuracies[2] == pytest.approx(accuracy(version, given["xt"], given["yt"]))
    assert len(played.round_cpu) == 1
    assert 0 < played.broker_cpu < played.round_cpu[0]
    assert [[*np.unique(s)] for s in given["steps"][0]] == [
        [*np.unique(given["own"][n])] for n in given["cohorts"][0]
    ], "a client trains on its own"


def test_what_was_played_elsewhere_is_not_played_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = room("elsewhere")
    asked = list[list[str]]()

    def run(command: list[str], **_: Any) -> None:
        *_, tasks, folder = command
        keys = [task["key"] for task in json.loads(Path(tasks).read_text())]
        asked.append(keys)
        for key in keys:
            np.savez(Path(folder) / f"{key}.npz", w0=np.ones(3), w1=np.zeros(2))
            row = {"key": key, "accuracies": [0.5], "round_cpu": [1], "round_s": [2], "mib": 3}
            with (Path(folder) / "rows.jsonl").open("a") as rows:
                rows.write(json.dumps(row) + "\n")

    monkeypatch.setattr(elsewhere.Framework, "python", lambda self, cache: Path("python"))
    with room("problem").Problem(clients=8, per_round=2, rounds=1) as few:
        monkeypatch.setattr(elsewhere.subprocess, "run", run)
        elsewhere.FLOWER.play(few, [{"key": "a"}], tmp_path)
        found = elsewhere.FLOWER.play(few, [{"key": "a"}, {"key": "b"}], tmp_path)
        elsewhere.PFL.play(few, [{"key": "a"}], tmp_path)
    assert asked == [["a"], ["b"], ["a"]]
    assert [w.tolist() for w in found["a"].weights] == [[1, 1, 1], [0, 0]]


def test_the_figure_of_all_methods_is_the_worst(monkeypatch: pytest.MonkeyPatch) -> None:
    rivals = room("rivals")
    apart = {"fedavg": 1e-6, "fedadam": 3e-5, "fedprox": 0.2}
    rows = [r for r in rivals.ROWS if r.name in apart]
    monkeypatch.setattr(
        rivals, "compared", lambda rows, seed, cache: {k: v * (1 + seed) for k, v in apart.items()}
    )
    found = {f.name: f.value for f in rivals.figures(rows, 2, Path())}
    assert found["fed_vs_flower_weights"] == found["fed_vs_flower_weights_fedadam"] == 6e-5
    assert found["fed_vs_pfl_points"] == 0.4


def test_the_bare_loop_learns() -> None:
    with room("problem").Problem(clients=10, per_round=5, rounds=1) as few:
        *_, (_, version) = zip(range(12), room("speed").bare(few), strict=False)
        with np.load(few.file) as data:
            assert accuracy(version, data["x"][-360:], data["y"][-360:]) > 0.3, "by chance 0.1"
