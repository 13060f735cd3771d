"""Participants trained side by side come to what each would come to in a plain loop."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.dag.capture.capture import capture
from shoal.dag.execute import model_copies, records
from shoal.job import Train
from shoal.peer.federated.batches import Participant, batches
from shoal.peer.federated.cohort import Cohort
from shoal.sim.plain.oracle import learning_rate, optimizer_of
from shoal.tests.peer.optimizers.eight_bits import from_elements
from shoal.tests.peer.optimizers.exact_muon import in_float64

SAMPLES = 200


class Classifier(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.layers(x), y, ignore_index=-100)


def plain() -> Classifier:
    return Classifier(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 4))


def normed() -> Classifier:
    # A bias in front of a norm has no gradient but rounding, of which AdamW makes whole steps.
    return Classifier(nn.Linear(12, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4))


def partly_frozen() -> Classifier:
    model = Classifier(nn.Linear(12, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 4))
    model.layers[0].requires_grad_(False)
    return model


class Masked(Classifier):
    """The mean over samples that count, and how many these are."""

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        counts = y > 2  # none, in one of ten batches
        each = F.cross_entropy(self.layers(x), y, reduction="none")
        return {"loss": (each * counts).sum() / counts.sum(), "weight": counts.sum().float()}


def masked() -> Masked:
    return Masked(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 4))


class Attention(nn.Module):
    """Of three positions each attends to those before it."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = x.view(-1, 3, 1, 3, 4).unbind(1)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).flatten(1)


def attending() -> Classifier:
    return Classifier(nn.Linear(12, 36), Attention(), nn.Linear(12, 4))


