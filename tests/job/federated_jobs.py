"""A job of clients, and tables of [sync] that tests add to it."""

from __future__ import annotations

from typing import Any

from shoal.job import Job


def job(**tables: Any) -> Job:
    found: dict[str, Any] = {
        "model": {"factory": "m.py:f"},
        "data": {"kind": "arrays", "source": "x.npz", "partition": {"kind": "iid", "clients": 40}},
        "sync": {"kind": "federated"},
        "plan": {"replicas": 3},
    }
    for key, table in tables.items():
        found[key] = {**found.get(key, {}), **table}
    train = found.pop("train", {"rounds": 5})
    return Job(train={"batch": 8, **train}, **found)


KRUM = {"aggregate": "krum", "weight": "equal", "per_round": 10}
FLAG = {"aggregate": "flag", "weight": "equal", "per_round": 10}
BUDGET = {"clip": 1.0, "epsilon": 8.0, "delta": 1e-5}
PRIVATE = {"weight": "equal", "privacy": BUDGET}
SHARES = {**BUDGET, "where": "distributed"}
MASKED = {"secure": True, "per_round": 5}
MASKED_TOP = {**MASKED, "compression": "topk"}
IN_SHARES = {"weight": "equal", "privacy": SHARES, "secure": True, "per_round": 5}
BUFFERED = {"method": "fedbuff", "per_round": "30%", "options": {"buffer": 4}}
