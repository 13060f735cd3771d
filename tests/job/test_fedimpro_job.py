"""What a job may ask for beside statistics of features that clients share."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.job import Job, SettingsError
from shoal.job.clients.local_work import FedImproOptions
from shoal.job.rounds import method_of, options_of
from shoal.tests.job.federated_jobs import KRUM, PRIVATE, job

OPTIONS = {"features": "low", "weight": 0.5, "rise": 10}


def impro(**tables: Any) -> Job:
    sync = {"method": "fedimpro", "options": OPTIONS, **tables.pop("sync", {})}
    return job(sync=sync, **tables)


def test_options_go_to_peers_with_the_method() -> None:
    found = impro()
    assert found.rounds is not None
    assert method_of(found.rounds.method).features
    options = options_of(found.rounds.method, found.rounds.options)
    assert options == FedImproOptions(features="low", weight=0.5, rise=10)
    assert Job.from_json(found.to_json()) == found.without_places()
    host = impro(data={"where": "peer", "partition": None})
    assert host.sync.chosen == "fedimpro"
    assert impro(sync={"compression": "topk", "client_feedback": "ef"}).sync.keeps_state


@pytest.mark.parametrize(
    ("tables", "key", "words"),
    [
        *(
            ({"sync": {"options": {name: value}}}, f"sync.options.{name}", words)
            for name, value, words in (
                ("weight", -0.1, "0 or more"),
                ("rise", -1, "0 or more"),
                ("batch", 1 << 17, "at most"),
                ("most_std", -1.0, "0 or more"),
                ("share", 0.0, "(0, 1]"),
                ("share", 1.5, "(0, 1]"),
                ("noise", 0.1, "not a known"),
            )
        ),
        ({"sync": KRUM}, "sync.aggregate", "the sum of nobody's"),
        ({"sync": PRIVATE}, "sync.privacy", "told without noise"),
        ({"sync": {"secure": True}}, "sync.secure", "sums of squares"),
        ({"sync": {"virtual_data": "vhl"}}, "sync.virtual_data", "noise has no labels"),
        ({"codec": {"sync": "int8"}}, "codec.sync", "a small difference of sums"),
        ({"model": {"dtype": "bf16"}}, "model.dtype", '"fp32" is'),
        ({"plan": {"stages": 3}}, "sync.method", "any but 'fedimpro' is"),
    ],
)
def test_what_cannot_be_is_refused_by_name(tables: Any, key: str, words: str) -> None:
    with pytest.raises(SettingsError) as error:
        impro(**tables)
    assert key in str(error.value)
    assert words in str(error.value)
