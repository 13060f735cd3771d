"""Participants that train on features of all as well come to what each would come to in a plain
loop, which draws them once more; and what features are drawn by is what all clients have
together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.dag.capture.capture import capture
from shoal.dag.execute.model_copies import RECORDED_AFTER
from shoal.dag.transforms.feature_statistics import (
    COUNT,
    DRAWN,
    SQUARE,
    SUM,
    above_features,
    with_statistics,
)
from shoal.job import Train
from shoal.job.clients.local_work import FedImproOptions
from shoal.peer.federated.batches import Participant, batches
from shoal.peer.federated.cohort import Cohort, Trained
from shoal.peer.federated.local_cohort import mean_of
from shoal.peer.federated.shared_features import Distribution, SharedFeatures, distribution_of
from shoal.sim.plain.client_loops import ClientWork
from shoal.sim.plain.plain_impro import ImproClient
from shoal.sim.plain.plain_vhl import with_places

SEED, ROUND, STEPS, BATCH = 5, 2, RECORDED_AFTER + 4, 4
OPTIONS = FedImproOptions(weight=0.7, share=0.2, batch=5, most_std=0.6, features="low")
TRAIN = Train(
    **{"steps": 9, "batch": BATCH, "optimizer": "sgd", "lr": 0.05, "momentum": 0.5},
    **{"schedule": "constant", "warmup": 0, "clip": 2.0, "weight_decay": 0.0},
)


class Model(nn.Module):
    def __init__(self, normed: bool = False) -> None:
        super().__init__()
        norm = [nn.BatchNorm1d(6)] if normed else []
        self.low = nn.Sequential(nn.Flatten(), nn.Linear(15, 8), nn.Tanh())
        self.high = nn.Sequential(nn.Linear(8, 6), *norm, nn.Tanh(), nn.Linear(6, 3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.high(self.low(x)), y)


class Samples:
    """A reader of 40 samples."""

    def __init__(self) -> None:
        rng = torch.Generator().manual_seed(1)
        self.x = torch.randn(40, 3, 5, generator=rng)
        self.y = torch.randint(0, 3, (40,), generator=rng)

    def samples(self, places: np.ndarray) -> dict[str, Tensor]:
        at = torch.from_numpy(places)
        return {"x": self.x[at], "y": self.y[at]}


def statistics() -> dict[str, Tensor]:
    """Of a version that has seen two of the classes, one of them half a time."""
    rng = torch.Generator().manual_seed(8)
    seen = torch.randn(3, 7, 8, generator=rng) * 0.5
    count = torch.tensor([7.0, 0.0, 3.5])
    by = count[:, None] / 7
    return {COUNT: count, SUM: by * seen.sum(1), SQUARE: by * seen.square().sum(1)}


def together(
    model: Model,
    some: Sequence[Participant],
    options: FedImproOptions = OPTIONS,
    steps: int = STEPS,
) -> list[Trained]:
    """What participants that are trained side by side come to."""
    reader, names = Samples(), {"features": options.features}
    example = reader.samples(np.arange(2))
    graph, _ = with_statistics(capture(model, example).graph, options.share, **names)
    version = {n: t.detach() for n, t in [*model.named_parameters(), *model.named_buffers()]}
    version |= statistics()
    plans = batches(some, seed=1, round_=ROUND, batch=BATCH, steps=steps)
    above = above_features(graph, options.share, **names)
    shared = SharedFeatures(options, above, seed=SEED, batch=BATCH, device=torch.device("cpu"))
    cohort = Cohort(graph, TRAIN, features=shared)
    mine = [*zip(some, plans, strict=True)]
    return [*cohort.work(version, mine, reader.samples, round_=ROUND)]


def each(made: Sequence[Trained]) -> dict[int, dict[str, Tensor]]:
    return {
        number: {n: t[k].detach() for n, t in trained.values.items()}
        for trained in made
        for k, number in enumerate(trained.participants)
    }


def alone(model: Model, one: Participant) -> Mapping[str, Tensor]:
    """What a participant comes to in a plain loop, under the names of the graph."""
    (plan,) = batches([one], seed=1, round_=ROUND, batch=BATCH, steps=STEPS)
    like = Samples().samples(np.arange(2))
    client = ImproClient(model, OPTIONS, like, x="x", y="y", batch=BATCH, seed=SEED).train()
    for name, tensor in statistics().items():
        client.get_buffer(name.rpartition(".")[2]).copy_(tensor)
    mine = [ClientWork(one.number, [b.tolist() for b in plan])]
    *_, (work,) = with_places([[], [], mine], BATCH)
    read = client.reading(Samples())  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(client.parameters(), lr=0.05, momentum=0.5)
    for step in work.batches:
        optimizer.zero_grad()
        client(**read(step)).backward()
        nn.utils.clip_grad_norm_(client.parameters(), 2.0)
        optimizer.step()
    found = client.state_dict()
    own = {n.removeprefix("module."): t for n, t in found.items() if n.startswith("module.")}
    return own | {f"feature_statistics.{n}": found[n] for n in ImproClient.AVERAGED}


@pytest.mark.parametrize(("normed", "sizes"), [(False, (8, 5, 8)), (True, (8, 6, 8))])
def test_each_comes_to_what_it_would_alone_however_many_steps_it_makes(
    normed: bool, sizes: Sequence[int]
) -> None:
    torch.manual_seed(0)
    model = Model(normed)
    some = [Participant(3 * i + 1, np.arange(12 * i, 12 * i + n)) for i, n in enumerate(sizes)]
    found = each(together(model, some))
    assert found.keys() == {p.number for p in some}
    for one in some:
        wanted = alone(model, one)
        assert found[one.number].keys() == wanted.keys()
        for name, tensor in wanted.items():
            torch.testing.assert_close(
                found[one.number][name], tensor, rtol=1e-4, atol=1e-5, msg=name
            )


def test_what_lies_below_features_has_no_gradient_of_drawn_ones() -> None:
    torch.manual_seed(0)
    model, some = Model(), [Participant(4, np.arange(4))]
    unclipped = [
        each(together(model, some, replace(OPTIONS, weight=weight), steps=1))[4]
        for weight in (0.0, 0.01)
    ]
    for name, tensor in unclipped[0].items():
        same = torch.equal(tensor, unclipped[1][name])
        assert same == (not name.startswith("high")), name


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10**6), st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_features_are_drawn_as_those_of_all_clients_together_lie(
    seed: int, sizes: list[int]
) -> None:
    rng = np.random.default_rng(seed)
    labels = [rng.integers(0, 3, n) for n in sizes]
    features = [rng.normal(y[:, None] + 2 * i, 0.5, (len(y), 4)) for i, y in enumerate(labels)]

    def rows(of: np.ndarray, y: np.ndarray) -> np.ndarray:
        return np.stack([of[y == c].sum(0) for c in range(3)]) / len(y)

    made = [
        Trained(
            (i,),
            {
                COUNT: torch.from_numpy(rows(np.ones((len(y), 1)), y)[None, :, 0]),
                SUM: torch.from_numpy(rows(f, y)[None]),
                SQUARE: torch.from_numpy(rows(f**2, y)[None]),
            },
            (1,),
            torch.zeros(1),
        )
        for i, (y, f) in enumerate(zip(labels, features, strict=True))
    ]
    version = mean_of(made, {i: n for i, n in enumerate(sizes)})
    found = distribution_of(version, 0.0)
    y, pooled = np.concatenate(labels), np.concatenate(features)
    assert found.classes.tolist() == [c for c in range(3) if (y == c).any()]
    for c, mean, std in zip(found.classes, found.mean, found.std, strict=True):
        np.testing.assert_allclose(mean, pooled[y == c].mean(0), rtol=1e-6, atol=1e-9)
        wanted = np.sqrt(pooled[y == c].var(0) + 1e-5)
        np.testing.assert_allclose(std, wanted, rtol=1e-5)
    capped = distribution_of(version, 0.3)
    np.testing.assert_array_equal(capped.std, np.minimum(found.std, 0.3))


def shared(options: FedImproOptions = OPTIONS) -> SharedFeatures:
    example = Samples().samples(np.arange(2))
    graph, _ = with_statistics(capture(Model(), example).graph, options.share, features="low")
    above = above_features(graph, options.share, features="low")
    return SharedFeatures(options, above, seed=SEED, batch=BATCH, device=torch.device("cpu"))


def test_drawn_features_hang_on_round_client_and_step_and_have_classes_in_turns() -> None:
    drawing = shared(replace(OPTIONS, batch=600))
    known = Distribution(np.array([0, 2]), np.array([[1.0] * 8, [-3.0] * 8]), np.full((2, 8), 0.5))

    def drawn(clients: list[int], round_: int = 1, step: int = 0) -> tuple[Tensor, Tensor]:
        some = [Participant(n, np.arange(3)) for n in clients]
        found = drawing.drawn(known, some, round_, step)
        return found[DRAWN], found["y"]

    features, labels = drawn([3, 7])
    assert features.shape == (2, 600, 8)
    assert torch.equal(drawn([7])[0][0], features[1])
    for other in (features[0], drawn([7], step=1)[0][0], drawn([7], round_=2)[0][0]):
        assert not torch.equal(other, features[1])
    for c, mean in ((0, 1.0), (2, -3.0)):
        mine = features[labels == c]
        assert len(mine) == 600, "half of each client's"
        assert float(mine.mean()) == pytest.approx(mean, abs=0.03)
        assert float(mine.std()) == pytest.approx(0.5, abs=0.02)


def test_nothing_is_drawn_before_there_are_statistics_or_without_weight() -> None:
    version = statistics()
    drawing = shared(replace(OPTIONS, rise=4))
    known = drawing.begin(version, 1)
    assert known is not None
    assert known.classes.tolist() == [0, 2]
    assert drawing.begin(version, 0) is None
    assert shared(replace(OPTIONS, weight=0.0)).begin(version, 9) is None
    nothing = {name: torch.zeros_like(t) for name, t in version.items()}
    assert drawing.begin(nothing, 1) is None
    gone = {name: 1e-8 * t for name, t in version.items()}
    assert drawing.begin(gone, 1) is None, "it is forgotten"
