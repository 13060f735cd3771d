"""benchmarks/sync/: what its figures are made of."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest
import torch


@pytest.fixture
def saps() -> ModuleType:
    return importlib.import_module("shoal.benchmarks.gossip.saps")


@pytest.fixture
def digits() -> ModuleType:
    return importlib.import_module("shoal.benchmarks.gossip.digits")


def test_fast_pairs_are_found_where_random_ones_and_rings_are_slow(saps):
    """The bar of SAPS on 32 peers, the best of the authors' own code being 4.06."""
    bottleneck, mean, rho = saps.measured("b4_t10", 0)
    assert bottleneck >= 3.9
    assert mean > bottleneck
    assert rho < 0.9
    for case in ("random", "ring"):
        assert saps.measured(case, 0)[0] < 0.5


def test_matchings_are_as_large_as_those_of_networkx(saps):
    assert saps.cardinality() >= 0.995


def test_gradients_are_those_of_each_replica(digits):
    torch.manual_seed(0)
    weights = {name: torch.randn(3, *shape) for name, shape in digits.SHAPES.items()}
    assert sum(w[0].numel() for w in weights.values()) == 2410
    x, y = torch.randn(3, 16, 64), torch.randint(10, (3, 16))
    found = digits._gradients(weights, x, y)
    for i in range(3):
        one = {name: w[i : i + 1] for name, w in weights.items()}
        expected = digits._gradients(one, x[i : i + 1], y[i : i + 1])
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name][i : i + 1], gradient)


def test_dense_replicas_stay_alike_and_learn(digits, monkeypatch):
    monkeypatch.setattr(digits, "STEPS", 60)
    together, single = digits.trained(0, 0, 0.3, 16)
    assert together == pytest.approx(single)
    assert together > 0.7
    together, single = digits.trained(0, 1, 0.3, 16)
    assert single > 0.5
