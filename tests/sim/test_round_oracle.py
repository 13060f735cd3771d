"""The loops of rounds against plainer ones: the chain of identities between the methods."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from shoal.job import Train
from shoal.sim.plain import oracle
from shoal.sim.plain.round_methods import (
    Average,
    DiLoCo,
    NoLoCo,
    Residual,
    Saps,
    SparseLoCo,
    Streaming,
    e3m0,
    sign,
    strided,
    top_of_chunks,
    two_bits,
)
from shoal.sim.plain.round_oracle import (
    PlainMember,
    PlainMethod,
    PlainReplica,
    PlainResult,
    Round,
    even,
    train,
)

STEPS, BATCH = 12, 8
SGD = Train(steps=STEPS, batch=BATCH, optimizer="sgd", lr=0.05, momentum=0.0, clip=0.0)
ADAM = Train(steps=STEPS, batch=BATCH, lr=0.02)


class Net(nn.Module):
    """Two blocks, so that there are fragments."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 5)
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return (x.sum(-1) - y).square().mean()


def net() -> Net:
    torch.manual_seed(5)
    return Net().double()


def batches(numbers: range) -> dict[str, Tensor]:
    """Of each sample by itself, so that a batch is the union of its parts."""
    each = [
        torch.randn(7, generator=torch.Generator().manual_seed(1 + g)).double() for g in numbers
    ]
    found = torch.stack(each)
    return {"x": found[:, :6], "y": found[:, 6]}


def run(method: PlainMethod, rounds: Sequence[Round], t: Train = ADAM) -> PlainResult:
    return train(net(), rounds, batches, t, method, steps=STEPS)


def weights(result: PlainResult, replica: int = 0) -> dict[str, Tensor]:
    return {n: p.detach() for n, p in result.replicas[replica].weights.items()}