class Scaled(Classifier):
    """Logits times a scalar that is trained."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.layers(x) * self.scale, y)


def scaled() -> Scaled:
    return Scaled(nn.Linear(12, 4))


MODELS = {
    "attending": attending,
    "masked": masked,
    "plain": plain,
    "normed": normed,
    "partly frozen": partly_frozen,
    "scaled": scaled,
}
TRAIN = {
    "sgd": Train(steps=9, batch=8, optimizer="sgd", lr=0.3, clip=0.4, warmup=0, momentum=0.9),
    "adamw": Train(steps=9, batch=8, lr=0.01, clip=0.0, warmup=2),
    "adafactor": Train(steps=9, batch=8, optimizer="adafactor", lr=0.05, clip=0.4, warmup=0),
    "adamw8bit": Train(steps=9, batch=8, optimizer="adamw8bit", lr=0.01, clip=0.4, warmup=0),
    "lion": Train(steps=9, batch=8, optimizer="lion", lr=0.01, warmup=0),
    "muon": Train(
        **{"steps": 9, "batch": 8, "optimizer": "muon", "lr": 0.01, "clip": 0.4, "warmup": 2},
        no_muon=("layers.2.*", "layers.3.*"),
    ),
}


def data() -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 12, generator=rng)
    return {"x": x, "y": torch.randint(0, 4, (SAMPLES,), generator=rng)}


def cohort_of(sizes: list[int]) -> list[Participant]:
    rng = np.random.default_rng(2)
    return [Participant(3 * i, rng.permutation(SAMPLES)[:n]) for i, n in enumerate(sizes)]


def alone(model: nn.Module, train: Train, steps: list[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """What a participant comes to by itself."""
    model = copy.deepcopy(model).train()
    optimizer = optimizer_of(model, train)
    for k, inputs in enumerate(steps):
        optimizer.zero_grad()
        out = model(**inputs)
        loss = out if isinstance(out, Tensor) else out["loss"]
        if not loss.isnan():  # the mean over nothing
            loss.backward()
            if train.clip:
                nn.utils.clip_grad_norm_(model.parameters(), train.clip)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(train, k, train.steps or 0)
        if not loss.isnan():
            optimizer.step()
    return {n: t.detach() for n, t in [*model.named_parameters(), *model.named_buffers()]}


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        *((name, optimizer) for name in MODELS for optimizer in ("sgd", "adamw")),
        *(("masked", optimizer) for optimizer in ("muon", "adafactor", "lion", "adamw8bit")),
        ("normed", "muon"),
        ("attending", "muon"),
    ],
)
def test_each_comes_to_what_it_would_alone(
    name: str, optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_float64(monkeypatch)
    from_elements(monkeypatch, 30)
    assert_as_alone(name, optimizer)


@pytest.mark.parametrize("name", ["attending", "normed"])
def test_nothing_is_said_of_operators_at_each_call(
    name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Fused attention has no vectorised form, and nor has a batch norm."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert_as_alone(name, "sgd")
    assert "performance drop" not in "".join([*map(str, said), *capfd.readouterr()])


@pytest.mark.parametrize("name", ["masked", "partly frozen"])
def test_what_comes_of_records_is_what_comes_alone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded, record = list[int](), records.record

    def noted(call: Callable[..., Any], values: Sequence[Tensor]) -> Any:
        recorded.append(len(values[-1]))
        return record(call, values)

    monkeypatch.setattr(model_copies, "RECORDED_AFTER", 1)
    monkeypatch.setattr(model_copies, "MOST_RECORDS", 2)
    monkeypatch.setattr(model_copies, "record", noted)
    assert_as_alone(name, "sgd")
    assert len({*recorded}) > 1, "of some at once, and of fewer where one has ended"


def assert_as_alone(name: str, optimizer: str) -> None:
    torch.manual_seed(0)
    model, tensors, train = MODELS[name](), data(), TRAIN[optimizer]
    graph = capture(model, {n: t[:8] for n, t in tensors.items()}).graph
    version = {n: t.detach() for n, t in [*model.named_parameters(), *model.named_buffers()]}
    some = cohort_of([16, 21, 40, 8, 12])
    plans = batches(some, seed=1, round_=2, batch=8, passes=2)

    def read(places: np.ndarray) -> dict[str, Tensor]:
        return {n: t[torch.from_numpy(places)] for n, t in tensors.items()}

    found, made = dict[int, dict[str, Tensor]](), dict[int, int]()
    for trained in Cohort(graph, train, most=3).work(
        version, [*zip(some, plans, strict=True)], read
    ):
        made |= zip(trained.participants, trained.steps, strict=True)
        for k, number in enumerate(trained.participants):
            found[number] = {n: t[k] for n, t in trained.values.items()}
    assert found.keys() == {p.number for p in some}
    for participant, steps in zip(some, plans, strict=True):
        expected = alone(model, train, [read(places) for places in steps])
        counts = [name != "masked" or bool((read(places)["y"] > 2).any()) for places in steps]
        assert made[participant.number] == sum(counts)
        still = {n for n, p in model.named_parameters() if not p.requires_grad}
        assert not still & found[participant.number].keys(), "what is frozen comes to nothing else"
        for value, tensor in expected.items():
            if value in still:
                continue
            got = found[participant.number][value]
            torch.testing.assert_close(got, tensor, rtol=1e-4, atol=2e-6, msg=value)


def test_masks_are_a_participants_own_whoever_is_beside() -> None:
    torch.manual_seed(0)
    model = Classifier(nn.Linear(12, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 4))
    tensors, train = data(), TRAIN["sgd"]
    graph = capture(model, {n: t[:8] for n, t in tensors.items()}).graph
    version = {n: t.detach() for n, t in model.named_parameters()}
    some = cohort_of([16, 21, 8])
    plans = batches(some, seed=1, round_=2, batch=8, passes=2)
    made = list[dict[int, dict[str, Tensor]]]()
    for most in (3, 1):
        found = dict[int, dict[str, Tensor]]()
        work = Cohort(graph, train, most=most).work(
            version,
            [*zip(some, plans, strict=True)],
            lambda places: {n: t[torch.from_numpy(places)] for n, t in tensors.items()},
        )
        for trained in work:
            for k, number in enumerate(trained.participants):
                found[number] = {n: t[k].detach() for n, t in trained.values.items()}
        made.append(found)
    for number, values in made[0].items():
        for name, tensor in values.items():
            torch.testing.assert_close(made[1][number][name], tensor, rtol=1e-4, atol=2e-6)
