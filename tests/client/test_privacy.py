"""The noise of a budget, against the closed form of a Gaussian mechanism, and what is refused."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.client import submission
from shoal.client.privacy import least_in_shares, least_noise, spent_epsilon, with_noise
from shoal.job import Job, SettingsError
from shoal.job.clients.client_privacy import ClientPrivacy


def job_of(noise: float = 0.0, epsilon: float = 8.0, per_round: int = 20) -> Job:
    return Job(
        model="m.py:f",
        train={"steps": 100, "batch": 8},
        data={
            **{"kind": "arrays", "source": "x.npz"},
            "partition": {"kind": "iid", "clients": 40},
        },
        sync={
            **{"kind": "federated", "weight": "equal", "per_round": per_round},
            "privacy": {"clip": 1.0, "epsilon": epsilon, "delta": 1e-5, "noise": noise},
        },
        plan={"replicas": 3},
    )


def delta_of(noise: float, sums: int, epsilon: float) -> float:
    """The exact delta of so many Gaussian mechanisms together, which are one with mu = sqrt(sums) /
    noise (Balle and Wang 2018, 1805.06530, theorem 8; Dong et al. 2019, 1905.02383, corollary 3.3).
    """
    mu = math.sqrt(sums) / noise

    def below(x: float) -> float:
        return 0.5 * math.erfc(-x / math.sqrt(2))

    return below(mu / 2 - epsilon / mu) - math.exp(epsilon) * below(-mu / 2 - epsilon / mu)


@settings(max_examples=12, deadline=None)
@given(
    st.floats(0.2, 12.0), st.sampled_from([1e-6, 1e-5, 1e-3]), st.sampled_from([1, 9, 108, 2008])
)
def test_noise_is_the_least_that_the_closed_form_allows(
    epsilon: float, delta: float, sums: int
) -> None:
    pytest.importorskip("dp_accounting")
    noise = least_noise(epsilon, delta, sums)
    assert delta_of(noise, sums, epsilon) <= delta * (1 + 1e-6)
    assert delta_of(noise * 0.999, sums, epsilon) > delta


@settings(max_examples=12, deadline=None)
@given(st.floats(0.5, 60.0), st.integers(1, 2000))
def test_what_is_spent_is_never_said_too_low(noise: float, sums: int) -> None:
    pytest.importorskip("dp_accounting")
    privacy = ClientPrivacy(clip=3.0, epsilon=1.0, delta=1e-5, noise=noise)
    spent = spent_epsilon(privacy, sums)
    if spent < 500:  # beyond that the closed form's own exponential is no number
        assert delta_of(noise, sums, spent) <= 1e-5 * (1 + 1e-6)
        assert spent < 1e-3 or delta_of(noise, sums, spent * 0.999) > 1e-5
    assert spent <= spent_epsilon(privacy, sums + 1)


def epsilon_of(noise: float, sums: int, delta: float) -> float:
    """The epsilon of concentrated privacy with rho = sums / (2 noise^2), by the best of many orders
    (Bun and Steinke 2016, 1605.02065, proposition 1.4; Canonne et al. 2020, 2004.00010, proposition
    12)."""
    rho = sums / (2 * noise**2)

    def at(a: float) -> float:
        return rho * a + math.log1p(-1 / a) - math.log(delta * a) / (a - 1)

    low, high = math.log(1e-3), math.log(1e7)
    for _ in range(200):  # it falls, and then rises
        a, b = low + (high - low) / 3, high - (high - low) / 3
        low, high = (low, b) if at(1 + math.exp(a)) < at(1 + math.exp(b)) else (a, high)
    return max(0.0, at(1 + math.exp(low)))


@settings(max_examples=12, deadline=None)
@given(
    st.floats(0.2, 12.0), st.sampled_from([1e-6, 1e-5, 1e-3]), st.sampled_from([1, 9, 108, 2008])
)
def test_noise_in_shares_is_the_least_by_concentrated_privacy_and_more_than_a_gaussians(
    epsilon: float, delta: float, sums: int
) -> None:
    pytest.importorskip("dp_accounting")
    noise = least_in_shares(epsilon, delta, sums)
    assert epsilon_of(noise, sums, delta) <= epsilon
    assert epsilon_of(noise * 0.998, sums, delta) > epsilon * 0.9999
    assert noise > least_noise(epsilon, delta, sums)
    hidden = ClientPrivacy(clip=1.0, epsilon=1.0, delta=delta, noise=noise, where="distributed")
    assert spent_epsilon(hidden, sums) <= epsilon
    assert spent_epsilon(hidden, sums) == pytest.approx(epsilon, rel=1e-4)


def test_a_job_whose_peers_add_the_noise_gets_as_much_of_it() -> None:
    pytest.importorskip("dp_accounting")
    job = job_of()
    assert job.sync.privacy is not None
    hidden = replace(job.sync.privacy, where="distributed")
    found = with_noise(replace(job, sync=replace(job.sync, privacy=hidden, secure=True)))
    assert found.sync.privacy is not None
    assert found.sync.privacy.noise == least_in_shares(8.0, 1e-5, 108)


def test_a_job_gets_the_noise_of_its_rounds() -> None:
    pytest.importorskip("dp_accounting")
    found = with_noise(job_of())
    privacy = found.sync.privacy
    assert privacy is not None
    assert privacy.noise == least_noise(8.0, 1e-5, 108)
    assert spent_epsilon(privacy, 108) == pytest.approx(8.0, rel=1e-5)
    assert with_noise(found) == found
    assert Job.from_json(found.to_json()).sync.privacy == privacy
    more = with_noise(job_of(noise=20.0)).sync.privacy
    assert more is not None
    assert more.noise == 20.0
    without = replace(job_of(), sync=replace(job_of().sync, privacy=None))
    assert with_noise(without) is without


def test_too_little_noise_is_refused() -> None:
    pytest.importorskip("dp_accounting")
    with pytest.raises(SettingsError, match=r"sync\.privacy\.noise. is 2: expected 6\.2"):
        with_noise(job_of(noise=2.0))


def test_noise_that_no_round_can_carry_is_refused() -> None:
    pytest.importorskip("dp_accounting")
    with pytest.raises(SettingsError, match=r"sync\.privacy\.epsilon.*more clients in a round"):
        with_noise(job_of(epsilon=0.01, per_round=2))


def test_a_model_with_running_statistics_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submission, "with_noise", lambda job: job)
    x = np.zeros((120, 3), np.float32)
    np.savez(tmp_path / "x.npz", x=x, y=np.zeros(120, np.int64))
    (tmp_path / "m.py").write_text(
        "from torch import nn\n\n"
        "def f():\n"
        "    class Normed(nn.Module):\n"
        "        def __init__(self):\n"
        "            super().__init__()\n"
        "            self.norm, self.out = nn.BatchNorm1d(3), nn.Linear(3, 2)\n\n"
        "        def forward(self, x, y):\n"
        "            return nn.functional.cross_entropy(self.out(self.norm(x)), y)\n\n"
        "    return Normed()\n"
    )
    job = replace(job_of(noise=9.0), folder=tmp_path)
    masked = replace(job, sync=replace(job.sync, privacy=None, per_round=4, secure=True))
    plain = replace(masked.sync, secure=False, method="fedbuff")
    buffered = replace(masked, sync=plain)
    for wrong, words in (
        (buffered, r"sync\.method.*running_mean.*different versions.*GroupNorm"),
        (job, r"sync\.privacy.*running_mean.*GroupNorm"),
        (masked, r"sync\.secure.*num_batches_tracked.*the largest.*GroupNorm"),
    ):
        with pytest.raises(SettingsError, match=words), submission.prepare(wrong):
            pass


def test_without_the_accountant_it_is_said_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting.pld", None)
    with pytest.raises(SettingsError, match=r"shoal\[privacy\]"):
        with_noise(job_of())
    monkeypatch.setitem(sys.modules, "dp_accounting.rdp", None)
    with pytest.raises(SettingsError, match=r"shoal\[privacy\]"):
        least_in_shares(1.0, 1e-5, 9)


@pytest.mark.parametrize("epsilon", [9e-7, 1e-12, 1e-308])
def test_a_budget_below_the_accountants_digits_is_refused(epsilon: float) -> None:
    """With 1e-308 the search for its noise had no end."""
    with pytest.raises(SettingsError, match="expected 1e-06 or more"):
        with_noise(job_of(epsilon=epsilon))
