"""The plain federated loop against scalars by hand, and the identities between methods."""

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

from shoal.sim.plain.client_loops import ClientWork, FederatedResult, train_cohorts
from shoal.sim.plain.client_methods import (
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedBuff,
    FedNova,
    FedProx,
    FedYogi,
    Scaffold,
)


class Bowl(nn.Module):
    """The mean of (w - x)² / 2: the gradient is w - mean x."""

    def __init__(self, w: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(w, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return ((self.w - x) ** 2 / 2).mean()


TARGETS = torch.tensor([1.0, 3.0], dtype=torch.float64)


def bowl(
    method: FedAvg,
    *cohorts: Sequence[ClientWork],
    start: float = 0.0,
    lr: float = 0.1,
    momentum: float = 0.0,
) -> list[float]:
    """The version after each round. Sample i is TARGETS[i]."""
    seen: list[float] = []
    train_cohorts(
        Bowl(start),
        cohorts,
        lambda samples: {"x": TARGETS[list(samples)]},
        method,
        lr=lr,
        momentum=momentum,
        committed=lambda count, result: seen.append(float(result.shared["w"])),
    )
    return seen


def work(client: int, steps: int, weight: float = 1.0) -> ClientWork:
    """So many steps on the one sample that the client has."""
    return ClientWork(client, [[client]] * steps, weight)


def test_fedavg_by_hand() -> None:
    # One step: .1 and .3. Two: .1 + .1·.9 = .19, and .3 + .1·2.7 = .57.
    assert bowl(FedAvg(), [work(0, 1), work(1, 1)]) == pytest.approx([0.2])
    assert bowl(FedAvg(), [work(0, 2), work(1, 2)]) == pytest.approx([0.38])
    # Weights 3 and 1: .75·.19 + .25·.57.
    assert bowl(FedAvg(), [work(0, 2, 3), work(1, 2)]) == pytest.approx([0.285])
    # Client 1 alone, then nobody, then client 0 from .3: .3 + .1·.7.
    assert bowl(FedAvg(), [work(1, 1)], [], [work(0, 1)]) == pytest.approx([0.3, 0.3, 0.37])
    # Momentum .5: .3, then v = .5·3 + 2.7 = 4.2 and .3 + .42.
    assert bowl(FedAvg(), [work(1, 2)], momentum=0.5) == pytest.approx([0.72])


def test_fedavgm_by_hand() -> None:
    # D = .2: v = -.2, w = .2. Then D = .1·(2 - .2) = .18: v = -.1 - .18 = -.28.
    both = [work(0, 1), work(1, 1)]
    assert bowl(FedAvgM(momentum=0.5), both, both) == pytest.approx([0.2, 0.48])
    assert bowl(FedAvgM(0.5, 0.0), both) == pytest.approx([0.1])


def test_fedprox_by_hand() -> None:
    # w_1 = .3; its next gradient is -2.7 + .5·.3 = -2.55: .555.
    assert bowl(FedProx(0.5), [work(1, 2)]) == pytest.approx([0.555])


def test_scaffold_by_hand() -> None:
    method = Scaffold(2)
    # Client 1 alone: w = .3; c_1 = -.3 / .1 = -3, and c = -3 / 2. Then client 0, whose gradient is
    # .3 - 1 + c - c_0 = -2.2: w = .52; c_0 = 0 + 1.5 - .22 / .1 = -.7, and c = -1.5 - .7 / 2.
    assert bowl(method, [work(1, 1)], [work(0, 1)]) == pytest.approx([0.3, 0.52])
    assert [float(c["w"]) for c in method.own] == pytest.approx([-0.7, -3.0])
    assert float(method.c["w"]) == pytest.approx(-1.85)
    # Half as far.
    assert bowl(Scaffold(2, 0.5), [work(1, 1)]) == pytest.approx([0.15])
    with pytest.raises(ValueError, match="without momentum"):
        bowl(Scaffold(2), [work(0, 1)], momentum=0.9)


def test_fedbuff_by_hand() -> None:
    # Sample 1 is 3: D = .1·(3 - w). From w = 0 it is .3, half of which counts: w = .15. Then from
    # 0 again, one version behind, with one from .15 (D = .285): (.3 / sqrt 2 + .285) / 2, halved.
    late = replace(work(1, 1), behind=1)
    seen = bowl(FedBuff(0.5), [work(1, 1)], [work(1, 1), late])
    assert seen == pytest.approx([0.15, 0.15 + (0.3 / 2**0.5 + 0.285) / 4])
    # Alone, three versions behind: half of what it moved from 0, and shares are not of what counts.
    late = replace(work(1, 1), behind=3)
    some = [[work(1, 1)]] * 3
    assert bowl(FedBuff(), *some, [late])[3] == pytest.approx(bowl(FedBuff(), *some)[2] + 0.15)
    with pytest.raises(ValueError, match="client 1 began 3 versions ago"):
        bowl(FedBuff(max_staleness=2), *some, [late])
    with pytest.raises(ValueError, match="began 1 versions ago"):
        bowl(FedAvg(), [work(1, 1)], [replace(work(1, 1), behind=1)])
    with pytest.raises(ValueError, match="began 2 versions ago"):
        bowl(FedBuff(), [work(1, 1)], [replace(work(1, 1), behind=2)])


def test_fednova_by_hand() -> None:
    # Client 0: one step, D = .1, a = 1. Client 1: three, .3, .57, .813, a = 3. Mean a is 2:
    # w = 2·(.1 / 1 + .813 / 3) / 2.
    assert bowl(FedNova(), [work(0, 1), work(1, 3)]) == pytest.approx([0.371])
    # Weights 3 and 1: mean a is 1.5, w = 1.5·(.75·.1 + .25·.271).
    assert bowl(FedNova(), [work(0, 1, 3), work(1, 3)]) == pytest.approx([0.214125])


def test_adaptive_methods_by_hand() -> None:
    # D = .3: m = .1·.3 = .03. v: Adam and Yogi .01·.09 = .0009, root .03; Adagrad .09, root .3.
    once = [work(1, 1)]
    assert bowl(FedAdam(eps=0.0), once) == pytest.approx([0.1])
    assert bowl(FedYogi(eps=0.0), once) == pytest.approx([0.1])
    assert bowl(FedAdagrad(eps=0.0), once) == pytest.approx([0.01])
    assert bowl(FedAdam(eps=0.07), once) == pytest.approx([0.03])
    # From .1, D = .29: m = .027 + .029 = .056. Adam's v = .99·.0009 + .01·.0841 = .001732;
    # Yogi's .0009 + .01·.0841 = .001741. Adagrad's from .01, D = .299: m = .0569, v = .179401.
    step = 0.1 * 0.056
    assert bowl(FedAdam(eps=0.0), once, once)[1] == pytest.approx(0.1 + step / 0.001732**0.5)
    assert bowl(FedYogi(eps=0.0), once, once)[1] == pytest.approx(0.1 + step / 0.001741**0.5)
    step = 0.1 * 0.0569
    assert bowl(FedAdagrad(eps=0.0), once, once)[1] == pytest.approx(0.01 + step / 0.179401**0.5)
    # Yogi where v is more than D²: with b2 = .5 .09 / 2 = .045; from 1, D = 0.2, v = .045 - .02.
    far = bowl(FedYogi(lr=1.0, betas=(0.0, 0.5), eps=0.0), once, once)
    assert far[0] == pytest.approx(0.3 / 0.045**0.5)
    moved = 0.1 * (3 - far[0])
    assert far[1] - far[0] == pytest.approx(moved / (0.045 - 0.5 * moved**2) ** 0.5)


def test_a_rate_may_change_from_round_to_round() -> None:
    """As Flower's FedAdam has it."""
    once = [work(1, 1)]
    method = FedAdam(lambda r: 0.1 * (1 - 0.99 ** (r + 2)) ** 0.5 / (1 - 0.9 ** (r + 2)), eps=0.0)
    assert bowl(method, once) == pytest.approx([0.1 * 0.0199**0.5 / 0.19])


class Net(nn.Module):
    """Two layers, a loss by cross-entropy."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(6, 5).double(), nn.Linear(5, 3).double()

    def forward(self, x: Tensor, y: Tensor) -> Mapping[str, Tensor]:
        return {"loss": F.cross_entropy(self.b(torch.tanh(self.a(x))), y)}


G = torch.Generator().manual_seed(1)
X = torch.randn(60, 6, generator=G, dtype=torch.float64)
Y = torch.randint(0, 3, (60,), generator=G)
PARTS = [range(12), range(12, 20), range(20, 45), range(45, 60)]


def rows(samples: Sequence[int]) -> dict[str, Tensor]:
    return {"x": X[list(samples)], "y": Y[list(samples)]}


def passes(samples: Sequence[int], batch: int, count: int = 1, seed: int = 0) -> list[list[int]]:
    """Batches of so many passes over a client's samples, each in an order of its own by
    `torch.randperm`; the last batch of a pass has what is over."""
    g = torch.Generator().manual_seed(seed)
    order = [torch.randperm(len(samples), generator=g) for _ in range(count)]
    return [[int(samples[i]) for i in part] for each in order for part in torch.split(each, batch)]


def drawn(rounds: int, size: int = 4, batch: int = 5) -> list[list[ClientWork]]:
    """Cohorts by lot; a pass over each one's samples."""
    rng = np.random.default_rng(0)
    found = []
    for r in range(rounds):
        cohort = sorted(rng.choice(4, size, replace=False).tolist())
        found.append([ClientWork(i, passes(PARTS[i], batch, 1, r), len(PARTS[i])) for i in cohort])
    return found


def net(
    method: FedAvg, cohorts: Sequence[Sequence[ClientWork]], momentum: float = 0.0
) -> FederatedResult:
    return train_cohorts(Net(), cohorts, rows, method, lr=0.2, momentum=momentum)


def same(a: FederatedResult, b: FederatedResult) -> bool:
    return all(torch.allclose(a.shared[n], b.shared[n], rtol=0, atol=1e-12) for n in a.shared)


@pytest.mark.parametrize(
    "method",
    [FedAvg(), FedAvgM(momentum=0.0), FedProx(0.3), FedNova(), Scaffold(4)],
    ids=lambda m: type(m).__name__,
)
def test_a_step_of_all_is_one_of_sgd_on_all_samples(method: FedAvg) -> None:
    """Of SCAFFOLD, whose mean has no weights, with clients of equal size."""
    parts = [range(k, k + 15) for k in range(0, 60, 15)] if isinstance(method, Scaffold) else PARTS
    cohort = [ClientWork(i, [list(part)], len(part)) for i, part in enumerate(parts)]
    found = net(method, [cohort] * 3)
    module = Net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.2)
    for _ in range(3):
        optimizer.zero_grad()
        module(X, Y)["loss"].backward()
        optimizer.step()
    for name, p in module.named_parameters():
        assert torch.allclose(found.shared[name], p, rtol=0, atol=1e-12)


def test_methods_without_their_option_are_fedavg() -> None:
    plain = net(FedAvg(), drawn(5, 2))
    assert same(plain, net(FedProx(0.0), drawn(5, 2)))
    assert same(plain, net(FedAvgM(1.0, 0.0), drawn(5, 2)))
    assert not same(plain, net(FedProx(0.1), drawn(5, 2)))
    assert not same(plain, net(FedAvgM(1.0, 0.5), drawn(5, 2)))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_fednova_is_fedavg_where_all_make_as_many_steps(momentum: float) -> None:
    cohorts = [
        [ClientWork(i, passes(PARTS[i], 3, 1, r)[:2], len(PARTS[i])) for i in (0, 1, 3)]
        for r in range(4)
    ]
    assert same(net(FedNova(), cohorts, momentum), net(FedAvg(), cohorts, momentum))
    assert not same(net(FedNova(), drawn(4)), net(FedAvg(), drawn(4)))


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_fednovas_length_is_what_gradients_count_for(momentum: float) -> None:
    """Constant gradients of 1 move SGD of rate 1 by as much."""
    w = nn.Parameter(torch.zeros((), dtype=torch.float64))
    optimizer = torch.optim.SGD([w], lr=1.0, momentum=momentum)
    for steps in range(1, 6):
        w.grad = torch.ones_like(w)
        optimizer.step()
        assert FedNova.length(steps, momentum) == pytest.approx(-w.item())


@settings(max_examples=20, deadline=None)
@given(st.lists(st.lists(st.integers(0, 3), min_size=1, unique=True), min_size=1, max_size=5))
def test_scaffolds_c_is_the_mean_of_those_of_all_clients(cohorts: list[list[int]]) -> None:
    method = Scaffold(4, 0.7)

    def committed(count: int, result: FederatedResult) -> None:
        for name, c in method.c.items():
            mean = torch.stack([own[name] for own in method.own]).mean(0)
            assert torch.allclose(c, mean, rtol=0, atol=1e-12)

    work = [[ClientWork(i, passes(PARTS[i], 5, 1)) for i in cohort] for cohort in cohorts]
    train_cohorts(Net(), work, rows, method, lr=0.2, committed=committed)


def test_scaffold_of_one_client_is_sgd() -> None:
    cohorts = [[ClientWork(0, passes(range(60), 7, 1, r))] for r in range(4)]
    assert same(net(Scaffold(1), cohorts), net(FedAvg(), cohorts))


def test_scaffold_comes_to_the_optimum_where_fedavg_does_not() -> None:
    """Bowls of other curvatures: FedAvg's fixed point with many steps is not the sum's optimum."""

    class Curved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros((), dtype=torch.float64))

        def forward(self, a: Tensor, x: Tensor) -> Tensor:
            return (a * (self.w - x) ** 2 / 2).mean()

    data = {"a": torch.tensor([1.0, 8.0]).double(), "x": TARGETS}
    cohorts = [[work(0, 5), work(1, 5)]] * 200

    def batch(samples: Sequence[int]) -> dict[str, Tensor]:
        return {n: t[list(samples)] for n, t in data.items()}

    optimum = (1 * 1 + 8 * 3) / 9
    found = train_cohorts(Curved(), cohorts, batch, Scaffold(2), lr=0.05)
    assert float(found.shared["w"]) == pytest.approx(optimum, abs=1e-9)
    found = train_cohorts(Curved(), cohorts, batch, FedAvg(), lr=0.05)
    assert abs(float(found.shared["w"]) - optimum) > 0.05


def test_training_leaves_the_module_and_refuses_buffers_that_change() -> None:
    module = Net()
    before = {n: p.clone() for n, p in module.named_parameters()}
    found = train_cohorts(module, drawn(2), rows, FedAvg(), lr=0.2)
    assert all(torch.equal(p, before[n]) for n, p in module.named_parameters())
    assert [sorted(losses) for losses in found.losses] == [[0, 1, 2, 3]] * 2
    assert [len(v) for v in found.losses[0].values()] == [3, 2, 5, 3]

    class Normed(Net):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Sequential(self.a, nn.BatchNorm1d(5).double())  # type: ignore[assignment]

    with pytest.raises(ValueError, match="running_mean"):
        train_cohorts(Normed(), drawn(1), rows, FedAvg(), lr=0.2)
