"""What all worlds of peers share that only have a transport."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from shoal.compression.codec import RAW
from shoal.dag.ir.graph import TensorSpec
from shoal.dag.schedule.flow import Role
from shoal.net.links.frame import Arrived, FrameKey, Payload
from shoal.net.links.messages import Message
from shoal.net.links.transport import (
    FrameAcknowledged,
    FrameArrived,
    LinkDown,
    LinkRefused,
    LinkUp,
    Transport,
    TransportEvent,
)


@dataclass
class Peer:
    """One peer of a world: its transport and what it was told."""

    name: str
    transport: Transport = field(init=False)
    events: list[TransportEvent] = field(default_factory=list)
    encodes: int = 0
    on_event: Callable[[TransportEvent], None] = lambda event: None

    def key(self, to: str, role: Role, microbatch: int, port: str = "x") -> FrameKey:
        return FrameKey("run", 1, 0, role, microbatch, 1, port, self.name, to)

    def send(self, to: str, tensor: torch.Tensor | int, role=Role.ACTIVATION, microbatch=0):
        """Encodes (an int: that many bytes) and sends; returns the key."""
        if isinstance(tensor, int):
            tensor = torch.arange(tensor, dtype=torch.int64).to(torch.uint8)
        self.encodes += 1
        encoded = RAW.encode(tensor)
        spec = TensorSpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        key = self.key(to, role, microbatch)
        self.transport.send(to, key, Payload("raw/1", encoded.header, spec, encoded.buffers))
        return key

    @property
    def arrived(self) -> list[Arrived]:
        return [e.arrived for e in self.events if isinstance(e, FrameArrived)]

    @property
    def arrived_keys(self) -> list[FrameKey]:
        return [a.key for a in self.arrived]

    @property
    def acknowledged(self) -> list[FrameKey]:
        return [e.key for e in self.events if isinstance(e, FrameAcknowledged)]

    @property
    def refusals(self) -> list[str]:
        return [e.why for e in self.events if isinstance(e, LinkRefused)]

    def ups(self, peer: str) -> int:
        return sum(isinstance(e, LinkUp) and e.peer == peer for e in self.events)

    def downs(self, peer: str) -> int:
        return sum(isinstance(e, LinkDown) and e.peer == peer for e in self.events)


class Outsider:
    """A hand-made dialler: says any bytes, keeps what it hears."""

    def __init__(self) -> None:
        self.heard: list[Message] = []
        self.ended = False

    def say(self, *messages: bytes) -> None:
        raise NotImplementedError

    def hang_up(self) -> None:
        raise NotImplementedError


class World:
    """What all worlds share."""

    def __init__(self) -> None:
        self.peers: dict[str, Peer] = {}

    async def join(self, name: str, boot: str = "1", max_frame_bytes: int = 1 << 30) -> Peer:
        raise NotImplementedError

    async def dial(self, a: Peer, b: Peer, generation: int = 1) -> None:
        raise NotImplementedError

    async def pair(self, slots: int = 100) -> tuple[Peer, Peer]:
        """Peers a and b; a has dialled b, every role has slots both ways, the link is up."""
        a, b = await self.join("a"), await self.join("b")
        await self.connect(a, b, slots)
        return a, b

    async def connect(self, a: Peer, b: Peer, slots: int = 100) -> None:
        b.transport.expect(a.name)
        await self.dial(a, b)
        for role in Role:
            a.transport.allow(b.name, role, slots)
            b.transport.allow(a.name, role, slots)
        await self.until(lambda: a.ups(b.name) > 0 and b.ups(a.name) > 0)

    async def until(self, condition: Callable[[], bool]) -> None:
        raise NotImplementedError

    async def settle(self, a: Peer, b: Peer) -> None:
        """Returns when all that could go on the link has arrived both ways, but for snapshots: a
        probe, which goes last, went each way and was acknowledged. Needs two slots for probes."""
        for _ in range(2):
            for x, y in ((a, b), (b, a)):
                self._probes = getattr(self, "_probes", 0) + 1
                key = x.send(y.name, 1, Role.PROBE, self._probes)
                await self.until(lambda x=x, key=key: key in x.acknowledged)
                y.transport.release(x.name, key)

    def cut(self, a: Peer, b: Peer) -> None:
        """Breaks the connection; it may be dialled again."""
        raise NotImplementedError

    async def outsider(self, to: Peer, name: str = "out") -> Outsider:
        """`name`: whom its certificate names, where there are certificates."""
        raise NotImplementedError

    async def crash(self, peer: Peer) -> None:
        """The process of this peer ends; its name may join again with another boot id."""
        raise NotImplementedError

    async def close(self) -> None:
        raise NotImplementedError

    def _peer(self, name: str) -> Peer:
        self.peers[name] = peer = Peer(name)
        return peer
