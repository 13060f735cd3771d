"""Members with certificates of one authority, and an attempt that is played with them: a broker
that passes on, aggregators that add up."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import cache

import torch
from torch import Tensor

from shoal.dag.plan.plan import PeerId
from shoal.dag.rounds.secret_sharing import joined
from shoal.net.identity.authority import Authority
from shoal.net.identity.names import Party, PartyRole
from shoal.net.identity.statements import CertifiedMember
from shoal.peer.secure.secure_member import SecureMember
from shoal.proto.broker_pb2 import MaskKey, SignedStatement

NOW = datetime(2026, 11, 1, tzinfo=UTC)
AUTHORITY = Authority.new(NOW)


@cache
def identity(name: str, *, days: int = 1, role: PartyRole = PartyRole.PEER) -> CertifiedMember:
    credential = AUTHORITY.credential(Party(role, name), NOW, timedelta(days=days))
    return CertifiedMember(credential, lambda: NOW)


def drawn(seed: int) -> Callable[[int], bytes]:
    return random.Random(seed).randbytes


def members_of(
    count: int, seed: int = 0, run: str = "run", round_: int = 3
) -> dict[PeerId, SecureMember]:
    return {
        PeerId(f"p{i}"): SecureMember(identity(f"p{i}"), run, round_, drawn(seed * 100 + i))
        for i in range(count)
    }


class Passing:
    """A broker: what went through it in one attempt, of which it may keep all."""

    def __init__(self, attempt: int, told: Sequence[SignedStatement]) -> None:
        self.attempt, self.told = attempt, list(told)
        self.dealt: dict[PeerId, dict[PeerId, bytes]] = {}
        self.revealed: dict[PeerId, dict[PeerId, bytes]] = {}

    def own_masks(self) -> dict[PeerId, bytes]:
        """As it finds them once enough have revealed."""
        names = sorted(MaskKey.FromString(signed.statement).member for signed in self.told)
        places = {PeerId(name): place for place, name in enumerate(names, 1)}
        return joined(self.revealed, places, len(names) // 2 + 1)

    def sealed_for(self, member: PeerId) -> dict[PeerId, bytes]:
        return {source: sealed[member] for source, sealed in self.dealt.items()}


class Aggregator:
    """A peer that adds up a part: what it was given, of which it may keep all."""

    def __init__(self, part: tuple[int, int]) -> None:
        self.part = part
        self.given: dict[PeerId, Tensor] = {}

    @property
    def total(self) -> Tensor:
        return torch.stack(list(self.given.values())).sum(0)


def deal(
    members: Mapping[PeerId, SecureMember], attempt: int, lost: Collection[PeerId] = ()
) -> Passing:
    """All join an attempt, and all but the lost ones tell what they dealt."""
    passing = Passing(attempt, [m.key for m in members.values()])
    for name, member in members.items():
        if name not in lost:
            passing.dealt[name] = member.deal(attempt, passing.told)
    return passing


def give(
    members: Mapping[PeerId, SecureMember],
    parts: Sequence[tuple[int, int]],
    values: Mapping[PeerId, Tensor],
    lost: Collection[PeerId] = (),
) -> list[Aggregator]:
    adders = [Aggregator(part) for part in parts]
    for name, member in members.items():
        for adder in adders if name not in lost else ():
            start, stop = adder.part
            adder.given[name] = member.masked(adder.part, values[name][start:stop])
    return adders


def reveal(members: Mapping[PeerId, SecureMember], passing: Passing) -> None:
    """All reveal, and each gets the masks."""
    for name, member in members.items():
        passing.revealed[name] = member.reveal(passing.attempt)
    for member in members.values():
        member.open(passing.own_masks())


def hold(members: Mapping[PeerId, SecureMember], passing: Passing) -> None:
    for name, member in members.items():
        member.hold(passing.sealed_for(name))
