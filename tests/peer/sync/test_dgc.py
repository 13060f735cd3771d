"""Momentum before compression among devices equals a plain loop in torch alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from shoal.dag.plan.plan import CodecChoice
from shoal.peer.compute.records import take_records

from .conftest import STEPS
from .loops import flat, loop, parted

SGD = {"optimizer": "sgd", "momentum": 0.9, "lr": 0.05, "batch": 10}
PLAIN = SGD | {"momentum": 0.0}


class DGC:
    def __init__(self, names, holders, ratio, mask=True):
        self.names, self.ratio, self.mask = names, ratio, mask
        self.u, self.v = [0.0] * holders, [0.0] * holders
        self.sent = self.all = 0.0

    def __call__(self, step, owns):
        total = 0.0
        for r, own in enumerate(owns):
            self.u[r] = 0.9 * self.u[r] + flat(own, self.names)
            self.all = self.all + self.u[r]
            v = self.v[r] + self.u[r]
            k = round(v.numel() / self.ratio)
            largest = v.abs().topk(k).indices
            sent = torch.zeros_like(v)
            sent[largest] = v[largest]
            self.v[r] = v - sent
            if self.mask:
                self.u[r] = torch.where(sent != 0, 0.0, self.u[r])
            total = total + sent
        self.sent = self.sent + total
        assert torch.allclose(self.sent + sum(self.v), self.all, atol=1e-4)
        return owns[0] | parted(total, owns[0], self.names)


def coded(plan, text):
    links = [(a, b) for a in plan.peers for b in plan.peers if a != b]
    return replace(plan, codecs=tuple(CodecChoice(a, b, "sync", text) for a, b in links))


@pytest.mark.parametrize("holders", ["a b", "a b c"])
def test_holders_equal_a_loop(net, exchanging, holders):
    made, names = net(**SGD), holders.split()
    plan = coded(exchanging(made.plan(1, [holders]), "dgc"), "ef+topk:ratio=7,values=fp32")
    world = made.world(plan)
    parameters = [n for n, _ in made.module.named_parameters()]
    without = net(**PLAIN).train
    method = DGC(parameters, len(names), 7)
    losses, weights = loop(made.module, without, made.reader(), len(names), method)
    assert world.run(STEPS) == pytest.approx(losses, rel=1e-4)
    got = world.weights()
    assert all(torch.allclose(got[n], weights[n], atol=1e-4) for n in weights)
    other = DGC(parameters, len(names), 7, mask=False)
    unmasked, _ = loop(made.module, without, made.reader(), len(names), other)
    assert losses != pytest.approx(unmasked, rel=1e-3), "the bar of the test"
    for r, peer in enumerate(names):
        found = world.devices[peer]._work.held[0].strategy.velocity
        u = flat(found, parameters)
        assert torch.allclose(u, method.u[r], atol=1e-5)
        assert ((u == 0) == (method.u[r] == 0)).all()
    one, *others = (take_records(world.devices[p]._work, STEPS) for p in names)
    shared = [n for n in one if n.startswith("param:")]
    assert all(torch.equal(one[n], o[n]) for n in shared for o in others), "bit for bit"


def test_a_codec_that_sends_all_makes_it_plain_sgd(net, exchanging):
    made, without = net(**SGD), net(**PLAIN)
    exact = without.world(without.plan(1, ["a b"])).run(STEPS)
    world = made.world(exchanging(made.plan(1, ["a b"]), "dgc"))
    assert world.run(STEPS) == pytest.approx(exact, rel=1e-5)


def test_without_the_mask_a_codec_that_sends_all_makes_it_sgd_with_momentum(
    net, exchanging, monkeypatch
):
    made = net(**SGD)
    exact = made.world(made.plan(1, ["a b"])).run(STEPS)
    world = made.world(exchanging(made.plan(1, ["a b"]), "dgc"))
    for device in world.devices.values():
        monkeypatch.setattr(device._work.held[0].strategy, "sent", lambda own: None)
    # Clipping comes before the momentum in torch, here after it.
    assert world.run(3)[:2] == pytest.approx(exact[:2], rel=1e-5)


def test_going_on_from_snapshots_equals_never_having_stopped(net, exchanging):
    made, stop = net(**SGD), STEPS // 2
    text = "ef+topk:ratio=7,values=fp32"
    plan = coded(exchanging(made.plan(2, ["a b", "c d"]), "dgc"), text)
    calm = made.world(plan)
    some(calm, 0, stop)
    states = tuple(device.snapshot(stop)() for device in calm.devices.values())
    again = made.world(plan, first_step=stop, resumed=states)
    some(calm, stop, STEPS)
    some(again, stop, STEPS)
    assert [o.loss for o in again.outcomes] == [o.loss for o in calm.outcomes[stop:]]
    got, wanted = again.weights(), calm.weights()
    assert all(torch.equal(got[n], wanted[n]) for n in wanted)


def some(world, first, last):
    for step in range(first, last):
        for device in world.devices.values():
            device.prefetch(step)
        world._pass(step, {p: b.flow.actions(p) for p, b in world.built.items()})
