"""Data of federated training that stays with peers: each host that has some is a client, which its
peers alone may train."""

from __future__ import annotations

from collections.abc import Iterable

from ...proto.broker_pb2 import RunSpec
from ..base.interface import PeerOffer

__all__ = ["has_client", "offer_of_each", "spec_of_client"]


def spec_of_client(spec: RunSpec, client: int) -> RunSpec:
    """Return the spec of a run that has one client's data and knows of no other; the same where
    data lies with the broker."""
    if not spec.client_data:
        return spec
    found = RunSpec()
    found.CopyFrom(spec)
    found.data.CopyFrom(spec.client_data[client])
    found.ClearField("client_data")
    return found


def offer_of_each(spec: RunSpec, offers: Iterable[PeerOffer]) -> dict[int, PeerOffer]:
    """Return the first offer that has the data of a client, by client; those that nobody offers
    are not in it."""
    numbers = {ref.hash: i for i, ref in enumerate(spec.client_data)}
    found: dict[int, PeerOffer] = {}
    for offer in offers:
        for manifest, _ in offer.manifests:
            if (client := numbers.get(manifest)) is not None:
                found.setdefault(client, offer)
                break
    return found


def has_client(spec: RunSpec, offer: PeerOffer) -> bool:
    """Return whether an offer has the data of some client."""
    return any(offer.keeps(ref.hash) is not None for ref in spec.client_data)
