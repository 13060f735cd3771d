"""What a job may ask for where several peers train a client together."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.job import Job, SettingsError
from shoal.job.clients.client_privacy import ClientPrivacy
from shoal.job.refusals.of_clients import not_in_pipelines
from shoal.tests.job.federated_jobs import job

PRIVACY = {"clip": 1.0, "epsilon": 8.0, "delta": 1e-5, "noise": 1.0}
SGD = {"rounds": 5, "optimizer": "sgd"}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"sync": {"method": "fedbuff"}}, "sync.method"),
    (
        {"sync": {"method": "scaffold", "weight": "equal", "local": {"steps": 4}}}
        | {"train": SGD | {"momentum": 0.0}},
        "sync.method",
    ),
    ({"sync": {"aggregate": "median", "weight": "equal"}}, "sync.aggregate"),
    ({"sync": {"compression": "topk"}}, "sync.compression"),
    ({"sync": {"virtual_data": "vhl"}}, "sync.virtual_data"),
    ({"sync": {"privacy": ClientPrivacy(**PRIVACY), "weight": "equal"}}, "sync.privacy"),
    ({"sync": {"secure": True}}, "sync.secure"),
    ({"data": {"partition": {"kind": "iid", "clients": 40, "held_out": 0.1}}}, "held_out"),
    ({"model": {"dtype": "bf16"}}, "model.dtype"),
    ({"train": {"rounds": 5, "state_dtype": "bf16"}}, "train.state_dtype"),
    ({"codec": {"activation": "bf16"}}, "codec.activation"),
    ({"codec": {"default": "topk:ratio=10"}}, "codec.activation"),
    ({"plan": {"scheduler": "swarm"}}, "plan.scheduler"),
]


@pytest.mark.parametrize(("tables", "key"), REFUSED)
def test_what_cannot_be_beside_stages_is_refused_by_name(tables: Any, key: str) -> None:
    alone = job(**tables)  # on one peer each it is fine
    assert key in next(not_in_pipelines(alone))[0]
    with pytest.raises(SettingsError, match=r"plan\.stages = 3") as error:
        job(**{**tables, "plan": {**tables.get("plan", {}), "stages": 3}})
    assert key in str(error.value)


@pytest.mark.parametrize("method", ["fedavg", "fedprox", "fedavgm", "fedadam", "fedyogi"])
@pytest.mark.parametrize("data", [{}, {"where": "peer", "partition": None}])
def test_what_stages_go_with(method: str, data: dict[str, Any]) -> None:
    tables: dict[str, Any] = {"sync": {"method": method, "weight": "equal", "local": {"steps": 4}}}
    tables["data"] = data
    found = job(**tables, plan={"stages": 3}, codec={"default": "lossless"})
    assert not [*not_in_pipelines(found)]
    assert Job.from_json(found.to_json()) == found.without_places()
