"""Plans are the same on every processor, though the last digits of logarithms are not."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shoal.dag.cost.network import Network
from shoal.dag.schedule.convert_plan import plan_to_proto
from shoal.dag.schedule.convert_report import report_to_proto
from shoal.planner.base.interface import NoPlan, without_last_digits
from shoal.planner.network.completion import complete
from shoal.planner.schedulers.schedulers import plan
from shoal.tests.planner.cases import random_case

OLD = {
    "NPY_DISABLE_CPU_FEATURES": "AVX512_ICL X86_V4 X86_V3",
    "OPENBLAS_CORETYPE": "Nehalem",
}
"""A processor of before 2013, for NumPy and for OpenBLAS."""


@given(st.floats(1e-12, 1e18), st.integers(-3, 3))
def test_numbers_stay_to_a_millionth_and_neighbours_become_equal(x: float, ulps: int) -> None:
    found = float(without_last_digits(np.array(x)))
    assert abs(found - x) <= 2**-20 * x
    near = np.array(found + ulps * np.spacing(found))
    assert float(without_last_digits(near)) == found


def test_what_is_no_number_stays() -> None:
    given = np.array([np.inf, -np.inf, np.nan, 0.0, -3.0])
    np.testing.assert_array_equal(without_last_digits(given), given)


def plans() -> str:
    """A digest of plans over links that were measured in part."""
    digest = hashlib.sha256()
    for seed in range(3):
        request = random_case(seed, operators=12, peers=7, held=False)
        network, rng = request.links, np.random.default_rng(seed)
        n = len(network.peers)
        hidden = rng.random((n, n)) < 0.5
        np.fill_diagonal(hidden, True)
        full = complete(
            np.where(hidden, np.nan, network.latency_s),
            np.where(hidden, np.nan, network.bandwidth),
            ["" if i % 3 else "here" for i in range(n)],
        )
        digest.update(full.latency_s.tobytes() + full.bandwidth.tobytes())
        links = Network(network.peers, full.latency_s, full.bandwidth, network.up, network.down)
        try:
            found, report = plan(replace(request, links=links))
        except NoPlan as error:
            digest.update(error.reason.encode())
        else:
            digest.update(plan_to_proto(found).SerializeToString(deterministic=True))
            digest.update(report_to_proto(report).SerializeToString(deterministic=True))
    return digest.hexdigest()


def test_another_processor_finds_the_same_plans() -> None:
    done = subprocess.run(
        [sys.executable, __file__],
        env={**os.environ, **OLD},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert done.stdout.strip() == plans()


if __name__ == "__main__":
    print(plans())
