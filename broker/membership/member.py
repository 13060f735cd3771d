"""One member: what it said of itself, what it is at, and what may be said in a Hello at all."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from google.protobuf.message import Message

from ...dag.plan.plan import PeerId
from ...net.printable import printable
from ...planner.base.interface import PeerOffer
from ...proto.broker_pb2 import Hello, Profile, Resolved
from ...proto.common_pb2 import Reason
from ...proto.graph_pb2 import CORE, FULL
from ..events import ReplicaId, StreamId
from .speeds import Correction, speeds_of

__all__ = ["PROTOCOL", "RELAY", "Member", "State", "clean", "dial", "problem_of"]

PROTOCOL = 3
"""The version of the protocol that this broker speaks."""

MOST_DATA = MOST_WEB = 64
"""Data sets of one peer, and places on the web where it reads."""

State = Literal["pool", "assigned", "draining", "resting"]


def clean(text: str, limit: int = 500) -> str:
    """Text from elsewhere, safe for a log line and a terminal: printable, of bounded length."""
    return printable(text, limit)


@dataclass(eq=False)
class Member:
    """A joined peer. Changed by Membership only."""

    id: PeerId
    stream: StreamId
    boot: str
    counter: int
    profile: Profile
    address: str
    joined: int  # Counts joins of this broker; the order of joining.
    heard_at: float  # When its last message came.
    state: State = "pool"
    run: ReplicaId | None = None  # Set exactly while it is assigned or draining.
    draining_since: float = 0.0
    stays_until: float = math.inf  # When it means to leave.
    closed: Reason | None = None  # Why its owner keeps it out of runs; None: it takes part.
    correction: Correction = field(default_factory=Correction)
    manifests: dict[tuple[str, str], tuple[str, ...]] = field(default_factory=dict)
    # Of its own data, by who asked and hash, with the inputs of the model that it keeps.
    blended: set[str] = field(default_factory=set)
    # Hashes of those of which sums with products may leave.
    odd: tuple[str, ...] = ()  # What of its profile's numbers could not be taken as it is.
    answers: dict[tuple[str, str, str], Resolved | None] = field(default_factory=dict)
    # What it said of its data, by the way of reading it; None: asked, see
    # broker/placement/datasets.py.

    @property
    def free(self) -> State:
        """Return its state without a run."""
        return "pool" if self.closed is None else "resting"

    @property
    def label(self) -> str:
        """For people: the name, and the id where that differs."""
        name = self.profile.name
        return self.id if name in ("", self.id) else f"{name} ({self.id})"

    @property
    def offer(self) -> PeerOffer:
        stated = self.profile.HasField("speeds") or self.profile.flops_per_s > 0
        speeds = speeds_of(self.profile)[0].slower(self.correction.factor)
        return PeerOffer(
            peer=self.id,
            name=self.profile.name,
            place=self.profile.place,
            device_memory_bytes=self.profile.device_memory_bytes,
            host_memory_bytes=self.profile.host_memory_bytes,
            flops_per_s=speeds.product if stated else 0.0,
            operator_set="core" if self.profile.operator_set == CORE else "full",
            reachable=bool(self.address),
            speeds=speeds if stated or self.correction.factor != 1.0 else None,
            learned=self.correction.factor,
            host=self.profile.host,
            cores=self.profile.cores * speeds.busy,
            threads=self.profile.threads,
            accelerator=self.profile.device.startswith("cuda"),
        )

    def offer_to(self, submitter: str) -> PeerOffer:
        """Return its offer for somebody's run, with what the peer said of its data when they asked.
        Of others' runs it has no say: their data would be whatever it calls its own."""
        mine = {name: kept for (by, name), kept in self.manifests.items() if by == submitter}
        blended = self.blended.intersection(mine)
        return replace(self.offer, manifests=tuple(mine.items()), blended=frozenset(blended))


RELAY = "relay"
"""The address of a peer that only the broker's relay reaches."""


def dial(a: Member, b: Member, relays: bool) -> tuple[Member, Member, str] | None:
    """Say which of two that shall have a link dials, whom, and where; the first one, if both can.
    None when neither can be dialled, and nothing is relayed."""
    if b.address:
        return a, b, b.address
    if a.address:
        return b, a, a.address
    return (a, b, RELAY) if relays else None


def _texts(message: Message, path: str = "") -> Iterator[tuple[str, str]]:
    """All texts of a message, each with the names that lead there."""
    for field_, value in message.ListFields():
        name = f"{path}.{field_.name}" if path else field_.name
        for part in value if field_.is_repeated else (value,):
            if isinstance(part, str):
                yield name, part
            elif isinstance(part, Message):
                yield from _texts(part, name)


def problem_of(hello: Hello) -> tuple[str, str] | None:
    """(code, text) of what is wrong with a Hello, or None."""
    if hello.version != PROTOCOL:
        return "version", (
            f"the peer speaks version {hello.version} of the protocol, this broker {PROTOCOL}: "
            "install the same version of shoal on both"
        )
    for field_name, value, least, most in (
        ("peer", hello.peer, 1, 128),
        ("boot", hello.boot, 1, 128),
        ("address", hello.address, 0, 300),
        ("holding.run", hello.holding.run, 0, 128),
        ("profile.name", hello.profile.name, 0, 128),
        ("profile.place", hello.profile.place, 0, 128),
        ("profile.owner", hello.profile.owner, 0, 128),
        ("profile.device", hello.profile.device, 0, 300),
        ("profile.software", hello.profile.software, 0, 300),
    ):
        if not least <= len(value) <= most or not value.isprintable():
            return "hello", (
                f"{field_name} of the Hello is {clean(value, 60)!r}: expected {least} to {most} "
                "printable characters"
            )
    for path, text in _texts(hello):
        if len(text) > 4096 or not text.isprintable():
            return "hello", (
                f"{path} of the Hello is {clean(text, 60)!r}: expected at most 4096 printable "
                "characters"
            )
    data = hello.profile.data
    if len(data) > MOST_DATA or any(not 1 <= len(d.name) <= 64 for d in data):
        return "hello", (
            f"profile.data of the Hello has {len(data)} data sets: expected at most {MOST_DATA}, "
            "each with a name of 1 to 64 characters"
        )
    web = hello.profile.web
    if len(web) > MOST_WEB or any(len(place) > 300 for place in web):
        return "hello", (
            f"profile.web of the Hello has {len(web)} places: expected at most {MOST_WEB}, each of "
            "at most 300 characters"
        )
    if hello.profile.operator_set not in (FULL, CORE):
        return "hello", (
            f"profile.operator_set of the Hello is {hello.profile.operator_set}: expected FULL "
            "or CORE"
        )
    if not (math.isfinite(hello.profile.flops_per_s) and hello.profile.flops_per_s >= 0):
        return "hello", (
            f"profile.flops_per_s of the Hello is {hello.profile.flops_per_s}: expected a finite "
            "number of at least 0"
        )
    return None
