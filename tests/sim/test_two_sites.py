"""The scenario of two sites keeps what it is for: each site is a replica, and the line between the
sites carries what replicas exchange, and nothing else."""

from __future__ import annotations

import pytest

from shoal.client.submission import draft
from shoal.job import Job
from shoal.sim.scenario.catalogue import find
from shoal.sim.scenario.scenario import Scenario
from shoal.sim.simulate import preview_cluster


@pytest.mark.slow
def test_each_of_two_sites_is_one_replica_that_no_peer_holds_alone() -> None:
    scenario = Scenario.from_toml(find("two-sites-rounds"))
    job = scenario.adjusted(Job.from_toml(scenario.job_path))
    answer = preview_cluster(scenario, *draft(job, lambda line: None))
    sites = {peer.name: peer.place for peer in scenario.peers}
    members = [sorted(replica.peers) for replica in answer.formation.replicas]
    assert sorted(members) == [["north-1", "north-2"], ["south-1", "south-2"]]
    assert [len({sites[p] for p in peers}) for peers in members] == [1, 1]
    [line] = [link for link in scenario.links if {link.from_, link.to} == {"north", "south"}]
    assert answer.formation.slowest_link == float(line.bandwidth)
