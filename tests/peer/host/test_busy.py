"""What a thread keeps of its speed beside others."""

from __future__ import annotations

import pytest

from shoal.peer.host import fit as busy


def test_a_share_lies_between_the_least_and_one() -> None:
    assert busy.busy_share(0.0, cores=1) == 1.0
    assert busy.LEAST <= busy.busy_share(0.05, cores=2) <= 1.0


def test_it_is_the_rate_beside_others_over_the_rate_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(busy, "_rate", lambda threads, seconds: 10.0 if threads == 1 else 6.0)
    assert busy.busy_share(0.0, cores=2) == pytest.approx(0.6)
    monkeypatch.setattr(busy, "_rate", lambda threads, seconds: float(threads))
    assert busy.busy_share(0.0, cores=4) == 1.0
