"""The networks of the literature keep the numbers that their authors computed with them."""

import numpy as np
import pytest

from shoal.sim.scenario.topologies import load, names


@pytest.mark.parametrize("name", names())
def test_a_set_expands_to_symmetric_matrices_without_gaps(name: str) -> None:
    topology = load(name)
    places = len(topology.places)
    assert topology.latency_s.shape == topology.bandwidth.shape == (places, places)
    assert (topology.latency_s >= 0).all()
    assert (topology.bandwidth > 0).all()
    assert np.isfinite(topology.bandwidth).all()
    assert (topology.latency_s == topology.latency_s.T).all()
    assert (topology.bandwidth == topology.bandwidth.T).all()


@pytest.mark.parametrize(
    ("name", "nodes"),
    [("skippipe_gcp_12", 20), ("dtfm_world_10", 0), ("dtfm_case_1_spot", 64)],
)
def test_nodes_sit_at_their_places(name: str, nodes: int) -> None:
    topology = load(name)
    network = topology.network()
    assert len(network) == len(set(network.peers)) == nodes
    for i in range(nodes):
        for j in range(nodes):
            if i != j:
                a, b = topology.node_places[i], topology.node_places[j]
                assert network.latency_s[i, j] == topology.latency_s[a, b]
                assert network.bandwidth[i, j] == topology.bandwidth[a, b]


def test_32_mib_from_the_netherlands_to_london_take_what_was_published() -> None:
    shipped = load("skippipe_gcp_12", "as_shipped")
    network, places = shipped.network(), shipped.places
    overhead_s = shipped.experiment["fixed_overhead_s_per_transfer"]
    seconds = network.seconds(places.index("NL"), places.index("London"), 32 * 2**20)
    assert seconds + overhead_s == pytest.approx(132.31, abs=0.005)
    corrected = load("skippipe_gcp_12").network()
    assert corrected.seconds(places.index("NL"), places.index("London"), 32 * 2**20) < 1.4


def test_seven_hops_there_and_back_inside_a_region_take_what_was_published() -> None:
    regional = load("dtfm_case_3_regional")
    size = regional.experiment["activation_bytes_per_stage_link"]
    assert 14 * regional.network().seconds(0, 1, size) == pytest.approx(26.46, abs=0.005)


def test_sharded_data_parallelism_over_eight_instances_takes_what_was_published() -> None:
    datacenter = load("dtfm_case_0_datacenter")
    shard = datacenter.experiment["gradient_bytes_per_stage"] / 8
    seconds = 2 * 7 * datacenter.network().seconds(0, 8, shard)  # one node of each instance
    assert seconds == pytest.approx(2.912, abs=0.0005)


def test_a_variant_overrides_what_it_names_only() -> None:
    plain, changed = load("dtfm_case_4_worldwide"), load("dtfm_case_4_worldwide", "traffic_control")
    assert np.diag(changed.latency_s) == pytest.approx(0.010)
    between = ~np.eye(len(plain.places), dtype=bool)
    assert (plain.latency_s[between] == changed.latency_s[between]).all()


def test_unknown_sets_and_variants_are_named_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r'named "dtfm_case_9"; known: skippipe_gcp_12, '):
        load("dtfm_case_9")
    with pytest.raises(ValueError, match=r'no variant "fast"; known: as_shipped'):
        load("skippipe_gcp_12", "fast")
