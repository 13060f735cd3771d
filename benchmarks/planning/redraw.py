"""Other networks of the same shape: is a plan's gain luck of the numbers that a file states?"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from shoal.job.units import Duration, Rate
from shoal.sim.scenario.scenario import Scenario
from shoal.sim.scenario.tables import PeerTable, Place

__all__ = ["FACTOR", "redraw"]

FACTOR = 4.0
SLOWEST, FASTEST = float(Rate("8Mbit")), float(Rate("10Gbit"))


def redraw(scenario: Scenario, seed: int) -> Scenario:
    """A scenario with the same peers in the same places and other links: every latency and
    bandwidth, and every uplink and downlink, times a factor drawn log-uniformly from [1/FACTOR,
    FACTOR], bandwidths then held between 8 Mbit/s and 10 Gbit/s.

    What is one number for many stays one: a link between places, and the lines of peers of one
    place that are alike. An uplink that was no faster than its downlink stays so.
    """
    rng = np.random.default_rng(seed)
    drawn: dict[Any, float] = {}

    def factor(*key: Any) -> float:
        return drawn.setdefault(key, float(FACTOR ** rng.uniform(-1.0, 1.0)))

    def rate(stated: Rate, *key: Any) -> Rate:
        drawn_rate = min(max(float(stated) * factor(*key, "rate"), SLOWEST), FASTEST)
        return Rate(f"{drawn_rate!r}B/s")

    def latency(stated: Duration, *key: Any) -> Duration:
        return Duration(f"{float(stated) * factor(*key, 'latency')!r}s")

    def line(peer: PeerTable) -> PeerTable:
        key = (peer.place, peer.up, peer.down)
        up, down = rate(peer.up, *key, "up"), rate(peer.down, *key, "down")
        return replace(peer, up=min(up, down) if peer.up <= peer.down else up, down=down)

    stated, links = scenario.spelled_out
    places = {name: Place() for name in {peer.place for peer in scenario.peers}} | dict(stated)
    return replace(
        scenario,
        network_set="",
        peers=tuple(line(peer) for peer in scenario.peers),
        places={
            name: replace(
                place,
                latency=latency(place.latency, name),
                bandwidth=rate(place.bandwidth, name),
            )
            for name, place in sorted(places.items())
        },
        links=tuple(
            replace(
                link,
                latency=latency(link.latency, *sorted((link.from_, link.to)), link.latency),
                bandwidth=rate(link.bandwidth, *sorted((link.from_, link.to)), link.bandwidth),
            )
            for link in links
        ),
    )
