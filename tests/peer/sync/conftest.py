"""Small models for what holders of a stage make of their gradients."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shoal.dag.plan.plan import StageExchange

STEPS = 12


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())
        self.last = nn.Linear(16, 4)

    def forward(self, x, y):
        return F.cross_entropy(self.last(self.layers(x)), y)


@pytest.fixture
def net(make_case):
    """A case of a net of three layers that takes twelve steps."""

    def make(**train):
        rng = np.random.default_rng(0)
        data = {"x": rng.normal(size=(90, 6)).astype("f4"), "y": rng.integers(0, 4, 90)}
        settings = {"steps": STEPS, "weight_decay": 0.0, "eps": 0.01} | train
        return make_case(Net(), **data, **settings)

    return make


@pytest.fixture
def exchanging():
    """exchanging(plan, strategy): the plan with that in every stage."""

    def make(plan, strategy, collective="all-to-all"):
        stages = range(len(plan.stages))
        return replace(
            plan,
            exchanges=tuple(StageExchange(k, collective, strategy=strategy) for k in stages),
        )

    return make


@pytest.fixture
def watched():
    """watched(world, steps): runs a world; at every step of every stage, all that holders had
    accumulated so far is what they sent so far and what they have unsent."""

    def run(world, steps, first=0, factor=1.0):
        worst = 0.0
        totals: dict = {}
        for step in range(first, first + steps):
            for device in world.devices.values():
                device.prefetch(step)
            seen = _listening(world, totals)
            world._pass(step, {p: b.flow.actions(p) for p, b in world.built.items()})
            for undo in seen:
                undo()
            worst = max(worst, _unbalanced(world, totals))
        return worst

    return run


def _listening(world, totals):
    undo = []
    for peer, device in world.devices.items():
        for k, held in device._work.held.items():
            strategy = held.strategy
            if not hasattr(strategy, "errors") or len(world.plan.stages[k].holders) < 2:
                continue
            first = world.plan.stages[k].holders[0] == peer
            was, update = strategy.on_gradient, strategy.update

            def on_gradient(step, strategy=strategy, was=was, k=k):
                for n, p in strategy.trained.items():
                    if p.grad is not None:
                        one = totals.setdefault((k, n), [0.0, 0.0])
                        one[0] = one[0] + p.grad.double()
                was(step)

            def updated(step, strategy=strategy, update=update, k=k, first=first, **also):
                for n, p in strategy.trained.items() if first else ():
                    if p.grad is not None:
                        one = totals.setdefault((k, n), [0.0, 0.0])
                        one[1] = one[1] + p.grad.double()
                update(step, **also)

            strategy.on_gradient, strategy.update = on_gradient, updated
            undo.append(lambda s=strategy: (delattr(s, "on_gradient"), delattr(s, "update")))
    return undo


def _unbalanced(world, totals):
    worst = 0.0
    for (k, n), (given, sent) in totals.items():
        left = 0.0
        for peer in world.plan.stages[k].holders:
            errors = world.devices[peer]._work.held[k].strategy.errors
            left = left + errors[n].double()
        worst = max(worst, float((given - sent - left).abs().max()))
    return worst
