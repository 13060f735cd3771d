"""The preview over a scenario's peers and links, without a broker."""

from __future__ import annotations

from dataclasses import replace

from ..broker.events import PreviewWanted
from ..broker.membership.speeds import speeds_of
from ..broker.planning.preview import preview_wanted
from ..broker.scheduler.base.interface import PeerOffer
from ..dag.ir.graph import Graph
from ..peer.host.profile import speeds_to_proto
from ..proto.broker_pb2 import PeerState, PreviewAnswer, Profile, RunSpec
from ..proto.graph_pb2 import CORE, FULL
from .scenario.scenario import Scenario

__all__ = ["preview_cluster"]


def preview_cluster(scenario: Scenario, spec: RunSpec, graph: Graph) -> PreviewAnswer:
    """What would run where if the peers of the scenario had joined: a speed that no device has is
    clamped and noted as for a peer that reports it."""
    network = scenario.network()
    states, offers, notes = [], [], list[str]()
    for offer, up, down in zip(scenario.offers(), network.up, network.down, strict=True):
        profile = _profile(offer, float(up), float(down))
        speeds, unlikely = speeds_of(profile)
        notes += unlikely
        offers.append(replace(offer, speeds=speeds, flops_per_s=speeds.product))
        states.append(PeerState(peer=offer.peer, profile=profile, membership="pool"))
    wanted = PreviewWanted(spec, tuple(states), tuple(offers), network, tuple(notes))
    return preview_wanted(wanted, graph)


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
