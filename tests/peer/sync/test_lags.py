"""Layer-wise sparse gradients among devices equal a plain loop in torch alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from shoal.dag.ir.graph import TensorSpec
from shoal.dag.plan.strategies import parse_strategy
from shoal.peer.compute.records import take_records

from .conftest import STEPS
from .loops import loop


class LAGS:
    def __init__(self, holders, ratio):
        self.errors, self.ratio = [{} for _ in range(holders)], ratio

    def __call__(self, step, owns):
        total = {}
        for n, like in owns[0].items():
            total[n], k = torch.zeros_like(like), max(1, round(like.numel() / self.ratio))
            for own, errors in zip(owns, self.errors, strict=True):
                a = own[n] + errors.get(n, 0.0)
                least = a.abs().view(-1).sort(descending=True).values[k - 1]
                sent = torch.where(a.abs() >= least, a, 0.0) if 2 * k < a.numel() else a
                errors[n] = a - sent
                total[n] += sent
        return total


@pytest.mark.parametrize("holders", ["a b", "a b c"])
def test_holders_equal_a_loop(net, exchanging, watched, holders):
    made, names = net(batch=10), holders.split()
    world = made.world(exchanging(made.plan(1, [holders]), "lags:ratio=12"))
    assert watched(world, STEPS) < 1e-5, "conserved for each parameter at every step"
    method = LAGS(len(names), 12)
    losses, weights = loop(made.module, made.train, made.reader(), len(names), method)
    assert [o.loss for o in world.outcomes] == pytest.approx(losses, rel=1e-4)
    got = world.weights()
    assert all(torch.allclose(got[n], weights[n], atol=1e-4) for n in weights)
    one, *others = (take_records(world.devices[p]._work, STEPS) for p in names)
    shared = [n for n in one if not n.startswith("own/")]
    assert all(torch.equal(one[n], o[n]) for n in shared for o in others), "bit for bit"


def test_a_stage_that_sends_all_is_exact(net, exchanging):
    made = net()
    exact = made.world(made.plan(1, ["a b c"])).run(STEPS)
    world = made.world(exchanging(made.plan(1, ["a b c"]), "lags:ratio=1"))
    assert world.run(STEPS) == pytest.approx(exact, rel=1e-5)


def test_stages_have_ratios_of_their_own(net, exchanging, watched):
    made = net()
    plan = exchanging(made.plan(2, ["a b", "c d"]), "lags:ratio=30")
    first, second = plan.exchanges
    plan = replace(plan, exchanges=(first, replace(second, strategy="lags:ratio=1")))
    world = made.world(plan)
    assert watched(world, 4) < 1e-5
    left = [
        max(float(e.abs().max()) for e in d._work.held[k].strategy.errors.values())
        for d, k in ((world.devices["a"], 0), (world.devices["c"], 1))
    ]
    assert left[0] > 0
    assert left[1] == 0


def test_a_parameter_is_never_longer_than_it_is():
    specs = [TensorSpec((n,), "float32") for n in (1000, 10, 3)]
    assert parse_strategy("lags:ratio=100").elements(specs) == 2 * 10 + 2 + 2 + 3
    assert parse_strategy("lags:ratio=1").elements(specs) == 1013 + 3
