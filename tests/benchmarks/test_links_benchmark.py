"""benchmarks/links/links.py: a probe between real processes over a shaped link, and what its
figures are made of."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def links() -> ModuleType:
    return importlib.import_module("shoal.benchmarks.links.links")


def _allowed() -> bool:
    if sys.platform != "linux" or os.geteuid() or not (shutil.which("ip") and shutil.which("tc")):
        return False
    name = f"links-try-{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode:
        return False
    bridge = ["ip", "-n", name, "link", "add", "br0", "type", "bridge"]
    bucket = ["tc", "-n", name, "qdisc", "add", "dev", "lo", "root", "tbf"]
    bucket += ["rate", "1mbit", "burst", "10k", "latency", "1ms"]
    works = not any(subprocess.run(c, capture_output=True).returncode for c in (bridge, bucket))
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return works


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.skipif(not _allowed(), reason="needs root, network namespaces and tbf")
def test_real_peers_measure_what_a_token_bucket_sustains(links: ModuleType, tmp_path: Path) -> None:
    """Not the 100 times as much that its burst shows. The bar is loose: the machine has others."""
    case = next(case for case in links.CASES if case.name == "tbf_50mbit_128KiB")
    with links.Hosts(("a", "b")) as hosts:
        hosts.shape("a", *case.lines)
        found = links.Bench(hosts, tmp_path).probe(case)
    assert found["bytes_per_s"] == pytest.approx(6.25e6 * 0.956, rel=0.25)
    assert found["latency_s"] < 0.05


def test_names_of_cases_are_their_own(links: ModuleType) -> None:
    names = [case.name for case in links.CASES]
    assert len(set(names)) == len(names) >= 20


def test_an_error_is_that_of_the_median_probe(links: ModuleType) -> None:
    def row(rate: float, latency_s: float) -> dict[str, float]:
        return {"bytes_per_s": rate, "rate": 1e6, "latency_s": latency_s, "latency": 0.02}

    rows = [row(1.1e6, 0.021), row(0.9e6, 0.5), row(1.05e6, 0.025)]
    assert links.errors(rows) == pytest.approx((0.05, 5 / 3)), "of the 3 ms that are allowed"
    assert links.errors([row(1e6, 0.017)])[1] == pytest.approx(1.0)
