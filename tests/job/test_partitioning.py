"""Settings of a partition: each wrong one is refused by its key."""

import pytest

from shoal.job import SettingsError
from shoal.job.clients.partitioning import Partitioning
from shoal.job.settings import plain

WRONG = [
    ({"kind": "random", "clients": 3}, "kind", '"iid" | "dirichlet" | "shards" | "by-key"'),
    ({"kind": "iid"}, "clients", 'kind "iid" needs their number'),
    ({"kind": "iid", "clients": 0}, "clients", "1 or more"),
    ({"kind": "iid", "clients": 2.5}, "clients", "expected an integer"),
    ({"kind": "iid", "clients": 10**9}, "clients", "at most 10000000"),
    ({"kind": "iid", "clients": 3, "alpha": 0.1}, "alpha", 'is of kind "dirichlet"'),
    ({"kind": "iid", "clients": 3, "shards": 2}, "shards", 'is of kind "shards"'),
    ({"kind": "shards", "clients": 3, "convention": "per-class"}, "convention", "leave it out"),
    ({"kind": "by-key", "self_balancing": True}, "self_balancing", "leave it out"),
    ({"kind": "dirichlet", "clients": 3}, "alpha", "needs a number above 0"),
    ({"kind": "dirichlet", "clients": 3, "alpha": 0}, "alpha", "finite number above 0"),
    ({"kind": "dirichlet", "clients": 3, "alpha": -1.0}, "alpha", "finite number above 0"),
    ({"kind": "dirichlet", "clients": 3, "alpha": float("nan")}, "alpha", "above 0"),
    ({"kind": "dirichlet", "clients": 3, "alpha": float("inf")}, "alpha", "finite number"),
    ({"kind": "dirichlet", "clients": 3, "alpha": "0.1"}, "alpha", "a number"),
    ({"kind": "dirichlet", "clients": 3, "alpha": 1, "convention": "lda"}, "convention", "per-c"),
    (
        {
            "kind": "dirichlet",
            "clients": 3,
            "alpha": 1,
            "convention": "per-client",
            "self_balancing": True,
        },
        "self_balancing",
        "equal size",
    ),
    ({"kind": "shards", "clients": 3, "shards": 0}, "shards", "1 or more"),
    ({"kind": "iid", "clients": 3, "min_samples": 0}, "min_samples", "at least 1"),
    ({"kind": "iid", "clients": 3, "held_out": 1.0}, "held_out", "in [0, 1)"),
    ({"kind": "iid", "clients": 3, "held_out": float("nan")}, "held_out", "in [0, 1)"),
    ({"kind": "iid", "clients": 3, "held_out": -0.1}, "held_out", "in [0, 1)"),
    ({"kind": "iid", "clients": 3, "seed": "x"}, "seed", "an integer"),
    ({"kind": "iid", "clients": 3, "num_partitions": 3}, "num_partitions", "is not a known key"),
]


@pytest.mark.parametrize(("table", "key", "text"), WRONG, ids=lambda x: str(x)[:50])
def test_a_wrong_setting_is_refused_by_its_key(
    table: dict[str, object], key: str, text: str
) -> None:
    with pytest.raises(SettingsError) as refused:
        Partitioning.from_table(table)
    assert refused.value.key == key
    assert text in refused.value.problem


def test_settings_go_through_plain_values_and_back() -> None:
    made = Partitioning(kind="dirichlet", clients=10, alpha=0.1, held_out=0.2, seed=-3)
    assert Partitioning.from_table(plain(made)) == made
