"""What a peer of the simulated world is: its card and its owner's terms, and what stands for its
device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from ...dag.cost.speed import Speeds
from ...dag.schedule.schedule import Action
from ...net.links.frame import Arrived, FrameKey, Payload
from ...peer.compute.order import BuildOrder
from ...peer.core import events as p
from ...peer.host.profile import speeds_to_proto
from ...peer.rounds.work import RoundWork
from ...proto import broker_pb2, graph_pb2

__all__ = ["PeerDevice", "PeerSpec"]

CALL_S = 1e-6
"""Fixed time of a kernel, of a peer that states FLOP/s only."""


class PeerDevice(Protocol):
    """What does things with values; see peer.device.TorchDevice, which is one."""

    def build(self, order: BuildOrder) -> p.Built: ...
    def discard(self) -> None: ...
    def accept(self, arrived: Arrived) -> None: ...
    def most_bytes(self, key: FrameKey) -> int | None: ...
    def payload(self, key: FrameKey) -> Payload: ...
    def release(self, key: FrameKey) -> None: ...
    def prefetch(self, step: int) -> None: ...
    @property
    def rounds(self) -> RoundWork[Any]: ...
    def compute(self, step: int, action: Action) -> p.Result: ...
    def export(self) -> bytes | memoryview: ...
    def snapshot(self, step: int) -> Callable[[], tuple[memoryview, ...]]: ...
    def blocks(self) -> Callable[[], tuple[memoryview, ...]]: ...


@dataclass(frozen=True, kw_only=True)
class PeerSpec:
    """One peer of the world. Times in seconds of the world's clock."""

    name: str
    flops_per_s: float = 1e10
    memory_bytes: int = 4 << 30
    core: bool = False
    """Whether it knows the core operator set only."""
    hardware: Speeds | None = None
    """Instead of `flops_per_s`: each class of work at its own speed."""
    place: str = ""
    owner: str = ""
    up: float = 0.0
    """Bytes/s that the owner allows of the uplink; 0: says nothing."""
    down: float = 0.0
    """Bytes/s that the owner allows of the downlink; 0: says nothing."""
    data: Mapping[str, str] = field(default_factory=dict)
    """Data that stays here: by its name, the hash of its manifest among the world's blobs."""
    joins_s: float = 0.0
    stays_s: float | None = None
    """How long after its coming the owner ends it, in good order, as it says; None: never."""

    @property
    def speeds(self) -> Speeds:
        return self.hardware or Speeds.of_flops(self.flops_per_s, CALL_S)

    @property
    def profile(self) -> broker_pb2.Profile:
        return broker_pb2.Profile(
            name=self.name,
            place=self.place,
            owner=self.owner,
            device="cpu simulated",
            device_memory_bytes=self.memory_bytes,
            host_memory_bytes=self.memory_bytes,
            flops_per_s=self.hardware.product if self.hardware else self.flops_per_s,
            speeds=speeds_to_proto(self.speeds),
            operator_set=graph_pb2.CORE if self.core else graph_pb2.FULL,
            up_bytes_per_s=self.up,
            down_bytes_per_s=self.down,
            stay_s=self.stays_s or 0.0,
            data=[broker_pb2.DataSet(name=name) for name in self.data],
        )
