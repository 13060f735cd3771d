"""Which runs there are, and which of their replicas the present event may have changed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from ..net.identity.statements import CheckStatement
from ..proto.broker_pb2 import Formation, RunEvent, RunSpec
from ..proto.journal_pb2 import RunHappened
from .events import Publish, ReplicaId, RunId
from .journal.decided import DurableState
from .membership.membership import Membership
from .policies.round_view import NetworkOf
from .records.run import RunRecord
from .records.space import outnumbered
from .records.submitted import run_of
from .rounds.coordinator import RoundCoordinator
from .runs.replica import Replica
from .runs.run import Run

__all__ = ["RunRegistry"]


class RunRegistry:
    """runs: by id, in order of submission, the newest ended ones included. rounds: of those whose
    replicas train apart. changed: replicas that the present event may have changed."""

    def __init__(
        self,
        decided: DurableState,
        members: Membership,
        network: NetworkOf,
        seed: str,
        check: CheckStatement | None = None,
        secret: bytes = b"",
    ) -> None:
        """`seed`: differs between brokers, and between starts of one without a journal. `check`: of
        what peers sign; None: they have no certificates. `secret`: of what is drawn of that."""
        self._check, self._secret = check, secret
        self.decided, self.members, self._network = decided, members, network
        self._seed = seed
        self.runs: dict[RunId, Run] = {}
        self.rounds: dict[RunId, RoundCoordinator] = {}
        for record in decided.runs.values():
            self._made(record)
        self.changed: dict[ReplicaId, Replica] = {}

    def _made(self, record: RunRecord) -> Run:
        run = self.runs[record.id] = Run(record, self.members)
        if run.has_rounds:
            self.rounds[run.id] = RoundCoordinator(
                run, self.members, self._network, self._check, self._secret
            )
        return run

    def replica(self, name: str | None) -> Replica | None:
        """The one that peers know by this id; None: there is none."""
        run, number = run_of(name or "")
        found = self.runs.get(run)
        known = found is not None and 0 <= number < len(found.replicas)
        return found.replicas[number] if found is not None and known else None

    def changing(self, name: str | None) -> Replica | None:
        """Return the replica of this id, about to change; None: there is none."""
        found = self.replica(name)
        if found is not None:
            self.changed[found.id] = found
        return found

    def replicas(self) -> list[Replica]:
        """All of them, those of ended runs too."""
        return [replica for run in self.runs.values() for replica in run.replicas]

    def all_changing(self, replicas: Iterable[Replica]) -> list[Replica]:
        """Return these replicas, all about to change."""
        found = list(replicas)
        self.changed |= {replica.id: replica for replica in found}
        return found

    def told_of(self, happened: RunHappened) -> None:
        """An event of a run may have changed all of its replicas; a step, of which there are most,
        is its own replica's alone."""
        replicas, event = self.runs[RunId(happened.run)].replicas, happened.event
        self.all_changing([replicas[event.replica]] if event.HasField("step") else replicas)

    def changed_by_run(self) -> dict[RunId, list[Replica]]:
        found: dict[RunId, list[Replica]] = {}
        for replica in self.changed.values():
            found.setdefault(replica.record.run.id, []).append(replica)
        return found

    # ------------------------------------------------------------ which there are

    def add(self, spec: RunSpec, owner: str) -> Run:
        """A run was submitted; raises RunSpecError. Ended runs that are too many now go."""
        run = self._made(self.decided.add(self._new_id(), spec, owner))
        self.all_changing(run.replicas)
        ended = [run for run in self.decided.runs.values() if run.ended]
        self.forget(outnumbered(ended, self.decided.options.kept_runs))
        return run

    def formed(self, run: RunId, formation: Formation, now: float) -> tuple[Run, Publish]:
        """Which replicas a run has is decided; none of them has begun."""
        record = self.decided.runs[run]
        published = record.publish(RunEvent(formed=formation), 0, now)
        if record.replicas[0] is not self.runs[run].replicas[0].record:  # what was to be decided
            self._made(record)
        self.all_changing(self.runs[run].replicas)
        return self.runs[run], published

    def _new_id(self) -> RunId:
        # The number never comes twice in one journal, so no id does, of forgotten runs either. The
        # digits differ between brokers and between starts of one without a journal, so that output
        # folders do not collide, and peers do not take a new run's terms for those of one that
        # they have left.
        number = self.decided.submitted + 1
        digest = hashlib.sha256(f"{self._seed}/{number}".encode()).hexdigest()
        return RunId(f"r-{number}-{digest[:4]}")

    def forget(self, runs: Iterable[RunId]) -> None:
        """Drop these ended runs."""
        for run in runs:
            self.decided.forget(run)
            del self.runs[run]
            self.rounds.pop(run, None)
