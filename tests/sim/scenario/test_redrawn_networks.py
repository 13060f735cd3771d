"""Networks of any scenario and of the testbeds, as they are stated and drawn anew."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.benchmarks.planning.redraw import FACTOR, redraw
from shoal.job import Job
from shoal.sim.scenario.scenario import SCENARIOS, Scenario
from shoal.sim.scenario.tables import LinkTable, PeerTable, Place

TESTBEDS = (8, 24, 48)


# ---------------------------------------------------------------- expansion


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    places = [f"place-{k}" for k in range(draw(st.integers(1, 4)))]
    at = draw(st.lists(st.sampled_from(places), min_size=1, max_size=8))
    peers = tuple(PeerTable(name=f"p{i}", place=place) for i, place in enumerate(at))
    used = list(dict.fromkeys(at))
    pairs = [(a, b) for i, a in enumerate(used) for b in used[:i]]
    names = [p.name for p in peers]
    pairs += [
        (a, b)
        for a, b in draw(st.sets(st.tuples(st.sampled_from(names), st.sampled_from(names))))
        if a < b
    ]
    number = st.integers(1, 1000)
    links = tuple(
        LinkTable.from_table(
            {
                "from": a,
                "to": b,
                "latency": f"{draw(number)}ms",
                "bandwidth": f"{draw(number)}Mbit",
            }
        )
        for a, b in pairs
    )
    inside = {name: Place.from_table({"latency": f"{draw(number)}us"}) for name in used}
    return Scenario(version=1, job="job.toml", peers=peers, links=links, places=inside)


@given(scenarios())
def test_links_in_both_directions_give_symmetric_positive_matrices_without_gaps(
    scenario: Scenario,
) -> None:
    network = scenario.network()
    off = ~np.eye(len(network), dtype=bool)
    assert (network.latency_s[off] > 0).all()
    assert (network.bandwidth[off] > 0).all()
    assert np.isfinite(network.latency_s).all()
    assert np.isfinite(network.bandwidth[off]).all()
    assert (network.latency_s == network.latency_s.T).all()
    assert (network.bandwidth == network.bandwidth.T).all()


@given(scenarios(), st.integers(0, 2**32))
def test_a_redrawn_network_is_near_the_stated_one_and_the_same_for_the_same_seed(
    scenario: Scenario, seed: int
) -> None:
    stated, drawn = scenario.network(), redraw(scenario, seed).network()
    again = redraw(scenario, seed).network()
    assert drawn.peers == stated.peers
    assert (drawn.latency_s == again.latency_s).all()
    assert (drawn.bandwidth == again.bandwidth).all()
    assert (drawn.up == again.up).all()
    off = ~np.eye(len(stated), dtype=bool)
    ratio = drawn.latency_s[off] / stated.latency_s[off]
    assert ((ratio >= 0.999 / FACTOR) & (ratio <= 1.001 * FACTOR)).all()
    assert ((drawn.bandwidth[off] >= 1e6) & (drawn.bandwidth[off] <= 1.25e9)).all()
    assert (drawn.latency_s == drawn.latency_s.T).all()


# ---------------------------------------------------------------- the testbeds


@pytest.mark.parametrize("size", TESTBEDS)
def test_a_testbed_has_clusters_from_slow_homes_to_fast_laboratories(size: int) -> None:
    scenario = Scenario.from_toml(SCENARIOS / f"testbed-{size}.toml")
    assert len(scenario.offers()) == size
    assert scenario.job_path.is_file()
    assert Job.from_toml(scenario.job_path).name == "gpt_bytes"
    off = ~np.eye(size, dtype=bool)
    rates = scenario.network().rates()[off] * 8
    assert rates.min() == 8e6
    assert rates.max() == 10e9
    for peer in scenario.peers:
        assert peer.up <= peer.down
        assert peer.memory == peer.hardware.memory_bytes  # in full, as published


@pytest.mark.parametrize("size", TESTBEDS)
def test_redrawing_a_testbed_changes_its_links_only(size: int) -> None:
    scenario = Scenario.from_toml(SCENARIOS / f"testbed-{size}.toml")
    first, second = redraw(scenario, 1), redraw(scenario, 2)
    assert first.offers() == second.offers() == scenario.offers()
    assert (first.network().bandwidth != second.network().bandwidth).any()
    assert (first.network().up != scenario.network().up).any()
    for peer in first.peers:
        assert peer.up <= peer.down
    off = ~np.eye(size, dtype=bool)
    rates = first.network().rates()[off] * 8
    assert rates.min() >= 8e6
    assert rates.max() <= 10e9
