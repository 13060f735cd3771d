"""Models, plans and steps of runs whose links have codecs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from shoal.dag.plan.plan import CodecChoice

ROLES = ("activation", "activation_grad", "sync")


class Mlp(nn.Module):
    def __init__(self, norm=False):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Linear(6, 40, bias=not norm), nn.BatchNorm1d(40) if norm else nn.Identity(),
            nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 4),
        )  # fmt: skip
        self.unread = nn.Parameter(torch.ones(5))

    def forward(self, x, y):
        return F.cross_entropy(self.net(x), y)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(256, 16)
        self.middle = nn.Linear(16, 16)
        self.head = nn.Linear(16, 256, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x, y):
        h = torch.tanh(self.middle(self.tokens(x)))
        return F.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


def digits():
    rng = np.random.default_rng(0)
    return {"x": rng.normal(size=(90, 6)).astype("f4"), "y": rng.integers(0, 4, 90)}


def coded(plan, text=None, **texts):
    """The plan with these codecs by role on every link; `text`: one for all roles."""
    texts = dict.fromkeys(ROLES, text) if text else texts
    links = [(a, b) for a in plan.peers for b in plan.peers if a != b]
    return replace(
        plan, codecs=tuple(CodecChoice(a, b, r, t) for a, b in links for r, t in texts.items())
    )


def parameters(world, stage):
    return [
        {n: p.detach() for n, p in w.held[stage].executor.parameters.items()}
        for w in (d._work for d in world.devices.values())
        if stage in w.held
    ]


def one_step(world, step):
    for device in world.devices.values():
        device.prefetch(step)
    world._pass(step, {p: b.flow.actions(p) for p, b in world.built.items()})


def stateful_world(case):
    plan = case.plan(2, ["a b", "c"], held_out=2)
    texts = {"activation": "delta+int8", "activation_grad": "efd+int8", "sync": "ef+topk:ratio=5"}
    return case.world(coded(plan, **texts))
