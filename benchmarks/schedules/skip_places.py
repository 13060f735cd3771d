"""Places for routes that skip: SkipPipe's twelve, other networks of the literature, random
geographies, and those of a file.

An edge takes latency + activation bytes / bandwidth + 0.35 s, as in SkipPipe's experiment
(arXiv 2502.19913), whose sizes all of these have: 6 stages of which a microbatch visits 4,
33,554,648 bytes, forwards of 0.44 s, three microbatches on a node.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.planner.routes.route_rules import LanePath, RouteRules
from shoal.planner.routes.route_timing import RouteTimes
from shoal.sim.scenario.topologies import Topology, load, topology_of

__all__ = ["PUBLISHED", "Instance", "from_file", "geography", "literature", "published"]

Floats = NDArray[np.float64]
PUBLISHED = json.loads((Path(__file__).parent / "skippipe_published.json").read_text())
"""Their shipped schedule: places and stages of its nodes, routes of each method."""
FORWARD_S = 0.44
EDGE_S = 0.35
REST_S = 0.13
ACTIVATION_BYTES = 33_554_648
"""Of 8 samples of 1,024 tokens and width 1,024, and 216 more: so their shipped delays say."""
NODES = 20
RADIUS_KM, KM_PER_S = 6371.0, 200_000.0
"""Of the earth; of light in glass."""


@dataclass(frozen=True, eq=False)
class Instance:
    """Nodes with their delays, and how many of them are in each stage."""

    name: str
    nodes: tuple[str, ...]
    """The place of each."""
    delay_s: Floats
    """(N, N)"""
    sizes: tuple[int, ...]
    forward_s: float = FORWARD_S
    rules: RouteRules = field(default_factory=RouteRules)

    def times(self, *, backward_first: bool = False) -> RouteTimes:
        """Their seconds for our calculation of events."""
        forward = np.full(len(self.nodes), self.forward_s)
        return RouteTimes(
            latency_s=self.delay_s,
            hold_s=np.zeros_like(self.delay_s),
            forward_s=forward,
            backward_s=1.5 * forward,
            loss_s=0.25 * forward,
            rest_s=REST_S,
            memory=self.rules.memory,
            backward_first=backward_first,
        )


def sizes_for(nodes: int, rules: RouteRules) -> tuple[int, ...]:
    """Nodes by stage, with as many first nodes as the others have places for. Raises ValueError for
    too few nodes."""
    best: tuple[int, ...] = ()
    for first in range(1, nodes):
        each = -(-rules.visits_per_stage(first * rules.memory) // rules.memory)
        if first + each * (rules.stages - 1) <= nodes:
            best = (first, *[each] * (rules.stages - 1))
    if not best:
        raise ValueError(f"{nodes} nodes for {rules.stages} stages: expected more")
    return best


def _instance(name: str, topology: Topology, node_places: Sequence[int]) -> Instance:
    network = replace(topology, node_places=tuple(node_places)).network()
    delay: Floats = network.latency_s + ACTIVATION_BYTES / network.bandwidth + EDGE_S
    np.fill_diagonal(delay, 0.0)
    rules = RouteRules()
    sizes = sizes_for(len(node_places), rules)
    # Whoever is left over stays out, for all planners.
    kept = sum(sizes)
    nodes = tuple(topology.places[k] for k in node_places[:kept])
    return Instance(name, nodes, delay[:kept, :kept], sizes, rules=rules)


def published(*, as_shipped: bool = True) -> Instance:
    """The twelve places with their nodes as in the shipped schedule. One link of the shipped table
    is a hundred times too slow."""
    topology = load("skippipe_gcp_12", "as_shipped" if as_shipped else "")
    at = [topology.places.index(p) for p in PUBLISHED["places"]]
    return _instance("skippipe12" if as_shipped else "skippipe12_corrected", topology, at)


def published_paths(method: str) -> list[LanePath]:
    """The shipped paths of a method, one for each route that its file lists."""
    stage = {n: s for s, nodes in enumerate(PUBLISHED["stage_nodes"]) for n in nodes}
    return [tuple((stage[n], n) for n in nodes) for nodes in PUBLISHED["routes"][method]]


def literature(name: str) -> Instance:
    """Twenty nodes, dealt out over the places of a set of `sim/topologies.json`."""
    topology = load(name)
    return _instance(name, topology, [k % len(topology.places) for k in range(NODES)])


def geography(seed: int, places: int = 12) -> Instance:
    """Places by chance on the earth, in a few regions: latency by distance, bandwidth falling with
    it and varying by a factor of about two, as those of public clouds do."""
    rng = np.random.default_rng(seed)
    regions = rng.integers(3, 6)
    centres = rng.normal(size=(regions, 3))
    at = centres[rng.integers(0, regions, places)]
    at = at / np.linalg.norm(at, axis=1, keepdims=True) + rng.normal(scale=0.2, size=(places, 3))
    at /= np.linalg.norm(at, axis=1, keepdims=True)
    km = RADIUS_KM * np.arccos(np.clip(at @ at.T, -1, 1))
    latency_s = 0.001 + 1.5 * km / KM_PER_S
    bandwidth = 260e6 / (1 + km / 500) * np.exp(rng.normal(scale=0.4, size=km.shape))
    bandwidth = np.sqrt(bandwidth * bandwidth.T)
    np.fill_diagonal(latency_s, 0.001)
    np.fill_diagonal(bandwidth, 2e9)
    names = tuple(f"place-{k}" for k in range(places))
    topology = Topology(f"geography{seed}", names, latency_s, bandwidth, (), {})
    return _instance(topology.name, topology, [k % places for k in range(NODES)])


def from_file(path: Path) -> Instance:
    """Places of a JSON file: one table with fields as in `sim/topologies.json`, of which `places`
    and `links` have to be there; nodes are dealt out over the places unless `node_places` says
    where they are. Raises ValueError that says what is wrong."""
    try:
        table: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    if not isinstance(table, dict) or not {"places", "links"} <= table.keys():
        raise ValueError(f"{path}: expected an object with places and links")
    known: dict[str, Any] = {
        "name": path.stem,
        "other_pairs": None,
        "same_place": {"latency_ms": 1, "bandwidth_bytes_per_s": 2147483648},
        "node_places": [],
        "experiment": {},
        "variants": {},
    }
    try:
        topology = topology_of(known | table)
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"{path}: not as in sim/topologies.json: {error!r}") from None
    count = max(NODES, len(topology.places))
    dealt = [k % len(topology.places) for k in range(count)]
    return _instance(topology.name, topology, topology.node_places or dealt)
