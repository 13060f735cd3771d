"""Which share of the sums of rounds is added up again, and where none can be."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.job import Job
from shoal.job.rounds import RoundSettings
from shoal.job.settings import SettingsError
from shoal.job.sync import Sync
from shoal.tests.job.federated_jobs import KRUM, MASKED, job


@pytest.mark.parametrize(
    ("sync", "why"),
    [
        ({"kind": "local", "audit": 1.5}, "from 0 to 1"),
        ({"kind": "local", "audit": -0.1}, "from 0 to 1"),
        ({"kind": "local", "audit": float("nan")}, "from 0 to 1"),
        ({"kind": "gossip", "audit": 0.5}, "no third one"),
        ({"kind": "allreduce", "audit": 0.5}, "no third one"),
        ({"kind": "federated", "audit": 0.5, "secure": True}, "what is masked"),
        ({"kind": "federated", "audit": 0.5, "aggregate": "median", "weight": "equal"}, "median"),
        (
            {
                **{"kind": "federated", "audit": 0.5, "weight": "equal"},
                "privacy": {"clip": 1.0, "epsilon": 8.0, "delta": 1e-5},
            },
            "adds noise",
        ),
    ],
)
def test_a_share_that_tells_nothing_is_refused_with_the_reason(
    sync: dict[str, Any], why: str
) -> None:
    with pytest.raises(SettingsError, match=why):
        Sync.from_table(sync)
    Sync.from_table({**sync, "audit": 0})
    Sync.from_table({**sync, "audit": 0.05})


@pytest.mark.parametrize(
    ("method", "options", "codec", "same"),
    [
        ("diloco", {}, "none", True),
        ("diloco", {}, "bf16", True),
        ("diloco", {}, "int8:block=128", True),
        ("diloco", {}, "topk:ratio=50", False),
        ("streaming-diloco", {}, "none", True),
        ("sparse-loco", {}, "none", True),
        ("sparse-loco", {"result_density": 0.5}, "none", False),
    ],
)
def test_what_is_not_the_same_bytes_everywhere_is_not_added_up_again(
    method: str, options: dict[str, Any], codec: str, same: bool
) -> None:
    assert RoundSettings(method=method, options=options, codec=codec).adds_alike == same


def test_a_job_whose_kind_is_found_may_have_any_share() -> None:
    found = Job(
        model="m.py:f",
        data={"kind": "arrays", "source": "x.npz"},
        train={"steps": 10, "batch": 8},
        plan={"replicas": "auto"},
        sync={"kind": "auto", "audit": 0.5},
    )
    assert found.decided("local", 2).sync.audit == 0.5
    assert found.decided("allreduce", 1).sync.kind == "allreduce"


@pytest.mark.parametrize(("sync", "same"), [({}, True), (MASKED, False), (KRUM, False)])
def test_sums_of_clients_that_nobody_may_see_are_not_added_up_again(
    sync: dict[str, Any], same: bool
) -> None:
    rounds = job(sync=sync).rounds
    assert rounds is not None
    assert rounds.adds_alike == same
