"""Opens a worker: asks the machine what it offers, binds the port, reads what lies on the disk."""

from __future__ import annotations

from functools import partial

import grpc.aio
import torch

from ...net.cap import Cap, Meter
from ...net.identity.credential import Credential
from ...net.local import joined, local_address, split
from ...net.transports.grpc_transport import SERVER_OPTIONS
from ...proto import broker_pb2
from ..blobs.cache import take_over
from ..compute.device import TorchDevice
from ..compute.stretch import StretchedDevice
from ..core.snapshots import SnapshotStore
from ..federated.client_states import ClientStates
from ..host.addresses import to_dial
from ..host.config import PeerConfig
from ..host.host import Host
from ..host.identity import Incarnation
from ..host.own_data import Catalogue, host_secret, offers
from ..host.profile import measure
from ..host.speeds_file import speeds_path
from ..hours import Hours
from .credentials import Credentials, listen, listen_within
from .daemon import Opened, Worker
from .owner import Owner
from .spans import Spans

__all__ = ["look", "open_worker"]


def look(config: PeerConfig, network: bytes = b"") -> broker_pb2.Profile:
    """What this host offers with the settings to a network, which its authority's fingerprint
    names. Raises ValueError for a device that is not here."""
    if config.threads:
        torch.set_num_threads(config.threads)
    return measure(
        config.device,
        name=config.name,
        place=config.place,
        owner=config.owner,
        core=config.operator_set == "core",
        memory_bytes=config.memory_bytes,
        up_bytes_per_s=config.up_bytes_per_s or 0.0,
        down_bytes_per_s=config.down_bytes_per_s or 0.0,
        stay_s=config.stay_s or 0.0,
        hours=str(Hours.parse(config.hours)) if config.hours else "",
        monthly_bytes=config.monthly_bytes or 0,
        data=offers(config.data),
        web=config.web,
        speeds=speeds_path(),
        stretch=config.stretch,
        network=network,
    )


def open_worker(
    config: PeerConfig,
    me: Incarnation,
    profile: broker_pb2.Profile,
    credential: Credential | None = None,
) -> Worker:
    """Makes the peer of this process, in its event loop; `Worker.run` closes what is opened here.
    Without a credential nothing is encrypted. Raises ValueError for a port that is taken, settings
    that do not go together or a damaged file (HostError), and OSError."""
    credentials = None if credential is None else Credentials(credential, config)
    meter = Meter()
    owner = None
    if config.host_state is not None:
        owner = Owner(
            Host(config.host_state),
            meter,
            peer=me.peer,
            name=config.name,
            broker=config.broker,
            monthly_bytes=config.monthly_bytes,
        )
    secret = host_secret(config.host_state or config.state) if config.data else b""
    kind = TorchDevice if config.stretch == 1 else partial(StretchedDevice, stretch=config.stretch)
    device = kind(
        config.device,
        member_of=None if credentials is None else credentials.member,
        clients=ClientStates(me.clients),
        identity_of=None if credentials is None else credentials.identity,
    )
    snapshots = SnapshotStore(me.snapshots)
    take_over(me.blobs)
    server = grpc.aio.server(options=SERVER_OPTIONS)
    host = config.host or local_address(split(to_dial(config.via, config.broker))[0])
    listens = joined(host, listen(server, host, config.port, credentials))
    within = "" if credentials is None else listen_within(server, me.boot, credentials)
    opened = Opened(
        server=server,
        listens=listens,
        within=within or listens,
        credentials=credentials,
        up=Cap(config.up_bytes_per_s, meter=meter),
        down=Cap(config.down_bytes_per_s, meter=meter),
        owner=owner,
        device=device,
        snapshots=snapshots,
        kept=snapshots.found(),
        own_data=Catalogue(me.scratch / "own", config.data, secret),
        spans=Spans(config.trace, me.peer, config.name),
    )
    return Worker(config, me, profile, opened)
