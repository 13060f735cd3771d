"""Replicas that train apart and meet in rounds come to what plain loops come to, to the same bits
however each is cut."""

from __future__ import annotations

import copy

import pytest
import torch

from shoal.job.rounds import FEDERATED, GOSSIP, LOCAL, RoundSettings
from shoal.peer.rounds.methods.round_strategies import STRATEGIES
from shoal.tests.peer.compute.test_device import Gpt, digits
from shoal.tests.peer.rounds.conftest import (
    PLAIN,
    Exchange,
    Net,
    hand_out,
    same,
    train,
)


@pytest.fixture
def net(make_case):
    return lambda **train: make_case(Net(), **digits(), **{**PLAIN, "batch": 16, **train})


class PlainReplica:
    def __init__(self, case):
        self.module = copy.deepcopy(case.module).train()
        t = case.train
        self.inner = torch.optim.SGD(self.module.parameters(), lr=t.lr, momentum=t.momentum)
        self.case = case

    def train(self, first, count, microbatches=4):
        """Microbatches [first, first + count) of the run."""
        read, size = self.case.reader(), self.case.train.microbatch_size
        of_run = self.case.train.microbatches
        for step in range(count // microbatches):
            self.inner.zero_grad()
            for m in range(microbatches):
                g = first + step * microbatches + m
                (self.module(**read.batch(*divmod(g, of_run), size)) / microbatches).backward()
            self.inner.step()


class PlainRounds:
    """Copies of the module, and torch's own SGD as the outer optimizer."""

    def __init__(self, case, weights, lr=1.0, momentum=0.0):
        self.replicas = [PlainReplica(case) for _ in weights]
        self.weights = [w / sum(weights) for w in weights]
        self.outer = copy.deepcopy(case.module)
        self.step = torch.optim.SGD(
            self.outer.parameters(), lr=lr, momentum=momentum, nesterov=momentum > 0
        )

    @torch.no_grad()
    def round(self):
        named = [dict(r.module.named_parameters()) for r in self.replicas]
        for name, p in self.outer.named_parameters():
            moved = [w * (p - n[name]) for w, n in zip(self.weights, named, strict=True)]
            p.grad = sum(moved)
        self.step.step()
        for name, buffer in self.outer.named_buffers():
            if buffer.is_floating_point():
                each = [dict(r.module.named_buffers())[name] for r in self.replicas]
                buffer.copy_(sum(w * b for w, b in zip(self.weights, each, strict=True)))
        for replica in self.replicas:
            own = dict(replica.module.named_buffers())
            for name, tensor in (*self.outer.named_parameters(), *self.outer.named_buffers()):
                if tensor.is_floating_point():
                    {**dict(replica.module.named_parameters()), **own}[name].copy_(tensor)


def assert_close(found, module):
    state = module.state_dict()
    for name, tensor in state.items():
        if tensor.is_floating_point():
            torch.testing.assert_close(found[name], tensor, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("weights", [(1, 1), (3, 5)])
@pytest.mark.parametrize("cuts", [(1, 1), (2, 3)])
def test_the_average_is_that_of_plain_loops(net, replica, cuts, weights):
    case = net()
    replicas = [replica(case, n, c) for n, c in zip("ab", cuts, strict=True)]
    plain = PlainRounds(case, weights)
    for round_ in range(3):
        train(replicas, round_, 2)
        for i, loop in enumerate(plain.replicas):
            [(first, count)] = hand_out(i, round_, 2)
            loop.train(first, count)
        hashes = Exchange(replicas, round=round_, weights=weights).run()
        plain.round()
        assert hashes[0] == hashes[1]
        for each in replicas:
            assert_close(each.weights(), plain.outer)


@pytest.mark.parametrize("method", ["average", "diloco"])
def test_outer_steps_are_torchs_whatever_the_cut(make_case, replica, method):
    """A model of attention with tied embeddings, on three replicas that are cut differently."""
    case = make_case(Gpt(), length=8, **{**PLAIN, "batch": 24})
    options = {"lr": 0.7, "momentum": 0.9} if method == "diloco" else {}
    replicas = [
        replica(case, n, c, method=method, options=options, of=3)
        for n, c in zip("abc", (1, 2, 3), strict=True)
    ]
    plain = PlainRounds(case, (1, 1, 1), **options)
    for round_ in range(3):
        train(replicas, round_, 1)
        for i, loop in enumerate(plain.replicas):
            [(first, count)] = hand_out(i, round_, 1, 3)
            loop.train(first, count)
        hashes = Exchange(replicas, round=round_).run()
        plain.round()
        assert len({*hashes}) == 1
        assert same(replicas[0].weights(), replicas[1].weights())
        assert same(replicas[0].weights(), replicas[2].weights())
        assert_close(replicas[0].weights(), plain.outer)


def test_one_replica_of_one_is_the_run_without_rounds(make_case, replica):
    """Its samples, masks and learning rates are those of today; only an averaged version is
    rounded: base - (base - now)."""
    case = make_case(Gpt(dropout=0.2), length=8, steps=4, batch=8, warmup=2)
    calm = case.world(case.plan(2, ["a", "b"]))
    calm.run(4)
    one = replica(case, "a", 2, of=1)
    one.begin(0, 0, 4, [(0, 16)], start=0.0, length=4.0)
    one.train(0, 4)
    assert one.world.outcomes == calm.outcomes
    assert same(one.weights(), calm.weights())


def test_ranges_say_what_is_trained_on(make_case, replica):
    """Two steps from two ranges are the two steps of the run that these microbatches are."""
    case = make_case(Gpt(dropout=0.2), length=8, steps=8, batch=8, schedule="constant", warmup=0)
    first, other = replica(case, "a", 1, of=1), replica(case, "b", 2, of=1)
    first.begin(0, 0, 2, [(20, 8)])
    other.begin(0, 5, 2, [(20, 3), (23, 5)])
    first.train(0, 2)
    other.train(5, 7)
    losses = [[o.loss for o in r.world.outcomes] for r in (first, other)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    with pytest.raises(ValueError, match="none of round 0, which has 8 from step 5 on"):
        next(iter(other.devices.values())).prefetch(7)


def test_the_learning_rate_is_that_of_the_place_in_the_run(make_case, replica):
    case = make_case(Gpt(), length=8, steps=100, batch=8, lr=1.0, warmup=0, schedule="linear",
                     lr_final=0.0)  # fmt: skip
    one = replica(case, "a", 1, of=2)
    one.begin(5, 7, 4, [(0, 8)], start=50.0, length=10.0)
    one.train(7, 11)
    assert [o.lr for o in one.world.outcomes] == pytest.approx([0.5, 0.475, 0.45, 0.425])


def test_the_record_of_a_method_says_what_its_strategy_keeps() -> None:
    """The version that a replica began with, and state."""
    kept = {n: 1 + len(s.slots) + len(s.own_slots) for n, s in STRATEGIES.items()}
    assert kept == {n: method.kept for n, method in {**LOCAL, **GOSSIP, **FEDERATED}.items()}


@pytest.mark.parametrize("overlap", [0, 2])
def test_plans_count_an_exchange_beside_steps_or_alone(overlap: int) -> None:
    """DiLoCo of four: given, written, back, version and momentum, and the sum of a quarter."""
    options = {"overlap": overlap}
    settings = RoundSettings(method="diloco", options=options, codec="int8:block=128", replicas=4)
    both = settings.stepping_bytes, settings.exchange_bytes
    exchanged = 4 + 1 + 4 + 8 + 2
    assert both == ((8 + exchanged, 0) if overlap else (8, exchanged))
