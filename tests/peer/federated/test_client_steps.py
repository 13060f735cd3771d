"""Clients by steps of a plan: whose each step is, and what is made of what clients came to."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shoal.dag.capture.capture import capture
from shoal.dag.rounds.cohorts import client_steps, cohort_of
from shoal.job import Training
from shoal.job.clients.client_options import Cohorts
from shoal.job.clients.local_work import LocalWork
from shoal.job.clients.partitioning import Partitioning
from shoal.job.rounds import RoundSettings
from shoal.job.training import Train
from shoal.peer.data.manifest import DataError
from shoal.peer.data.survey import Ignored
from shoal.peer.federated.client_steps import ClientSteps, check_labels, why_not_in_steps
from shoal.proto.broker_pb2 import RoundStart, SampleRange


class Divided:
    """Client c of n has the samples that follow those of the clients before it."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes, self._ends = sizes, np.cumsum(sizes)

    def train(self, client: int) -> Any:
        return np.arange(self._ends[client] - self.sizes[client], self._ends[client])

    def client_of(self, sample: int) -> int:
        return int(np.searchsorted(self._ends, sample, side="right"))


def model(**of: Any) -> Any:
    return SimpleNamespace(**({"buffers": (), "operators": (), "weight": ""} | of))


def steps_of(sizes: list[int], batch: int, per_round: int, **work: Any) -> tuple[Any, Divided]:
    partition = Partitioning(kind="iid", clients=len(sizes))
    weight = work.pop("weight", "samples")
    cohorts = Cohorts(
        partition=partition,
        labels="",
        clients=len(sizes),
        per_round=per_round,
        local=LocalWork(**work),
        weight=weight,
    )
    rounds = RoundSettings(method="fedavg", cohorts=cohorts)
    training = Training(seed=4, train=Train(steps=3, batch=batch), rounds=rounds)
    divided = Divided(sizes)
    return ClientSteps(training, model(), cast(Any, divided), batch), divided


def begun(local: ClientSteps, steps: int, *ranges: tuple[int, int], round_: int = 2) -> RoundStart:
    cohort = [SampleRange(first=a, count=n) for a, n in ranges]
    start = RoundStart(round=round_, first_step=7, steps=steps, cohort=cohort)
    local.begin(start)
    return start


