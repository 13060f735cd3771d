"""The preview over a scenario's peers and links, without a broker."""

from __future__ import annotations

from pathlib import Path

from ..broker.events import PreviewWanted
from ..broker.preview import preview_wanted
from ..dag.graph import Graph
from ..proto.broker_pb2 import PeerState, PreviewAnswer, Profile, RunSpec
from .scenario import Scenario

__all__ = ["preview_cluster"]


def preview_cluster(path: Path, job: Path, spec: RunSpec, graph: Graph) -> PreviewAnswer:
    """What would run where if the peers of the scenario file had joined. Raises SettingsError for
    the file, OSError when it cannot be read."""
    scenario = Scenario.from_toml(path, job=job)
    offers = scenario.offers()
    states = tuple(
        PeerState(
            peer=o.peer,
            profile=Profile(
                name=o.name,
                place=o.place,
                device_memory_bytes=o.device_memory_bytes,
                host_memory_bytes=o.host_memory_bytes,
                flops_per_s=o.flops_per_s,
            ),
            membership="pool",
        )
        for o in offers
    )
    return preview_wanted(PreviewWanted(spec, states, offers, scenario.network()), graph)
