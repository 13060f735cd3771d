"""What was submitted: it never changes."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from ...net.web.places import why_not
from ...planner.requests.requirements import RunRequirements, decided, read_spec
from ...proto.broker_pb2 import RunSpec
from ...proto.graph_pb2 import CORE
from ..events import ReplicaId, RunId
from ..membership.member import Member
from ..options import BrokerOptions

__all__ = ["SubmittedRun", "replica_id", "run_of"]

_NUMBER = re.compile("[1-9][0-9]{0,5}")


def replica_id(run: RunId, number: int) -> ReplicaId:
    """Under which peers know a replica: the first by its run's id, others by a number behind it."""
    return ReplicaId(f"{run}.{number}" if number else run)


def run_of(replica: str) -> tuple[RunId, int]:
    """The run that a replica's id names, and its number there; -1 for what can be no id."""
    run, dot, number = replica.partition(".")
    if not dot:
        return RunId(run), 0
    return RunId(run), int(number) if _NUMBER.fullmatch(number) else -1


@dataclass(frozen=True, slots=True)
class SubmittedRun:
    """number: counts the broker's runs, from 1. owner: who submitted it; empty where nobody has an
    identity."""

    id: RunId
    number: int
    owner: str
    spec: RunSpec
    requirements: RunRequirements
    options: BrokerOptions

    @property
    def lease_s(self) -> float:
        """Silence after which one of its peers is lost."""
        asked = self.requirements.recovery.lease
        return self.options.lease_s if asked is None else float(asked)

    @property
    def takes_snapshots(self) -> bool:
        return "snapshot" in self.requirements.recovery.ladder

    @property
    def begins_anew(self) -> bool:
        """Whether it may go back to its last checkpoint, or to the weights that it began with."""
        rounds = self.requirements.has_rounds  # others have the newest version
        return rounds or "checkpoint" in self.requirements.recovery.ladder

    def decided(self, replicas: int) -> SubmittedRun:
        """With so many replicas that train apart; 0: with one whose weights are always equal."""
        spec = decided(self.spec, "local" if replicas else "allreduce", max(1, replicas))
        return replace(self, spec=spec, requirements=read_spec(spec))

    def suits(self, member: Member) -> bool:
        """Whether a peer could take part, by its operators and by where on the web it reads."""
        core = self.requirements.core or member.profile.operator_set != CORE
        return core and self.reads(member)

    def reads(self, member: Member) -> bool:
        """Whether a peer's owner lets it read the weights of the run from the web, if need be."""
        return not any(why_not(origin, member.profile.web) for origin in self.requirements.origins)
