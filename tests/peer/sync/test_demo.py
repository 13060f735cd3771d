"""Decoupled momentum among devices equals a plain loop in torch alone."""

from __future__ import annotations

import math

import pytest
import torch

from shoal.dag.ir.graph import TensorSpec
from shoal.dag.plan.messages import blocks_of
from shoal.dag.plan.strategies import parse_strategy
from shoal.peer.compute.records import take_records
from shoal.peer.sync.demo import dct, inverse, transformed
from shoal.peer.sync.optimizer import learning_rate

from .conftest import STEPS
from .loops import loop

SGD = {"optimizer": "sgd", "momentum": 0.0, "clip": 0.0, "lr": 0.01, "batch": 10}
BLOCK, TOP, DECAY = 5, 3, 0.9
TEXT = f"demo:block={BLOCK},top={TOP},decay={DECAY}"


def tiles(sizes):
    """(rows, columns) of each block of a matrix, as slices; the last ones may lie over its ends."""
    a, b = (max(1, min(n, BLOCK)) for n in sizes)
    return a, b, [(i, j) for i in range(0, sizes[0], a) for j in range(0, sizes[1], b)]


def waves(side):
    found = torch.zeros(side, side)
    for k in range(side):
        for n in range(side):
            found[k, n] = math.cos(math.pi * (2 * n + 1) * k / (2 * side))
        found[k] /= found[k].norm()
    return found


class DeMo:
    def __init__(self, made, holders):
        self.train, self.momentum = made.train, [{} for _ in range(holders)]
        self.counts = [len(range(r, made.train.microbatches, holders)) for r in range(holders)]

    def __call__(self, step, owns):
        lr, total = learning_rate(self.train, step), {}
        for n, like in owns[0].items():
            matrix = like.view(1, -1) if like.dim() == 1 else like
            a, b, blocks = tiles(matrix.shape)
            whole = []
            for own, count, momentum in zip(owns, self.counts, self.momentum, strict=True):
                gradient = own[n].view_as(matrix) / max(1, count)
                whole.append(DECAY * momentum.get(n, torch.zeros_like(matrix)) + lr * gradient)
            step_, kept = torch.zeros_like(matrix), [w.clone() for w in whole]
            for i, j in blocks:
                chosen = []
                for w in whole:
                    block = torch.zeros(a, b)
                    piece = w[i : i + a, j : j + b]
                    block[: piece.shape[0], : piece.shape[1]] = piece
                    coded = waves(a) @ block @ waves(b).T
                    least = coded.abs().view(-1).sort(descending=True).values[min(TOP, a * b) - 1]
                    chosen.append(torch.where(coded.abs() >= least, coded, 0.0))
                count = sum((c != 0).float() for c in chosen)
                mean = sum(chosen) / count.clamp(min=1)
                rows, columns = piece.shape
                step_[i : i + a, j : j + b] = (waves(a).T @ mean @ waves(b))[:rows, :columns]
                for k, c in zip(kept, chosen, strict=True):
                    k[i : i + a, j : j + b] -= (waves(a).T @ c @ waves(b))[:rows, :columns]
            for momentum, k in zip(self.momentum, kept, strict=True):
                momentum[n] = k
            total[n] = step_.sign().view_as(like) * self.train.microbatches
        return total


@pytest.mark.parametrize("holders", ["a b", "a b c", "a"])
def test_holders_equal_a_loop(net, exchanging, holders):
    made, names = net(**SGD), holders.split()
    world = made.world(exchanging(made.plan(1, [holders]), TEXT))
    losses, weights = loop(
        made.module, made.train, made.reader(), len(names), DeMo(made, len(names))
    )
    assert world.run(STEPS) == pytest.approx(losses, rel=1e-3)
    got = world.weights()
    assert all(torch.allclose(got[n], weights[n], atol=1e-4) for n in weights)
    one, *others = (take_records(world.devices[p]._work, STEPS) for p in names)
    shared = [n for n in one if not n.startswith("own/")]
    assert all(torch.equal(one[n], o[n]) for n in shared for o in others), "bit for bit"


def test_what_is_kept_and_what_was_sent_is_the_momentum(net, exchanging):
    made = net(**SGD)
    world = made.world(exchanging(made.plan(1, ["a b"]), TEXT))
    world.run(3)
    for device in world.devices.values():
        strategy = device._work.held[0].strategy
        before = {n: e.clone() for n, e in strategy.errors.items()}
        grads = {n: torch.randn_like(p) for n, p in strategy.trained.items()}
        for n, p in strategy.trained.items():
            p.grad = grads[n].clone()
        strategy.on_gradient(3)
        lr = learning_rate(made.train, 3) / strategy.holder.own
        message = strategy.message(0)
        strategy.take(0, strategy.space(()).add([message]))
        for n, p in strategy.trained.items():
            whole = DECAY * before[n] + lr * grads[n]
            assert torch.allclose(strategy._left[n] + p.grad, whole, atol=1e-6)


def test_all_numbers_kept_leave_no_momentum(net, exchanging):
    made = net(**SGD)
    world = made.world(exchanging(made.plan(1, ["a b"]), "demo:block=64,top=4096,decay=0.9"))
    world.run(3)
    errors = world.devices["a"]._work.held[0].strategy.errors
    assert max(float(e.abs().max()) for e in errors.values()) < 1e-6


@pytest.mark.parametrize("sizes", [(64, 64), (130, 70), (7,), (3, 4, 5), (1, 200)])
def test_the_transform_and_back_is_nothing(sizes):
    b = blocks_of(TensorSpec(sizes, "float32"), {"block": 64, "top": 32})
    x = torch.randn(sizes)
    coded = transformed(x, b)
    assert coded.shape == (b.number, b.rows * b.columns)
    assert torch.allclose(inverse(coded, b).reshape(sizes), x, atol=1e-5)
    eye = dct(b.columns) @ dct(b.columns).T
    assert torch.allclose(eye, torch.eye(b.columns, dtype=torch.float64), atol=1e-12)


def test_a_message_has_six_bytes_for_each_number_that_is_sent():
    specs = [TensorSpec((128, 256), "float32")]
    assert parse_strategy("demo:block=64,top=32,decay=0.9").elements(specs) == 8 * 32 * 3 // 2 + 1


@pytest.mark.slow
def test_replicas_stay_equal_for_a_thousand_steps(net, exchanging):
    made = net(**SGD | {"steps": 1000})
    world = made.world(exchanging(made.plan(1, ["a b c"]), TEXT))
    world.run(1000)
    one, *others = (take_records(d._work, 1000) for d in world.devices.values())
    shared = [n for n in one if not n.startswith("own/")]
    assert all(torch.equal(one[n], o[n]) for n in shared for o in others)