def close(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> None:
    torch.testing.assert_close(dict(a), dict(b), rtol=1e-9, atol=1e-11)


def same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> None:
    torch.testing.assert_close(dict(a), dict(b), rtol=0, atol=0)


@pytest.mark.parametrize("t", [SGD, ADAM], ids=["sgd", "adamw"])
def test_one_replica_is_the_plain_loop(t: Train) -> None:
    module = net()
    plain = oracle.train(
        module,
        lambda step, m: batches(range(step * BATCH, (step + 1) * BATCH)),
        t,
        steps=STEPS,
        microbatches=1,
    )
    found = run(Average(), even(1, steps=STEPS, every=4, batch=BATCH), t)
    assert [x for r in found.losses for x in r[0]] == pytest.approx(plain.losses, rel=1e-9)
    close(weights(found), dict(module.named_parameters()))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_step_of_sgd_and_averaging_is_a_step_on_the_union(momentum: float) -> None:
    t = Train(steps=STEPS, batch=BATCH, optimizer="sgd", lr=0.05, momentum=momentum, clip=0.0)
    module = net()
    oracle.train(
        module,
        lambda step, m: batches(range(step * BATCH, (step + 1) * BATCH)),
        t,
        steps=STEPS,
        microbatches=1,
    )
    found = run(Average(), even(4, steps=STEPS, every=1, batch=BATCH), t)
    for k in range(4):
        close(weights(found, k), dict(module.named_parameters()))


ROUNDS = even(4, steps=STEPS, every=5, batch=BATCH)


@pytest.mark.parametrize(
    "method",
    [
        DiLoCo(lr=1.0, momentum=0.0),
        SparseLoCo(decay=0.0, encode=top_of_chunks(1.0)),
        Streaming(1.0, 0.0, fragments=1, mix=0.0),
    ],
    ids=["diloco", "sparse-loco", "streaming-diloco"],
)
def test_at_the_plainest_options_it_is_averaging(method: PlainMethod) -> None:
    close(weights(run(method, ROUNDS)), weights(run(Average(), ROUNDS)))


def test_what_is_pruned_on_its_way_back_is_not_lost() -> None:
    """Whatever all replicas have moved is in the version, or left with one of them."""
    quarter, eighth = top_of_chunks(0.25, 16), top_of_chunks(0.125, 16)
    method = SparseLoCo(decay=1.0, encode=quarter, back=eighth)
    start, moved = dict(net().named_parameters()), {n: 0.0 for n, _ in net().named_parameters()}

    class Watched(PlainMethod):
        def begin(self, shared: dict[str, Tensor]) -> None:
            method.begin(shared)
            self.shared = shared

        def commit(self, count: int, r: Round, replicas: Mapping[int, PlainReplica]) -> None:
            for n, was in method.shared.items():
                moved[n] += sum(was - x.weights[n].detach() for x in replicas.values()) / 4
            method.commit(count, r, replicas)

    run(Watched(), ROUNDS)
    for n, was in start.items():
        left = sum(method.sent.left[k, n] for k in range(4)) / 4
        torch.testing.assert_close(was - method.shared[n], moved[n] - left)
        assert bool(left.any())


def test_streaming_in_one_fragment_and_in_time_is_diloco() -> None:
    streamed = run(Streaming(0.4, 0.9, fragments=1, mix=0.0), ROUNDS)
    same(weights(streamed), weights(run(DiLoCo(0.4, 0.9), ROUNDS)))


def test_diloco_is_its_formula() -> None:
    found = DiLoCo(lr=0.7, momentum=0.9)
    versions = [dict(net().named_parameters())]

    def committed(count: int, result: PlainResult) -> None:
        versions.append({n: p.clone() for n, p in found.shared.items()})

    unequal = [
        Round(
            r.start, r.every, tuple(PlainMember(m.replica, m.steps, m.samples, w) for m, w in pairs)
        )
        for r in ROUNDS
        for pairs in [list(zip(r.members, (1, 2, 3, 4), strict=True))]
    ]
    train(net(), unequal, batches, ADAM, found, steps=STEPS, committed=committed)
    momentum = {n: torch.zeros_like(p) for n, p in versions[0].items()}
    for count, r in enumerate(unequal):
        trained = [_alone(versions[count], r, m, count, unequal) for m in r.members]
        for name, was in versions[count].items():
            d = sum(m.weight * (was - w[name]) for m, w in zip(r.members, trained, strict=True))
            d = d / 10
            momentum[name] = 0.9 * momentum[name] + d
            step = 0.7 * (d + 0.9 * momentum[name])
            torch.testing.assert_close(versions[count + 1][name], was - step, rtol=1e-9, atol=1e-11)


def _alone(
    start: Mapping[str, Tensor], r: Round, m: PlainMember, count: int, rounds: Sequence[Round]
) -> dict[str, Tensor]:
    """What one member makes of a version, from a loop that knows no rounds but its own."""
    module, t = net(), ADAM
    optimizer = oracle.optimizer_of(module, t)
    versions = _STARTS.setdefault(m.replica, {})
    versions[count] = start
    for k in range(count + 1):
        module.load_state_dict({n: p.detach() for n, p in versions[k].items()})
        own = rounds[k].members[m.replica]
        for j in range(own.steps):
            optimizer.zero_grad()
            module(**batches(own.part(j))).backward()
            norm = torch.stack([p.grad.norm() for p in module.parameters()]).norm()
            for p in module.parameters():
                p.grad *= min(1.0, t.clip / float(norm))
            for group in optimizer.param_groups:
                group["lr"] = oracle.learning_rate(t, rounds[k].start + j, STEPS)
            optimizer.step()
    return {n: p.detach().clone() for n, p in module.named_parameters()}


_STARTS: dict[int, dict[int, Mapping[str, Tensor]]] = {}


@pytest.mark.parametrize("late", [1, 2])
def test_what_arrives_late_loses_nothing(late: int) -> None:
    """With a mean of one there is nothing to learn from others: the local steps alone remain."""
    rounds = even(1, steps=STEPS, every=3, batch=BATCH, fragments=2, late=late)
    streamed = run(Streaming(1.0, 0.0, mix=0.0), rounds)
    close(weights(streamed), weights(run(Average(), rounds)))


def test_every_parameter_is_in_one_fragment() -> None:
    names = [n for n, _ in net().named_parameters()]
    fragments = strided(names, 2)
    assert sorted(itertools.chain.from_iterable(fragments)) == sorted(names)
    assert "blocks.1.weight" in fragments[1]
    assert "first.weight" in fragments[0]


def _paired(count: int) -> tuple[tuple[int, int], ...]:
    return (((0, 1), (2, 3)), ((0, 2),))[count % 2]


def test_without_momentum_noloco_is_the_mean_of_pairs() -> None:
    rounds = even(4, steps=STEPS, every=3, batch=BATCH, pairs=_paired)
    noloco = run(NoLoCo(lr=1.0, momentum=0.0), rounds)
    pairs = run(Saps(lambda count, name, shape: torch.ones(shape, dtype=torch.bool)), rounds)
    for k in range(4):
        close(weights(noloco, k), weights(pairs, k))


def test_two_that_meet_in_every_round_are_averaged() -> None:
    rounds = even(2, steps=STEPS, every=3, batch=BATCH, pairs=lambda count: ((0, 1),))
    close(weights(run(NoLoCo(1.0, 0.0), rounds)), weights(run(Average(), rounds)))


def test_saps_exchanges_what_the_mask_has_and_keeps_every_mean() -> None:
    def mask(count: int, name: str, shape: torch.Size) -> Tensor:
        return torch.rand(shape, generator=torch.Generator().manual_seed(count)) < 0.3

    def at_rest(pairs: bool) -> PlainResult:
        idle = Train(steps=STEPS, optimizer="sgd", lr=0.05, clip=0.0, weight_decay=0.0)
        rounds = even(4, steps=3, every=3, batch=BATCH, pairs=_paired if pairs else lambda c: ())
        return train(net(), rounds, batches, idle, Saps(mask), steps=STEPS)

    met, alone = at_rest(True), at_rest(False)
    close(met.mean(), alone.mean())
    for a, b in ((0, 1), (2, 3)):
        for name, p in weights(met, a).items():
            chosen = mask(0, name, p.shape)
            apart = weights(alone, a)[name], weights(alone, b)[name]
            torch.testing.assert_close(p[chosen], ((apart[0] + apart[1]) / 2)[chosen])
            assert torch.equal(p[~chosen], apart[0][~chosen])
            assert torch.equal(p[chosen], weights(met, b)[name][chosen])


def test_unequal_hardware_and_who_comes_and_goes() -> None:
    """Ranges, steps and members as a broker may give them; a late joiner starts at the version."""
    rounds = [
        Round(0, 3, (PlainMember(0, 3, range(0, 12), 12), PlainMember(1, 2, range(12, 24), 12))),
        Round(3, 3, (PlainMember(1, 4, range(24, 40), 16), PlainMember(2, 2, range(40, 48), 8))),
    ]
    seen: list[dict[str, Tensor]] = []

    def committed(count: int, result: PlainResult) -> None:
        seen.extend(weights(result, k) for k in result.replicas)

    found = train(net(), rounds, batches, ADAM, DiLoCo(), steps=STEPS, committed=committed)
    assert [{k: len(x) for k, x in r.items()} for r in found.losses] == [{0: 3, 1: 2}, {1: 4, 2: 2}]
    for k in (1, 2):
        same(weights(found, 0), weights(found, k))
    again = train(net(), rounds, batches, ADAM, DiLoCo(), steps=STEPS)
    same(weights(found), weights(again))
    assert found.losses == again.losses


NUMBERS = st.lists(st.integers(-1000, 1000), min_size=1, max_size=40)


@given(rounds=st.lists(NUMBERS, min_size=1, max_size=4), decay=st.sampled_from([0.0, 0.5, 1.0]))
def test_what_is_sent_and_what_stays_is_all(rounds: list[list[int]], decay: float) -> None:
    """Exactly, where no rounding is possible: whole numbers and decays by powers of two."""
    size = min(map(len, rounds))
    residual = Residual(top_of_chunks(0.25, chunk=8), decay)
    left = torch.zeros(size, dtype=torch.float64)
    for numbers in rounds:
        d = torch.tensor(numbers[:size], dtype=torch.float64)
        sent = residual("w", d)
        assert torch.equal(residual.left["w"] + sent, decay * left + d)
        left = residual.left["w"]


@given(NUMBERS)
def test_four_bits_are_the_nearest_of_their_fifteen_numbers(numbers: list[int]) -> None:
    x = torch.tensor(numbers, dtype=torch.float64)
    most = float(x.abs().max())
    levels = torch.tensor([0.0, *(s * most * 2.0**-i for s in (1, -1) for i in range(7))]).double()
    nearest = (x[:, None] - levels).abs().min(1).values
    torch.testing.assert_close((e3m0(x) - x).abs(), nearest)
    assert all(bool((v == levels).any()) for v in e3m0(x))


@given(NUMBERS, st.sampled_from([4, 8]))
def test_the_top_of_each_chunk_is_kept(numbers: list[int], chunk: int) -> None:
    x = torch.tensor(numbers, dtype=torch.float64)
    found = top_of_chunks(0.25, chunk)(x)
    for first in range(0, len(numbers), chunk):
        row, kept = x[first : first + chunk], found[first : first + chunk]
        k = max(1, round(0.25 * len(row)))
        assert torch.equal(kept[kept != 0], row[kept != 0])
        assert kept.abs().sum() == row.abs().sort(descending=True).values[:k].sum()


@given(NUMBERS)
def test_two_bits_and_one_keep_signs_and_the_mean_magnitude(numbers: list[int]) -> None:
    x = torch.tensor([numbers], dtype=torch.float64)
    assert len(two_bits(x).abs().unique()) <= 3  # of them 0
    for encode in (two_bits, sign):
        found = encode(x)
        assert torch.equal(found.sign(), x.sign()) or not x.any()
    torch.testing.assert_close(two_bits(x).abs().sum(), x.abs().sum())
    assert (two_bits(x) - x).norm() <= (sign(x) - x).norm() + 1e-9
