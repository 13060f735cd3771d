"""Participants that train on virtual data as well come to what each would come to in a plain loop,
which makes the noise once more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.dag.capture.capture import capture
from shoal.dag.execute.model_copies import RECORDED_AFTER
from shoal.dag.transforms.virtual_classes import above_loss, with_classes
from shoal.job import Job, Train
from shoal.job.clients.local_work import LocalWork, VhlOptions
from shoal.peer.federated.batches import Participant, batches
from shoal.peer.federated.cohort import Cohort
from shoal.peer.federated.vhl_loss import VirtualData
from shoal.sim.plain.client_loops import ClientWork
from shoal.sim.plain.plain_vhl import VhlClient, with_places

SEED, ROUND, STEPS, BATCH, FURTHER = 5, 2, RECORDED_AFTER + 4, 4, 2
VHL = VhlOptions(
    **{"alpha": 0.7, "l1": 0.6, "l2": 0.3, "temperature": 0.5, "spread": 0.4},
    **{"batch": 3, "per_class": 6, "classes": FURTHER, "calibrate": LocalWork(passes=6)},
)
TRAIN = Train(
    **{"steps": 9, "batch": BATCH, "optimizer": "sgd", "lr": 0.05, "momentum": 0.5},
    **{"schedule": "constant", "warmup": 0, "clip": 2.0, "weight_decay": 0.0},
)


class Classifier(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.layers(x), y)


def plain() -> Classifier:
    return Classifier(nn.Flatten(), nn.Linear(15, 8), nn.Tanh(), nn.Linear(8, 3))


def normed() -> Classifier:
    layers = (nn.Conv1d(3, 4, 2, bias=False), nn.BatchNorm1d(4), nn.ReLU(), nn.Flatten())
    return Classifier(*layers, nn.Linear(16, 3, bias=False))


def named() -> Classifier:
    return Classifier(nn.Conv1d(3, 4, 2), nn.ReLU(), nn.Conv1d(4, 3, 4), nn.Flatten())


NAMES = {"features": "layers.1", "logits": "layers.3"}


def dropping() -> Classifier:
    return Classifier(nn.Flatten(), nn.Linear(15, 8), nn.Dropout(0.4), nn.Linear(8, 3))


class Samples:
    """A reader of 40 samples."""

    def __init__(self) -> None:
        rng = torch.Generator().manual_seed(1)
        self.x = torch.randn(40, 3, 5, generator=rng)
        self.y = torch.randint(0, 3, (40,), generator=rng)

    def samples(self, places: np.ndarray) -> dict[str, Tensor]:
        at = torch.from_numpy(places)
        return {"x": self.x[at], "y": self.y[at]}


def job(vhl: VhlOptions = VHL) -> Job:
    return Job(
        model={"factory": "m.py:f"},
        data={"kind": "arrays", "source": "x", "partition": {"kind": "iid", "clients": 40}},
        sync={"kind": "federated", "virtual_data": "vhl", "vhl": vhl},
        train=replace(TRAIN, steps=5),
    )


def together(
    model: Classifier, some: Sequence[Participant], steps: int = STEPS, vhl: VhlOptions = VHL
) -> dict[int, dict[str, Tensor]]:
    """What participants that are trained side by side come to."""
    reader = Samples()
    names = {"features": vhl.features, "logits": vhl.logits}
    graph = with_classes(capture(model, reader.samples(np.arange(2))).graph, FURTHER, **names)
    version = {n: t.detach() for n, t in [*model.named_parameters(), *model.named_buffers()]}
    more = [p for p in graph.parameters if p.name not in version]
    version |= {p.name: torch.zeros(p.spec.sizes) for p in more}
    plans = batches(some, seed=1, round_=ROUND, batch=BATCH, steps=steps)
    form = above_loss(graph, **names)
    cohort = Cohort(graph, TRAIN, virtual=VirtualData(vhl, form, SEED, BATCH))
    made = cohort.work(version, [*zip(some, plans, strict=True)], reader.samples, round_=ROUND)
    return {
        number: {n: t[k].detach() for n, t in trained.values.items()}
        for trained in made
        for k, number in enumerate(trained.participants)
    }


def alone(model: Classifier, one: Participant, vhl: VhlOptions = VHL) -> Mapping[str, Tensor]:
    """What a participant comes to in a plain loop, under the names of the model."""
    (plan,) = batches([one], seed=1, round_=ROUND, batch=BATCH, steps=STEPS)
    client = VhlClient.of(model, job(vhl), Samples()).train()  # type: ignore[arg-type]
    *_, (work,) = with_places(
        [[], [], [ClientWork(one.number, [b.tolist() for b in plan])]], job(vhl).train.batch
    )
    read = client.reading(Samples(), SEED)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(client.parameters(), lr=0.05, momentum=0.5)
    for step in work.batches:
        optimizer.zero_grad()
        client(**read(step)).backward()
        nn.utils.clip_grad_norm_(client.parameters(), 2.0)
        optimizer.step()
    return client.state_dict()


@pytest.mark.parametrize(
    ("make", "sizes", "other"),
    [
        (plain, (8, 8), {}),
        (normed, (8, 5, 8), {"source": "generator"}),
        (named, (8, 5), {**NAMES, "source": "generator", "noise": (1, 2)}),
    ],
    ids=["plain", "normed", "named"],
)
def test_each_comes_to_what_it_would_alone_however_many_steps_it_makes(
    make: type[Classifier], sizes: Sequence[int], other: Mapping[str, Any]
) -> None:
    torch.manual_seed(0)
    model, vhl = make(), replace(VHL, **other)
    some = [Participant(3 * i + 1, np.arange(12 * i, 12 * i + n)) for i, n in enumerate(sizes)]
    found = together(model, some, vhl=vhl)
    assert found.keys() == {p.number for p in some}
    for one in some:
        wanted = alone(model, one, vhl)
        own = {n.replace("virtual_classes.", "rows."): t for n, t in found[one.number].items()}
        own = {n if n.startswith("rows.") else f"module.{n}": t for n, t in own.items()}
        assert own.keys() == wanted.keys()
        for name, tensor in wanted.items():
            torch.testing.assert_close(own[name], tensor, rtol=1e-4, atol=1e-5, msg=name)


def test_what_a_model_draws_is_each_participants_own() -> None:
    torch.manual_seed(0)
    model, some = dropping(), [Participant(n, np.arange(8)) for n in (2, 9)]
    both = together(model, some, 3)
    for one in some:
        for name, tensor in together(model, [one], 3)[one.number].items():
            torch.testing.assert_close(both[one.number][name], tensor, rtol=1e-5, atol=1e-6)


class Functional(Classifier):
    """A classifier whose last linear is no module."""

    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(15, 3))
        self.rows = nn.Parameter(torch.eye(3) * 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(self.layers(x), self.rows), y)


def test_the_plain_loop_has_no_further_rows_for_a_linear_that_is_no_module() -> None:
    reader: Any = Samples()
    assert VhlClient.of(plain(), job(), reader).seen.logits == "layers.3"
    with pytest.raises(ValueError, match=r"not that of an nn\.Linear"):
        VhlClient.of(Functional(), job(), reader)
