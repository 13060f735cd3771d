"""Keys of federated jobs of which nothing would come, or too much: refused before anything is
captured."""

from __future__ import annotations

import re
from typing import Any

import pytest

from shoal.job import Job, SettingsError
from shoal.job.clients.local_work import LocalWork
from shoal.tests.job.federated_jobs import job

OF_PEERS = {"kind": "by-peer", "clients": 3}


def vhl(**options: Any) -> dict[str, Any]:
    return {"virtual_data": "vhl", "vhl": options}


def sends(kind: str, **options: Any) -> dict[str, Any]:
    links = {"client_links": {"up": "1Mbit"}} if kind != "topk" else {}
    return {"compression": kind, "compression_options": options, **links}


@pytest.mark.parametrize(
    ("tables", "key"),
    [
        ({"data": {"where": "peer", "partition": {**OF_PEERS, "held_out": 0.2}}}, "held_out"),
        ({"data": {"where": "peer", "partition": {**OF_PEERS, "min_samples": 9}}}, "min_samples"),
        ({"data": {"where": "peer", "partition": {**OF_PEERS, "seed": 4}}}, "partition.seed"),
        ({"data": {"partition": {"kind": "by-key", "key": "who", "seed": 4}}}, "partition.seed"),
        (
            {"sync": {"per_round": 2, "quorum": 3}, "plan": {"replicas": "auto"}}
            | {"data": {"where": "peer", "partition": OF_PEERS}},
            "sync.quorum",
        ),
        ({"sync": {"method": "fedadagrad", "options": {"betas": [0.9, 0.5]}}}, "options.betas"),
        ({"sync": {"method": "fedimpro", "options": {"weight": 0, "share": 0.3}}}, "options.share"),
        ({"sync": vhl(l1=0, l2=0, temperature=0.5)}, "sync.vhl.temperature"),
        ({"sync": vhl(l1=0, l2=0, alpha=0, per_class=9)}, "sync.vhl.per_class"),
        ({"sync": sends("bcrs+opwa", gamma=1, overlap_degree=2)}, "overlap_degree"),
        ({"sync": {**sends("topk", least_ratio=1), "client_feedback": "ef"}}, "client_feedback"),
        ({"data": {"where": "peer", "partition": OF_PEERS}, "plan": {"replicas": 2}}, "replicas"),
        ({"codec": {"grad": "bf16"}}, "codec.grad"),
        ({"codec": {"activation": "int8"}}, "codec.activation"),
        ({"codec": {"default": "int8"}}, "codec.default"),
        ({"codec": {"feedback": "ef21"}}, "codec.feedback"),
    ],
)
def test_a_key_that_clients_have_no_use_for_is_refused(tables: dict[str, Any], key: str) -> None:
    found = job(**tables)
    assert Job.from_json(found.to_json()).sync == found.sync, "as a journal has it"
    with pytest.raises(SettingsError, match=rf"{re.escape(key)}` is .*, and changes nothing with"):
        found.check_idle()


@pytest.mark.parametrize(
    "tables",
    [
        {"data": {"where": "peer", "partition": OF_PEERS}, "plan": {"replicas": "auto"}},
        {"data": {"partition": {"kind": "by-key", "key": "who", "seed": 4, "held_out": 0.2}}},
        {"sync": {"method": "fedadagrad", "options": {"betas": [0.5, 0.99]}}},
        {"codec": {"default": "lossless", "sync": "int8"}},
        {"sync": vhl(l1=0, l2=0, per_class=9)},
        {"sync": vhl(l2=0, alpha=0, temperature=0.5, calibrate={"passes": 1})},
        {"sync": {"method": "fedimpro", "options": {"share": 0.3}}},
    ],
)
def test_a_key_that_clients_have_a_use_for_is_taken(tables: dict[str, Any]) -> None:
    job(**tables).check_idle()


@pytest.mark.parametrize(
    ("work", "sizes", "batch"),
    [({"steps": 2**20}, [5, 17], 100), ({"steps": 2**20}, [40], 32), ({"passes": 2**15}, [513], 8)],
)
def test_a_client_walks_over_no_more_samples_than_their_order_has_memory_for(
    work: dict[str, int], sizes: list[int], batch: int
) -> None:
    local = LocalWork(**work)
    local.check_walked([*sizes[:-1], 0, 16], max(batch, 16))
    with pytest.raises(SettingsError, match=rf"is {2**20 if 'steps' in work else 2**15}, and a cl"):
        local.check_walked(sizes, batch)
