"""Versions evaluated on clients' own samples, against a loop over clients in eval mode."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.dag.capture.capture import capture
from shoal.dag.permutation import Indices
from shoal.peer.data.partition import partition
from shoal.peer.federated import client_evaluation
from shoal.peer.federated.client_evaluation import ClientEvaluation

SAMPLES, SIZES = 150, (12, 8, 4)


class Classifier(nn.Module):
    """Has all that is another thing in training, and a weight that some samples have no part in."""

    def __init__(self) -> None:
        super().__init__()
        wide, middle, out = SIZES
        self.layers = nn.Sequential(
            *(nn.Linear(wide, middle), nn.BatchNorm1d(middle), nn.Dropout(0.5)),
            nn.Linear(middle, out),
        )

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        made, counts = self.layers(x), (y != 3).float()
        loss = F.cross_entropy(made, y, reduction="none")
        right = (made.argmax(1) == y).float()
        total = counts.sum()
        return {
            **{"loss": (loss * counts).sum() / total, "weight": total},
            "accuracy": (right * counts).sum() / total,
        }


def test_each_client_has_the_means_over_its_own_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(SAMPLES, SIZES[0]), torch.randint(0, SIZES[2], (SAMPLES,))
    module = Classifier()
    graph = capture(module, {"x": x[:8], "y": y[:8]}).graph
    version = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    plain = copy.deepcopy(module).eval()
    divided = partition(y.numpy(), kind="dirichlet", alpha=0.3, clients=20, held_out=0.4, seed=1)
    have = [c for c in range(20) if len(divided.held_out(c))]

    def read(at: Indices) -> dict[str, Tensor]:
        return {"x": x[torch.tensor(at)], "y": y[torch.tensor(at)]}

    for most in (1000, 3):
        monkeypatch.setattr(client_evaluation, "MOST_EVALUATED", most)
        found = ClientEvaluation(graph, divided, seed=5, batch=4, most=3)
        assert len(found.clients) == min(most, len(have))
        assert {*found.clients.tolist()} <= {*have}
        own = [read(divided.held_out(c).copy()) for c in found.clients.tolist()]
        own = [mine for mine in own if (mine["y"] != 3).any()]
        with torch.no_grad():
            made = [plain(**mine) for mine in own]
        numbers = found.numbers(version, read)
        assert [n.name for n in numbers] == ["loss", "accuracy"]
        for n in numbers:
            each = [float(one[n.name]) for one in made]
            mean = np.average(each, weights=[float(one["weight"]) for one in made])
            spread = [mean, min(each), np.median(each), max(each)]
            assert n.clients == len(own)
            assert [n.mean, n.least, n.median, n.most] == pytest.approx(spread, rel=1e-4, abs=1e-6)

    nobody = partition(kind="iid", clients=5, samples=SAMPLES)
    assert not ClientEvaluation(graph, nobody, seed=5, batch=4, most=3).numbers(version, read)
