"""The preview over a scenario's peers and links, without a broker."""

from __future__ import annotations

from ..broker.events import PreviewWanted
from ..broker.preview import preview_wanted
from ..broker.scheduler.interface import PeerOffer
from ..dag.graph import Graph
from ..peer.profile import speeds_to_proto
from ..proto.broker_pb2 import PeerState, PreviewAnswer, Profile, RunSpec
from ..proto.graph_pb2 import CORE, FULL
from .scenario import Scenario

__all__ = ["preview_cluster"]


def preview_cluster(scenario: Scenario, spec: RunSpec, graph: Graph) -> PreviewAnswer:
    """What would run where if the peers of the scenario had joined."""
    offers = scenario.offers()
    network = scenario.network()
    states = tuple(
        PeerState(peer=o.peer, profile=_profile(o, float(up), float(down)), membership="pool")
        for o, up, down in zip(offers, network.up, network.down, strict=True)
    )
    return preview_wanted(PreviewWanted(spec, states, offers, network), graph)


def _profile(offer: PeerOffer, up: float, down: float) -> Profile:
    return Profile(
        name=offer.name,
        place=offer.place,
        device_memory_bytes=offer.device_memory_bytes,
        host_memory_bytes=offer.host_memory_bytes,
        flops_per_s=offer.flops_per_s,
        operator_set=CORE if offer.operator_set == "core" else FULL,
        speeds=None if offer.speeds is None else speeds_to_proto(offer.speeds),
        up_bytes_per_s=up,
        down_bytes_per_s=down,
    )
