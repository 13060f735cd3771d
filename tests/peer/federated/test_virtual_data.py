"""Noise that all clients train on as well, and the contrasts of VHL."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.dag.capture.capture import capture
from shoal.dag.transforms.virtual_classes import above_loss, with_classes
from shoal.job.clients.local_work import LocalWork, VhlOptions
from shoal.peer.data.manifest import DataError
from shoal.peer.federated.batches import Participant
from shoal.peer.federated.vhl_loss import VirtualData, VirtualLoss, contrast
from shoal.peer.federated.virtual_data import noise_shape, virtual_batch, virtual_samples
from shoal.sim.plain.plain_vhl import _Noise

VHL = VhlOptions(batch=6, per_class=50)


def word(*words: int) -> int:
    """splitmix64 folded over words, in Python's own integers."""
    low, h = 2**64 - 1, 0
    for w in words:
        z = ((h ^ (w & low)) + 0x9E3779B97F4A7C15) & low
        z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & low
        z = ((z ^ z >> 27) * 0x94D049BB133111EB) & low
        h = z ^ z >> 31
    return h


def gauss(key: int, element: int) -> float:
    words = [word(key, element, n) for n in range(3)]
    parts = [w >> bits & 0xFFFF for w in words for bits in (0, 16, 32, 48)]
    return (sum(parts) - 6 * 0xFFFF) / 2**16


@settings(deadline=None, max_examples=30)
@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 9), st.integers(0, 49))
def test_a_sample_is_of_seed_class_and_number_to_the_bit(seed: int, label: int, at: int) -> None:
    found = virtual_samples(VHL, np.array([3, label]), np.array([7, at]), (2, 5, 8), seed)
    assert found.dtype == np.float32
    for channel, row, column in ((0, 0, 0), (0, 4, 7), (1, 2, 3), (1, 3, 4)):
        small = channel * 4 + (row * 2 // 5) * 2 + column * 2 // 8  # drawn as (2, 2, 2)
        mean, own = gauss(word(seed, 10, label), small), gauss(word(seed, 11, label, at), small)
        assert found[1, channel, row, column] == mean + 0.5 * own


@settings(deadline=None, max_examples=12)
@given(
    st.integers(-(2**63), 2**63 - 1),
    st.sampled_from([(5,), (64,), (2, 5, 8), (1, 3, 3)]),
    st.sampled_from([0.0, 0.5, 40.0]),
)
def test_an_untrained_network_makes_the_same_bits_as_the_plain_loops_one(
    seed: int, sample: tuple[int, ...], spread: float
) -> None:
    vhl = VhlOptions(source="generator", spread=spread, per_class=50)
    labels, numbers = np.array([[0, 9], [4, 0]]), np.array([[3, 49], [0, 3]])
    found = virtual_samples(vhl, labels, numbers, sample, seed)
    assert found.shape == (2, 2, *sample)
    assert found.dtype == np.float32
    plain = _Noise(vhl, seed)
    for at in np.ndindex(2, 2):
        wanted = plain.sample(int(labels[at]), int(numbers[at]), sample)
        np.testing.assert_array_equal(found[at], wanted.numpy())
        assert np.square(found[at]).mean() == pytest.approx(1.0, rel=1e-5)
    assert np.array_equal(found[0, 0], found[1, 1])


def test_classes_of_an_untrained_network_lie_apart() -> None:
    vhl = VhlOptions(source="generator")
    labels, numbers = np.repeat(np.arange(10), 8), np.arange(80)
    noise = virtual_samples(vhl, labels, numbers, (1, 8, 8), 3).reshape(80, -1)
    near = noise @ noise.T / 64
    same = labels[:, None] == labels
    assert near[same & ~np.eye(80, dtype=bool)].mean() > 0.6
    assert abs(near[~same].mean()) < 0.2


def test_noise_is_normal_about_the_means_of_classes() -> None:
    numbers = np.arange(4000)
    one = virtual_samples(VHL, np.zeros(4000, np.int64), numbers, (64,), 5)[:, ::4]
    own = (one - one.mean(0)).ravel() / 0.5
    assert own.std() == pytest.approx(1.0, abs=0.01)
    assert (np.abs(own) < 1).mean() == pytest.approx(math.erf(0.5**0.5), abs=0.01)
    means = virtual_samples(VHL, numbers, numbers, (64,), 5)[:, ::4]
    assert means.std() == pytest.approx(1.25**0.5, abs=0.01)
    assert abs(np.corrcoef(one[:, :4].T) - np.eye(4)).max() < 0.06


def test_a_batch_hangs_on_seed_round_client_and_step_and_not_on_who_is_beside() -> None:
    def batch(clients: list[int], seed: int = 1, round_: int = 2, step: int = 3) -> np.ndarray:
        labels, numbers = virtual_batch(VHL, 10, 40, clients, seed=seed, round_=round_, step=step)
        assert 0 <= labels.min() <= labels.max() < 10
        assert 0 <= numbers.min() <= numbers.max() < 50
        return labels * 50 + numbers

    three = batch([4, 9, 5])
    assert np.array_equal(three[1], batch([9])[0])
    others = [three[0], batch([9], seed=4), batch([9], round_=4), batch([9], step=4), three[1]]
    assert len({o.tobytes() for o in others}) == len(others)


@pytest.mark.parametrize(
    ("sample", "shape"), [((64,), (16,)), ((1, 8, 8), (1, 2, 2)), ((3, 33, 2), (3, 9, 1))]
)
def test_noise_is_drawn_smaller_than_samples(
    sample: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    assert noise_shape(VhlOptions(), sample) == shape
    with pytest.raises(ValueError, match="none of them larger"):
        noise_shape(VhlOptions(noise=(*sample[:-1], sample[-1] + 1)), sample)


def one_by_one(z: Tensor, labels: list[int], others: Tensor, of: list[int], alone: bool) -> float:
    total = 0.0
    for i, label in enumerate(labels):
        beside = [j for j in range(len(of)) if not (alone and i == j)]
        near = {
            j: math.exp(float(z[i] @ others[j] / z[i].norm() / others[j].norm()) / 0.4)
            for j in beside
        }
        mine = [math.log(near[j] / sum(near.values())) for j in beside if of[j] == label]
        total -= sum(mine) / len(mine) if mine else 0.0
    return total / len(labels)


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 10**6))
def test_the_contrast_is_that_of_anchor_after_anchor(n: int, m: int, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    z, other = (torch.randn(2, k, 5, dtype=torch.float64, generator=rng) for k in (n, m))
    labels, of = (torch.randint(0, 3, (2, k), generator=rng) for k in (n, m))
    far, near = contrast(z, labels, other, of, 0.4), contrast(z, labels, None, None, 0.4)
    for k in range(2):
        mine = labels[k].tolist()
        assert float(far[k]) == pytest.approx(
            one_by_one(z[k], mine, other[k], of[k].tolist(), False), abs=1e-9
        )
        assert float(near[k]) == pytest.approx(one_by_one(z[k], mine, z[k], mine, True), abs=1e-9)


def test_anchors_without_positives_give_nothing_and_no_gradient() -> None:
    z = torch.randn(1, 3, 4, requires_grad=True)
    other, apart = torch.randn(1, 2, 4), torch.tensor([[0, 1, 2]])
    for found in (
        contrast(z, apart, other, torch.tensor([[5, 6]]), 0.07),
        contrast(z, apart, None, None, 0.07),
        contrast(z[:, :1], apart[:, :1], None, None, 0.07),
    ):
        assert float(found.detach()) == 0.0
        (grad,) = torch.autograd.grad(found.sum(), z)
        assert not grad.any()


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.layers(x), y)