@given(st.data())
def test_each_step_is_of_one_client_and_each_client_has_its_own_samples(
    data: st.DataObject,
) -> None:
    sizes = data.draw(st.lists(st.integers(1, 13), min_size=2, max_size=7))
    batch = data.draw(st.integers(1, 5))
    passes, steps = data.draw(st.sampled_from([(1, 0), (2, 0), (0, 1), (0, 5)]))
    per_round = data.draw(st.integers(1, len(sizes)))
    first = data.draw(st.integers(0, per_round - 1))
    count = data.draw(st.integers(1, per_round - first))
    local, divided = steps_of(sizes, batch, per_round, passes=passes, steps=steps)
    clients = cohort_of(len(sizes), 4, 2, range(first, first + count))
    mine = [sizes[c] for c in clients]
    total = int(client_steps(mine, batch, passes=passes, steps=steps).sum())
    begun(local, total, (first, count))
    at, seen = 7, []
    for client, size in zip(clients, mine, strict=True):
        rest, walked = list[int](), Counter[int]()
        own = steps or passes * -(-size // batch)
        for k in range(own):
            whole = [int(local.samples(at, m, 1)[0]) for m in range(batch)]
            real = [x for m, x in enumerate(whole) if local.counts(at, m)]
            rest = rest or [batch] * (size // batch) + [size % batch] * bool(size % batch)
            assert len(real) == rest.pop(0)
            assert whole[: len(real)] == real, "what only fills up comes last"
            assert set(whole) == set(real), "and has no sample of others"
            assert {divided.client_of(x) for x in real} == {client}
            walked.update(real)
            assert local.ends(at) == (size if k + 1 == own else 0)
            at += 1
        if passes:
            assert set(walked.values()) == {passes}
            assert len(walked) == size
        seen.append(client)
    assert at == 7 + total
    for wrong in (6, at):
        with pytest.raises(DataError, match="of no client"):
            local.samples(wrong, 0, 1)


def test_the_mean_is_over_clients_once_wherever_it_goes_on() -> None:
    sizes, generator = [3, 8, 5], torch.Generator().manual_seed(0)
    version = torch.randn(6, generator=generator)
    came = [version + torch.randn(6, generator=generator) for _ in range(3)]
    local, _ = steps_of(sizes, 4, 3, passes=1)
    order = cohort_of(3, 4, 2, range(3))
    begun(local, 5, (0, 3))
    last = {n: 6 + sum(-(-sizes[m] // 4) for m in order[: i + 1]) for i, n in enumerate(order)}
    for number in order[:2]:
        local.add("param:w", came[number], version, last[number])
    left = {name: tensor.clone() for name, tensor in local.state().items()}
    local.add("param:w", torch.full((6,), 1e9), version, last[order[2]])  # of a step that is lost

    other, _ = steps_of(sizes, 4, 3, passes=1)
    other.load(left)
    begun(other, 5, (0, 3))
    other.add("param:w", came[order[2]], version, last[order[2]])
    moved = other.work({})
    exact = sum(n * x.double() for n, x in zip(sizes, came, strict=True)) / sum(sizes)
    squares = sum(
        n * float((x.double() - version.double()).square().sum())
        for n, x in zip(sizes, came, strict=True)
    )
    assert moved == pytest.approx(squares / sum(sizes))
    found = other.clients("param:w")
    assert found is not None
    torch.testing.assert_close(found, exact.float(), rtol=0, atol=0)


@pytest.mark.parametrize("count", [1, 3])
def test_a_client_that_is_in_it_twice_or_not_at_all_is_noticed(count: int) -> None:
    local, _ = steps_of([2, 2], 2, 2, passes=1)
    begun(local, 2, (0, 2))
    for _ in range(count):
        local.add("param:w", torch.ones(2), torch.zeros(2), 7)
    with pytest.raises(DataError, match=f"has {2 * count} of the weight 4"):
        local.clients("param:w")


def test_a_sum_is_of_its_round() -> None:
    local, _ = steps_of([2, 2], 2, 2, passes=1)
    begun(local, 2, (0, 2))
    local.add("param:w", torch.ones(2), torch.zeros(2), 7)
    begun(local, 2, (0, 2), round_=3)
    assert not local.state()


def test_steps_that_are_not_those_of_the_clients_are_refused() -> None:
    local, _ = steps_of([2, 7], 2, 2, passes=1)
    begun(local, 4, (0, 2))
    with pytest.raises(DataError, match="has 4 steps: expected 5, those of its 2 clients"):
        local.samples(7, 0, 1)


def test_whole_microbatches_divide_a_batch() -> None:
    local, _ = steps_of([6], 4, 1, passes=1)
    begun(local, 2, (0, 1))
    assert [len(local.samples(7, m, 2)) for m in range(2)] == [2, 2]
    with pytest.raises(DataError, match="a batch of 2 samples in step 8: expected a multiple of"):
        local.samples(8, 0, 4)


@pytest.mark.parametrize(
    ("found", "method", "why"),
    [
        ({"buffers": [SimpleNamespace(update=object())]}, "fedavg", "running statistics"),
        (
            {"operators": [SimpleNamespace(target="shoal.dropout.default")]},
            "fedavg",
            "random numbers",
        ),
        ({"weight": "w"}, "fedprox", "weighs its losses"),
    ],
)
def test_models_whose_clients_one_peer_trains(found: Any, method: str, why: str) -> None:
    assert why in why_not_in_steps(model(**found), method)
    assert not why_not_in_steps(model(), method)


class Mean(nn.Module):
    """A linear classifier; `counted`: its mean is over labels that count, which it says."""

    def __init__(self, counted: bool) -> None:
        super().__init__()
        self.layer, self.counted = nn.Linear(3, 2), counted

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        if not self.counted:
            return nn.functional.cross_entropy(self.layer(x), y)
        total = nn.functional.cross_entropy(self.layer(x), y, reduction="sum")
        count = (y != -100).sum()
        return {"loss": total / count.clamp(min=1), "weight": count.float()}


def test_labels_that_a_loss_ignores_are_refused_where_its_mean_is_over_others() -> None:
    example = {"x": torch.randn(4, 3), "y": torch.zeros(4, dtype=torch.int64)}
    plain, counted = (capture(Mean(c), example, sizes=(1, 2)).graph for c in (False, True))
    [entropy] = [op.name for op in plain.operators if "cross_entropy" in op.target]
    check_labels(plain, Ignored())
    for ignored in (Ignored(seen=frozenset({entropy})), Ignored(unknown=frozenset({entropy}))):
        with pytest.raises(DataError, match="labels that the loss ignores"):
            check_labels(plain, ignored)
    [entropy] = [op.name for op in counted.operators if "cross_entropy" in op.target]
    check_labels(counted, Ignored(seen=frozenset({entropy})))
