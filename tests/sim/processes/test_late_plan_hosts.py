"""Hosts as network namespaces: a run whose links became slow after they were measured moves to
another plan within a few steps; and hosts of one machine know that they are.

The links get a token bucket, as homes and clouds have it, once every link was measured without.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

STEPS = 25
JOB = """
version = 1
[model]
factory = "shoal.examples.gpt:gpt"
args = { layers = 8, width = 256, heads = 8, length = 64, dropout = 0.0 }
[data]
length = 64
[train]
steps = %d
batch = 16
microbatch = 4
eval_every = 0
[plan]
%s
"""


@pytest.fixture
def parts() -> ModuleType:
    if why := importlib.import_module("shoal.benchmarks.links.namespaces").usable():
        pytest.skip(why)
    return importlib.import_module("shoal.benchmarks.links.hosts")


pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(300)]


def test_a_run_over_links_that_became_slow_moves_within_a_few_steps(
    parts: Any, tmp_path: Path
) -> None:
    with parts.Pool(4, [[]], tmp_path) as pool:
        pool.train([JOB % (2, "stages = 4\nreplan = false")])
        pool.shape([["qdisc add dev eth root tbf rate 50mbit burst 128kb latency 200ms"]])
        (row,) = pool.train([JOB % (STEPS, "replan = true")])
    if all(len(holders) == 1 for _, _, holders in row["plan"][0][0]):
        pytest.skip(f"auto took no replicas here, so nothing was promised too much: {row['plan']}")
    assert len(row["plan"]) >= 2, row
    note = row["notes"][0]
    assert "promised" in note
    assert "MB/s, not" in note
    slow = [i for i, s in enumerate(row["seconds"]) if s > 1.5 * row["predicted"][0]]
    assert len([i for i in slow if i < 12]) >= 3
    moved = next(i for i in range(3, STEPS) if row["seconds"][i] < 0.6 * row["seconds"][1])
    assert moved <= 12, row["seconds"]


def test_hosts_of_one_machine_know_that_they_are(parts: Any, tmp_path: Path) -> None:
    ask = "import socket; from shoal.peer.host.profile import host_id; print(host_id(b'net'))"
    with parts.Pool(2, [[]], tmp_path) as pool:
        said = {pool.said(host, ask) for host in ("core", *pool.names)}
    assert len(said) == 1
    assert len(said.pop().strip()) == 32