def loss_of(vhl: VhlOptions, calibrates: bool = True) -> VirtualLoss:
    example = {"x": torch.zeros(2, 12), "y": torch.zeros(2, dtype=torch.int64)}
    form = above_loss(with_classes(capture(Classifier(), example).graph, 3))
    labels, classes = torch.tensor([[0, 1, 2, 1]]), torch.tensor([[1, 1, 0]])
    return VirtualLoss(form, vhl, labels, classes, torch.tensor([calibrates]))


def grads(vhl: VhlOptions, calibrates: bool = True) -> tuple[Tensor, Tensor]:
    """Of features and of logits, samples first."""
    loss = loss_of(vhl, calibrates)
    rng = torch.Generator().manual_seed(3)
    features = torch.randn(1, 7, 8, generator=rng, requires_grad=True)
    logits = torch.randn(1, 7, 6, generator=rng, requires_grad=True)
    made = {loss.form.features: features, loss.form.logits: logits}
    total = loss(made).sum() + 0 * features.sum()
    found = torch.autograd.grad(total, (features, logits))
    return found[0][0], found[1][0]


def test_the_contrast_with_samples_sends_nothing_to_noise() -> None:
    only = VhlOptions(alpha=0.0, l1=1.0, l2=0.0)
    features, logits = grads(only)
    assert features[:4].any()
    assert not features[4:].any()
    assert logits[:4, :3].any()
    assert not logits[4:].any()
    assert not logits[:, 3:].any(), "masked, where no further class is trained"
    features, _ = grads(VhlOptions(alpha=0.0, l1=0.0, l2=1.0))
    assert not features[:4].any()
    assert features[4:].any()
    features, _ = grads(only, calibrates=False)
    assert not features.any()


def test_further_classes_stand_beside_the_models_own() -> None:
    _, logits = grads(VhlOptions(alpha=1.0, l1=0.0, l2=0.0))
    assert logits[:4, 3:].any(), "samples are told from noise"
    lowest = logits[4:].argmin(1)
    assert lowest.tolist() == [4, 4, 3], "the class of noise c is C + c"


def test_a_client_calibrates_in_the_first_passes_over_its_own_samples() -> None:
    form = loss_of(VHL).form
    for work, expected in (
        (LocalWork(passes=2), [True, False]),
        (LocalWork(steps=5), [True, True]),
        (LocalWork(steps=4), [False, False]),
    ):
        vhl = VhlOptions(batch=6, calibrate=work)
        virtual = VirtualData(vhl, form, 1, 4)
        some = [Participant(3, np.arange(9)), Participant(5, np.arange(8))]
        inputs = {"x": torch.ones(2, 4, 12), "y": torch.zeros(2, 4, dtype=torch.int64)}
        whole, loss = virtual.beside(inputs, some, 0, 4, torch.device("cpu"))
        assert whole.keys() == {"x"}
        assert whole["x"].shape == (2, 10, 12)
        assert torch.equal(whole["x"][:, :4], inputs["x"])
        assert loss.calibrates.tolist() == expected
        for label in (3, -100):
            wrong = {**inputs, "y": torch.full((2, 4), label)}
            with pytest.raises(DataError, match="none of the 3 classes"):
                virtual.beside(wrong, some, 0, 4, torch.device("cpu"))
