"""Replicas that train apart and meet in rounds come to what plain loops come to, to the same bits
however each is cut."""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shoal.compression.interface import CodecError
from shoal.dag.execute.execute import TensorSpecError
from shoal.dag.plan.action import Action, Kind
from shoal.dag.rounds import vector
from shoal.dag.rounds.sums import LargeContributionError
from shoal.dag.rounds.wiring import GIVE, RESULT, VERSION, port_of
from shoal.peer.compute.records import load_records, write_records
from shoal.peer.core.snapshots import SnapshotError, in_parts
from shoal.peer.rounds import digest
from shoal.tests.peer.compute.test_device import Gpt, digits
from shoal.tests.peer.rounds.conftest import Exchange

PLAIN = {
    "optimizer": "sgd", "momentum": 0.9, "schedule": "constant", "warmup": 0, "clip": 0.0,
    "weight_decay": 0.0, "lr": 0.05, "steps": 12,
}  # fmt: skip
"""Training that a loop of four lines does."""


class Net(nn.Module):
    """Layers of all sizes, a batch norm, and a parameter that is read at both ends."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 16)
        self.norm = nn.BatchNorm1d(16)
        self.middle = nn.Linear(16, 16)
        self.last = nn.Linear(16, 4)
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x, y):
        h = torch.tanh(self.norm(self.first(x) * self.scale))
        h = torch.tanh(self.middle(h))
        return F.cross_entropy(self.last(h * self.scale), y)


@pytest.fixture
def net(make_case):
    return lambda **train: make_case(Net(), **digits(), **{**PLAIN, "batch": 16, **train})


def hand_out(number, round_, steps, of=2, microbatches=4):
    """Where the samples of a replica begin, and how many there are, in microbatches."""
    mine = steps * microbatches
    return [(round_ * of * mine + number * mine, mine)]


def train(replicas, round_, steps):
    for i, replica in enumerate(replicas):
        replica.begin(round_, round_ * steps, steps, hand_out(i, round_, steps, len(replicas)))
        replica.train(round_ * steps, (round_ + 1) * steps)
        assert not any(r.code for r in replica.contribute(round_).values())


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


def same(a, b, but=()):
    assert a.keys() == b.keys()
    return [n for n in a if not torch.equal(a[n], b[n]) and n not in but] == []


COUNTER = "norm.num_batches_tracked"


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


# ---------------------------------------------------------------- attempts


def trained(case, replica, names="abc", cuts=(1, 2, 3), **settings):
    settings = {"method": "diloco", **settings}
    replicas = [
        replica(case, n, c, of=len(names), **settings) for n, c in zip(names, cuts, strict=True)
    ]
    train(replicas, 0, 1)
    return replicas


def case_of_three(make_case, **train):
    return make_case(Net(), **digits(), **{**PLAIN, "batch": 24, **train})


def test_neither_order_nor_who_adds_up_changes_a_bit(make_case, replica):
    case = case_of_three(make_case)
    found = set()
    for seed, order in enumerate(permutations(range(3))):
        replicas = trained(case, replica)
        weights = [(2, 3, 7)[i] for i in order]
        hashes = Exchange([replicas[i] for i in order], weights=weights, seed=seed).run()
        found |= {*hashes}
    assert len(found) == 1


@pytest.mark.parametrize("applied", [False, True])
def test_another_attempt_comes_to_what_it_would_have_come_to_as_the_first(
    make_case, replica, applied
):
    case = case_of_three(make_case)
    calm = trained(case, replica)
    wanted = Exchange(calm[:2], weights=(2, 3)).run()
    replicas = trained(case, replica)
    first = Exchange(replicas, weights=(2, 3, 4))
    first.begin()
    first.give()
    if applied:
        assert {*first.apply()} != {*wanted}
    second = Exchange(replicas[:2], weights=(2, 3), attempt=2)
    assert second.run() == wanted
    assert first.frames.keys().isdisjoint(second.frames)
    for each, other in zip(replicas[:2], calm[:2], strict=True):
        assert same(each.weights(), other.weights())
    for both in (calm, replicas):  # and so does the next round, with its momentum
        train(both[:2], 1, 1)
    assert Exchange(replicas[:2], round=1).run() == Exchange(calm[:2], round=1).run()


def test_a_contribution_is_taken_down_once(make_case, replica):
    case = case_of_three(make_case)
    [a, b, c] = trained(case, replica)
    first = Exchange([a, b, c])
    first.run()
    before = a.contribute()
    a.begin(0, 0, 1, hand_out(0, 0, 1, 3))
    assert a.contribute() == before
    assert sum(r.drift for r in before.values()) > 0
    second = Exchange([a, b, c], attempt=2)
    second.run()
    gives = [{k._replace(term=0): f for k, f in e.frames.items()} for e in (first, second)]
    assert gives[0] == gives[1]


def test_who_joins_by_a_version_goes_on_as_the_others(make_case, replica):
    case = case_of_three(make_case)
    a, b, c = trained(case, replica, cuts=(2, 1, 3))
    hashes = Exchange([a, b], joiners=[c]).run()
    assert len({*hashes}) == 1
    assert same(c.weights(), a.weights(), but={COUNTER})
    train([a, b, c], 1, 1)
    hashes = Exchange([a, b, c], round=1).run()
    assert len({*hashes}) == 1
    calm = trained(case, replica, cuts=(2, 1, 3))
    Exchange(calm[:2]).run()
    train(calm[:2], 1, 1)
    assert Exchange(calm[:2], round=1).run() != hashes[:2], "the joiner counts"


def test_a_version_may_be_sent_once_its_round_is_over(make_case, replica):
    case = case_of_three(make_case)
    a, b, c = trained(case, replica, cuts=(1, 1, 1))
    exchange = Exchange([a, b], joiners=[c])
    exchange.begin()
    exchange.give()
    for each in (a, b):
        each.each(Kind.APPLY, 0)
        each.begin(1, 1, 1, [(0, 4)])
        each.train(1, 2)
    [segment] = exchange.segments
    exchange.send([(VERSION, p, "a.0", "c.0") for p in exchange.parts(segment)])
    [hash_c] = [r.hash for r in c.each(Kind.APPLY, 0).values()]
    calm = trained(case, replica, cuts=(1, 1, 1))
    assert hash_c == Exchange(calm[:2]).run()[0]


# ---------------------------------------------------------------- codecs


@pytest.mark.parametrize("codec", ["bf16", "int8", "lossless", "int4:rounding=stochastic"])
def test_all_apply_the_bytes_of_the_result(make_case, replica, codec, monkeypatch):
    monkeypatch.setattr("shoal.peer.rounds.coding.LEAST_ELEMENTS", 64)
    case = make_case(Gpt(), length=8, **{**PLAIN, "batch": 24})
    exact = trained(case, replica)
    Exchange(exact).run()
    coded = trained(case, replica, codec=codec)
    exchange = Exchange(coded)
    hashes = exchange.run()
    assert len({*hashes}) == 1
    apart = [
        float((t - exact[0].weights()[n]).norm() / t.norm()) for n, t in coded[0].weights().items()
    ]
    assert (max(apart) == 0) == (codec == "lossless")
    assert max(apart) < 0.1
    swapped = [trained(case, replica, codec=codec)[i] for i in (2, 0, 1)]
    if "stochastic" not in codec:
        assert {*Exchange(swapped).run()} == {*hashes}, "who adds up makes no difference"


@pytest.mark.parametrize("codec", ["ef+topk:ratio=10", "delta+int8", "lowrank:rank=2"])
def test_codecs_that_remember_are_refused(make_case, replica, codec):
    case = case_of_three(make_case)
    with pytest.raises(ValueError, match="attempts of a round may be done again"):
        replica(case, "a", codec=codec)


def test_large_entries_are_cut_into_pieces(make_case, replica, monkeypatch):
    """Frames of 100 elements at most, and the same version."""
    case = case_of_three(make_case)
    whole = Exchange(trained(case, replica))
    whole.run()
    for module in (vector, digest):
        monkeypatch.setattr(module, "PIECE", 100)
    replicas = trained(case, replica)
    small = Exchange(replicas)
    assert len({*small.run()}) == 1
    assert len(small.frames) > len(whole.frames)
    assert max(len(f) for f in small.frames.values()) <= 400
    assert same(replicas[0].weights(), whole.replicas[0].weights())


# ---------------------------------------------------------------- what goes wrong


def test_no_number_is_named_and_goes_nowhere(make_case, replica):
    case = case_of_three(make_case)
    a, *_ = trained(case, replica, cuts=(2, 1, 1))
    a.begin(1, 1, 1, [(0, 4)])
    device = a.devices["a.1"]
    with torch.no_grad():
        device._work.held[1].executor.parameters["last.bias"][0] = float("nan")
    found = a.contribute(1)
    assert (found["a.0"].code, found["a.1"].code) == ("", "nonfinite")
    assert "last.bias" in found["a.1"].why


def test_who_moved_too_far_says_so_and_a_larger_grid_takes_it(make_case, replica):
    case = case_of_three(make_case)
    replicas = trained(case, replica)
    tight = Exchange(replicas, exponent=-20)
    found = tight.begin()
    assert {r.code for r in found.values()} == {"overflow"}
    assert "expected less than 2^-20" in found["a.0"].why
    assert len({*Exchange(replicas, attempt=2, exponent=0).run()}) == 1


@pytest.mark.parametrize("what", ["large", "nan", "short", "long", "codec", "absent", "port"])
def test_a_broken_contribution_spoils_nothing(make_case, replica, what):
    """It is refused, and the sum is as if it had not come: the right one makes it whole."""
    case, held = case_of_three(make_case), []

    def broken(key, frame):
        if key.hop != GIVE or held:
            return frame
        held.append(frame)
        data = bytearray(frame.data)
        if what in ("large", "nan"):
            np.frombuffer(data, "<f4")[-1] = 1e30 if what == "large" else np.nan
        data = data[:-4] if what == "short" else data + b"\0" * 4 if what == "long" else data
        changed = replace(frame, data=memoryview(data), absent=what == "absent")
        if what == "codec":
            return replace(changed, codec="bf16/1")
        if what == "port":
            return replace(changed, key=key._replace(port=f"0{key.port}"))
        return changed

    wanted = Exchange(trained(case, replica)).run()
    exchange = Exchange(trained(case, replica), change=broken)
    exchange.begin()
    each = [(s, p) for s in exchange.segments for p in exchange.parts(s)]
    exchange.send([(GIVE, p, g.peer, s.aggregator) for s, p in each for g in s.givers])
    [error] = exchange.refused.values()
    expected = {"large": LargeContributionError, "nan": LargeContributionError}
    expected |= {"short": CodecError, "long": CodecError}
    assert isinstance(error, expected.get(what, TensorSpecError))
    [right] = held
    target = exchange.devices[right.key.destination]
    result = next(
        exchange.key(RESULT, p, s.aggregator, t)
        for s, p in each
        for t in s.takers
        if t != s.aggregator == right.key.destination and port_of(p) == right.key.port
    )
    with pytest.raises(KeyError, match="is not there to be sent"):
        target.payload(result)
    target.accept(replace(right, data=memoryview(bytearray(exchange.frames[right.key]))))
    exchange.send([(RESULT, p, s.aggregator, t) for s, p in each for t in s.takers])
    assert exchange.apply() == wanted


def test_a_frame_that_comes_twice_counts_once(make_case, replica):
    case = case_of_three(make_case)
    wanted = Exchange(trained(case, replica)).run()
    exchange = Exchange(trained(case, replica))

    def twice(key, frame):
        again = replace(frame, data=memoryview(bytearray(frame.data)))
        exchange.devices[key.destination].accept(again)
        return frame

    exchange.change = twice
    assert exchange.run() == wanted


def test_frames_of_other_attempts_are_refused(make_case, replica):
    case = case_of_three(make_case)
    replicas = trained(case, replica)
    old = Exchange(replicas, attempt=1)
    old.begin()
    kept = []
    old.change = lambda key, frame: kept.append(frame)
    each = [(s, p) for s in old.segments for p in old.parts(s)]
    old.send([(GIVE, p, g.peer, s.aggregator) for s, p in each for g in s.givers])
    assert kept
    new = Exchange(replicas, attempt=2)
    new.begin()
    for frame in kept:
        device = new.devices[frame.key.destination]
        assert device.most_bytes(frame.key) == 0
        assert device.most_bytes(frame.key._replace(term=3)) is None
        with pytest.raises(ValueError, match="has none come"):
            device.accept(frame)
    new.give()
    assert len({*new.apply()}) == 1


def test_a_version_that_is_not_whole_is_not_applied(make_case, replica):
    case = case_of_three(make_case)
    replicas = trained(case, replica)
    before = [r.weights() for r in replicas]
    lost = []

    def lose(key, frame):
        if key.hop == RESULT and not lost:
            lost.append(frame)
            return None
        return frame

    exchange = Exchange(replicas, change=lose)
    exchange.begin()
    exchange.give()
    peer = lost[0].key.destination
    [found] = [r.each(Kind.APPLY, 0)[peer] for r in replicas if peer in r.devices]
    assert found.code == "missing"
    mine = next(i for i, r in enumerate(replicas) if peer in r.devices)
    device = replicas[mine].devices[peer]
    for held in device._work.held.values():
        for name, tensor in held.executor.parameters.items():
            assert torch.equal(tensor, before[mine].get(name, tensor))
    device.accept(lost[0])
    assert not device.compute(0, Action(Kind.APPLY)).round.code


# ---------------------------------------------------------------- snapshots


def moved(case, replica, old, name, cuts, step):
    """The same replica, made anew from its snapshots, with other stages."""
    states = tuple(device.snapshot(step)() for device in old.devices.values())
    return replica(case, name, cuts, of=3, method="diloco", resumed=states)


@pytest.mark.parametrize("when", ["in the middle", "contributed", "applied", "committed"])
def test_going_on_from_a_snapshot_in_a_round_equals_never_having_stopped(make_case, replica, when):
    case = case_of_three(make_case)
    found = []
    for stops in (False, True):
        replicas = trained(case, replica, cuts=(2, 2, 1))
        Exchange(replicas).run()
        for i, each in enumerate(replicas):
            each.begin(1, 1, 2, hand_out(i, 1, 2, 3))
            each.train(1, 2)
            if when != "in the middle":
                each.train(2, 3)
                each.contribute(1)
        if when in ("applied", "committed"):
            Exchange(replicas, round=1).run()
        if stops:
            step = 2 if when == "in the middle" else 3
            b = replicas[1]
            replicas[1] = moved(case, replica, b, "b", 3 if step == 3 else 2, step)
            if when != "committed":
                replicas[1].begin(1, 1, 2, hand_out(1, 1, 2, 3))
        if when == "in the middle":
            for each in replicas:
                each.train(2, 3)
        if when != "committed":
            for each in replicas:
                each.contribute(1)
            found.append(Exchange(replicas, round=1, attempt=2).run())
        for i, each in enumerate(replicas):
            each.begin(2, 3, 1, hand_out(i, 20, 1, 3))
        found.append([r.hash for r in replicas[0].contribute(2).values()])
        for each in replicas:
            each.contribute(2)
        found.append(Exchange(replicas, round=2).run())
    half = len(found) // 2
    assert found[:half] == found[half:]
    assert all(len({*hashes}) == 1 for hashes in (found[0], found[-1]))


def test_snapshots_without_what_rounds_began_with_are_named(make_case, replica):
    case = case_of_three(make_case)
    a, *_ = trained(case, replica)
    tensors = dict(load_records([a.devices["a.0"].snapshot(1)()]).tensors)
    del tensors["round:param:scale:base"]
    with pytest.raises(SnapshotError, match="began with of 'param:scale'"):
        replica(case, "a", of=3, resumed=(in_parts(write_records(tensors)),), method="diloco")


def test_the_owner_is_asked_for_what_rounds_keep(make_case, replica):
    case = case_of_three(make_case)
    plain = case.world(case.plan(1, ["a"]))
    for method, copies in (("average", 1), ("diloco", 2)):
        one = replica(case, "a", of=3, method=method)
        rounds = one.devices["a.0"]._work.rounds
        assert rounds.size_bytes == 4 * copies * one.vector.elements
        more = one.world.built["a.0"].device_bytes - plain.built["a"].device_bytes
        assert more == rounds.size_bytes
        assert one.world.built["a.0"].vector.entries == one.vector.entries
