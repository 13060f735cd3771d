"""Gradients of low rank among devices equal a plain loop in torch alone."""

from __future__ import annotations

import pytest
import torch

from shoal.dag.ir.graph import TensorSpec
from shoal.dag.plan.strategies import parse_strategy
from shoal.peer.compute.records import take_records
from shoal.peer.sync.low_rank import orthonormal

from .conftest import STEPS
from .loops import loop


def basis(matrix):
    return torch.linalg.qr(matrix.double()).Q.float()


class PowerSGD:
    """Every holder's A and error; the factor that all have."""

    def __init__(self, made, holders, start):
        self.names = [n for n, p in made.module.named_parameters() if p.dim() == 2]
        self.errors = [dict.fromkeys(self.names, 0.0) for _ in range(holders)]
        self.factor = dict(start)

    def __call__(self, step, owns):
        total = {n: sum(own[n] for own in owns) for n in owns[0]}
        for n in self.names:
            a = [own[n] + e[n] for own, e in zip(owns, self.errors, strict=True)]
            total[n], sent, self.factor[n] = self.one(step, a, self.factor[n])
            for e, whole, part in zip(self.errors, a, sent, strict=True):
                e[n] = whole - part
        return total

    def one(self, step, a, q):
        p = basis(sum(x @ q for x in a))
        own = [x.T @ p for x in a]
        return p @ sum(own).T, [p @ o.T for o in own], basis(sum(own))


class ACPSGD(PowerSGD):
    def one(self, step, a, factor):
        if (factor.shape[0] == a[0].shape[1]) == (a[0].shape[0] == factor.shape[0]):
            left = step % 2 == self.square
        else:
            left = factor.shape[0] == a[0].shape[1]
        if left:  # P's turn: the factor is Q
            own = [x @ factor for x in a]
            return sum(own) @ factor.T, [o @ factor.T for o in own], basis(sum(own))
        own = [x.T @ factor for x in a]
        return factor @ sum(own).T, [factor @ o.T for o in own], basis(sum(own))


def starting(world):
    """The factors that a run begins with: the seed's, the same at all."""
    strategy = world.devices["a"]._work.held[0].strategy
    acp = type(strategy).__name__ == "ACPSGD"
    return {
        n: strategy.factor(n, left=acp and not m.first) for n, m in strategy.matrices.items()
    }, strategy.matrices


@pytest.mark.parametrize("collective", ["all-to-all", "ring", "tree", "two-level"])
@pytest.mark.parametrize(("word", "kind"), [("powersgd", PowerSGD), ("acp-sgd", ACPSGD)])
@pytest.mark.parametrize("holders", ["a b", "a b c"])
def test_holders_equal_a_loop(net, exchanging, watched, word, kind, holders, collective):
    if collective != "all-to-all" and holders == "a b":
        pytest.skip("the collectives differ with three")
    made = net(batch=10)
    plan = exchanging(made.plan(1, [holders]), f"{word}:rank=2,saving=0", collective)
    world = made.world(plan)
    start, matrices = starting(world)
    assert watched(world, STEPS) < 1e-5, "conserved at every step"
    method = kind(made, len(holders.split()), start)
    method.square = 0 if all(m.first for m in matrices.values() if m.rows == m.columns) else 1
    losses, weights = loop(made.module, made.train, made.reader(), len(holders.split()), method)
    assert [o.loss for o in world.outcomes] == pytest.approx(losses, rel=1e-4)
    got = world.weights()
    assert all(torch.allclose(got[n], weights[n], atol=1e-4) for n in weights)
    exact, _ = loop(
        made.module, made.train, made.reader(), 1,
        lambda step, owns: {n: sum(o[n] for o in owns) for n in owns[0]},
    )  # fmt: skip
    assert losses != pytest.approx(exact, rel=1e-3), "the bar of the test"
    one, *others = (take_records(world.devices[p]._work, STEPS) for p in holders.split())
    shared = [n for n in one if not n.startswith("own/")]
    assert any("factor" in n for n in shared)
    assert all(torch.equal(one[n], o[n]) for n in shared for o in others), "bit for bit"


def test_full_rank_is_exact(net, exchanging):
    made = net()
    exact = made.world(made.plan(1, ["a b"])).run(STEPS)
    world = made.world(exchanging(made.plan(1, ["a b"]), "powersgd:rank=16,saving=0"))
    assert world.run(STEPS) == pytest.approx(exact, rel=1e-5)
    for n in world.devices["a"]._work.held[0].strategy.matrices:
        assert torch.allclose(unsent(world, n), torch.zeros(()), atol=1e-6)


def test_factors_recover_from_columns_that_were_zero():
    """Rows of an embedding that no sample had: the next gradient has others."""
    found = orthonormal(torch.zeros(5, 3))
    assert torch.allclose(found.T @ found, torch.eye(3))


@pytest.mark.parametrize("word", ["powersgd", "acp-sgd"])
def test_messages_are_as_long_as_the_plan_says_and_small_matrices_go_as_they_are(word):
    specs = [TensorSpec((n, m), "float32") for n, m in ((64, 256), (256, 64), (4, 4), (64, 64))]
    specs.append(TensorSpec((64,), "float32"))
    choice = parse_strategy(f"{word}:rank=4,saving=2")
    dense, flags = 16 + 64, 5
    if word == "powersgd":
        assert choice.elements(specs, 0) == 4 * (64 + 256 + 64) + dense + flags
        assert choice.elements(specs, 1) == 4 * (256 + 64 + 64)
    else:  # the wide and the tall one balance each other
        assert choice.elements(specs, 0) == 4 * (64 + 64 + 64) + dense + flags or (
            choice.elements(specs, 0) == 4 * (256 + 64) + 4 * 64 + dense + flags
        )


@pytest.mark.parametrize(
    "text", ["powersgd", "powersgd:rank=2", "powersgd:rank=2,saving=1,k=3", "mean:rank=1", "acp"]
)
def test_a_text_that_is_no_strategy_is_refused(text):
    with pytest.raises(ValueError, match="expected"):
        parse_strategy(text)


@pytest.mark.parametrize("word", ["powersgd", "acp-sgd"])
def test_going_on_from_snapshots_equals_never_having_stopped(net, exchanging, watched, word):
    made = net()
    plan, stop = exchanging(made.plan(2, ["a b", "c d"]), f"{word}:rank=1,saving=0"), STEPS // 2
    calm = made.world(plan)
    watched(calm, stop)
    states = tuple(device.snapshot(stop)() for device in calm.devices.values())
    again = made.world(plan, first_step=stop, resumed=states)
    watched(calm, STEPS - stop, stop)
    watched(again, STEPS - stop, stop)
    assert [o.loss for o in again.outcomes] == [o.loss for o in calm.outcomes[stop:]]
    got, wanted = again.weights(), calm.weights()
    assert all(torch.equal(got[n], wanted[n]) for n in wanted)
    # With fewer holders nothing that was unsent is missing.
    fewer = made.world(
        exchanging(made.plan(1, ["a b"]), f"{word}:rank=1,saving=0"),
        first_step=stop, resumed=states,
    )  # fmt: skip
    same = made.world(plan, first_step=stop, resumed=states)
    for n in ("layers.0.weight", "last.weight"):
        had, has = (unsent(world, n) for world in (same, fewer))
        assert torch.allclose(had, has, atol=1e-6)
        assert had.abs().sum() > 0


def unsent(world, name):
    held = (h for d in world.devices.values() for h in d._work.held.values())
    return sum(h.strategy.errors.get(name, 0.0) for h in held)
