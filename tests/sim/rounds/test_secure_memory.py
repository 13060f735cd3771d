"""What broker and aggregators hold of a masked round, in a world of peers with certificates: all
that lies in their memory is taken, and no update of a peer comes out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
import torch
from google.protobuf.message import Message
from torch import Tensor

from shoal.broker import events as b
from shoal.broker.policies import segments
from shoal.dag.exchange.collective import Hop
from shoal.dag.plan.plan import PeerId
from shoal.dag.rounds.vector import Span
from shoal.job import Job
from shoal.peer.compute.device import TorchDevice
from shoal.peer.core import events as p
from shoal.peer.rounds.attempt import RoundAttempt
from shoal.peer.rounds.part_algebra import WrittenPart
from shoal.peer.secure.secure_member import SecureMember
from shoal.proto.broker_pb2 import DONE, MaskShare, SignedStatement
from shoal.tests.peer.secure.people import Aggregator, Passing, drawn, identity
from shoal.tests.peer.secure.test_single_updates import Attack, known_sets, memory
from shoal.tests.sim.clients.test_federated_world import job_of, world_of

COUNT = 5
Share = tuple[PeerId, Span]


class Watched:
    """A run, and what there was of its first round. members: by peer. values: by peer and part,
    what it gave before it was masked. adders: by part, who added it up. said: all messages that the
    broker got and gave. stages: by peer, how far weights in its stages are from the version when
    its contribution is there."""

    def __init__(self, lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.members: dict[PeerId, SecureMember] = {}
        self.values: dict[Share, Tensor] = {}
        self.adders: dict[Span, tuple[PeerId, Aggregator]] = {}
        self.said: list[Message] = []
        self.keys: list[SignedStatement] = []
        self.stages: dict[str, float] = {}
        masked, add = SecureMember.masked, RoundAttempt.add

        def seen_masked(member: SecureMember, part: Span, values: Tensor) -> Tensor:
            if member is self.members[member._me]:
                self.values[member._me, part] = values.clone()
            return masked(member, part, values)

        def seen_add(
            attempt: RoundAttempt[Tensor],
            part: Span,
            hop: Hop,
            given: WrittenPart[Tensor],
            block: int = 0,
        ) -> None:
            if not attempt.plan.round and not hop.total:
                _, adder = self.adders.setdefault(part, (attempt.peer, Aggregator(part)))
                adder.given[hop.source] = given.values.view(torch.int64).clone()
            add(attempt, part, hop, given, block)

        monkeypatch.setattr(SecureMember, "masked", seen_masked)
        monkeypatch.setattr(RoundAttempt, "add", seen_add)
        self.world = world_of(
            lab, COUNT, device=lambda _: TorchDevice(clock=lambda: 0.0, member_of=self._member)
        )
        self.run, checks = self.world.submit(lab.spec), self.world.observe

        def observe(seen: Any) -> None:
            checks(seen)
            if seen.who == "broker":
                self._heard(seen.record)
            elif isinstance(seen.record, p.Tell) and seen.record.message.round.masks.HasField(
                "key"
            ):
                self._look(seen.who)

        self.world.observe = observe
        events = self.world.finish(self.run)
        assert events[-1].state.phase == DONE, events[-1].state.reason.text

    def _member(self, peer: PeerId, run: str, round_: int) -> SecureMember:
        found = SecureMember(identity(peer), run, round_, drawn(100 * round_ + ord(peer[-1])))
        self.members.setdefault(peer, found)
        return found

    def _heard(self, record: Any) -> None:
        if isinstance(record, b.PeerSaid | b.Tell):
            self.said.append(record.message)
            plan = record.message.round_plan if isinstance(record, b.Tell) else None
            if plan is not None and plan.keys and not plan.round:
                self.keys = list(plan.keys)

    def _look(self, peer: str) -> None:
        work = self.world.peers[peer].device.rounds
        moved = [
            float((entry.now - entry.version.values).abs().max()) for entry in work.entries.values()
        ]
        self.stages[peer] = max(moved)
        assert not any("given" in name for name in work.state()), "a snapshot has a contribution"

    @property
    def passing(self) -> Passing:
        """What the attempt's members told each other."""
        return Passing(1, self.keys)

    @property
    def broker(self) -> list[Any]:
        """All that the broker holds, and every message that went through it."""
        return [self.world.broker.machine, self.world.blobs, *map(plain, self.said)]


def plain(message: Message) -> Any:
    """Return a message as dictionaries; shares of masks by whose they are."""
    found: dict[Any, Any] = {}
    for field, value in message.ListFields():
        if isinstance(value, Message):
            found[field.name] = plain(value)
        elif field.message_type is None:
            found[field.name] = value if isinstance(value, bytes | str | int | float) else [*value]
        elif all(isinstance(v, MaskShare) for v in _each(value)):
            found[field.name] = {PeerId(v.member): v.share for v in value}
        else:
            found[field.name] = [plain(v) for v in _each(value) if isinstance(v, Message)]
    return found


def _each(value: Any) -> Iterator[Any]:
    return iter(value.values() if hasattr(value, "values") else value)


@pytest.fixture
def watched(
    laboratory: Callable[[Job], Any],
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> Watched:
    monkeypatch.setattr(segments, "UNDIVIDED", 10)
    job = job_of(tmp_path_factory.mktemp("held"), "fedavg", 1)
    sync, plan = replace(job.sync, secure=True), replace(job.plan, replicas=COUNT)
    return Watched(laboratory(replace(job, name="held", sync=sync, plan=plan)), monkeypatch)


def test_no_update_comes_out_of_what_broker_and_aggregators_hold(watched: Watched) -> None:
    names, broker = sorted(watched.members), watched.broker
    assert len(names) == COUNT
    assert len({who for who, _ in watched.adders.values()}) > 1
    hint = watched.members[names[0]]._now

    def attack(held: list[Any]) -> Attack:
        return Attack(held, watched.passing, hint, watched.run, 0)

    adders = [adder for _, adder in watched.adders.values()]
    there = [found for found in memory(broker) if isinstance(found, bytes)]
    assert sum(map(len, there)) > 10_000, "the broker's memory was not looked at"
    for (member, part), given in watched.values.items():
        raw = given.numpy().tobytes()
        assert not any(raw in found for found in there), "the broker has a contribution"
        held = watched.adders[part][1].given[member]
        assert (held == given).float().mean() < 0.1, "it was given without masks"
    outside = attack([*broker, *adders])
    for part, (who, adder) in watched.adders.items():
        values = {m: watched.values[m, part] for m in names}
        assert len(adder.given) == COUNT
        assert known_sets(outside, adder, values, names) == [tuple(names)], "the sum of all"
        honest = [m for m in names if m != who]
        inside = attack([*broker, *adders, watched.members[who]])
        assert known_sets(inside, adder, values, honest) == [tuple(honest)], "of all others"
    for two in combinations(names, 2):
        taken = attack([*broker, *adders, *(watched.members[m] for m in two)])
        honest = [m for m in names if m not in two]
        assert known_sets(taken, adder, values, honest) == [tuple(honest)]
    robbed = attack([*broker, *adders, watched.members[names[0]]._mine.exchange])
    assert (names[0],) in known_sets(robbed, adder, values, names), "the attack does not work"


def test_neither_stages_nor_snapshots_have_a_contribution(watched: Watched) -> None:
    assert watched.stages == dict.fromkeys(map(str, sorted(watched.members)), 0.0)
    assert any(bool(v.any()) for v in watched.values.values()), "nobody moved"
